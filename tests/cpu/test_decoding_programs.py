# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet_hf.cpu.compile`: programs, here uncompiled, compute what the layers do and are used only where they do."""

import copy
import os
import pickle
import shutil
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plain_programs import BFLOAT16, KINDS, PROMPT, check, decoded, linear_layers, read, same, state_after
from small_models import DIALECTS, FAMILIES, LATENT, close, random_ids, small_config, small_llama, small_model
from torch import nn
from transformers.utils import logging

import retnet_hf
import retnet_hf.cpu
from retnet_hf import RetNetForMaskedLM, RetNetForSequenceClassification, RetNetState, cpu
from retnet_hf.cpu import CompiledLinear, number_of_programs, original
from retnet_hf.cpu import products as cpu_products
from retnet_hf.cpu import programs as cpu_programs
from retnet_hf.cpu.products import HALF_TYPES, is_faster_as_vector, product_of, vector
from retnet_hf.ops import gradients
from retnet_hf.retnet import modeling_retnet
from retnet_hf.vllm import refuse_what_has_no_memory


pytest_plugins = ("plain_programs",)  # the fixture `made`

compiled = retnet_hf.cpu.compile  # a fast copy, with programs in a folder


def query_weights(model) -> list[nn.Parameter]:
    return [layer.retention.q_proj.weight for layer in model.model.layers]


def test_programs_decode_as_many_sequences_as_they_were_made_for(made, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(cpu.logger, "warning_once", warnings.append)
    model = small_model()
    fast = compiled(model, tmp_path, batch_sizes=iter([1, 3, 3]))
    for batch in (1, 2, 3):
        made.clear()
        ids = random_ids(batch, 7)
        same(decoded(fast, ids), decoded(model, ids))
        assert len(made) == (0 if batch == 2 else 5 * len(model.model.layers))
    [said] = set(warnings)
    assert "made no program for steps of 2 sequences: add this number to batch_sizes" in said


MASK = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]])


@pytest.mark.parametrize(
    ("inputs", "programs"),
    [({}, 2), ({"position_ids": torch.tensor([[0], [7], [7]])}, 0), ({"attention_mask": torch.tensor([[1], [0], [1]])}, 0)],
    ids=["own positions", "a row that begins anew", "a padded row"],
)
def test_rows_of_a_program_have_their_own_positions_and_others_are_left_to_the_layers(made, tmp_path, inputs, programs):
    model, ids, found = small_model(), random_ids(3, 7), []
    for each in (compiled(model, tmp_path, batch_sizes=[3]), model):
        _, state = read(each, ids, **({} if inputs else {"attention_mask": MASK}))
        with torch.no_grad():
            found.append((each(ids[:, :1], past_key_values=state, **inputs).logits, state))
    same(*found)
    assert len(made) == programs


def test_layers_without_a_program_have_programs_of_their_products(made, tmp_path):
    """And the kernels of PyTorch serve what a program does not: a prompt, several sequences, a gradient, a compiler."""
    fast = compiled(small_model("transnormer", learned_rotary_layers=[0, 1]), tmp_path)
    linear = {name for name, module in fast.named_modules() if isinstance(module, nn.Linear)}
    assert {name for name, module in fast.named_modules() if isinstance(module, CompiledLinear)} == linear
    for calls in (decoded, lambda model: decoded(model, ids=random_ids(2, 7))):
        same(calls(fast), calls(original(fast)))
    seen = len(made.of_products)
    with torch.no_grad():
        token = torch.ones(1, 1, 32)
        expected = original(fast).lm_head(token)
        close(fast.lm_head(token), expected)
        close(torch.compile(fast.lm_head, backend="eager", fullgraph=True)(token), expected)
    close(fast.lm_head(token), expected)
    assert len(made.of_products) == seen + 1
    assert fast.lm_head(token).requires_grad


