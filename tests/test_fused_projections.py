# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`fuse_projections` changes where weights lie, and nothing else."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

from retnet_hf import RetNetConfig, RetNetForCausalLM
from retnet_hf.fused_projections import is_plain


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
    model.fuse_projections()
    assert all(fused_layers(model))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], weight) and after[name].shape == weight.shape for name, weight in before.items())
    assert all(isinstance(parameter, nn.Parameter) and parameter.requires_grad for parameter in model.parameters())
    torch.testing.assert_close(logits(model, ids), expected)
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0), generated)


def test_six_projections_of_a_block_take_two_products(ids):
    model = small_model()
    assert count_products(model, ids) == 2 * 8 + 1
    model.fuse_projections()
    assert count_products(model, ids) == 2 * (8 - 6) + 1  # and the two


def test_fusing_adds_no_memory_and_twice_is_once(ids):
    model = small_model()
    model.fuse_projections()
    expected = logits(model, ids)
    model.fuse_projections()
    assert torch.equal(logits(model, ids), expected)
    retention = model.model.layers[0].retention
    memory = retention.fused_projections.weight.untyped_storage()
    for name in ("q_proj", "k_proj", "v_proj", "g_proj"):
        assert getattr(retention, name).weight.untyped_storage().data_ptr() == memory.data_ptr()
    assert memory.nbytes() == 4 * 32 * (32 + 32 + 64 + 64)


def test_gradients_are_those_of_the_model_as_it_was(ids):
    model, plain = small_model(), small_model()
    model.fuse_projections()
    for each in (model, plain):
        each(ids, labels=ids).loss.backward()
    for (name, weight), other in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(weight.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_a_training_step_reaches_the_next_decode_step(ids):
    model, plain = small_model(), small_model()
    model.fuse_projections()
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        each(ids, labels=ids).loss.backward()
        optimizer.step()
    torch.testing.assert_close(logits(model, ids), logits(plain, ids), atol=1e-4, rtol=1e-4)
    assert all(fused_layers(model))


def test_it_is_saved_as_if_it_were_not_fused(tmp_path, ids):
    model = small_model()
    model.save_pretrained(tmp_path / "plain")
    model.fuse_projections()
    model.save_pretrained(tmp_path / "fused")
    plain, fused = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "fused"))
    assert plain.keys() == fused.keys()
    assert all(torch.equal(plain[name], fused[name]) for name in plain)
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "fused"), ids), logits(model, ids))


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to(torch.float64),
        lambda model: copy.deepcopy(model),
        lambda model: model.load_state_dict(small_model(3).state_dict()) and model,
        lambda model: model.load_state_dict(small_model(3).state_dict(), assign=True) and model,
    ],
    ids=["another type", "deepcopy", "other weights", "other tensors"],
)
def test_weights_that_moved_or_changed_are_the_ones_that_count(move, ids):
    model = small_model()
    model.fuse_projections()
    model = move(model)
    plain = small_model().to(model.dtype)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(model, ids), logits(plain, ids))


def test_weights_that_left_give_their_memory_back(ids):
    model = small_model()
    model.fuse_projections()
    model.to(torch.float64)
    logits(model, ids)
    assert not any(fused_layers(model))


def test_hooks_see_what_they_would_have_seen(ids):
    model, seen = small_model(), []
    expected = logits(model, ids)
    model.fuse_projections()
    model.model.layers[0].retention.k_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    torch.testing.assert_close(logits(model, ids), expected)
    assert seen == [(2, 7, 32)]


def test_a_layer_put_in_the_place_of_another_is_used(ids):
    model, plain = small_model(), small_model()
    model.fuse_projections()
    torch.manual_seed(5)
    other = nn.Linear(32, 32)
    assert not is_plain(other)  # it has a bias
    for each in (model, plain):
        each.model.layers[1].retention.q_proj = other
    torch.testing.assert_close(logits(model, ids), logits(plain, ids))
    model.fuse_projections()
    assert fused_layers(model) == [True, True, False, True]


def test_a_head_that_is_the_embedding_stays_where_it_is():
    model = small_model(tie_word_embeddings=True)
    model.fuse_projections()
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
    model.fuse_projections()
    torch.testing.assert_close(logits(compiled, ids), expected)
    assert compiler.counts == [2 * 8 + 1, 2 * (2 + 2) + 1]


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.load_state_dict(small_model(3, num_hidden_layers=1).state_dict()),
        lambda model: model.load_state_dict(small_model(3, num_hidden_layers=1).state_dict(), assign=True),
        lambda model: setattr(
            model.model.layers[0].mlp.up_proj.weight, "data", 2 * model.model.layers[0].mlp.up_proj.weight.data
        ),
        lambda model: setattr(model.model.layers[0].mlp, "up_proj", nn.Linear(32, 48)),
    ],
    ids=["another type", "other weights", "other tensors", "other data", "another layer"],
)
def test_a_compiled_model_takes_the_weights_that_count(move, compiler, ids):
    model = small_model(num_hidden_layers=1)
    model.fuse_projections()
    compiled = torch.compile(model, fullgraph=True, backend=compiler)
    logits(compiled, ids)
    move(model)
    actual = logits(compiled, ids)
    torch.testing.assert_close(actual, logits(model, ids))
    torch.testing.assert_close(actual, logits(copy.deepcopy(model), ids))  # of which nothing lies side by side
