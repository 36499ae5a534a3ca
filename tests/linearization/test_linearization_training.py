# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Stage 1 in memory that does not grow with layers, and over several processes."""

import weakref

import pytest
import torch
from small_models import random_ids
from transformer_sources import divergence, source_of
from transformers import TrainingArguments

from retnet_hf import linearization
from retnet_hf.linearization import align, measure_heads, prepare_for_alignment, transfer
from retnet_hf.linearization.distillation import DivergenceByRows


class Saved:
    """A tensor that a backward pass needs, among those that are held."""

    held, peak = weakref.WeakSet(), 0

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        Saved.held.add(self)
        Saved.peak = max(Saved.peak, sum(saved.tensor.nbytes for saved in Saved.held))


def peak_of_a_step(layers: int) -> int:
    """The most bytes that are saved for backward passes at once in a step of alignment."""
    teacher = source_of("Llama 3", num_hidden_layers=layers)
    student = transfer(teacher, kept=[], measures=measure_heads(teacher, [random_ids(2, 16)]))
    parameters, Saved.peak = prepare_for_alignment(student), 0
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        align(student, teacher, random_ids(4, 64), with_loss=lambda loss: loss.backward())
    assert all(parameter.grad.abs().sum() > 0 for parameter in parameters if parameter.ndim > 1)
    return Saved.peak


def test_the_activations_of_alignment_are_those_of_one_layer():
    two, eight = peak_of_a_step(2), peak_of_a_step(8)
    activations = 4 * 64 * 32 * 4  # B T D bytes
    assert two > 5 * activations  # what is counted are activations
    assert eight < two + activations / 2


def test_alignment_in_half_precision_has_the_gradients_of_a_backward_pass_outside_autocast():
    """That of a layer runs within the forward pass of the teacher, where autocast is on."""
    teacher = source_of("Llama 3")
    student = transfer(teacher, kept=[], measures=measure_heads(teacher, [random_ids(2, 16)]))
    ids = random_ids(2, 150)  # several chunks
    parameters = prepare_for_alignment(student)

    def without_autocast(loss):
        with torch.autocast("cpu", enabled=False):
            (loss / 2).backward()

    with torch.autocast("cpu", torch.bfloat16):
        align(student, teacher, ids, with_loss=without_autocast)
    expected = [parameter.detach() - 0.1 * parameter.grad for parameter in parameters]
    student.zero_grad()
    arguments = TrainingArguments(
        "unused", max_steps=1, learning_rate=0.1, optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant", bf16=True,
        per_device_train_batch_size=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    blocks = [{"input_ids": row} for row in ids]
    linearization.AlignmentTrainer(student, arguments, teacher=teacher, train_dataset=blocks).train()
    for parameter, wanted in zip(parameters, expected):
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("trained", [True, False])
def test_the_divergence_by_rows_is_that_of_all_logits(monkeypatch, trained):
    monkeypatch.setattr("retnet_hf.linearization.distillation.ROWS", 3)
    generator = torch.Generator().manual_seed(0)
    shapes = (8, 6), (11, 6), (8, 5), (11, 5)
    hidden, weight, teacher, head = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes)
    hidden.requires_grad_()
    weight.requires_grad_(trained)
    wanted = [hidden, weight][: 1 + trained]
    expected = divergence(hidden.float() @ weight.float().T, teacher.float() @ head.float().T).mean()
    found = DivergenceByRows.apply(hidden.float(), weight.float(), teacher.float(), head.float())
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(3 * found, wanted), torch.autograd.grad(3 * expected, wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("padded", [False, True])
def test_the_loss_of_distillation_is_the_mean_divergence_of_present_tokens(tmp_path, padded):
    source, ids = source_of("Qwen3"), random_ids(3, 20)
    student, mask = transfer(source, kept=[0]), torch.ones(3, 20, dtype=torch.int64)
    if padded:
        mask[1, :7] = mask[2, :15] = 0
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    trainer = linearization.DistillationTrainer(student, arguments, train_dataset=[], teacher=source)
    inputs = {"input_ids": ids} | ({"attention_mask": mask} if padded else {})
    loss = trainer.compute_loss(student, inputs)
    each = divergence(student(**inputs).logits, source(**inputs).logits.detach())[mask.bool()]
    torch.testing.assert_close(loss, each.mean(), rtol=1e-4, atol=1e-6)
    parameters = [parameter for parameter in student.parameters() if parameter.requires_grad]
    for one, other in zip(torch.autograd.grad(loss, parameters), torch.autograd.grad(each.mean(), parameters), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
