# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Training: Trainer with evaluation and resuming, gradient checkpointing, and LoRA by PEFT."""

import copy
import logging

import numpy
import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from small_models import (
    VOCAB_SIZE,
    as_for_a_llama,
    close,
    greedy,
    left_padded,
    random_ids,
    same_state,
    small_config,
    small_model,
)
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from retnet_hf import RetNetForCausalLM, RetNetState


class Cycles(Dataset):
    """Texts that count on: each token is the one before it plus a step of 1, 2 or 3."""

    def __init__(self, texts: int = 64, length: int = 21, uneven: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        start = torch.randint(3, VOCAB_SIZE, (texts, 1), generator=generator)
        step = torch.randint(1, 4, (texts, 1), generator=generator)
        self.ids = (start + step * torch.arange(length) - 3) % (VOCAB_SIZE - 3) + 3
        self.lengths = torch.randint(length // 2, length + 1, (texts,), generator=generator) if uneven else [length] * texts

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict:
        ids = self.ids[index][: self.lengths[index]].tolist()
        return {"input_ids": ids, "labels": list(ids)}


def collate(batch: list[dict]) -> dict:
    """Left padding; the first token of a text is nothing to predict, whether or not there is padding before it."""
    ids, mask = left_padded([torch.tensor([text["input_ids"]]) for text in batch])
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask.cumsum(-1) < 2, -100)}


def fresh_model(**overrides) -> RetNetForCausalLM:
    torch.manual_seed(0)
    return RetNetForCausalLM(small_config(**overrides))


def trainer(folder, model=None, data=None, callbacks=(), collator=collate, **arguments) -> Trainer:
    defaults = {
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "max_steps": 20,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
    }
    return Trainer(
        model=fresh_model() if model is None else model,
        args=TrainingArguments(output_dir=str(folder), **(defaults | arguments)),
        train_dataset=Cycles() if data is None else data,
        eval_dataset=Cycles(texts=12, uneven=True),
        data_collator=collator,
        callbacks=list(callbacks),
    )


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def learned(trainer: Trainer) -> bool:
    return sum(losses(trainer)[-3:]) / 3 < 0.95 * losses(trainer)[0]


@pytest.mark.parametrize("form", ["parallel", "chunkwise"])
def test_trainer_learns_and_resumes(tmp_path, form):
    """Interrupted at step 10 and resumed from its folder, the run ends at the same weights, bit for bit."""
    options = {"retention_form": form, "hidden_dropout": 0.1}
    whole = trainer(tmp_path / "whole", fresh_model(**options))
    whole.train()
    assert len(losses(whole)) == 20
    assert learned(whole)

    class StopAtTen(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step >= 10

    saving = {"save_strategy": "steps", "save_steps": 10}
    first = trainer(
        tmp_path / "two", fresh_model(retention_form=form, hidden_dropout=0.1), callbacks=[StopAtTen()], **saving
    )
    first.train()
    assert first.state.global_step == 10
    torch.manual_seed(99)  # another process would start from other weights
    second = trainer(tmp_path / "two", RetNetForCausalLM(whole.model.config), **saving)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 20
    for (name, mine), theirs in zip(second.model.named_parameters(), whole.model.parameters()):
        assert mine.equal(theirs), name
    assert losses(second) == losses(whole)

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "checkpoint-20")
    assert loaded.config.retention_form == form
    for mine, theirs in zip(loaded.parameters(), whole.model.parameters()):
        assert mine.equal(theirs)


def test_trainer_learns_and_resumes_in_another_dialect(tmp_path):
    """Tied embeddings, post-norm, grouped heads, bfloat16 weights and uneven texts."""
    options = {"num_key_value_heads": 2, "norm_position": "post", "tie_word_embeddings": True, "dtype": torch.bfloat16}
    saving = {"save_strategy": "steps", "save_steps": 10, "bf16": True, "data": Cycles(uneven=True), "max_steps": 20}
    whole = trainer(tmp_path, fresh_model(**options), **saving)
    whole.train()
    assert learned(whole)
    second = trainer(tmp_path, fresh_model(**options), **saving)
    second.train(resume_from_checkpoint=str(tmp_path / "checkpoint-10"))
    for (name, mine), theirs in zip(second.model.named_parameters(), whole.model.parameters()):
        assert mine.equal(theirs), name
    assert second.model.lm_head.weight is second.model.model.embed_tokens.weight


