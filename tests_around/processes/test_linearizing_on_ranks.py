# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Stage 1 of linearizing on two processes: the step of their mean gradient."""

import torch
from small_models import random_ids
from torchrun import run_ranks
from transformer_sources import source_of

from retnet_hf.linearization import align, measure_heads, prepare_for_alignment, transfer


RANK = """
import sys, torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM, TrainingArguments
import retnet_hf
from retnet_hf.linearization import AlignmentTrainer, prepare_for_alignment

folder = sys.argv[1]
teacher, student = (AutoModelForCausalLM.from_pretrained(folder + name) for name in ("/teacher", "/student"))
prepare_for_alignment(student)
arguments = TrainingArguments(
    folder + "/run", max_steps=1, learning_rate=0.1, optim="sgd", max_grad_norm=0.0, lr_scheduler_type="constant",
    per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[], save_strategy="no", use_cpu=True,
    disable_tqdm=True, logging_strategy="no",
)
blocks = [{"input_ids": block} for block in torch.load(folder + "/ids.pt")]


class InOrder(AlignmentTrainer):
    def _get_train_sampler(self, *_):
        return None


InOrder(student, arguments, train_dataset=blocks, teacher=teacher).train()
rank = torch.distributed.get_rank()
torch.save(student.state_dict(), folder + f"/rank{rank}.pt")
torch.distributed.destroy_process_group()
"""


def test_two_ranks_take_the_step_of_their_mean_gradient(tmp_path):
    teacher = source_of("Qwen2")
    student = transfer(teacher, kept=[], measures=measure_heads(teacher, [random_ids(2, 16)]))
    ids = random_ids(8, 16)
    teacher.save_pretrained(tmp_path / "teacher")
    student.save_pretrained(tmp_path / "student")
    torch.save(ids, tmp_path / "ids.pt")
    (tmp_path / "rank.py").write_text(RANK, encoding="utf-8")
    run_ranks([2], tmp_path / "rank.py", tmp_path)
    one, other = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
    assert all(one[name].equal(other[name]) for name in one)
    parameters = prepare_for_alignment(student)
    for batch in ids.split(2):  # two of each rank
        align(student, teacher, batch, with_loss=lambda loss: (loss / (2 * 4)).backward())
    names = {id(parameter): name for name, parameter in student.named_parameters()}
    assert any(parameter.grad.abs().max() > 1e-4 for parameter in parameters)
    for parameter in parameters:
        expected = parameter.detach() - 0.1 * parameter.grad
        torch.testing.assert_close(one[names[id(parameter)]], expected, rtol=1e-4, atol=1e-6)
