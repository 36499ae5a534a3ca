# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Who chooses the code that computes retention, and what happens where it cannot be had."""

import subprocess
import sys
from collections import Counter, defaultdict
from functools import partial
from unittest import mock

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridConfig
from retnet_hf.gpu import kernel_check
from retnet_hf.ops import kernels as kernels_module
from retnet_hf.ops.gradients import cross_entropy_and_gradient_, gated, normed_gate, rotate_both
from retnet_hf.ops.kernels import AUTO, KERNELS_VARIABLE, TORCH, Kernels, load_kernels, logger
from retnet_hf.ops.retention_forms import chunkwise_retention, recurrent_step_


SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """Neither by the environment nor by an earlier warning."""
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    logger.warning_once.cache_clear()
    monkeypatch.setattr(kernels_module, "_by_default", [])
    monkeypatch.setattr(kernel_check, "checked", defaultdict(set))
    monkeypatch.setattr(kernel_check, "wrong", {})
    monkeypatch.setattr(kernels_module, "VERIFIED", set())
    monkeypatch.setattr(kernel_check, "VERIFIED", kernels_module.VERIFIED)


@pytest.fixture
def no_triton(monkeypatch):
    """None in the place of a module is how Python says that it is not to be found."""
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "retnet_hf.gpu.retention_triton", raising=False)


def test_names_of_kernels(monkeypatch):
    """The environment goes before the configuration."""
    assert RetNetConfig(**SIZES).kernels == "auto"
    assert RetNetHybridConfig(**SIZES, layer_types=["linear_attention"]).kernels == "auto"
    with pytest.raises(StrictDataclassError, match="kernels must be one of auto, triton, torch, got 'cuda'"):
        RetNetConfig(**SIZES, kernels="cuda")
    monkeypatch.setenv(KERNELS_VARIABLE, "torch")
    assert load_kernels("triton") is TORCH
    monkeypatch.setenv(KERNELS_VARIABLE, "cuda")
    with pytest.raises(ValueError, match=f"{KERNELS_VARIABLE} must be one of auto, triton, torch, got 'cuda'"):
        load_kernels("torch")


def test_without_triton_pytorch_computes(no_triton):
    """A folder whose configuration asks for kernels loads and runs everywhere. "fla" of earlier versions is "auto"."""
    torch.manual_seed(0)
    assert RetNetConfig.from_dict(SIZES | {"kernels": "fla"}).kernels == "auto"
    model = RetNetForCausalLM(RetNetConfig(**SIZES, kernels="triton"))
    assert model.model.kernels is TORCH
    ids, plain = torch.arange(3, 30)[None], RetNetForCausalLM(RetNetConfig(**SIZES))
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=0)


def test_a_gpu_without_triton_is_told_about(no_triton, monkeypatch, caplog):
    said = []
    with monkeypatch.context() as patch:  # by default
        patch.setattr(kernels_module.logger, "warning_once", said.append)
        patch.setattr(kernels_module, "AUTO", AUTO._replace(runs_on=lambda device: True))
        model = with_kernels()
        for _ in range(2):
            model(IDS)
    [message] = said
    assert message.startswith("PyTorch's operations compute retention")
    assert "triton" in message
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("retnet_hf.ops.kernels.logger.propagate", True, raising=False)
    with caplog.at_level("WARNING"):
        assert load_kernels("triton") is TORCH
    assert "kernels='triton' cannot be used here" in caplog.text


# Without a GPU: stand-ins for kernels, on a device that is said to have them.


class StandIns:
    """Kernels that are PyTorch's operations, or are wrong in one of them. Counts their calls."""

    functions = {"chunkwise": chunkwise_retention, "step_": recurrent_step_, "cross_entropy_": cross_entropy_and_gradient_}
    functions |= {"rotate": lambda q, k, *turns: tuple(map(Tensor.type_as, rotate_both(q, k, *turns), (q, k)))}
    functions |= {"gated": gated, "normed_gate": normed_gate}

    def __init__(self, broken: str | None = None, wrong=None) -> None:
        self.calls = Counter()
        functions = {name: partial(self.call, name, wrong if name == broken else None) for name in self.functions}
        self.kernels = Kernels(lambda device: True, **functions, checked=True)

    def call(self, name, wrong, *operands, **options):
        self.calls[name] += 1
        function = self.functions[name] if wrong is None else partial(wrong, self.functions[name])
        return function(*operands, **options)


