# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`fuse_projections` changes where weights lie, and nothing else."""

import copy

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from retnet_hf import RetNetConfig, RetNetForCausalLM
from retnet_hf.fused_projections import is_faster_side_by_side, is_plain


def small_model(seed: int = 0, **options) -> RetNetForCausalLM:
    torch.manual_seed(seed)
    options = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, **options}
    return RetNetForCausalLM(RetNetConfig(intermediate_size=48, **options)).eval()


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(1))


def fused_layers(model: nn.Module) -> list[bool]:
    return [module.fused_projections is not None for module in model.modules() if hasattr(module, "fused_projections")]


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits


def count_products(model: nn.Module, ids: torch.Tensor) -> int:
    """Linear layers that a forward runs one by one."""
    calls = []
    original = nn.Linear.forward
    try:
        nn.Linear.forward = lambda self, x: calls.append(self) or original(self, x)
        logits(model, ids)
    finally:
        nn.Linear.forward = original
    return len(calls)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_output_gate": False, "use_gated_mlp": False},
        {"num_key_value_heads": 1},
        {"tie_word_embeddings": True},
        {"dtype": torch.bfloat16},
    ],
    ids=["plain", "ungated", "grouped", "tied", "bfloat16"],
)
def test_names_shapes_values_and_results_stay(options, ids):
    model = small_model(**options).to(options.get("dtype", torch.float32))
    expected, before = logits(model, ids), {name: weight.clone() for name, weight in model.state_dict().items()}
    generated = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    model.fuse_projections(measure=False)
    tied = bool(options.get("tie_word_embeddings"))
    assert fused_layers(model) == [not tied, True, True, True, True]  # the head, and two in each of the blocks
    torch.testing.assert_close(logits(model, ids), expected)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0), generated)
    after = dict(model.named_parameters())
    assert list(after) == [name for name in before if name in after]
    assert all(torch.equal(weight, before[name]) and weight.requires_grad for name, weight in after.items())
    assert [name for name, weight in after.items() if not weight.is_contiguous()]


def test_six_projections_of_a_block_take_two_products(ids):
    model = small_model()
    assert count_products(model, ids) == 2 * 8 + 1
    model.fuse_projections(measure=False)
    assert count_products(model, ids) == 2 * (8 - 6) + 1  # and the two


def test_fusing_adds_no_memory_and_twice_is_once(ids):
    model = small_model()
    model.fuse_projections(measure=False)
    expected = logits(model, ids)
    model.fuse_projections(measure=False)
    assert torch.equal(logits(model, ids), expected)
    retention = model.model.layers[0].retention
    memory = retention.fused_projections.weight.untyped_storage()
    for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
        assert getattr(retention, name).weight.untyped_storage().data_ptr() == memory.data_ptr()
    assert memory.nbytes() == 4 * 32 * (32 + 32 + 64 + 64)


def test_a_forward_that_records_a_gradient_puts_the_weights_back(ids):
    model, plain = small_model(), small_model()
    model.fuse_projections(measure=False)
    for each in (model, plain):
        each(ids, labels=ids).loss.backward()
    assert all(weight.is_contiguous() for weight in model.parameters())
    assert not any(fused_layers(model))
    for (name, weight), other in zip(model.named_parameters(), plain.named_parameters()):
        torch.testing.assert_close(weight.grad, other[1].grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_training_goes_as_if_nothing_had_been_laid_out(fused, training, ids):
    """PyTorch's fused optimizers do not ask how a parameter lies in memory."""
    model, plain = small_model(), small_model()
    model.fuse_projections(measure=False)
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, fused=fused)
        each.train(training)
        for _ in range(2):
            each(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        each.eval()
    for (name, weight), other in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(weight, other, msg=lambda text, name=name: f"{name}: {text}")
    model.fuse_projections(measure=False)
    torch.testing.assert_close(logits(model, ids), logits(plain, ids))


SAVERS = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "safetensors": lambda model, folder: save_file(model.state_dict(), folder / "model.safetensors"),
    "accelerate": lambda model, folder: Accelerator(cpu=True).save_model(model, folder),
}


@pytest.mark.parametrize("save", SAVERS)
def test_it_is_saved_as_if_nothing_had_been_laid_out(save, tmp_path, ids):
    model, plain = small_model(), small_model()
    model.fuse_projections(measure=False)
    for name, each in {"fused": model, "plain": plain}.items():
        (tmp_path / name).mkdir()
        SAVERS[save](each, tmp_path / name)
    fused, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("fused", "plain"))
    assert fused.keys() == expected.keys()
    assert all(torch.equal(fused[name], weight) for name, weight in expected.items())