@pytest.mark.parametrize("made", [0, -1], ids=["sums", "kernels"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer(made, tmp_path, kind, dtype):
    dialect, options = KINDS[kind]
    model = small_model(dialect, **options).to(dtype)
    expected, fast = decoded(model), compiled(model, tmp_path)
    files = {"grouped": 3, "hybrid": 7, "minimax": 6}
    assert (number_of_programs(fast), len(list(tmp_path.iterdir()))) == (2, files.get(kind, 2))
    same(decoded(fast), expected, 1e-4 if dtype == torch.float32 else 0.05)
    assert len(made) == 5 * 2
    assert len(made.of_products) >= 5  # of the head, at least
    made.clear()
    same(decoded(original(fast)), expected, 0)
    same(decoded(model), expected, 0)
    assert not made
    assert not made.of_products


def test_a_base_model_and_a_model_with_another_head_have_programs(made, tmp_path):
    model = small_model()
    fast = compiled(model.model, tmp_path)
    state, other = (RetNetState(model.config) for _ in range(2))
    with torch.no_grad():
        for ids in (PROMPT, PROMPT[:, :1]):
            found = fast(ids, past_key_values=state).last_hidden_state
            close(found, model.model(ids, past_key_values=other).last_hidden_state)
    assert len(made) == 2
    classifier = small_model(model_class=RetNetForSequenceClassification)
    fast = compiled(classifier, tmp_path)
    assert number_of_programs(fast) == 2
    with torch.no_grad():
        close(fast(PROMPT).logits, classifier(PROMPT).logits)


@pytest.mark.parametrize("dialect", ["fla", "grouped", "torchscale"])
def test_values_that_change_in_place_are_seen(made, tmp_path, dialect):
    fast = compiled(model := small_model(dialect), tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    same(decoded(fast), decoded(model))
    assert made


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.load_state_dict({k: 1.5 * v for k, v in model.state_dict().items()}, assign=True),
        lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)),
        lambda model: get_peft_model(model, LoraConfig(target_modules=["o_proj", "down_proj"], init_lora_weights=False)),
        lambda model: [setattr(layer.mlp, "act_fn", nn.Tanh()) for layer in model.model.layers],
        lambda model: [setattr(layer.mlp.down_proj, "bias", nn.Parameter(torch.ones(32))) for layer in model.model.layers],
        lambda model: [setattr(weight, "data", weight.data.T) for weight in query_weights(model)],
    ],
    ids=["type", "other tensors", "adapters", "adapters of outputs", "activation", "a bias", "a layout"],
)
def test_other_weights_and_modules_end_programs_with_a_warning(made, tmp_path, change, monkeypatch):
    warnings = []
    monkeypatch.setattr(cpu.programs.logger, "warning_once", warnings.append)
    fast = compiled(small_model(), tmp_path)
    change(fast)
    expected = decoded(original(fast))
    same(decoded(fast), expected)
    assert not made
    assert len(warnings) == 2 - number_of_programs(fast) + (fast.lm_head.program is None)
    # Hidden states of another type are told apart first.
    assert number_of_programs(fast) == (2 if fast.dtype == torch.float64 else 0)


def test_what_a_program_does_not_compute_the_layers_do(made, tmp_path):
    plain, model = small_model(), compiled(small_model(), tmp_path)
    same(decoded(model, ids=random_ids(2, 7)), decoded(plain, ids=random_ids(2, 7)))

    token, states = random_ids(1, 1), [state_after(each) for each in (model, plain)]
    calls = [{"attention_mask": torch.tensor([[0]])}, {"use_cache": False}, {"output_attentions": True}]
    with torch.no_grad():
        for options in [*calls, {"retention_form": "chunkwise"}]:
            close(*(each(token, past_key_values=past, **options).logits for each, past in zip((model, plain), states)))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(token, past_key_values=states[0])
        model(token, past_key_values=states[0].clone().to(torch.float64))
        for state in states:
            state.activate_past_recording()
        model(token, past_key_values=states[0])
    model(token, past_key_values=copy.deepcopy(states[0]), labels=random_ids(1, 1)).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.model.layers[1].parameters())
    assert not made

    seen = []
    handle = model.model.layers[0].retention.o_proj.register_forward_hook(lambda *_: seen.append(1))
    same(decoded(model), decoded(plain))
    assert len(seen) == 6  # the prompt, and each step
    assert len(made) == 5  # of the other layer
    handle.remove()


@pytest.mark.parametrize("change", ["none", "strides", "turn", "narrows", "shape of the state", "type"])
def test_a_program_is_asked_for_what_it_was_made_for_alone(made, tmp_path, change):
    """It reads memory as it was traced, and has a rotation of its own."""
    fast = compiled(small_model(), tmp_path)
    layer, state = fast.model.layers[0], state_after(fast)
    hidden_states, past = torch.randn(1, 1, 32), state.layers[0]
    with torch.no_grad():
        plan = fast.model.plan(hidden_states, past_key_values=state)[0]
        if change == "strides":
            hidden_states = torch.randn(1, 1, 64)[..., ::2]
        elif change == "type":
            hidden_states = hidden_states.bfloat16()
        elif change == "turn":
            plan.rotate.rotate = torch.add
        elif change == "narrows":
            plan.rotate.cast_dtypes = (torch.float32,)
        elif change == "shape of the state":
            past.recurrent_states = past.recurrent_states[..., :-1].contiguous()
        assert (layer.programs[1].decay(hidden_states, plan, past) is not None) == (change == "none")


