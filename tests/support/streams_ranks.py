# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Training on streams: the folder of model and tokens, of a run, and of a run that goes on from a checkpoint."""

import gc
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from retnet_hf import CarryState, TokenStreams


STREAMS, SEGMENT = 4, 16
STEPS_PER_EPOCH = 6


def train(given: Path, output: Path, processes: int, resumed: bool = False) -> None:
    """Eight steps, more than an epoch, with a checkpoint after four; ends with the weights in `output`/final."""
    options = {"max_steps": 8, "save_steps": 4, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "logging_steps": 1}
    options |= {"dataloader_num_workers": 2, "use_cpu": True, "report_to": "none", "disable_tqdm": True}
    rows = STREAMS // processes
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(given / "model"),
        TrainingArguments(output_dir=str(output), per_device_train_batch_size=rows, **options),
        train_dataset=TokenStreams(torch.load(given / "tokens.pt"), rows, SEGMENT, processes),
        callbacks=[CarryState()],
    )
    trainer.train(resume_from_checkpoint=resumed)
    trainer.save_model(str(output / "final"))


if __name__ == "__main__":
    gc.disable()
    torch.set_num_threads(1)
    given, new, begun = map(Path, sys.argv[1:])
    train(given, new, int(os.environ["WORLD_SIZE"]))
    train(given, begun, int(os.environ["WORLD_SIZE"]), resumed=True)