def test_an_adapter_can_come_and_be_merged_and_saved(tmp_path, ids):
    model = small_model()
    model.fuse_projections(measure=False)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)).eval()
    expected = logits(adapted, ids)
    assert (expected - logits(small_model(), ids)).abs().max() > 1e-3
    merged = adapted.merge_and_unload(safe_merge=True)
    torch.testing.assert_close(logits(merged, ids), expected, atol=1e-4, rtol=1e-4)
    merged.fuse_projections(measure=False)
    torch.testing.assert_close(logits(merged, ids), expected, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded, ids), expected, atol=1e-4, rtol=1e-4)


def test_autocast_computes_as_before(ids):
    model = small_model()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = logits(model, ids)
        model.fuse_projections(measure=False)
        assert torch.equal(logits(model, ids), expected)
    assert all(fused_layers(model))


def test_what_inference_mode_laid_out_can_be_trained(ids):
    model = small_model()
    with torch.inference_mode():
        model.fuse_projections(measure=False)
        model(ids)
    model(ids, labels=ids).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_pickled_model_computes_the_same(tmp_path, ids):
    model = small_model()
    expected = logits(model, ids)
    model.fuse_projections(measure=False)
    torch.save(model, tmp_path / "model.pt")
    torch.testing.assert_close(logits(torch.load(tmp_path / "model.pt", weights_only=False), ids), expected)


def test_unfusing_puts_every_weight_back(ids):
    model = small_model()
    expected = logits(model, ids)
    model.fuse_projections(measure=False)
    assert not model.lm_head.weight.is_contiguous()
    model.unfuse_projections()
    assert all(weight.is_contiguous() for weight in model.parameters())
    assert len({weight.untyped_storage().data_ptr() for weight in model.parameters()}) == len(list(model.parameters()))
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.double().float(),
        lambda model: copy.deepcopy(model),
        lambda model: model.load_state_dict(small_model(3).state_dict()) and model,
        lambda model: model.load_state_dict(small_model(3).state_dict(), assign=True) and model,
    ],
    ids=["another type", "another type and back", "deepcopy", "other weights", "other tensors"],
)
def test_weights_that_moved_or_changed_are_the_ones_that_count(move, ids):
    model = small_model()
    model.fuse_projections(measure=False)
    model = move(model)
    actual = logits(model, ids)
    plain = small_model().to(model.dtype)
    plain.load_state_dict(model.state_dict())  # which puts them back
    torch.testing.assert_close(actual, logits(plain, ids))


def test_weights_that_left_give_their_memory_back(ids):
    model = small_model()
    model.fuse_projections(measure=False)
    model.to(torch.float64)
    logits(model, ids)
    held = [module.fused_projections for module in model.modules() if hasattr(module, "fused_projections")]
    assert all(fused is None or fused.weight is None for fused in held)


def test_hooks_see_what_they_would_have_seen(ids):
    model, seen = small_model(), []
    expected = logits(model, ids)
    model.fuse_projections(measure=False)
    model.model.layers[0].retention.k_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    torch.testing.assert_close(logits(model, ids), expected)
    assert seen == [(2, 7, 32)]
    assert all(fused_layers(model))  # without the hook it goes on as before


def test_a_layer_put_in_the_place_of_another_is_used(ids):
    model, plain = small_model(), small_model()
    model.fuse_projections(measure=False)
    torch.manual_seed(5)
    other = nn.Linear(32, 32)
    assert not is_plain(other)  # it has a bias
    for each in (model, plain):
        each.model.layers[1].retention.q_proj = other
    torch.testing.assert_close(logits(model, ids), logits(plain, ids))
    model.fuse_projections(measure=False)
    assert fused_layers(model) == [True, True, True, False, True]  # the head, and two in each of the blocks


