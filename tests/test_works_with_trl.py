# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""TRL's SFTTrainer: instructions packed into one row train as instructions apart."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from small_models import VOCAB_SIZE, close, random_ids, rounding, small_model, word_tokenizer
from trl import SFTConfig, SFTTrainer


LONGEST = 24


def instructions(count: int = 24) -> Dataset:
    """A few words to be said again: a prompt, and its completion."""
    rows = []
    for seed in range(count):
        text = " ".join(f"w{token}" for token in random_ids(1, 2 + seed % 5, seed)[0].tolist())
        rows.append({"prompt": text + " w3 ", "completion": text})
    return Dataset.from_list(rows)


def trainer(folder, **arguments) -> SFTTrainer:
    tokenizer = word_tokenizer()
    tokenizer.eos_token = f"w{VOCAB_SIZE - 1}"
    config = {
        "per_device_train_batch_size": 24,
        "max_length": LONGEST,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "seed": 1,
    }
    peft_config = arguments.pop("peft_config", None)
    return SFTTrainer(
        model=small_model(),
        args=SFTConfig(output_dir=str(folder), **(config | arguments)),
        train_dataset=instructions(),
        processing_class=tokenizer,
        peft_config=peft_config,
    )


def losses(trainer: SFTTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def batch_of(trainer: SFTTrainer) -> dict:
    return dict(next(iter(trainer.get_train_dataloader())))


def gradients(model, batch: dict) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


PACKED = {"packing": True, "packing_strategy": "bfd"}
PADDING_FREE = {"padding_free": True, "max_length": None}


@pytest.mark.parametrize("arguments", [PACKED, PADDING_FREE], ids=["packing", "padding_free"])
def test_packed_instructions_do_not_leak(tmp_path, arguments):
    """Loss and every gradient are those of the padded batch of the same instructions, and so are the runs."""
    apart, packed = trainer(tmp_path), trainer(tmp_path, **arguments)
    batches = [batch_of(one) for one in (apart, packed)]
    assert batches[0]["input_ids"].shape[0] == 24
    assert batches[1]["input_ids"].shape[0] == 1
    assert (batches[0]["labels"] != -100).sum() == (batches[1]["labels"] != -100).sum() > 24
    for mine, expected in zip(gradients(packed.model, batches[1]), gradients(apart.model, batches[0])):
        close(mine, expected, rounding(batches[0]["labels"].numel()))

    row = {name: batches[1][name] for name in ("input_ids", "labels")}
    with torch.no_grad():
        difference = packed.model(**row).logits - packed.model(**batches[1]).logits
    assert difference.abs().max() > 0.1  # so much would show, had the row not said where an instruction begins

    for one in (apart, packed):
        one.train()
    assert losses(packed) == pytest.approx(losses(apart), rel=1e-3)
    assert losses(packed)[-1] < 0.8 * losses(packed)[0]


def test_packed_instructions_train_adapters(tmp_path):
    """With PEFT's defaults, and with gradient checkpointing, which SFTTrainer switches on by itself."""
    run = trainer(tmp_path, peft_config=LoraConfig(task_type="CAUSAL_LM"), max_steps=8, learning_rate=3e-2, **PACKED)
    run.train()
    assert run.args.gradient_checkpointing
    assert run.model.get_base_model().model.gradient_checkpointing
    assert losses(run)[-1] < 0.9 * losses(run)[0]