@pytest.fixture
def device_has(monkeypatch):
    def has(stand_ins: StandIns) -> StandIns:
        monkeypatch.setattr(kernels_module, "AUTO", AUTO._replace(runs_on=lambda device: True))
        monkeypatch.setattr(kernels_module, "_import_kernels", lambda: stand_ins.kernels)
        return stand_ins

    return has


@pytest.fixture
def heard(monkeypatch):
    messages = []
    monkeypatch.setattr(kernel_check.logger, "warning", messages.append)
    return messages


IDS = torch.arange(3, 30)[None]


def model_of(**options) -> RetNetForCausalLM:
    torch.manual_seed(0)
    return RetNetForCausalLM(RetNetConfig(**SIZES, chunk_size=8, **options)).eval()


def with_kernels(**options) -> RetNetForCausalLM:
    """A model that was made when the device was said to have kernels."""
    model = model_of(**options)
    for module in model.modules():
        if hasattr(module, "kernels"):
            module.kernels = kernels_module.AUTO
    return model


def results_of(model: RetNetForCausalLM) -> list[torch.Tensor]:
    model.zero_grad()
    output = model(IDS, labels=IDS, use_cache=False)
    output.loss.backward()
    found = [output.logits.detach(), *(parameter.grad for parameter in model.parameters())]
    with torch.no_grad():
        prompt = model(IDS, use_cache=True)
        step = model(IDS[:, :1], past_key_values=prompt.past_key_values, use_cache=True)
    return [*found, prompt.logits, step.logits]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def expected():
    return results_of(model_of(kernels="torch"))


