# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""TRL: instructions packed into one row train as instructions apart; trainers make a reference model by themselves."""

import math

import pytest
import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from small_models import VOCAB_SIZE, close, random_ids, rounding, small_model, word_tokenizer
from transformers import AutoModelForCausalLM


def instructions() -> Dataset:
    texts = [" ".join(f"w{token}" for token in random_ids(1, 2 + seed % 5, seed)[0].tolist()) for seed in range(24)]
    return Dataset.from_list([{"prompt": text + " w3 ", "completion": text} for text in texts])


COMMON = {"learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
COMMON |= {"use_cpu": True, "bf16": False, "seed": 1}


def trainer(folder, peft_config=None, **arguments) -> trl.SFTTrainer:
    sizes = {"per_device_train_batch_size": 24, "max_length": 24, "max_steps": 4}
    return trl.SFTTrainer(
        model=small_model(),
        args=trl.SFTConfig(output_dir=str(folder), **(COMMON | sizes | arguments)),
        train_dataset=instructions(),
        processing_class=word_tokenizer(VOCAB_SIZE - 1),
        peft_config=peft_config,
    )


def losses(trainer: trl.SFTTrainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


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
    batches = [dict(next(iter(one.get_train_dataloader()))) for one in (apart, packed)]
    assert (batches[0]["input_ids"].shape[0], batches[1]["input_ids"].shape[0]) == (24, 1)
    assert (batches[0]["labels"] != -100).sum() == (batches[1]["labels"] != -100).sum() > 24
    close(gradients(packed.model, batches[1]), gradients(apart.model, batches[0]), rounding(batches[0]["labels"].numel()))

    row = {name: batches[1][name] for name in ("input_ids", "labels")}
    with torch.no_grad():
        difference = packed.model(**row).logits - packed.model(**batches[1]).logits
    assert difference.abs().max() > 0.1  # so much would show, had the row not said where an instruction begins

    for one in (apart, packed):
        one.train()
    assert losses(packed) == pytest.approx(losses(apart), rel=1e-3)
    assert losses(packed)[-1] < 0.8 * losses(packed)[0]


def test_packed_instructions_train_adapters(tmp_path):
    """With PEFT's defaults, and with gradient checkpointing, which trl.SFTTrainer switches on by itself."""
    run = trainer(tmp_path, peft_config=LoraConfig(task_type="CAUSAL_LM"), max_steps=8, learning_rate=3e-2, **PACKED)
    run.train()
    assert run.args.gradient_checkpointing
    assert run.model.get_base_model().model.gradient_checkpointing
    assert losses(run)[-1] < 0.9 * losses(run)[0]


PREFERENCES = [{"prompt": "w3 w4 ", "chosen": f"w{9 + seed} w5", "rejected": "w8 w7"} for seed in range(8)]
JUDGED = [{"prompt": row["prompt"], "completion": row["chosen"], "label": bool(i % 2)} for i, row in enumerate(PREFERENCES)]
WRITTEN = {"num_generations": 2, "max_completion_length": 5, "beta": 0.1}
WITH_REFERENCES = {  # trainer, configuration, its arguments, examples, the loss of a model that is its own reference
    "DPO": (trl.DPOTrainer, trl.DPOConfig, {}, PREFERENCES, math.log(2)),
    "KTO": (trl.KTOTrainer, trl.KTOConfig, {}, JUDGED, 0.5),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, WRITTEN, [{"prompt": "w3 w4 "}] * 8, 0.0),
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig, WRITTEN, [{"prompt": "w3 w4 "}] * 8, 0.0),
}


@pytest.mark.parametrize("dialect", ["fla", "hybrid"])
@pytest.mark.parametrize("by_name", [True, False], ids=["by name", "as a model"])
@pytest.mark.parametrize("method", WITH_REFERENCES)
def test_trainers_make_their_reference_by_themselves(tmp_path, method, by_name, dialect):
    """The reference is the model itself, so that the first loss is known, and all weights learn."""
    make, make_arguments, options, examples, first_loss = WITH_REFERENCES[method]
    small_model(dialect).save_pretrained(tmp_path / "model")
    name = str(tmp_path / "model")
    reward = {"reward_funcs": lambda completions, **_: [float(len(completion)) for completion in completions]}
    run = make(
        model=name if by_name else AutoModelForCausalLM.from_pretrained(name),
        args=make_arguments(str(tmp_path), per_device_train_batch_size=4, max_steps=2, **COMMON, **options),
        train_dataset=Dataset.from_list(examples),
        processing_class=word_tokenizer(VOCAB_SIZE - 1),
        **(reward if "num_generations" in options else {}),
    )
    before = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    run.train()
    assert (losses(run)[0], len(losses(run))) == (pytest.approx(first_loss, abs=1e-5), 2)
    assert [name for name, weight in run.model.named_parameters() if weight.equal(before[name])] == []
