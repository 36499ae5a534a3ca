# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`retnet_hf_cpu.compile` without programs: fused products change the speed of a copy, and nothing else."""

import copy

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from small_models import close
from torch import nn
from transformers import AutoModelForCausalLM, pipeline

import retnet_hf_cpu
from retnet_hf import RetNetConfig, RetNetForCausalLM
from retnet_hf_cpu import original
from retnet_hf_cpu.fusing import FastLinear, is_faster_side_by_side


def small_model(seed: int = 0, **options) -> RetNetForCausalLM:
    torch.manual_seed(seed)
    options = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, **options}
    return RetNetForCausalLM(RetNetConfig(intermediate_size=48, **options)).eval()


def fused(model: RetNetForCausalLM, measure: bool = False) -> RetNetForCausalLM:
    """A fast copy without programs."""
    return retnet_hf_cpu.compile(model, programs=False, measure=measure)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(50, (2, 7), generator=torch.Generator().manual_seed(1))


def fused_layers(model: nn.Module) -> set[str]:
    """Names of the layers that take their outputs from fused products."""
    return {
        name.removeprefix("model.layers.")
        for name, module in model.named_modules()
        if isinstance(module, FastLinear) and module.shared is not None
    }


RETENTION = {f"retention.{name}_proj" for name in "qkvg"}
MLP = {"mlp.up_proj", "mlp.gate_proj"}
EVERY = {"lm_head"} | {f"{layer}.{name}" for layer in range(2) for name in RETENTION | MLP}


@torch.no_grad()
def logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits


def count_products(model: nn.Module, ids: torch.Tensor, monkeypatch) -> int:
    calls, linear = [], nn.functional.linear
    with monkeypatch.context() as patches:
        patches.setattr(nn.functional, "linear", lambda *arguments: calls.append(1) or linear(*arguments))
        logits(model, ids)
    return len(calls)


@pytest.mark.parametrize(
    ("options", "layers"),
    [
        ({}, EVERY),
        (
            {"use_output_gate": False, "use_gated_mlp": False},
            {name for name in EVERY if "g_proj" not in name and "gate" not in name},
        ),
        ({"num_key_value_heads": 1}, EVERY),
        ({"tie_word_embeddings": True}, EVERY - {"lm_head"}),
        ({"dtype": torch.bfloat16}, EVERY),
    ],
    ids=["plain", "ungated", "grouped", "tied", "bfloat16"],
)
def test_parameters_are_the_very_same_and_results_stay(options, layers, ids):
    model = small_model(**options).to(options.get("dtype", torch.float32))
    expected, before = logits(model, ids), {name: weight.clone() for name, weight in model.state_dict().items()}
    generated = model.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    kinds = [type(module) for module in model.modules()]
    fast = fused(model)
    assert type(fast) is RetNetForCausalLM
    assert fused_layers(fast) == layers
    torch.testing.assert_close(logits(fast, ids), expected)
    assert torch.equal(fast.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0), generated)

    mine, theirs = dict(fast.named_parameters()), dict(model.named_parameters())
    assert list(mine) == list(theirs)
    assert all(mine[name] is weight and weight.requires_grad for name, weight in theirs.items())
    assert all(mine is theirs for mine, theirs in zip(fast.buffers(), model.buffers(), strict=True))
    # the model is left as it was
    assert [type(module) for module in model.modules()] == kinds
    assert not {id(module) for module in model.modules()} & {id(module) for module in fast.modules()}
    assert fast.config is not model.config
    assert all(torch.equal(weight, before[name]) and weight.is_contiguous() for name, weight in model.state_dict().items())
    assert torch.equal(logits(model, ids), expected)


def test_six_projections_of_a_layer_take_two_products(ids, monkeypatch):
    model = small_model()
    assert count_products(model, ids, monkeypatch) == 2 * 8 + 1
    assert count_products(fused(model), ids, monkeypatch) == 2 * (8 - 6 + 2) + 1


def test_fused_weights_are_copied_once_and_outputs_are_not_kept(ids):
    fast = fused(small_model())
    logits(fast, ids)
    retention = fast.model.layers[0].retention
    (product,) = retention.q_proj.shared.products.products
    assert {getattr(retention, f"{name}_proj").shared for name in "qkvg"} == {retention.q_proj.shared}
    assert product.operands[0].untyped_storage().nbytes() == 4 * 32 * (32 + 32 + 64 + 64)
    assert all(module.shared.products.kept is None for module in fast.modules() if isinstance(module, FastLinear))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["fast", "original"])
