# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`datasets` in streaming mode: Trainer reads a text that it never holds, as it reads the same text held in memory."""

import json
from pathlib import Path

import pytest
import torch
from datasets import IterableDataset, load_dataset
from small_models import small_config, word_tokenizer
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from retnet_hf import RetNetForCausalLM


BLOCK = 16


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Two files of lines that count on, of several lengths."""
    files = [str(tmp_path_factory.mktemp("texts") / "part.jsonl") for _ in range(2)]
    for part, file in enumerate(files):
        lines = [" ".join(f"w{3 + (line + word) % 80}" for word in range(9 + (line + part) % 8)) for line in range(60)]
        Path(file).write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return files


def blocks(files, streaming: bool):
    """Tokenised, joined, and cut into blocks: the usual preparation of a language model's text."""
    tokenizer = word_tokenizer()

    def cut(batch: dict) -> dict:
        ids = [token for text in tokenizer(batch["text"])["input_ids"] for token in text]
        return {"input_ids": [ids[start : start + BLOCK] for start in range(0, len(ids) - BLOCK + 1, BLOCK)]}

    data = load_dataset("json", data_files=files, split="train", streaming=streaming)
    return data.map(cut, batched=True, batch_size=20, remove_columns=["text"])


def train(folder, data, resume: str | None = None, **arguments) -> Trainer:
    torch.manual_seed(0)
    defaults = {"per_device_train_batch_size": 4, "max_steps": 12, "learning_rate": 1e-2, "logging_steps": 1}
    defaults |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    trainer = Trainer(
        model=RetNetForCausalLM(small_config()),
        args=TrainingArguments(str(folder), train_sampling_strategy="sequential", **(defaults | arguments)),
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(word_tokenizer(), mlm=False),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_streamed_training_is_training_from_memory_and_resumes(files, tmp_path):
    """From a checkpoint in the middle: what has been read is passed over, and the end is the same."""
    streamed, saving = blocks(files, streaming=True), {"save_strategy": "steps", "save_steps": 6}
    assert isinstance(streamed, IterableDataset)
    runs = [train(tmp_path, streamed), train(tmp_path, blocks(files, streaming=False))]
    assert len(set(losses(runs[0]))) == 12
    assert losses(runs[0]) == losses(runs[1])
    shuffled = streamed.shuffle(seed=3, buffer_size=32)
    runs += [train(tmp_path, shuffled, **saving), train(tmp_path, shuffled, str(tmp_path / "checkpoint-6"), **saving)]
    assert runs[3].state.global_step == 12
    assert losses(runs[2]) != losses(runs[0])
    for one, other in (runs[:2], runs[2:]):
        for (name, mine), theirs in zip(one.model.named_parameters(), other.model.parameters()):
            assert mine.equal(theirs), name
