# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`accelerate launch` with two processes on CPUs: DDP and Trainer compute what one process does.

Device maps and offloading are in test_saving_and_loading.py.
"""

import json

import pytest
import torch
from small_models import close, random_ids, rounding, small_model
from torchrun import free_port, run_launcher
from transformers import Trainer, TrainingArguments


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
accelerator = Accelerator(cpu=True)
assert accelerator.num_processes == 2 and torch.distributed.get_backend() == "gloo"
rank, ids = accelerator.process_index, torch.load(folder + "/ids.pt")
results = {}

def fresh():
    return AutoModelForCausalLM.from_pretrained(folder + "/model").train()

model = accelerator.prepare(fresh())
assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
half = ids.chunk(2)[rank]
accelerator.backward(model(half, labels=half).loss)
results["gradients"] = {name.removeprefix("module."): each.grad for name, each in model.named_parameters()}

data = [{"input_ids": row, "labels": row} for row in torch.load(folder + "/data.pt")]
training = json.load(open(folder + "/training.json"))
sharded = AutoModelForCausalLM.from_pretrained(folder + "/model", distributed_config=DistributedConfig(fsdp_size=2))
for name, model in {"plain": fresh(), "sharded": sharded.train()}.items():
    arguments = TrainingArguments(output_dir=folder + "/out", per_device_train_batch_size=2, **training)
    trainer = Trainer(model, arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = accelerator.unwrap_model(trainer.model).state_dict()
    weights = {key: getattr(weight, "full_tensor", lambda: weight)() for key, weight in weights.items()}
    results[name] = {"losses": losses, "weights": weights}
if rank == 0:
    torch.save(results, folder + "/results.pt")
accelerator.end_training()
"""


MODEL, IDS, DATA = small_model(), random_ids(4, 21), random_ids(16, 17, seed=1)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("launched")
    MODEL.save_pretrained(folder / "model")
    torch.save(IDS, folder / "ids.pt")
    torch.save(DATA, folder / "data.pt")
    (folder / "training.json").write_text(json.dumps(TRAINING))
    (folder / "process.py").write_text(PROCESS)
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"]
    launcher += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_ip=127.0.0.1"]
    run_launcher([*launcher, f"--main_process_port={free_port()}"], folder / "process.py", folder)
    return torch.load(folder / "results.pt")


def test_gradients_of_two_processes_are_those_of_one(results):
    MODEL(IDS, labels=IDS).loss.backward()
    assert results["gradients"].keys() == dict(MODEL.named_parameters()).keys()
    for name, parameter in MODEL.named_parameters():
        close(results["gradients"][name], parameter.grad, rounding(IDS.numel()))


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_trainer_in_two_processes_is_trainer_in_one(results, tmp_path, kind):
    arguments = TrainingArguments(output_dir=str(tmp_path), per_device_train_batch_size=4, **TRAINING)
    data = [{"input_ids": row, "labels": row} for row in DATA]
    trainer = Trainer(small_model().train(), arguments, train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 4
    assert results[kind]["losses"] == pytest.approx(losses, rel=1e-4)
    for name, weight in trainer.model.state_dict().items():
        close(results[kind]["weights"][name], weight, 1e-3)
