# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Several processes compute what one does: sequences split over ranks, parallel engines, streams, and linearizing."""

import json
import re
import shutil

import pytest
import torch
from places import ROOT
from safetensors.torch import load_file
from small_models import close, random_ids, small_model
from streams_ranks import SEGMENT, STEPS_PER_EPOCH, STREAMS, train
from torchrun import free_port, run_launcher, run_ranks, torchrun
from transformer_sources import source_of
from transformers import Trainer, TrainingArguments

from retnet_hf import RetNetForCausalLM, RetNetForMaskedLM, context_parallel, shard_sequence
from retnet_hf.linearization import align, measure_heads, prepare_for_alignment, transfer


def test_ranks_that_share_sequences_compute_what_one_process_does():
    run_ranks([2, 3, 4], "context_parallel_ranks.py")


@pytest.mark.parametrize("program", ["train_sharded.py", "train_long.py"])
def test_the_programs_of_the_guide_run_by_their_own_lines(program, tmp_path, monkeypatch):
    guide = (ROOT / "docs" / "guides" / "scale.md").read_text(encoding="utf-8")
    text = re.search(rf"`{program}`:\n\n```py\n(.*?)```", guide, re.DOTALL)[1]
    (tmp_path / program).write_text(text, encoding="utf-8")
    assert re.search(rf"^torchrun --nproc-per-node 2 {program}$", guide, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    printed = torchrun(2, tmp_path / program, OMP_NUM_THREADS="1")
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)", printed, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    saved = {"train_sharded.py": "trained", "train_long.py": "trained-long"}[program]
    RetNetForCausalLM.from_pretrained(tmp_path / saved)


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match="if all layers of the model are retention"):
        context_parallel(small_model("hybrid"), "a group")
    with pytest.raises(ValueError, match="got a RetNetForMaskedLM"):
        context_parallel(small_model("fla", RetNetForMaskedLM, bidirectional=True), "a group")
    with pytest.raises(RuntimeError, match="torchrun or accelerate launch"):
        context_parallel(small_model(), "a group")
    with pytest.raises(RuntimeError, match="torchrun or accelerate launch"):
        shard_sequence({"input_ids": torch.ones(1, 4)}, "a group")


def test_every_engine_computes_what_one_process_does(tmp_path):
    run_ranks([2, 4], "parallel_engines_ranks.py", tmp_path)


def test_processes_carry_the_states_of_their_rows(tmp_path):
    small_model().save_pretrained(tmp_path / "model")
    torch.save(torch.randint(0, 40, (STREAMS * SEGMENT * STEPS_PER_EPOCH,)), tmp_path / "tokens.pt")
    train(tmp_path, tmp_path / "one", 1)
    shutil.copytree(tmp_path / "one" / "checkpoint-4", tmp_path / "two after one" / "checkpoint-4")
    run_ranks([2], "streams_ranks.py", tmp_path, tmp_path / "two", tmp_path / "two after one")
    shutil.copytree(tmp_path / "two" / "checkpoint-4", tmp_path / "one after two" / "checkpoint-4")
    train(tmp_path, tmp_path / "one after two", 1, resumed=True)
    carried = {path.name for path in (tmp_path / "two" / "checkpoint-4").glob("carried*")}
    assert carried == {f"carried_state.{rank}-of-2.safetensors" for rank in (0, 1)}
    expected = load_file(tmp_path / "one" / "final" / "model.safetensors")
    for run in ("two", "two after one", "one after two"):
        weights = load_file(tmp_path / run / "final" / "model.safetensors")
        torch.testing.assert_close(weights, expected, rtol=0, atol=2e-5)


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
    assert any(parameter.grad.abs().max() > 1e-4 for parameter in parameters)
    for name, parameter in student.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(one[name], parameter.detach() - 0.1 * parameter.grad, rtol=1e-4, atol=1e-6)


TRAINING = {"max_steps": 4, "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
TRAINING |= {"disable_tqdm": True, "use_cpu": True, "train_sampling_strategy": "sequential"}

PROCESS = """
import gc; gc.disable()
import json, sys
import torch
torch.set_num_threads(1)
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
import retnet_hf

folder = sys.argv[1]
accelerator, results = Accelerator(cpu=True), {}
assert accelerator.num_processes == 2 and torch.distributed.get_backend() == "gloo"
data = [{"input_ids": row, "labels": row} for row in torch.load(folder + "/data.pt")]
training = json.load(open(folder + "/training.json"))
for name, config in {"plain": None, "sharded": DistributedConfig(fsdp_size=2)}.items():
    model = AutoModelForCausalLM.from_pretrained(folder + "/model", distributed_config=config)
    arguments = TrainingArguments(output_dir=folder + "/out", per_device_train_batch_size=2, **training)
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = accelerator.unwrap_model(trainer.model).state_dict()
    weights = {key: getattr(weight, "full_tensor", lambda: weight)() for key, weight in weights.items()}
    results[name] = {"losses": losses, "weights": weights}
if accelerator.is_main_process:
    torch.save(results, folder + "/results.pt")
accelerator.end_training()
"""

DATA = random_ids(16, 17, seed=1)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launched")
    small_model().save_pretrained(folder / "model")
    torch.save(DATA, folder / "data.pt")
    (folder / "training.json").write_text(json.dumps(TRAINING))
    (folder / "process.py").write_text(PROCESS)
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    launcher += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_ip=127.0.0.1"]
    run_launcher([*launcher, f"--main_process_port={free_port()}"], folder / "process.py", folder)
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_trainer_in_two_processes_is_trainer_in_one(results, tmp_path, kind):
    arguments = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=4, **TRAINING)
    data = [{"input_ids": row, "labels": row} for row in DATA]
    trainer = Trainer(small_model().train(), arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert (len(losses), results[kind]["losses"]) == (4, pytest.approx(losses, rel=1e-4))
    for name, weight in trainer.model.state_dict().items():
        close(results[kind]["weights"][name], weight, 1e-3)
