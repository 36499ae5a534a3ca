# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""torch.compile and torch.export: one graph, the same numbers, and no compilation from one decode step to the next."""

import copy
import functools

import pytest
import torch
from small_models import COVERING, close, greedy, left_padded, random_ids, same_state, small_model
from small_vision_models import VISION_FAMILIES
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import CompileConfig, DynamicCache

from retnet_hf import RetNetState


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(scope="module")
def model():
    """One layer with something of every dialect, since each compilation costs seconds; its heads share states."""
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "decay_schedule": [0.6, 0.6, 0.97, 0.97]}
    return small_model("torchscale", num_hidden_layers=1, chunk_size=8, **fields)


def test_a_second_model_of_another_configuration_is_one_graph():
    """A compiler that has seen two values of a field takes it for a symbol, which decides about no kernel."""
    ids = random_ids(2, 9)
    for fields in ({"value_expansion": 2.0}, {"value_expansion": 1.0, "hidden_size": 64, "num_attention_heads": 4}):
        model = small_model(num_hidden_layers=1, **fields)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        with torch.no_grad():
            close(compiled(ids, use_cache=False).logits, model(ids).logits)


@pytest.mark.parametrize("form", ["parallel", "chunkwise", "recurrent"])
def test_compiled_forward_in_every_form(model, form):
    length = 5 if form == "recurrent" else 21  # the recurrence is unrolled, token by token
    ids, mask = left_padded([random_ids(1, length), random_ids(1, 4, seed=1)])
    expected = model(ids, attention_mask=mask, retention_form=form)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    out = compiled(ids, attention_mask=mask, use_cache=False, retention_form=form)
    close(out.logits[mask.bool()], expected.logits[mask.bool()])
    with torch.no_grad():
        out = compiled(ids, attention_mask=mask, use_cache=True, retention_form=form)
    same_state(out.past_key_values, expected.past_key_values)
    assert out.past_key_values.get_seq_length() == length


def gradients_of(model, forward, **batch) -> dict[str, Tensor]:
    model.zero_grad()
    loss = forward(**batch).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


OPTIONS = [{"retention_form": "chunkwise"}, {"retention_form": "parallel", "use_cache": False}, {}]


@pytest.mark.parametrize("options", OPTIONS, ids=["chunkwise", "parallel", "gradient checkpointing"])
def test_compiled_training_step(model, options):
    model = copy.deepcopy(model).train()
    ids, mask = left_padded([random_ids(1, 21), random_ids(1, 6, seed=1)])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)} | options
    expected = gradients_of(model, model, **batch)
    if not options:
        model.gradient_checkpointing_enable()
    found = gradients_of(model, torch.compile(model, fullgraph=bool(options), backend="aot_eager"), **batch)
    for name in expected:
        close(found[name], expected[name])
    assert not options or not counters["graph_break"]


@pytest.mark.parametrize("padded", [False, True])
def test_compiled_decode(model, padded):
    """generate() with model.forward compiled: the prompt and the first step compile, the other 29 do not."""
    ids, mask = left_padded([random_ids(1, 9), random_ids(1, 4, seed=1)])
    ids, options = (ids, {"attention_mask": mask}) if padded else (random_ids(2, 7), {})
    expected, compiled, history = greedy(model, ids, 31, **options), copy.deepcopy(model), []
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(compiled.forward, backend=counter, fullgraph=not padded)

    @functools.wraps(compiled.forward)  # generate() reads its signature
    def forward(*args, **kwargs):
        outputs = step(*args, **kwargs)
        history.append(counter.frame_count)
        return outputs

    compiled.forward = forward
    assert greedy(compiled, ids, 31, **options).equal(expected)
    assert len(history) == 31
    assert len(set(history[1:])) == 1, history


def decode(step, state, ids, **options) -> Tensor:
    return torch.cat([step(token, past_key_values=state, **options).logits for token in ids.split(1, dim=1)], dim=1)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("kind", ["state", "dynamic cache", "prompt"])