def test_copies_have_no_programs_and_files_nothing_of_them(made, tmp_path):
    model = compiled(small_model(), tmp_path)
    expected = decoded(model)
    made.clear()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert number_of_programs(twin) == 0
        same(decoded(twin), expected)
    assert not made
    assert set(model.state_dict()) == set(small_model().state_dict())


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "up_proj", "gate_proj", "down_proj"])
def test_adapted_layers_have_no_program(made, tmp_path, name):
    config = LoraConfig(target_modules=[name], layers_to_transform=[0], init_lora_weights=False)
    adapted = get_peft_model(small_model(), config)
    model = adapted.get_base_model().eval()
    fast = compiled(model, tmp_path)
    assert number_of_programs(fast) == 1
    same(decoded(fast), decoded(model))
    with adapted.disable_adapter():
        assert number_of_programs(compiled(model, tmp_path)) == 1


def test_files_differ_by_what_a_program_is_made_of(made, tmp_path):
    models = [small_model(), small_model(dtype=torch.bfloat16).to(torch.bfloat16), small_model(rms_norm_eps=1e-3)]
    models += [small_model(intermediate_size=48), small_model(use_rotary=False)]
    models += [small_model() for _ in range(3)]
    for one, another, third in zip(*(model.model.layers for model in models[-3:])):
        one.retention.head_norm.eps = 0.5
        another.mlp.act_fn, third.mlp.act_fn = nn.Tanh(), nn.Sigmoid()
    for model in models:
        compiled(model, tmp_path)
    heads = 2  # in float32 and in bfloat16
    assert len(list(tmp_path.iterdir())) == len(models) + heads
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        compiled(models[0], tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert len(list(tmp_path.iterdir())) == len(models) + heads + 2


def test_files_differ_by_the_machine_and_by_the_source_of_the_programs(made, tmp_path, monkeypatch):
    """Otherwise, a program of an older version would compute in its own way after an upgrade."""
    packages = cpu_programs.SOURCES
    assert {Path(module.__file__).parent for module in (gradients, modeling_retnet, cpu_programs)} <= set(packages)
    for package in packages:
        shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(cpu_programs, "SOURCES", tuple(tmp_path / package.name for package in packages))
    monkeypatch.setattr(cpu_programs, "machine", cpu_programs.machine.__wrapped__)  # without its cache
    monkeypatch.setattr(cpu.constants, "HF_HOME", str(tmp_path))

    def files() -> int:
        compiled(small_model(), None)  # in the cache of the Hub
        return len(list((tmp_path / "retnet_hf" / "decoding").iterdir()))

    assert [files(), files()] == [2, 2]  # of the layers, and of the head
    for number, changed in enumerate([tmp_path / "ops" / "gradients.py", tmp_path / "cpu" / "products.py"]):
        changed.write_text(changed.read_text(encoding="utf-8") + "# another version\n", encoding="utf-8")
        assert files() == 2 * (number + 2)
    monkeypatch.setattr(cpu_programs, "machine", lambda: {"machine": "another"})
    assert files() == 8


def test_without_a_compiler_nothing_is_written_and_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", mock.Mock(side_effect=OSError("no g++")))
    with pytest.raises(RuntimeError, match=r"needs a C\+\+ compiler: no g\+\+"):
        compiled(small_model(), tmp_path / "programs")
    assert list((tmp_path / "programs").iterdir()) == []


def test_without_programs_half_precision_is_multiplied_as_a_vector(tmp_path, monkeypatch):
    monkeypatch.setattr("retnet_hf.cpu.products.is_faster_as_vector", lambda *kind: True)
    fast = compiled(small_model().to(torch.bfloat16), programs=False)
    monkeypatch.setattr(nn.Linear, "forward", None)  # the linear layer is not called
    with torch.no_grad():
        logits = fast.lm_head(torch.ones(1, 1, 32, dtype=torch.bfloat16))
    expected = fast.lm_head.weight.double().sum(1)
    close(logits[0, 0].double(), expected.detach(), 2**-8)
    monkeypatch.undo()
    with torch.no_grad():
        for ids in (PROMPT, random_ids(3, 1)):
            assert fast(ids).logits.equal(original(fast)(ids).logits)


@pytest.mark.skipif(os.name != "posix", reason="modes of files are those of POSIX")
def test_programs_that_others_may_write_to_are_refused(tmp_path):
    folder, program = tmp_path / "programs", tmp_path / "programs" / "a.pt2"
    folder.mkdir()
    program.touch()
    for place in (folder, program):
        cpu_programs.require_private(folder)
        cpu_programs.require_private(program)
        for mode in (0o772, 0o727):
            place.chmod(mode)
            with pytest.raises(ValueError, match="can be written to by other users .*chmod go-w"):
                cpu_programs.require_private(place)
        place.chmod(0o755)
    cpu_programs.require_private(tmp_path / "not there")
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="can be written to by other users"):
        compiled(small_model(), folder=tmp_path)


