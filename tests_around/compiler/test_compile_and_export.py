# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""torch.compile and torch.export: one graph, the same numbers, and no compilation from one decode step to the next."""

import copy

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


def graph_breaks() -> dict:
    return dict(counters["graph_break"])


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
    """One graph with a mask and a gradient, and one that returns a state."""
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


def gradients_of(model, forward, **kwargs) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = forward(**kwargs).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("form", "kwargs"), [("chunkwise", {}), ("parallel", {"use_cache": False})])
def test_compiled_training_step(model, form, kwargs):
    model = copy.deepcopy(model).train()
    ids, mask = left_padded([random_ids(1, 21), random_ids(1, 6, seed=1)])
    labels = ids.masked_fill(mask == 0, -100)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "retention_form": form} | kwargs
    loss, gradients = gradients_of(model, compiled, **batch)
    expected_loss, expected = gradients_of(model, model, **batch)
    close(loss, expected_loss, 1e-5)
    for name in expected:
        close(gradients[name], expected[name])
    assert graph_breaks() == {}


def test_compiled_training_step_with_gradient_checkpointing(model):
    model = copy.deepcopy(model).train()
    ids = random_ids(2, 21)
    expected_loss, expected = gradients_of(model, model, input_ids=ids, labels=ids)
    model.gradient_checkpointing_enable()
    compiled = torch.compile(model, backend="aot_eager")
    loss, gradients = gradients_of(model, compiled, input_ids=ids, labels=ids)
    close(loss, expected_loss, 1e-5)
    for name in expected:
        close(gradients[name], expected[name])


class CompiledForward:
    """model.forward, compiled, with a count of its compilations after every call."""

    def __init__(self, model: nn.Module, **options) -> None:
        self.counter = CompileCounterWithBackend("aot_eager")
        self.compiled = torch.compile(model.forward, backend=self.counter, **options)
        self.history = []

    def __call__(self, *args, **kwargs):
        outputs = self.compiled(*args, **kwargs)
        self.history.append(self.counter.frame_count)
        return outputs


def test_compiled_decode(model):
    """generate() with model.forward compiled: the prompt and the first step compile, the other 29 do not."""
    ids = random_ids(2, 7)
    expected = greedy(model, ids, 31)
    compiled = small_like(model)
    compiled.forward = forward = keep_signature(CompiledForward(compiled, fullgraph=True), compiled.forward)
    assert greedy(compiled, ids, 31).equal(expected)
    assert len(forward.history) == 31
    assert len(set(forward.history[1:])) == 1, forward.history


def test_compiled_decode_left_padded(model):
    ids, mask = left_padded([random_ids(1, 9), random_ids(1, 4, seed=1)])
    expected = greedy(model, ids, 31, attention_mask=mask)
    compiled = small_like(model)
    compiled.forward = forward = keep_signature(CompiledForward(compiled), compiled.forward)
    assert greedy(compiled, ids, 31, attention_mask=mask).equal(expected)
    assert len(set(forward.history[1:])) == 1, forward.history


def small_like(model):
    """A copy whose forward may be replaced."""
    return copy.deepcopy(model)


def keep_signature(forward: CompiledForward, original):
    forward.__signature__ = __import__("inspect").signature(original)  # generate() reads it
    return forward


def decode(model, step, state, ids) -> list[Tensor]:
    return [step(token, past_key_values=state, use_cache=True).logits for token in ids.split(1, dim=1)]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_compiled_decode_fullgraph(model, context):
    """One graph serves 24 steps, whatever mode of autograd they run in."""
    ids = random_ids(2, 31)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=counter)
    with context():
        state = model(ids[:, :7], use_cache=True).past_key_values
        logits = decode(model, step, state, ids[:, 7:8])
        first = counter.frame_count
        logits += decode(model, step, state, ids[:, 8:])
        assert counter.frame_count == first == 1
    assert state.get_seq_length() == 31
    close(torch.cat(logits, dim=1), model(ids).logits[:, 7:])


@pytest.mark.parametrize("make", [RetNetState, lambda config: DynamicCache(config=config)], ids=["state", "dynamic_cache"])
def test_compiled_decode_fullgraph_from_the_first_token(model, make):
    """The empty state is another graph than a filled one; from then on there is one."""
    ids = random_ids(2, 24)
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=counter)
    state = make(model.config)
    with torch.no_grad():
        logits = decode(model, step, state, ids[:, :2])
        compilations = counter.frame_count
        logits += decode(model, step, state, ids[:, 2:])
    assert counter.frame_count == compilations <= 2
    close(torch.cat(logits, dim=1), model(ids).logits)


