# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What `launch` remembers of a kernel, what `compiled_together` compiles, and what a model compiles, without a GPU."""

import functools
import threading
from unittest import mock

import pytest
import torch


triton = pytest.importorskip("triton", reason="triton cannot be imported here")

from retnet_hf import RetNetConfig, RetNetForCausalLM  # noqa: E402
from retnet_hf.gpu import kernel_check, launching  # noqa: E402
from retnet_hf.gpu.launching import cdiv, compiled_together, launch, next_power_of_2  # noqa: E402
from retnet_hf.ops.kernels import load_kernels  # noqa: E402


class Kernel:
    """A kernel (x, y, length, TILE), and what Triton has compiled of it. Records how it was launched."""

    arg_names = ("x", "y", "length", "TILE")
    cache_key = "of the sources"

    def __init__(self) -> None:
        self.calls, self.accepts_constants = [], True

    def __getitem__(self, programs):
        return functools.partial(self.called, "again" if len(programs) == 3 else "first", programs)

    def called(self, way, programs, *arguments, **options):
        if way == "again" and not self.accepts_constants:
            raise TypeError("function takes 3 arguments")
        self.calls.append((way, programs, arguments[2:], options))
        return self

    def warmup(self, *arguments, grid, **options):
        self.calls.append(("warmup", arguments[2:], threading.get_ident()))
        return self


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launching, "launches", {})
    monkeypatch.setattr(launching, "remembers", True)
    monkeypatch.setattr(triton, "JITFunction", Kernel)
    return Kernel()


def launched(kernel, x=None, length=5, tile=16) -> str:
    """The way of a launch: "first" through Triton, "again" without it."""
    x = torch.zeros(64) if x is None else x
    launch(kernel, 3, (x, torch.zeros(4)), (length,), TILE=tile, num_warps=4)
    return kernel.calls[-1][0]


def test_a_kernel_is_launched_through_triton_once(kernel):
    assert [launched(kernel), launched(kernel)] == ["first", "again"]
    assert kernel.calls[0][1:] == ((3,), (5,), {"TILE": 16, "num_warps": 4})
    assert kernel.calls[1][1:3] == ((3, 1, 1), (5, 16))  # the constants come after the numbers


@pytest.mark.parametrize(
    "other",
    [{"length": 6}, {"tile": 32}, {"x": torch.zeros(64, dtype=torch.bfloat16)}, {"x": torch.zeros(64)[1:]}],
    ids=["number", "constant", "dtype", "alignment"],
)
def test_what_triton_may_compile_for_is_told_apart(kernel, other):
    launched(kernel)
    assert [launched(kernel, **other), launched(kernel, **other)] == ["first", "again"]


def test_a_version_whose_compiled_kernels_take_other_arguments_is_left_to_triton(kernel):
    launched(kernel)
    kernel.accepts_constants = False
    assert [launched(kernel), launched(kernel)] == ["first", "first"]
    assert not launching.remembers


def test_memory_of_launches_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(launching, "MOST_LAUNCHES", 4)
    for length in range(2, 30):
        launched(kernel, length=length)
        assert len(launching.launches) <= 4


def test_kernels_of_a_block_compile_in_other_threads_and_are_not_launched(kernel):
    with compiled_together():
        for length in (5, 5, 6):
            launch(kernel, 3, (torch.zeros(64), torch.zeros(4)), (length,), TILE=16, num_warps=4)
    assert sorted(call[:2] for call in kernel.calls) == [("warmup", (5,)), ("warmup", (6,))]
    assert threading.get_ident() not in {call[2] for call in kernel.calls}
    assert launched(kernel) == "first"


def test_a_kernel_that_does_not_compile_does_not_end_the_block(kernel, monkeypatch):
    monkeypatch.setattr(kernel, "warmup", mock.Mock(side_effect=RuntimeError("PassManager::run failed")))
    with compiled_together():
        launch(kernel, 3, (torch.zeros(64), torch.zeros(4)), (5,), TILE=16, num_warps=4)
    assert launched(kernel) == "first"  # where Triton would raise


def compilation(kernel, tensors, numbers, options) -> tuple:
    kinds = [(tensor.dtype, tensor.data_ptr() % 16 == 0) for tensor in tensors]
    for number, parameter in zip(numbers, kernel.params[len(tensors) :]):
        kinds += [None if parameter.do_not_specialize else (number == 1, number % 16 == 0)]
    return kernel, *kinds, *options.items()


@pytest.mark.parametrize("groups", [2, 4])
def test_the_check_before_the_first_use_compiles_what_a_model_launches(monkeypatch, groups):
    compiled, in_check, difference = {True: set(), False: set()}, [], kernel_check.difference

    def launched_nowhere(kernel, programs, tensors, numbers, **options):
        compiled[bool(in_check)].add(compilation(kernel, tensors, numbers, options))

    def checked(*use):
        in_check.append(use)
        difference(*use)
        in_check.clear()

    for module in ("retention", "rotation", "gates", "cross_entropy"):
        monkeypatch.setattr(f"retnet_hf.gpu.{module}_triton.launch", launched_nowhere)
        monkeypatch.setattr(f"retnet_hf.gpu.{module}_triton.runs_on", lambda device: True)
    monkeypatch.setattr(kernel_check, "difference", checked)
    monkeypatch.setattr(kernel_check, "checked", kernel_check.defaultdict(set))
    monkeypatch.setattr(kernel_check, "VERIFIED", set())
    monkeypatch.setattr("retnet_hf.ops.kernels.VERIFIED", kernel_check.VERIFIED)
    sizes = {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "chunk_size": 64}
    model = RetNetForCausalLM(RetNetConfig(**sizes, num_key_value_heads=groups)).bfloat16().eval()
    for module in model.modules():
        if hasattr(module, "kernels"):
            module.kernels = load_kernels("triton")._replace(runs_on=lambda device: True)
    ids = torch.zeros(3, 150, dtype=torch.long)
    with torch.no_grad():
        state = model(ids, use_cache=True).past_key_values
        model(ids[:, :1], past_key_values=state)
    model.train()(ids, labels=ids, use_cache=False).loss.backward()
    names = {kernel.fn.__name__ for kernel, *_ in compiled[False]}
    assert names >= {"states_kernel", "read_kernel", "step_kernel", "rotation_kernel", "normed_gate_kernel", "gate_kernel"}
    assert compiled[False] <= compiled[True]


def test_sizes_are_those_of_triton():
    for number in range(1, 300):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        assert cdiv(number, 16) == triton.cdiv(number, 16)