def test_trainer_evaluates(tmp_path):
    """evaluate() and predict() run although the model returns its state; predictions are the logits."""
    run = trainer(tmp_path, small_model(), per_device_eval_batch_size=5)
    data = [collate([text]) for text in Cycles(texts=12, uneven=True)]
    predicted = run.predict(run.eval_dataset)
    assert isinstance(predicted.predictions, numpy.ndarray)
    assert predicted.predictions.shape == (12, 21, VOCAB_SIZE)
    assert predicted.label_ids.shape == (12, 21)
    with torch.no_grad():
        for row, (batch, label) in enumerate(zip(data, predicted.label_ids)):
            length = batch["input_ids"].shape[1]
            own = run.model(batch["input_ids"]).logits[0]
            # Trainer pads shorter batches at the end, within a batch the collator pads in front
            there = torch.tensor(label != -100).nonzero().squeeze(1)
            assert len(there) == length - 1
            close(torch.tensor(predicted.predictions[row])[there], own[1:])

    metrics = run.evaluate()
    batches = [collate([run.eval_dataset[i] for i in rows]) for rows in (range(5), range(5, 10), range(10, 12))]
    expected = numpy.average([run.model(**batch).loss.item() for batch in batches], weights=[5, 5, 2])
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-4)


def test_trainer_evaluates_with_metrics(tmp_path):
    """compute_metrics gets logits and labels, and nothing of the state."""
    seen = {}

    def metrics(evaluated):
        seen["predictions"], seen["labels"] = evaluated.predictions, evaluated.label_ids
        return {"accuracy": (evaluated.predictions[:, :-1].argmax(-1) == evaluated.label_ids[:, 1:]).mean()}

    run = trainer(tmp_path, eval_strategy="steps", eval_steps=10)
    run.compute_metrics = metrics
    run.train()
    assert seen["predictions"].shape == (12, 21, VOCAB_SIZE)
    assert sum("eval_accuracy" in entry for entry in run.state.log_history) == 2
    assert run.evaluate()["eval_loss"] < losses(run)[0]


def test_trainer_with_the_collators_of_transformers(tmp_path, tokenizer):
    """Language modelling with padding, and documents flattened into one row, whose losses are the same."""
    data = Cycles(texts=8, uneven=True)
    examples = [data[index] for index in range(8)]
    padded = DataCollatorForLanguageModeling(tokenizer, mlm=False)([{"input_ids": e["input_ids"]} for e in examples])
    packed = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(examples)
    positions = DataCollatorWithFlattening()(examples)
    model = small_model()
    expected = sum(
        model(torch.tensor([e["input_ids"]]), labels=torch.tensor([e["labels"]])).loss * (len(e["input_ids"]) - 1)
        for e in examples
    ) / sum(len(e["input_ids"]) - 1 for e in examples)
    assert padded["input_ids"].shape[0] == 8
    assert packed["input_ids"].shape[0] == positions["input_ids"].shape[0] == 1
    for batch in (packed, positions):
        close(model(**batch).loss, expected, 1e-5)
    # the first token of a left-padded text is predicted from padding: not so when the texts run alone
    first = (padded["attention_mask"].cumsum(-1) == 1) & (padded["attention_mask"] == 1)
    close(model(**(padded | {"labels": padded["labels"].masked_fill(first, -100)})).loss, expected, 1e-5)

    texts = [Cycles(uneven=True)[index]["input_ids"] for index in range(64)]
    for collator in (DataCollatorForLanguageModeling(tokenizer, mlm=False), DataCollatorWithFlattening()):
        run = trainer(tmp_path, data=[{"input_ids": text} for text in texts], collator=collator)
        run.train()
        assert learned(run)


def test_trainer_accumulates_gradients(tmp_path):
    """Four batches of 2 with accumulation are one batch of 8, also with texts of different lengths."""
    data = Cycles(texts=8, uneven=True)
    runs = [
        trainer(tmp_path, data=data, max_steps=3, per_device_train_batch_size=size, gradient_accumulation_steps=8 // size)
        for size in (8, 2)
    ]
    for run in runs:
        run.train()
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-4)