def test_compiled_decode_fullgraph_with_masks_and_positions(model):
    """What generate() hands over at each step, given to a compiled step by hand."""
    ids, mask = left_padded([random_ids(1, 24), random_ids(1, 15, seed=1)])
    expected = model(ids, attention_mask=mask).logits
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=counter)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        state = model(ids[:, :10], attention_mask=mask[:, :10]).past_key_values
        for n in range(10, 24):
            logits = step(
                ids[:, n : n + 1],
                attention_mask=mask[:, n : n + 1],
                position_ids=positions[:, n : n + 1],
                past_key_values=state,
            ).logits
            close(logits[:, 0], expected[:, n])
            if n == 10:
                first = counter.frame_count
    assert counter.frame_count == first == 1


def test_compiled_generate_static(fla_model):
    """generate() compiles by itself where it is asked to, and neither steps nor later texts compile again."""
    model = small_like(fla_model).double()  # two of the tokens are nearly as likely as each other
    config = CompileConfig(backend="aot_eager", fullgraph=True)
    config._compile_all_devices = True  # also here, where there may be no GPU
    kwargs = {"cache_implementation": "static", "compile_config": config}
    ids = random_ids(2, 9)
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
    model = small_like(fla_model)
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
    """A model without state, as torch.export takes it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.model(input_ids, attention_mask=attention_mask, use_cache=False).logits


@pytest.mark.parametrize("strict", [True, False])
def test_torch_export_static(model, strict):
    ids, mask = left_padded([random_ids(1, 21), random_ids(1, 6, seed=1)])
    with torch.no_grad():
        program = torch.export.export(Logits(model), (ids,), strict=strict)
        close(program.module()(ids), model(ids).logits)
        program = torch.export.export(Logits(model), (ids, mask), strict=strict)
        close(program.module()(ids, mask)[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()])


def test_torch_export_static_of_the_model_itself(model):
    """As a user calls it: keyword arguments, use_cache=False, and the output class of transformers."""
    ids = random_ids(2, 21)
    with torch.no_grad():
        program = torch.export.export(model, (), {"input_ids": ids, "use_cache": False}, strict=False)
        close(program.module()(input_ids=ids, use_cache=False).logits, model(ids).logits)


@pytest.mark.parametrize("length", [2, 100])
def test_torch_export_dynamic_length(model, length):
    """Batch and length open: the exported program answers at others, longer and shorter than a chunk."""
    batch_open, length_open = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=4096)
    shape = {0: batch_open, 1: length_open}
    ids = random_ids(2, length)
    with torch.no_grad():
        program = torch.export.export(Logits(model), (ids,), dynamic_shapes=(shape,), strict=False)
        for batch, other in ((2, length), (3, 33), (1, 7), (5, 130), (3, 1000)):
            ids = random_ids(batch, other)
            close(program.module()(ids), model(ids).logits)


def test_torch_export_dynamic_length_with_a_mask(model):
    shape = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    ids, mask = left_padded([random_ids(1, 21), random_ids(1, 6, seed=1)])
    with torch.no_grad():
        program = torch.export.export(Logits(model), (ids, mask), dynamic_shapes=(shape, shape), strict=False)
        ids, mask = left_padded([random_ids(1, 34), random_ids(1, 5, seed=1), random_ids(1, 13, seed=2)])
        close(program.module()(ids, mask)[mask.bool()], model(ids, attention_mask=mask).logits[mask.bool()])


def test_torch_export_saves_and_loads(fla_model, tmp_path):
    ids = random_ids(2, 21)
    with torch.no_grad():
        program = torch.export.export(Logits(fla_model), (ids,))
        torch.export.save(program, tmp_path / "model.pt2")
        close(torch.export.load(tmp_path / "model.pt2").module()(ids), fla_model(ids).logits)


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
        traced = torch.jit.trace(model, traced_with, strict=False)
        close(traced(others)["logits"], model(others).logits, 5e-5)


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

        class Traced(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = model

            def forward(self, ids, given, name=name):
                return self.model(ids, use_cache=False, **{name: given}).logits

        with torch.no_grad():
            traced = torch.jit.trace(Traced(), (ids, traced_with), check_trace=False)
            logits, expected = traced(ids, other), model(ids, use_cache=False, **{name: other}).logits
        close(logits[:, 5:], expected[:, 5:], 5e-5)