def test_compiled_decode_fullgraph(model, context, kind):
    """One graph serves all steps, in any mode of autograd. The empty state is another graph than a filled one."""
    ids, counter, begun = random_ids(2, 31), CompileCounterWithBackend("aot_eager"), 7 if kind == "prompt" else 2
    step = torch.compile(model, fullgraph=True, backend=counter)
    with context():
        if kind == "prompt":
            state, logits = model(ids[:, :7], use_cache=True).past_key_values, []
        else:
            state = RetNetState(model.config) if kind == "state" else DynamicCache(config=model.config)
            logits = [decode(step, state, ids[:, :2])]
        logits.append(decode(step, state, ids[:, begun : begun + 1]))
        compilations = counter.frame_count
        logits.append(decode(step, state, ids[:, begun + 1 :]))
    assert counter.frame_count == compilations <= (1 if kind == "prompt" else 2)
    assert state.get_seq_length() == 31
    close(torch.cat(logits, dim=1), model(ids).logits[:, -sum(each.shape[1] for each in logits) :])


def test_compiled_decode_fullgraph_with_masks_and_positions(model):
    """What generate() hands over at each step, given to a compiled step by hand."""
    ids, mask = left_padded([random_ids(1, 24), random_ids(1, 15, seed=1)])
    expected, counter = model(ids, attention_mask=mask).logits, CompileCounterWithBackend("aot_eager")
    step, positions = torch.compile(model, fullgraph=True, backend=counter), (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        state = model(ids[:, :10], attention_mask=mask[:, :10]).past_key_values
        for n in range(10, 24):
            now = slice(n, n + 1)
            logits = decode(step, state, ids[:, now], attention_mask=mask[:, now], position_ids=positions[:, now])
            close(logits[:, 0], expected[:, n])
    assert counter.frame_count == 1


def test_compiled_generate_static(fla_model):
    """generate() compiles by itself where it is asked to, and neither steps nor later texts compile again."""
    model = copy.deepcopy(fla_model).double()  # two of the tokens are nearly as likely as each other
    config = CompileConfig(backend="aot_eager", fullgraph=True)
    config._compile_all_devices = True  # also here, where there may be no GPU
    kwargs, ids = {"cache_implementation": "static", "compile_config": config}, random_ids(2, 9)
    assert greedy(model, ids, 20, **kwargs).equal(greedy(model, ids, 20))
    compilations = counters["stats"]["unique_graphs"]
    assert compilations == 1
    assert greedy(model, ids[:, :6], 40, **kwargs).equal(greedy(model, ids[:, :6], 40))
    padded, mask = left_padded([random_ids(1, 9), random_ids(1, 4, seed=1)])
    assert greedy(model, padded, 20, attention_mask=mask, **kwargs).equal(greedy(model, padded, 20, attention_mask=mask))
    assert counters["stats"]["unique_graphs"] == compilations


def compiles(model, **kwargs) -> bool:
    """Whether generate() compiles, on a machine where every device may."""
    config = CompileConfig(backend="eager")
    config._compile_all_devices = True
    counters.clear()
    torch._dynamo.reset()
    greedy(model, random_ids(1, 5), 4, compile_config=config, **kwargs)
    return counters["stats"]["unique_graphs"] > 0


def test_generate_compiles_only_when_asked(fla_model):
    model = copy.deepcopy(fla_model)
    assert compiles(model, cache_implementation="static")
    for kwargs in (
        {},
        {"cache_implementation": "dynamic"},
        {"past_key_values": RetNetState(model.config)},
        {"past_key_values": DynamicCache(config=model.config)},
        {"cache_implementation": "static", "disable_compile": True},
    ):
        assert not compiles(model, **kwargs), kwargs
    assert not RetNetState(model.config).is_compileable
    assert compiles(model, past_key_values=RetNetState(model.config, compileable=True))


class Logits(nn.Module):
    """A model without state, as torch.export takes it, and an argument."""

    def __init__(self, model: nn.Module, name: str = "attention_mask") -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, input_ids: Tensor, given: Tensor | None = None) -> Tensor:
        return self.model(input_ids, use_cache=False, **{self.name: given}).logits


