# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`datasets` in streaming mode: Trainer reads a text that it never holds, as it reads the same text held in memory."""

import json

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
    folder = tmp_path_factory.mktemp("texts")
    for part in range(2):
        lines = [
            {"text": " ".join(f"w{3 + (line + word) % 80}" for word in range(9 + (line + part) % 8))} for line in range(60)
        ]
        (folder / f"part{part}.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    return [str(folder / f"part{part}.jsonl") for part in range(2)]


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
    defaults = {
        "per_device_train_batch_size": 4,
        "max_steps": 12,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "train_sampling_strategy": "sequential",
    }
    trainer = Trainer(
        model=RetNetForCausalLM(small_config()),
        args=TrainingArguments(output_dir=str(folder), **(defaults | arguments)),
        train_dataset=data,
        data_collator=DataCollatorForLanguageModeling(word_tokenizer(), mlm=False),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def same_weights(actual: Trainer, expected: Trainer) -> None:
    for (name, mine), theirs in zip(actual.model.named_parameters(), expected.model.parameters()):
        assert mine.equal(theirs), name


def test_streamed_training_is_training_from_memory(files, tmp_path):
    streamed = blocks(files, streaming=True)
    assert isinstance(streamed, IterableDataset)
    runs = [train(tmp_path, streamed), train(tmp_path, blocks(files, streaming=False))]
    assert len(set(losses(runs[0]))) == 12
    assert losses(runs[0]) == losses(runs[1])
    same_weights(*runs)


def test_streamed_training_resumes(files, tmp_path):
    """From a checkpoint in the middle: what has been read is passed over, and the end is the same."""
    shuffled = blocks(files, streaming=True).shuffle(seed=3, buffer_size=32)
    saving = {"save_strategy": "steps", "save_steps": 6}
    whole = train(tmp_path, shuffled, **saving)
    assert losses(whole) != losses(train(tmp_path / "another", blocks(files, streaming=True)))
    second = train(tmp_path, shuffled, resume=str(tmp_path / "checkpoint-6"), **saving)
    assert second.state.global_step == 12
    same_weights(second, whole)