def test_a_model_on_a_cpu_never_imports_triton():
    program = f"""
import sys, torch
from retnet_hf import RetNetConfig, RetNetForCausalLM
model = RetNetForCausalLM(RetNetConfig(**{SIZES}))
model(torch.arange(3, 30)[None]).logits.sum().backward()
model.generate(torch.arange(3, 30)[None], max_new_tokens=2)
assert not [name for name in sys.modules if name.startswith("retnet_hf") and "triton" in name or "kernel_check" in name]
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_device_that_has_kernels_uses_them_by_default(device_has, expected, heard):
    stand_ins, model = device_has(StandIns()), with_kernels()
    same(results_of(model), expected)
    checks = stand_ins.calls.copy()
    same(results_of(model), expected)
    again = stand_ins.calls - checks  # without a check any more
    assert again == {"chunkwise": 2, "rotate": 3, "step_": 1, "gated": 3, "normed_gate": 3, "cross_entropy_": 1}
    # of training and of a step, each to compile and twice to compare
    compared = {"chunkwise": 3, "rotate": 6, "step_": 3, "gated": 6, "normed_gate": 6, "cross_entropy_": 6}
    assert (checks - again, heard) == (compared, [])


def of_result(change):
    return lambda function, *operands, **options: change(*function(*operands, **options))


def of_operands(change):
    return lambda function, *operands, **options: function(*change(*operands), **options)


def failing(function, *operands, **options):
    raise RuntimeError("PassManager::run failed\nand a page of more")


HALVED = of_operands(lambda query, *rest: (query.detach() + 0.5 * (query - query.detach()), *rest))
CUT = of_result(lambda output, state: (output.index_fill(2, torch.tensor([-3, -2, -1]), 0), state))
NAN = of_result(lambda output, state: (output.index_fill(2, torch.tensor([5]), float("nan")), state))
TRIPLED = of_result(lambda *results: [3 * result for result in results])
MUTANTS = {
    "decays": ("chunkwise", of_operands(lambda q, k, v, decay, *rest: (q, k, v, 2 * decay, *rest)), "differs by"),
    "the last tokens": ("chunkwise", CUT, "differs by"),
    "not a number": ("chunkwise", NAN, "the output differs by nan"),
    "the gradient": ("chunkwise", HALVED, "the gradient of the queries differs by 0.5"),
    "the state": ("chunkwise", of_result(lambda output, state: (output, 1.5 * state)), "the state differs by 0.5"),
    "the step": ("step_", TRIPLED, "differs by 2"),
    "the rotation": ("rotate", of_operands(lambda q, k, of_q, _: (q, k, of_q, of_q)), "the rotation of the keys differs by"),
    "the gate": ("gated", of_operands(lambda values, *gate: (values.flip(-1), *gate)), "the gated values differs by"),
    "the loss": ("cross_entropy_", lambda function, *operands: 1.5 * function(*operands), "the loss differs by 0.5"),
    "the norm": ("normed_gate", of_operands(lambda values, *gate: (values + 0.5, *gate)), "norm"),
}
FAILS = "they fail with RuntimeError: PassManager::run failed. Please report this"
MUTANTS |= {f"{name} does not compile": (name, failing, FAILS) for name in StandIns.functions}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_kernel_that_is_wrong_or_does_not_compile_is_never_used_and_told_once(device_has, expected, heard, mutant):
    broken, wrong, said = MUTANTS[mutant]
    stand_ins, model = device_has(StandIns(broken, wrong)), with_kernels()
    same(results_of(model), expected)
    (message,) = heard
    assert said in message
    assert "in torch.float32 on cpu" in message
    checks = stand_ins.calls.copy()
    same(results_of(model), expected)
    assert (stand_ins.calls, len(heard)) == (checks, 1)


def test_a_model_whose_kernels_are_wrong_stays_with_pytorch_when_others_are_right(device_has, heard):
    """What is wrong for one size of heads is used for no model of this dtype."""

    def wrong_for_sixteen(function, values, *gate):
        return function(values + (values.shape[-1] == 16), *gate)

    stand_ins = device_has(StandIns("normed_gate", wrong_for_sixteen))
    model, other = with_kernels(), with_kernels(value_expansion=1.0)
    model(IDS, labels=IDS)
    assert len(heard) == 1
    other(IDS, labels=IDS)
    calls = stand_ins.calls["normed_gate"]
    model(IDS, labels=IDS)
    other(IDS, labels=IDS)
    assert stand_ins.calls["normed_gate"] == calls


def test_kernels_that_are_asked_for_are_checked_too(monkeypatch, expected, heard):
    monkeypatch.setattr(kernels_module, "_import_kernels", lambda: StandIns("chunkwise", TRIPLED).kernels)
    same(results_of(model_of(kernels="triton")), expected)
    assert len(heard) == 1


@pytest.mark.parametrize("how", ["configuration", "environment"])
def test_a_device_that_has_kernels_does_without_where_it_is_told_to(device_has, monkeypatch, how):
    stand_ins = device_has(StandIns())
    if how == "environment":
        monkeypatch.setenv(KERNELS_VARIABLE, "torch")
    results_of(model_of(kernels="torch" if how == "configuration" else "auto"))
    assert stand_ins.calls == {}


def test_the_check_leaves_random_numbers_modes_and_gradients_as_they_are(device_has, expected):
    device_has(StandIns())
    model, before = with_kernels(), torch.get_rng_state()
    with torch.inference_mode():
        logits = model(IDS).logits
    assert torch.equal(torch.get_rng_state(), before)
    assert logits.is_inference()
    same([logits], expected[:1])
    with torch.autocast("cpu", torch.bfloat16):
        model(IDS, labels=IDS).loss.backward()
    assert {dtype for _, dtype, _ in kernel_check.checked} == {torch.float32, torch.bfloat16}


def test_memory_that_is_short_says_nothing_about_kernels(device_has, heard):
    device_has(StandIns("chunkwise", mock.Mock(side_effect=torch.OutOfMemoryError("out of memory"))))
    results_of(with_kernels())
    assert (heard, kernel_check.wrong) == ([], {})


def test_the_check_is_not_seen_by_a_call_that_is_computed_again(device_has, expected, heard):
    """torch.utils.checkpoint around a whole model has hooks for what any backward pass keeps."""
    device_has(StandIns())
    model = with_kernels()
    checkpoint(lambda: model(IDS, labels=IDS, use_cache=False).loss, use_reentrant=False).backward()
    same([parameter.grad for parameter in model.parameters()], expected[1:-2])
    assert heard == []


def test_a_compiler_trusts_kernels_that_were_not_found_to_be_wrong(device_has, expected, heard):
    """And does not check them, in one graph."""
    stand_ins, model = device_has(StandIns("chunkwise", TRIPLED)), with_kernels()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert not torch.allclose(compiled(IDS, use_cache=False).logits, expected[0], atol=1e-3)
        same([model(IDS, use_cache=False).logits], expected[:1])  # finds that they are wrong
        torch.compiler.reset()
        before = stand_ins.calls["chunkwise"]
        same([torch.compile(model, backend="eager", fullgraph=True)(IDS, use_cache=False).logits], expected[:1])
    assert (stand_ins.calls["chunkwise"], len(heard)) == (before, 1)


def test_what_kernels_do_not_compute_is_left_to_pytorch(device_has):
    stand_ins, model = device_has(StandIns()), with_kernels()
    with torch.no_grad():
        torch.func.vmap(lambda ids: model(ids[None], use_cache=False).logits)(IDS)
        torch.export.export(model, (IDS,), {"use_cache": False}, strict=False)
        model.double()(IDS)
    assert stand_ins.calls == {}