def checkpointing(model, reentrant: bool):
    twin = copy.deepcopy(model).train()
    twin.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    twin.enable_input_require_grads()
    return twin


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("use_cache", [None, True, False])
def test_gradient_checkpointing(model, reentrant, use_cache):
    """Loss and every gradient are the same, and the layers are run again in the backward pass."""
    plain, checkpointed = copy.deepcopy(model).train(), checkpointing(model, reentrant)
    ids, mask = left_padded([random_ids(1, 21), random_ids(1, 6, seed=1)])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "use_cache": use_cache}
    runs = []
    for layer in checkpointed.model.layers:
        layer.mixer.register_forward_hook(lambda *_: runs.append(1))
    expected, out = plain(**batch), checkpointed(**batch)
    forward_runs = len(runs)
    expected.loss.backward()
    out.loss.backward()
    layers = len(model.model.layers)
    assert (forward_runs, len(runs)) == (layers, 2 * layers)
    assert out.loss.equal(expected.loss)
    for mine, theirs in zip(checkpointed.parameters(), plain.parameters()):
        close(mine.grad, theirs.grad, 1e-6)
    assert out.past_key_values is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_without_require_grads_on_the_inputs(model, reentrant):
    """Straight after gradient_checkpointing_enable(), with nothing else done."""
    plain, checkpointed = copy.deepcopy(model).train(), copy.deepcopy(model).train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = random_ids(2, 21)
    for one in (plain, checkpointed):
        one(ids, labels=ids).loss.backward()
    for mine, theirs in zip(checkpointed.parameters(), plain.parameters()):
        close(mine.grad, theirs.grad, 1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_with_dropout_and_hidden_states(reentrant):
    model = small_model(hidden_dropout=0.2, activation_dropout=0.2)
    ids = random_ids(2, 21)
    results = []
    for one in (copy.deepcopy(model).train(), checkpointing(model, reentrant)):
        torch.manual_seed(7)
        out = one(ids, labels=ids, output_hidden_states=True)
        assert len(out.hidden_states) == 3
        out.loss.backward()
        results.append([out.loss.detach()] + [parameter.grad for parameter in one.parameters()])
    for mine, theirs in zip(*results):
        close(mine, theirs, 1e-6)


def test_gradient_checkpointing_is_for_training_only(model):
    """In eval() a checkpointed model returns its state and generates as ever."""
    checkpointed = checkpointing(model, reentrant=False).eval()
    assert checkpointed(random_ids(2, 7)).past_key_values is not None
    assert greedy(checkpointed, random_ids(2, 7)).equal(greedy(model, random_ids(2, 7)))
    checkpointed.gradient_checkpointing_disable()
    assert not checkpointed.is_gradient_checkpointing


@pytest.mark.parametrize("kwargs", [{"use_reentrant": False}, {"use_reentrant": True}, None])
def test_trainer_gradient_checkpointing(tmp_path, kwargs, caplog):
    run, plain = trainer(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs), trainer(tmp_path)
    with caplog.at_level(logging.WARNING):
        run.train()
    plain.train()
    assert "None of the inputs have requires_grad" not in caplog.text
    assert learned(run)
    assert losses(run) == pytest.approx(losses(plain), rel=1e-3)


def lora(model, **overrides) -> PeftModel:
    fields = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return get_peft_model(copy.deepcopy(model), LoraConfig(**(fields | overrides)))


def test_peft_lora(model, tmp_path):
    """On all linear layers: attaches, learns, saves, loads, merges to the same logits."""
    tuned = lora(model)
    adapted = {name.rsplit(".", 1)[-1] for name, module in tuned.named_modules() if hasattr(module, "lora_A")}
    linear = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert adapted == linear - {"lm_head"}
    ids = random_ids(2, 21)
    with torch.no_grad():
        close(tuned(ids).logits, model(ids).logits, 1e-6)

    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    history = []
    for _ in range(15):
        loss = tuned(ids, labels=ids).loss
        loss.backward()
        history.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert history[-1] < 0.8 * history[0]
    tuned.eval().double()  # in which a merged weight is as good as two
    with torch.no_grad():
        expected = tuned(ids).logits
    tokens = greedy(tuned, input_ids=ids[:, :7])

    tuned.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(copy.deepcopy(model).double(), tmp_path / "adapter").eval()
    with torch.no_grad():
        close(loaded(ids).logits, expected, 1e-11)
    merged = loaded.merge_and_unload()
    assert type(merged) is type(model)
    with torch.no_grad():
        close(merged(ids).logits, expected, 1e-11)
    assert greedy(merged, ids[:, :7]).equal(tokens)
    merged.save_pretrained(tmp_path / "merged")
    with torch.no_grad():
        close(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits, expected, 1e-11)


def test_peft_lora_from_folders(model, tmp_path):
    """The adapter's folder names the folder of its base model: PEFT and transformers find both."""
    model.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = get_peft_model(
        base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    )
    tuned.save_pretrained(tmp_path / "adapter")
    ids = random_ids(2, 9)
    with torch.no_grad():
        expected = tuned.eval()(ids).logits
        close(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()(ids).logits, expected)
        close(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()(ids).logits, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_peft_lora_with_gradient_checkpointing(model, reentrant):
    tuned = lora(model, init_lora_weights=False)
    plain = copy.deepcopy(tuned)
    tuned.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    tuned.enable_input_require_grads()
    ids = random_ids(2, 21)
    for one in (tuned.train(), plain.train()):
        one(input_ids=ids, labels=ids).loss.backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
    assert gradients
    for name, parameter in tuned.named_parameters():
        if parameter.requires_grad:
            close(parameter.grad, gradients[name], 1e-6)


def test_peft_lora_in_trainer(tmp_path):
    base = fresh_model()
    frozen = {name: p.clone() for name, p in base.named_parameters()}
    tuned = get_peft_model(base, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    run = trainer(tmp_path, tuned, max_steps=30, learning_rate=3e-2)
    run.train()
    assert sum(losses(run)[-3:]) / 3 < 0.98 * losses(run)[0]
    for name, parameter in tuned.get_base_model().named_parameters():
        if "lora" not in name:
            assert parameter.equal(frozen[name.replace(".base_layer", "")]), name


def test_adapters_of_transformers(model, tmp_path):
    """model.add_adapter(), the way of transformers itself."""
    adapted = copy.deepcopy(model)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with as_for_a_llama(lambda llama: llama.add_adapter(config)):
        adapted.add_adapter(config)
    ids = random_ids(2, 9)
    with torch.no_grad():
        assert not torch.allclose(adapted(ids).logits, model(ids).logits, atol=1e-3)
        adapted.disable_adapters()
        close(adapted(ids).logits, model(ids).logits, 1e-6)


def test_operations_of_a_training_step_can_be_counted():
    model = small_model()
    ids = random_ids(1, 21)
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(ids, retention_form="parallel")
    with FlopCounterMode(display=False) as step:
        model(ids, labels=ids, retention_form="parallel").loss.backward()
    assert 2.5 < step.get_total_flops() / forward.get_total_flops() < 3.1  # a backward pass is two forward ones


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("dialect", ["fla", "grouped", "hybrid", "sinks"])
def test_gradient_checkpointing_updates_a_given_state_once_and_changes_no_gradient(dialect, use_reentrant):
    """Layers are computed again in the backward pass, when the state has moved on."""
    found = []
    for checkpointing in (False, True):
        model, state = small_model(dialect).train(), None
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        state, losses = RetNetState(model.config), []
        for ids in (random_ids(2, 9, 1), random_ids(2, 1, 2), random_ids(2, 7, 3)):
            losses.append(model(ids, past_key_values=state, labels=ids, use_cache=True).logits.square().mean())
            state = state.clone() if use_reentrant else state  # whose gradients do not reach earlier calls
        sum(losses).backward()
        found.append(([parameter.grad for parameter in model.parameters()], state))
    (expected, state), (gradients, again) = found
    assert int(again.get_seq_length()) == 17
    same_state(again, state)
    for gradient, other in zip(gradients, expected):
        close(gradient, other, 1e-5)


@pytest.mark.parametrize("options", [{}, {"avg_fn": get_ema_avg_fn(0.9)}, {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}])
def test_averages_of_buffers_are_the_buffers(options):
    """PyTorch averages buffers as float32 if it is asked to, and leaves them as they are by default."""
    model, ids = small_model(), random_ids(2, 300)
    average, exact = AveragedModel(model, use_buffers=True, **options), AveragedModel(model, **options)
    for _ in range(50):
        average.update_parameters(model)
        exact.update_parameters(model)
    assert all(map(torch.equal, exact.module.buffers(), model.buffers()))
    close(average(ids).logits, model(ids).logits, 1e-4)