@pytest.mark.parametrize("strict", [True, False])
def test_torch_export_static(model, strict, tmp_path):
    """Of logits, with and without a mask, also saved; and as a user calls it, with the output class of transformers."""
    ids, mask = left_padded([random_ids(1, 21), random_ids(1, 6, seed=1)])
    with torch.no_grad():
        program = torch.export.export(Logits(model), (ids,), strict=strict)
        torch.export.save(program, tmp_path / "model.pt2")
        for each in (program, torch.export.load(tmp_path / "model.pt2")):
            close(each.module()(ids), model(ids).logits)
        program = torch.export.export(Logits(model), (ids, mask), strict=strict)
        close(program.module()(ids, mask)[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()])
        program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
        close(program.module()(input_ids=ids, use_cache=False).logits, model(ids).logits)


@pytest.mark.parametrize("length", [2, 100])
def test_torch_export_dynamic_length(model, length):
    """Batch and length open: the exported program answers at others, longer and shorter than a chunk."""
    batch_open, length_open = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=4096)
    shape, ids = {0: batch_open, 1: length_open}, random_ids(2, length)
    with torch.no_grad():
        program = torch.export.export(Logits(model), (ids,), dynamic_shapes=(shape,), strict=False)
        for batch, other in ((2, length), (3, 33), (1, 7), (5, 130), (3, 1000)):
            ids = random_ids(batch, other)
            close(program.module()(ids), model(ids).logits)
        shape = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
        ids, mask = left_padded([random_ids(1, 21), random_ids(1, 6, seed=1)])
        program = torch.export.export(Logits(model), (ids, mask), dynamic_shapes=(shape, shape), strict=False)
        ids, mask = left_padded([random_ids(1, 34), random_ids(1, 5, seed=1), random_ids(1, 13, seed=2)])
        close(program.module()(ids, mask)[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()])


@pytest.mark.parametrize("grad", [True, False], ids=["with gradients", "without"])
@pytest.mark.parametrize("kind", [*COVERING, "ring", *VISION_FAMILIES])
def test_models_can_be_traced(kind, grad):
    """torch.jit.trace with its own check, which compares programs with and without gradients; several chunks."""
    if kind in VISION_FAMILIES:
        traced_with, others = torch.randn(2, 2, 3, 32, 32)
        model = VISION_FAMILIES[kind].model()
    else:
        traced_with, others = random_ids(2, 21), random_ids(2, 21, seed=1)
        model = small_model(kind, use_cache=False)
    with torch.set_grad_enabled(grad):
        close(torch.jit.trace(model, traced_with, strict=False)(others)["logits"], model(others).logits, 5e-5)


@pytest.mark.parametrize("kind", ["fla", "hybrid", "torchscale", "hypenet", *VISION_FAMILIES])
def test_a_traced_model_is_right_about_another_length_or_refuses_it(kind):
    if kind in VISION_FAMILIES:
        model, inputs = VISION_FAMILIES[kind].model(), torch.randn(2, 3, 32, 32)
        others = [torch.randn(1, 3, 32, 32), torch.randn(2, 3, 64, 64), torch.randn(2, 3, 32, 64)]
    else:
        model, inputs = small_model(kind, use_cache=False), random_ids(2, 21)
        others = [random_ids(*shape, seed=1) for shape in ((1, 21), (2, 22), (2, 20), (2, 16), (2, 5), (2, 40), (2, 1))]
    with torch.no_grad():
        traced, right = torch.jit.trace(model, inputs, strict=False, check_trace=False), 0
        for other in others:
            try:
                logits = traced(other)["logits"]
            except RuntimeError:  # sizes that were constants of the trace do not fit
                continue
            close(logits, model(other).logits, 5e-5)
            right += 1
    assert right >= 1


@pytest.mark.parametrize("kind", ["fla", "hybrid"])
def test_a_model_traced_without_padding_is_right_about_padding_and_documents(kind):
    model, ids = small_model(kind), random_ids(2, 21)
    padded = torch.ones_like(ids)
    padded[0, :5] = 0
    plain = torch.arange(21).repeat(2, 1)
    for name, traced_with, other in (("attention_mask", torch.ones_like(ids), padded), ("position_ids", plain, plain % 10)):
        with torch.no_grad():
            traced = torch.jit.trace(Logits(model, name), (ids, traced_with), check_trace=False)
            logits, expected = traced(ids, other), Logits(model, name)(ids, other)
        close(logits[:, 5:], expected[:, 5:], 5e-5)
