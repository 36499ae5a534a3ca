# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What `launch` remembers of a kernel, and what `compiled_together` compiles, with a stand-in for Triton's kernels."""

import threading

import pytest
import torch


triton = pytest.importorskip("triton", reason="triton cannot be imported here")

from retnet_hf.gpu import launching  # noqa: E402
from retnet_hf.gpu.launching import cdiv, compiled_together, launch, next_power_of_2  # noqa: E402


class Kernel:
    """A kernel (x, y, length, TILE). Records how it was launched."""

    arg_names = ("x", "y", "length", "TILE")
    cache_key = "of the sources"

    def __init__(self) -> None:
        self.calls = []
        self.accepts_constants = True

    def __getitem__(self, programs):
        def first(*arguments, **options):
            self.calls.append(("first", programs, arguments[2:], options))
            return self.compiled

        return first

    @property
    def compiled(self):
        kernel = self

        class Compiled:
            def __getitem__(self, programs):
                def again(*arguments):
                    if not kernel.accepts_constants:
                        raise TypeError("function takes 3 arguments")
                    kernel.calls.append(("again", programs, arguments[2:]))

                return again

        return Compiled()

    def warmup(self, *arguments, grid, **options):
        self.calls.append(("warmup", arguments[2:], threading.get_ident()))
        return self.compiled


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
    assert kernel.calls[1][1:] == ((3, 1, 1), (5, 16))  # the constants come after the numbers


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
    def failing(*arguments, **options):
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(kernel, "warmup", failing)
    with compiled_together():
        launch(kernel, 3, (torch.zeros(64), torch.zeros(4)), (5,), TILE=16, num_warps=4)
    assert launched(kernel) == "first"  # where Triton would raise


def test_sizes_are_those_of_triton():
    for number in range(1, 300):
        assert next_power_of_2(number) == triton.next_power_of_2(number)
        assert cdiv(number, 16) == triton.cdiv(number, 16)