def test_a_head_that_is_the_embedding_stays_where_it_is():
    model = small_model(tie_word_embeddings=True)
    model.fuse_projections(measure=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.is_contiguous()


class Products:
    """A compiler's backend that counts the matrix products of each graph and runs it as it is."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        linear = torch._C._nn.linear
        self.counts.append(sum(node.target is linear for node in graph.graph.nodes))
        return graph


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield Products()
    torch._dynamo.reset()


def test_a_compiled_model_takes_fused_products(compiler, ids):
    model = small_model()
    expected = logits(model, ids)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    torch.testing.assert_close(logits(compiled, ids), expected)
    model.fuse_projections(measure=False)
    torch.testing.assert_close(logits(compiled, ids), expected)
    assert compiler.counts == [2 * 8 + 1, 2 * (2 + 2) + 1]


def double_a_weight(model: RetNetForCausalLM) -> None:
    for projection in (model.model.layers[0].mlp.up_proj, model.model.layers[0].retention.k_proj, model.lm_head):
        projection.weight.data = 2 * projection.weight.data


MOVES = {
    "another type": lambda model, other: model.to(torch.float64),
    "other weights": lambda model, other: model.load_state_dict(other.state_dict()),
    "other tensors": lambda model, other: model.load_state_dict(other.state_dict(), assign=True),
    "other data": lambda model, other: double_a_weight(model),
    "another layer": lambda model, other: setattr(model.model.layers[0].mlp, "up_proj", nn.Linear(32, 48)),
}


# without a gate the feed-forward is a single layer, which is laid out and takes its own product
@pytest.mark.parametrize(
    ("move", "gated"), [*((move, True) for move in MOVES), ("other data", False), ("another layer", False)]
)
def test_a_compiled_model_takes_the_weights_that_count(move, gated, compiler, ids):
    model, other = (small_model(seed, num_hidden_layers=1, use_gated_mlp=gated) for seed in (0, 3))
    other.fuse_projections(measure=False)
    model.fuse_projections(measure=False)
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    before = logits(compiled, ids)
    MOVES[move](model, other)
    plain = copy.deepcopy(model)
    plain.unfuse_projections()
    actual = logits(compiled, ids)
    torch.testing.assert_close(actual, logits(plain, ids))
    assert actual.dtype != before.dtype or (actual - before).abs().max() > 1e-3


@pytest.fixture
def clock(monkeypatch):
    """Time passes in products alone: so many seconds for a type of weight, and whether it is contiguous."""
    now, seconds = [0.0], {}
    product = nn.functional.linear

    def linear(hidden_states, weight, *arguments):
        now[0] += seconds.get((weight.dtype, weight.is_contiguous()), 1.0)
        return product(hidden_states, weight, *arguments)

    monkeypatch.setattr(nn.functional, "linear", linear)
    monkeypatch.setattr("retnet_hf.fused_projections._verdicts", {})
    monkeypatch.setattr("retnet_hf.fused_projections.time.perf_counter", lambda: now[0])
    return seconds


@pytest.mark.parametrize(
    ("apart", "together", "faster"),
    [(1.0, 2.9, False), (1.0, 2.0, True), (1.0, 50.0, False)],
)
def test_weights_are_laid_out_where_that_takes_less_time(clock, apart, together, faster):
    """Three products with one weight each against one with all: a gain must be clear."""
    clock[torch.float32, True], clock[torch.float32, False] = apart, together
    weights = [torch.rand(8, 4) for _ in range(3)]
    assert is_faster_side_by_side([weights, weights]) == faster


def test_a_kind_of_product_is_laid_out_by_its_own_trial(clock, ids):
    """In a model of two types, that which gains and not the other."""
    model = small_model(num_hidden_layers=1)
    clock[torch.float32, True], clock[torch.float32, False] = 1.0, 1.0
    clock[torch.bfloat16, True], clock[torch.bfloat16, False] = 1.0, 30.0
    expected = logits(model, ids)
    model.model.layers[0].mlp.to(torch.bfloat16)
    assert model.fuse_projections()
    assert fused_layers(model) == [
        False,
        True,
        False,
    ]  # a head alone gains nothing, retention does, the bfloat16 layer loses
    model.model.layers[0].mlp.to(torch.float32)
    torch.testing.assert_close(logits(model, ids), expected, rtol=0.05, atol=0.05)


def test_a_model_that_gains_nothing_is_left_as_it_was(clock, ids):
    model, plain = small_model(), small_model()
    clock[torch.float32, False] = 30.0
    before = {name: weight.data_ptr() for name, weight in model.named_parameters()}
    assert not model.fuse_projections()
    assert not any(fused_layers(model))
    assert {name: weight.data_ptr() for name, weight in model.named_parameters()} == before
    assert torch.equal(logits(model, ids), logits(plain, ids))


def test_a_kind_of_product_is_tried_once_in_a_process(clock, monkeypatch):
    trials = []
    monkeypatch.setattr("retnet_hf.fused_projections.is_faster_side_by_side", lambda groups: trials.append(groups) or True)
    for _ in range(3):
        assert small_model().fuse_projections()
    assert [len(groups) for groups in trials] == [1, 2, 2]  # the head, and two blocks' retention and feed-forward


def test_weights_of_inference_mode_are_left_alone(ids):
    with torch.inference_mode():
        model = small_model()
        assert not model.fuse_projections(measure=False)
    assert logits(model, ids).isfinite().all()


def test_a_trial_on_this_machine_changes_no_result_and_no_random_number(ids):
    model, plain = small_model(), small_model()
    torch.manual_seed(5)
    assert model.fuse_projections() == any(fused_layers(model))
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    torch.testing.assert_close(logits(model, ids), logits(plain, ids))