def test_training_goes_as_in_the_model(kind, training, ids):
    """The model is trained, too, whose parameters these are."""
    shared, plain = small_model(), small_model()
    model = fused(shared)
    model = model if kind == "fast" else original(model)
    for each in (model, plain):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True)
        each.train(training)
        for _ in range(2):
            each(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        each.eval()
    expected = logits(plain, ids)
    for (name, weight), other in zip(model.named_parameters(), plain.parameters()):
        torch.testing.assert_close(weight, other, msg=lambda text, name=name: f"{name}: {text}")
    for each in (model, shared):
        torch.testing.assert_close(logits(each, ids), expected)
    assert not fused_layers(model)  # of weights that are not the same any more
    again = fused(model)
    assert fused_layers(again) == EVERY
    torch.testing.assert_close(logits(again, ids), expected)


SAVERS = {
    "save_pretrained": lambda model, folder: model.save_pretrained(folder),
    "safetensors": lambda model, folder: save_file(model.state_dict(), folder / "model.safetensors"),
    "accelerate": lambda model, folder: Accelerator(cpu=True).save_model(model, folder),
}


@pytest.mark.parametrize("save", SAVERS)
def test_a_fast_copy_is_saved_as_the_model_is(save, tmp_path):
    model = small_model()
    for name, each in {"plain": model, "fast": fused(model), "original": original(fused(model))}.items():
        (tmp_path / name).mkdir()
        SAVERS[save](each, tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    for name in ("fast", "original"):
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == files
        assert all((tmp_path / name / file).read_bytes() == (tmp_path / "plain" / file).read_bytes() for file in files)


def test_an_original_is_plain_and_leaves_the_fast_copy_as_it_is(ids):
    model = small_model()
    fast = fused(model)
    plain = original(fast)
    assert not fused_layers(plain)
    assert [type(module) for module in plain.modules()] == [type(module) for module in model.modules()]
    assert [vars(module).keys() for module in plain.modules()] == [vars(module).keys() for module in model.modules()]
    assert all(mine is theirs for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True))
    assert torch.equal(logits(plain, ids), logits(model, ids))
    assert fused_layers(fast) == EVERY


def test_an_adapter_can_come_and_be_merged_and_saved(tmp_path, ids):
    fast = fused(small_model())
    adapted = get_peft_model(fast, LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)).eval()
    expected = logits(adapted, ids)
    assert (expected - logits(small_model(), ids)).abs().max() > 1e-3
    merged = adapted.merge_and_unload(safe_merge=True)
    for each in (merged, fused(merged)):
        torch.testing.assert_close(logits(each, ids), expected, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(loaded, ids), expected, atol=1e-4, rtol=1e-4)


def test_autocast_computes_as_before(ids, monkeypatch):
    model = small_model()
    fast = fused(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(logits(fast, ids), logits(model, ids))
        assert count_products(fast, ids, monkeypatch) == count_products(model, ids, monkeypatch)
    assert fused_layers(fast) == EVERY


def test_what_inference_mode_fused_can_be_trained(ids):
    model = small_model()
    with torch.inference_mode():
        fast = fused(model)
        fast(ids)
    fast(ids, labels=ids).loss.backward()
    assert all(weight.grad is not None for weight in fast.parameters())


def test_a_pickled_copy_computes_the_same(tmp_path, ids):
    fast = fused(small_model())
    expected = logits(fast, ids)
    torch.save(fast, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.testing.assert_close(logits(loaded, ids), expected)
    assert torch.equal(logits(original(loaded), ids), logits(small_model(), ids))


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.to(torch.float64),
        lambda model: model.double().float(),
        lambda model: copy.deepcopy(model),
        lambda model: model.load_state_dict(small_model(3).state_dict()) and model,
        lambda model: model.load_state_dict(small_model(3).state_dict(), assign=True) and model,
        lambda model: [parameter.detach().mul_(1.5) for parameter in model.parameters()] and model,
    ],
    ids=["another type", "another type and back", "deepcopy", "other weights", "other tensors", "in place"],
)
def test_weights_that_moved_or_changed_are_used(move, ids):
    model = move(fused(small_model()))
    plain = small_model().to(model.dtype)
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits(model, ids), logits(plain, ids))
    torch.testing.assert_close(logits(original(model), ids), logits(plain, ids))


def test_fused_weights_that_do_not_fit_any_more_give_their_memory_back(ids):
    fast = fused(small_model())
    fast.load_state_dict(small_model(3).state_dict())
    logits(fast, ids)
    assert not fused_layers(fast)


def test_hooks_see_what_they_would_have_seen(ids):
    model, seen = small_model(), []
    fast = fused(model)
    fast.model.layers[0].retention.k_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    torch.testing.assert_close(logits(fast, ids), logits(model, ids))
    assert seen == [(2, 7, 32)]
    assert fused_layers(fast) == EVERY


def test_hooked_layers_are_not_fused(ids):
    model, seen = small_model(), []
    model.model.layers[0].retention.k_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    fast = fused(model)
    assert fused_layers(fast) == EVERY - {f"0.{name}" for name in RETENTION}
    torch.testing.assert_close(logits(fast, ids), logits(model, ids))
    assert len(seen) == 2


def test_a_layer_put_in_the_place_of_another_is_used(ids):
    plain = small_model()
    fast = fused(plain)
    torch.manual_seed(5)
    other = nn.Linear(32, 32)  # with a bias
    for each in (fast, plain):
        each.model.layers[1].retention.q_proj = other
    torch.testing.assert_close(logits(fast, ids), logits(plain, ids))
    assert fused_layers(fused(fast)) == EVERY - {f"1.{name}" for name in RETENTION}