SIZES = "batch_sizes must be a list of one or more positive numbers of"
REFUSED = [  # models, arguments, and what is said
    (lambda: small_model().to(torch.float64), {}, "needs a model that decodes on a CPU"),
    (lambda: small_model().to("meta"), {}, "needs a model that decodes on a CPU"),
    (lambda: small_model(model_class=RetNetForMaskedLM, bidirectional=True), {}, "that decodes on a CPU"),
    (small_llama, {}, "needs a model of retnet_hf, got LlamaForCausalLM"),
    (small_model, {"programs": False, "prompts": True}, "prompts=True needs programs=True"),
    *((small_model, {"batch_sizes": sizes}, SIZES) for sizes in ((), (0,), (4, -1), 4)),
]


@pytest.mark.parametrize(("make", "arguments", "said"), REFUSED)
def test_what_cannot_be_compiled_is_refused(tmp_path, make, arguments, said):
    with pytest.raises(ValueError, match=said):
        compiled(make(), tmp_path, **arguments)


STATELESS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}


@pytest.mark.parametrize(
    ("family", "fields", "said"),
    [
        ("sinks", {}, "attention_sinks must be 0 to be served by vLLM, got 2"),
        ("ring", {"hidden_act": "relu"}, "hidden_act of experts must be silu or gelu to be served by vLLM, got 'relu'"),
        ("fla", LATENT, "kv_lora_rank must be None to be served by vLLM, got 6"),
        ("fla", STATELESS, "layer_types must contain linear_attention to be served by vLLM"),
        *((name, {}, None) for name in (*DIALECTS, *FAMILIES) if name != "sinks"),
    ],
)
def test_vllm_is_given_only_layers_that_its_tables_have_a_place_for(family, fields, said):
    with nullcontext() if said is None else pytest.raises(ValueError, match=said):
        refuse_what_has_no_memory(small_config(family, **fields))


@pytest.mark.parametrize(("family", "programs"), [("hypenet", 2), ("transnormer", 1), ("ring", 1)])
def test_a_fast_copy_says_which_layers_have_no_program(family, programs, made, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.get_logger("retnet_hf.cpu"), "propagate", True)
    model = small_model(family)
    fast = retnet_hf.cpu.compile(model, folder=tmp_path)
    assert retnet_hf.cpu.number_of_programs(fast) == programs
    said = f"compiles only the products of {2 - programs} of 2 layers of retention, since they have"
    assert (said in caplog.text) == (programs < 2)
    same(decoded(fast), decoded(model))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("faster", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dense_weights(dtype, faster, bias, monkeypatch):
    monkeypatch.setattr(cpu_products, "is_faster_as_vector", lambda *kind: faster)
    layers = linear_layers(dtype, bias)
    check(layers, 2e-6 if dtype == torch.float32 else 2 * BFLOAT16)
    assert ({product_of(layer).kernel for layer in layers} == {vector}) == (faster and dtype in HALF_TYPES)


def test_what_is_not_understood_or_hooked_has_no_product():
    layer = nn.Linear(4, 4)
    handle = layer.register_forward_hook(lambda *_: None)
    assert [product_of(each) for each in (nn.Linear(32, 8, device="meta"), nn.Bilinear(4, 4, 4), layer)] == [None] * 3
    handle.remove()
    assert product_of(layer) is not None


def test_whether_a_vector_is_faster_is_found_out_once(monkeypatch):
    trials = []
    monkeypatch.setattr(cpu_products, "is_clearly_faster", lambda *sides: trials.append(sides) or True)
    is_faster_as_vector.cache_clear()
    try:
        assert [is_faster_as_vector(8, 4, torch.bfloat16, threads) for threads in (1, 1, 2)] == [True] * 3
        assert len(trials) == 2
        for side in trials[0]:
            assert all(result.flatten().tolist() == [4.0] * 8 for result in side())
    finally:
        is_faster_as_vector.cache_clear()
