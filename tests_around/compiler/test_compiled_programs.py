# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Programs of `retnet_hf.cpu`, compiled by PyTorch, compute what layers do, and are kept."""

import pytest
import torch
from plain_programs import PROMPT, decoded, read, same
from small_models import close, greedy, random_ids, small_model
from torch import nn

import retnet_hf.cpu
from retnet_hf.cpu import number_of_programs
from retnet_hf.cpu import programs as cpu_programs
from retnet_hf.cpu.programs import AfterOperator, BeforeOperator
from retnet_hf.retnet.modeling_retnet import RetNetDecoderLayer


compiled = retnet_hf.cpu.compile


def test_compiled_programs_compute_what_the_layers_do_and_are_kept(tmp_path, monkeypatch):
    """A program is compiled once for all layers that are alike, then loaded. A broken file is made again."""
    make, model = cpu_programs.make, small_model(num_hidden_layers=3)
    expected, text = decoded(model), greedy(model, PROMPT)
    with monkeypatch.context() as patches:  # sums without a trial
        patches.setattr(cpu_programs, "make", lambda path, steps, inputs: make(path, steps[:1], inputs))
        fast = compiled(model, tmp_path / "programs")
    assert number_of_programs(fast) == 3
    files = list((tmp_path / "programs").iterdir())
    assert len(files) == 2  # of layers, and of the head
    same(decoded(fast), expected)
    assert greedy(fast, PROMPT).equal(text)
    monkeypatch.setattr(cpu_programs.LayerProgram, "decay", lambda *arguments: None)
    same(decoded(fast), expected)
    monkeypatch.undo()

    other = small_model(seed=1)  # of other weights, and fewer layers
    expected = decoded(other)
    with monkeypatch.context() as patches:
        patches.setattr(torch._inductor, "aoti_compile_and_package", None)  # nothing is compiled any more
        fast = compiled(other, tmp_path / "programs")
        assert number_of_programs(fast) == 2
        same(decoded(fast), expected)
    for path in files:
        path.write_bytes(b"no program")
    monkeypatch.setattr(cpu_programs, "make", lambda path, steps, inputs: make(path, steps[1:], inputs))  # the kernels
    same(decoded(compiled(other, tmp_path / "programs")), expected)


def test_the_program_that_a_trial_finds_clearly_faster_is_kept(tmp_path, monkeypatch):
    """Of two that compute the same; the second one without a clear gain."""
    step, inputs = nn.Tanh(), [(torch.ones(3),)] * 2
    other, path, asked = nn.Sigmoid(), tmp_path / "kept.pt2", []
    step.any_length = other.any_length = False
    for faster, expected in ((True, step), (False, other)):

        def is_clearly_faster(one, another, faster=faster):
            asked.append([[float(result[0][0]) for result in runs()] for runs in (one, another)])
            return faster

        monkeypatch.setattr(cpu_programs, "is_clearly_faster", is_clearly_faster)
        cpu_programs.make(path, [step, other], inputs)
        close(cpu_programs.load(path)([torch.full((3,), 0.5)])[0], expected(torch.full((3,), 0.5)))
    first, second = float(torch.tensor(1.0).tanh()), float(torch.tensor(1.0).sigmoid())
    for found in asked:
        assert found == [pytest.approx([first] * 2), pytest.approx([second] * 2)]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_two_programs_serve_every_length_and_are_kept(tmp_path, monkeypatch):
    make, load, shapes = cpu_programs.make, cpu_programs.load, ((1, 2), (1, 130), (3, 7))

    def make_of_prompts(path, steps, inputs):  # those of steps have tests of their own, and are not compiled
        make(path, steps, inputs) if isinstance(steps[0], (BeforeOperator, AfterOperator)) else path.touch()

    monkeypatch.setattr(cpu_programs, "make", make_of_prompts)
    monkeypatch.setattr(cpu_programs, "load", lambda path: load(path) if path.stat().st_size else None)
    model, other = (small_model(num_key_value_heads=2, seed=seed) for seed in (0, 1))
    expected = [[read(each, random_ids(*shape)) for shape in shapes] for each in (model, other)]
    copies, files = [compiled(model, tmp_path, prompts=True)], len(list(tmp_path.iterdir()))
    assert files == 4  # of prompts, of steps, and of the head
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", None)  # nothing is compiled any more
    copies.append(compiled(other, tmp_path, prompts=True))
    assert len(list(tmp_path.iterdir())) == files
    monkeypatch.setattr(RetNetDecoderLayer, "forward", None)  # no layer computes by itself
    for fast, own in zip(copies, expected):
        for shape, result in zip(shapes, own):
            same(read(fast, random_ids(*shape)), result)