def test_pipelines_take_a_fast_copy(ids):
    from small_models import small_model as model_of_words
    from small_models import word_tokenizer

    model, tokenizer = model_of_words(), word_tokenizer()
    texts = [
        pipeline("text-generation", each, tokenizer=tokenizer)("w5 w6 w7", max_new_tokens=5, do_sample=False)
        for each in (model, fused(model))
    ]
    assert texts[0] == texts[1]


class CountProducts:
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
    yield CountProducts()
    torch._dynamo.reset()


def test_a_compiled_copy_takes_fused_products(compiler, ids):
    fast = fused(small_model())
    compiled = torch.compile(fast, fullgraph=True, backend=compiler)
    for _ in range(2):
        torch.testing.assert_close(logits(compiled, ids), logits(fast, ids))
    assert compiler.counts == [2 * (2 + 2) + 1]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to(torch.float64),
        lambda model: setattr(model.model.layers[0].mlp, "up_proj", nn.Linear(32, 48)),
    ],
    ids=["another type", "another layer"],
)
def test_a_compiled_copy_sees_other_types_and_layers(change, compiler, ids):
    fast = fused(small_model(num_hidden_layers=1))
    compiled = torch.compile(fast, fullgraph=True, backend=compiler)
    before = logits(compiled, ids)
    change(fast)
    actual = logits(compiled, ids)
    torch.testing.assert_close(actual, logits(original(fast), ids))
    assert actual.dtype != before.dtype or (actual - before).abs().max() > 1e-3


class Logits(nn.Module):
    def __init__(self, model: RetNetForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids, use_cache=False).logits


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_copy_is_the_program_of_the_model(strict, ids):
    model = small_model(num_hidden_layers=1)
    fast = fused(model)
    with torch.no_grad():
        program = torch.export.export(Logits(fast), (ids,), strict=strict)
        torch.testing.assert_close(program.module()(ids), logits(model, ids))
    assert set(program.state_dict) == set(Logits(model).state_dict())
    assert fused_layers(fast)


@pytest.fixture
def clock(monkeypatch):
    """Time passes in products alone: so many seconds for a type of weight, and whether it is contiguous."""
    now, seconds = [0.0], {}
    product = nn.functional.linear

    def linear(hidden_states, weight, *arguments):
        now[0] += seconds.get((weight.dtype, weight.is_contiguous()), 1.0)
        return product(hidden_states, weight, *arguments)

    monkeypatch.setattr(nn.functional, "linear", linear)
    monkeypatch.setattr("retnet_hf_cpu.fusing._verdicts", {})
    monkeypatch.setattr("retnet_hf_cpu.products.time.perf_counter", lambda: now[0])
    return seconds


@pytest.mark.parametrize(
    ("apart", "together", "faster"),
    [(1.0, 2.9, False), (1.0, 2.0, True), (1.0, 50.0, False)],
)
def test_weights_are_fused_where_that_takes_less_time(clock, apart, together, faster):
    """Three products with one weight each against one with all: a gain must be clear."""
    clock[torch.float32, True], clock[torch.float32, False] = apart, together
    weights = [torch.rand(8, 4) for _ in range(3)]
    assert is_faster_side_by_side([weights, weights]) == faster


def test_a_kind_of_product_is_fused_by_its_own_trial(clock, ids):
    """In a model of two types, that which gains and not the other."""
    model = small_model(num_hidden_layers=1)
    clock[torch.float32, True], clock[torch.float32, False] = 1.0, 1.0
    clock[torch.bfloat16, True], clock[torch.bfloat16, False] = 1.0, 30.0
    expected = logits(model, ids)
    model.model.layers[0].mlp.to(torch.bfloat16)
    fast = fused(model, measure=True)
    assert fused_layers(fast) == {f"0.{name}" for name in RETENTION}  # a head alone gains nothing, bfloat16 loses
    model.model.layers[0].mlp.to(torch.float32)
    torch.testing.assert_close(logits(fast, ids), expected, rtol=0.05, atol=0.05)


def test_a_model_that_gains_nothing_is_only_copied(clock, ids):
    model = small_model()
    clock[torch.float32, False] = 30.0
    fast = fused(model, measure=True)
    assert not fused_layers(fast)
    assert torch.equal(logits(fast, ids), logits(model, ids))


def test_a_kind_of_product_is_tried_once_in_a_process(clock, monkeypatch):
    trials = []
    monkeypatch.setattr("retnet_hf_cpu.fusing.is_faster_side_by_side", lambda groups: trials.append(groups) or True)
    for _ in range(3):
        assert fused_layers(fused(small_model(), measure=True)) == EVERY
    assert sorted(len(groups) for groups in trials) == [1, 2, 2]  # the head, and retention and feed-forward of two layers


def test_weights_of_inference_mode_are_not_fused(ids):
    with torch.inference_mode():
        fast = fused(small_model())
    assert not fused_layers(fast)
    assert logits(fast, ids).isfinite().all()


def test_a_trial_on_this_machine_changes_no_result_and_no_random_number(ids):
    model = small_model()
    torch.manual_seed(5)
    fast = fused(model, measure=True)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3))
    close(logits(fast, ids), logits(model, ids))
