# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`compile_decoding`: programs compute what the layers do, are kept, and are used only where they may be.

One test compiles. In the others the function that would be compiled stands for its program.
"""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_models import close, greedy, random_ids, small_model
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup
from transformers import AutoModelForCausalLM, TorchAoConfig

from retnet_hf import RetNetForMaskedLM, RetNetState, decoding_programs
from retnet_hf.retention_state import RetNetStateLayer


PROMPT = random_ids(1, 7)


@pytest.fixture
def made(monkeypatch) -> list:
    """Programs that would have been compiled; they run as they are."""
    steps, runs = {}, []

    def make(path, step, inputs):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        steps[path] = step

    def load(path):
        def run(flat: list[Tensor]) -> list[Tensor]:
            runs.append(path)
            hidden_states, state, decay, *others = flat
            operands = len(steps[path].names)
            rotations = others[: len(others) - operands]
            with torch.no_grad():
                return [steps[path](hidden_states, state, decay, rotations, others[len(rotations) :])]

        return run

    monkeypatch.setattr(decoding_programs, "make", make)
    monkeypatch.setattr(decoding_programs, "load", load)
    return runs


@torch.no_grad()
def state_after(model, ids: Tensor = PROMPT) -> RetNetState:
    """The state after a prompt."""
    state = RetNetState(model.config)
    model(ids, past_key_values=state, use_cache=True)
    return state


@torch.no_grad()
def decoded(model, ids: Tensor = PROMPT) -> tuple[Tensor, RetNetState]:
    """Logits of five tokens one by one after a prompt, and the state after them."""
    state = state_after(model, ids)
    steps = [random_ids(ids.shape[0], 1, seed=number) for number in range(5)]
    logits = [model(step, past_key_values=state, use_cache=True).logits for step in steps]
    return torch.cat(logits, dim=1), state


def query_weights(model) -> list[nn.Parameter]:
    return [layer.retention.q_proj.weight for layer in model.model.layers]


def same(found: tuple[Tensor, RetNetState], expected: tuple[Tensor, RetNetState], tolerance: float = 1e-4) -> None:
    close(found[0].float(), expected[0].float(), tolerance)
    for layer, other in zip(found[1].layers, expected[1].layers, strict=True):
        assert layer.next_position.equal(other.next_position)
        assert layer.cumulative_length.equal(other.cumulative_length)
        if isinstance(layer, RetNetStateLayer):
            close(layer.recurrent_states, other.recurrent_states, tolerance)


def test_compiled_programs_compute_what_the_layers_do_and_are_kept(tmp_path, monkeypatch):
    """Compiled once for the layers that are alike, then loaded; a broken file is made anew."""
    model = small_model(num_hidden_layers=3)
    expected, text = decoded(model), greedy(model, PROMPT)
    assert model.compile_decoding(tmp_path / "programs") == 3
    (path,) = (tmp_path / "programs").iterdir()
    same(decoded(model), expected)
    assert greedy(model, PROMPT).equal(text)

    other = small_model(seed=1)  # of other weights, and fewer layers
    expected = decoded(other)
    with monkeypatch.context() as patches:
        patches.setattr(torch._inductor, "aoti_compile_and_package", None)  # nothing is compiled any more
        assert other.compile_decoding(tmp_path / "programs") == 2
        same(decoded(other), expected)
    path.write_bytes(b"no program")
    other.compile_decoding(tmp_path / "programs")
    same(decoded(other), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("dialect", "options", "programs", "files"),
    [
        ("fla", {}, 2, 1),
        ("fla", {"use_output_gate": False, "use_gated_mlp": False, "use_head_norm": False, "use_rotary": False}, 2, 1),
        ("grouped", {}, 2, 2),
        ("torchscale", {}, 2, 1),
        ("hybrid", {"retention_window": None}, 2, 2),
        ("hybrid", {}, 0, 0),
    ],
    ids=["plain", "bare", "grouped", "torchscale", "hybrid", "window"],
)
def test_every_kind_of_layer(made, tmp_path, dialect, options, programs, files, dtype):
    model = small_model(dialect, **options).to(dtype)
    expected = decoded(model)
    assert model.compile_decoding(tmp_path) == programs
    assert len(list(tmp_path.iterdir())) == files
    same(decoded(model), expected, 1e-4 if dtype == torch.float32 else 0.05)
    assert len(made) == 5 * programs
    model.uncompile_decoding()
    same(decoded(model), expected, 0)
    assert len(made) == 5 * programs


@pytest.mark.parametrize(
    "config",
    [Int8WeightOnlyConfig(), IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))],
    ids=["int8", "int4"],
)
def test_quantised_layers(made, tmp_path, config):
    small_model(hidden_size=64, intermediate_size=64).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", quantization_config=TorchAoConfig(config)).eval()
    expected = decoded(model)
    assert model.compile_decoding(tmp_path) == 2
    same(decoded(model), expected, 0.05)
    assert len(made) == 2 * 5


def test_weights_that_lie_side_by_side(made, tmp_path):
    model = small_model()
    expected = decoded(model)
    model.fuse_projections(measure=False)
    assert model.compile_decoding(tmp_path) == 2
    same(decoded(model), expected)
    assert len(made) == 2 * 5


@pytest.mark.parametrize("dialect", ["fla", "grouped", "torchscale"])
def test_values_that_change_in_place_are_seen(made, tmp_path, dialect):
    model = small_model(dialect)
    model.compile_decoding(tmp_path)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    found = decoded(model)
    assert made
    model.uncompile_decoding()
    same(found, decoded(model))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True),
        lambda model: model.fuse_projections(measure=False),
        lambda model: get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False)),
        lambda model: get_peft_model(model, LoraConfig(target_modules=["o_proj", "down_proj"], init_lora_weights=False)),
        lambda model: [setattr(layer.mlp, "act_fn", nn.Tanh()) for layer in model.model.layers],
        lambda model: [setattr(layer.mlp.down_proj, "bias", nn.Parameter(torch.ones(32))) for layer in model.model.layers],
        lambda model: [setattr(weight, "data", weight.data.T) for weight in query_weights(model)],
    ],
    ids=["type", "other tensors", "place", "adapters", "adapters of outputs", "activation", "a bias", "a layout"],
)
def test_weights_that_lie_elsewhere_end_it_with_a_warning(made, tmp_path, change, caplog):
    model = small_model()
    model.compile_decoding(tmp_path)
    change(model)
    expected = decoded(copy.deepcopy(model))
    same(decoded(model), expected)
    assert not made


def test_what_a_program_does_not_compute_the_layers_do(made, tmp_path):
    """Several sequences, several tokens, padding, gradients, a record of the past, hooks, autocast, no state to change."""
    model, plain = small_model(), small_model()
    model.compile_decoding(tmp_path)
    same(decoded(model, ids=random_ids(2, 7)), decoded(plain, ids=random_ids(2, 7)))

    token = random_ids(1, 1)
    states = [state_after(each) for each in (model, plain)]
    with torch.no_grad():
        for options in ({"attention_mask": torch.tensor([[0]])}, {"use_cache": False}, {"output_attentions": True}):
            found, expected = (
                each(token, past_key_values=state, **options).logits for each, state in zip((model, plain), states)
            )
            close(found, expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(token, past_key_values=states[0])
        for state in states:
            state.activate_past_recording()
        model(token, past_key_values=states[0])
    loss = model(token, past_key_values=copy.deepcopy(states[0]), labels=random_ids(1, 1)).logits.sum()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.model.layers[1].parameters())
    assert not made

    seen = []
    handle = model.model.layers[0].retention.o_proj.register_forward_hook(lambda *_: seen.append(1))
    same(decoded(model), decoded(plain))
    assert len(seen) == 6  # the prompt, and each step
    assert len(made) == 5  # of the other layer
    handle.remove()


def test_hidden_states_of_layers_are_recorded(made, tmp_path):
    model, plain = small_model(), small_model()
    model.compile_decoding(tmp_path)
    state, other = state_after(model), state_after(plain)
    with torch.no_grad():
        found = model(random_ids(1, 1), past_key_values=state, output_hidden_states=True).hidden_states
        expected = plain(random_ids(1, 1), past_key_values=other, output_hidden_states=True).hidden_states
    assert made
    assert len(found) == len(expected) == 3
    for one, another in zip(found, expected):
        close(one, another)


def test_inference_mode(made, tmp_path):
    model = small_model()
    expected = decoded(model)
    model.compile_decoding(tmp_path)
    with torch.inference_mode():
        same(decoded(model), expected)
    assert made


def test_dropout_of_training_mode_is_that_of_the_layers(made, tmp_path):
    model = small_model(hidden_dropout=0.5)
    model.compile_decoding(tmp_path)
    model.train()
    torch.manual_seed(0)
    assert not decoded(model)[0].equal(decoded(model)[0])
    assert not made


def test_a_head_of_another_vocabulary_is_used(made, tmp_path, monkeypatch):
    monkeypatch.setattr("retnet_hf.decoding_products.is_faster_as_vector", lambda *kind: True)
    model = small_model().to(torch.bfloat16)
    model.compile_decoding(tmp_path)
    model.resize_token_embeddings(128)
    with torch.no_grad():
        model.lm_head.weight.normal_()
    expected = decoded(copy.deepcopy(model))
    assert expected[0].shape[-1] == 128
    same(decoded(model), expected, 0.05)


def test_copies_have_no_programs_and_files_nothing_of_them(made, tmp_path):
    model = small_model()
    model.compile_decoding(tmp_path)
    expected = decoded(model)
    made.clear()
    same(decoded(copy.deepcopy(model)), expected)
    same(decoded(pickle.loads(pickle.dumps(model))), expected)
    assert not made
    assert set(model.state_dict()) == set(small_model().state_dict())


@pytest.mark.parametrize("disabled", [False, True])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "g_proj", "o_proj", "up_proj", "gate_proj", "down_proj"])
def test_adapted_layers_have_no_program(made, tmp_path, name, disabled):
    model = get_peft_model(small_model(), LoraConfig(target_modules=[name], layers_to_transform=[0]))
    with model.disable_adapter() if disabled else nullcontext():
        assert model.compile_decoding(tmp_path) == 1


def test_files_differ_by_what_a_program_is_made_of(made, tmp_path, monkeypatch):
    models = [small_model(), small_model(dtype=torch.bfloat16).to(torch.bfloat16), small_model(rms_norm_eps=1e-3)]
    models += [small_model(intermediate_size=48), small_model(use_rotary=False), small_model()]
    for layer in models[-1].model.layers:
        layer.retention.head_norm.eps = 0.5
    for model in models:
        model.compile_decoding(tmp_path)
    assert len(list(tmp_path.iterdir())) == len(models)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        models[0].compile_decoding(tmp_path)
    finally:
        torch.set_num_threads(threads)
    assert len(list(tmp_path.iterdir())) == len(models) + 1
    monkeypatch.setattr(decoding_programs, "machine", lambda: {"machine": "another"})
    models[0].compile_decoding(tmp_path)
    assert len(list(tmp_path.iterdir())) == len(models) + 2


def test_the_folder_by_default_is_in_the_cache_of_the_hub(made, tmp_path, monkeypatch):
    monkeypatch.setattr(decoding_programs.constants, "HF_HOME", str(tmp_path))
    small_model().compile_decoding()
    assert len(list((tmp_path / "retnet_hf" / "decoding").iterdir())) == 1


def test_models_that_do_not_decode_on_a_cpu_in_float32_or_less_are_refused(tmp_path):
    encoder = small_model(model_class=RetNetForMaskedLM, bidirectional=True)
    for model in (small_model().to(torch.float64), small_model().to("meta"), encoder):
        with pytest.raises(ValueError, match="compile_decoding is for models that decode on a CPU"):
            model.compile_decoding(tmp_path)


def test_without_a_compiler_nothing_is_written_and_the_error_says_so(tmp_path, monkeypatch):
    def fails(*args, **kwargs):
        raise OSError("no g++")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fails)
    model = small_model()
    expected = decoded(model)
    with pytest.raises(RuntimeError, match=r"takes a C\+\+ compiler: no g\+\+"):
        model.compile_decoding(tmp_path / "programs")
    assert list((tmp_path / "programs").iterdir()) == []
    same(decoded(model), expected)


def test_the_head_of_half_precision_is_a_product_with_a_vector(made, tmp_path, monkeypatch):
    monkeypatch.setattr("retnet_hf.decoding_products.is_faster_as_vector", lambda *kind: True)
    model = small_model().to(torch.bfloat16)
    model.compile_decoding(tmp_path)
    monkeypatch.setattr(nn.Linear, "forward", None)  # the head is not called
    with torch.no_grad():
        logits = model.project(torch.ones(1, 1, 32, dtype=torch.bfloat16))[0]
    expected = model.lm_head.weight.double().sum(1)
    close(logits[0, 0].double(), expected.detach(), 2**-8)
