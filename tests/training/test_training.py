# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Training: Trainer with evaluation and resuming, gradient checkpointing, and LoRA by PEFT."""

import copy
import logging

import numpy
import peft
import pytest
import small_models
import torch
import transformers
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from small_models import VOCAB_SIZE, as_for_a_llama, close, greedy, left_padded, random_ids, small_config, small_model
from small_vision_models import VISION_FAMILIES, small_vir
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.data import Dataset
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, DataCollatorForLanguageModeling, Trainer

import retnet_hf
from retnet_hf import MuonAdamW, RetNetForCausalLM, RetNetState


HAS_MUON = hasattr(torch.optim, "Muon")
MATRICES = ("v", "o", "up", "down")


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


def trainer(
    folder, model=None, data=None, callbacks=(), collator=collate, held_out=None, muon=False, **arguments
) -> Trainer:
    model = fresh_model() if model is None else model
    defaults = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, "max_steps": 20, "logging_steps": 1, "seed": 1}
    defaults |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(folder), **(defaults | arguments)),
        train_dataset=Cycles() if data is None else data,
        eval_dataset=Cycles(texts=12, uneven=True) if held_out is None else held_out,
        data_collator=collator,
        callbacks=list(callbacks),
        optimizer_cls_and_kwargs=(lambda: MuonAdamW, {"lr": 1e-2}) if muon and HAS_MUON else None,
    )


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def learned(trainer: Trainer) -> bool:
    return sum(losses(trainer)[-3:]) / 3 < 0.95 * losses(trainer)[0]


class StopAtTen(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= 10


ANOTHER_DIALECT = {"num_key_value_heads": 2, "norm_position": "post", "tie_word_embeddings": True, "dtype": torch.bfloat16}


@pytest.mark.parametrize("options", [{"retention_form": "parallel"}, {"retention_form": "chunkwise"}, ANOTHER_DIALECT])
def test_trainer_learns_and_resumes(tmp_path, options):
    """Interrupted at step 10 and resumed from its folder, the run ends at the same weights, bit for bit."""
    options, half = options | {"hidden_dropout": 0.1}, options is ANOTHER_DIALECT
    saving = {"save_strategy": "steps", "save_steps": 10, "bf16": half, "data": Cycles(uneven=half)}
    saving["muon"] = options.get("retention_form") != "parallel"
    whole = trainer(tmp_path / "whole", fresh_model(**options), **saving)
    whole.train()
    assert len(losses(whole)) == 20
    assert learned(whole)
    first = trainer(tmp_path / "two", fresh_model(**options), callbacks=[StopAtTen()], **saving)
    first.train()
    assert first.state.global_step == 10
    torch.manual_seed(99)  # another process would start from other weights
    second = trainer(tmp_path / "two", RetNetForCausalLM(whole.model.config), **saving)
    second.train(resume_from_checkpoint=True)
    assert (second.state.global_step, losses(second)) == (20, losses(whole))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "two" / "checkpoint-20")
    assert loaded.config.retention_form == options.get("retention_form", "auto")
    assert (second.model.lm_head.weight is second.model.model.embed_tokens.weight) == half
    for model in (second.model, loaded):
        for (name, mine), theirs in zip(model.named_parameters(), whole.model.parameters()):
            assert mine.equal(theirs), name


@pytest.mark.skipif(not HAS_MUON, reason="PyTorch has Muon from version 2.9 on")
def test_muon_updates_values_outputs_and_feed_forward_networks_and_adamw_the_rest(monkeypatch):
    """As torch's own optimizers do, with the sizes of AdamW's updates, and weight decay for matrices."""
    ids, model = random_ids(2, 21), fresh_model()
    twin, optimizer = copy.deepcopy(model), MuonAdamW(model, lr=1e-2)
    ours = {name for name, each in twin.named_parameters() if name.endswith(tuple(f"{end}_proj.weight" for end in MATRICES))}
    groups = [[], [], []]
    for name, parameter in twin.named_parameters():
        groups[0 if name in ours else 1 + (parameter.ndim < 2)].append(parameter)
    muon = torch.optim.Muon(groups[0], 1e-2, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    others = [{"params": groups[1], "weight_decay": 0.1}, {"params": groups[2], "weight_decay": 0.0}]
    optimizers = muon, torch.optim.AdamW(others, 1e-2, (0.9, 0.95), fused=True)
    for _ in range(3):
        loss = optimizer.step(lambda: [loss := model(ids, labels=ids).loss, loss.backward()][0])
        twin(ids, labels=ids).loss.backward()
        [each.step() for each in optimizers]
        [each.zero_grad() for each in (optimizer, *optimizers)]
    assert loss < 4.2
    small_models.same_tensors(dict(model.named_parameters()), dict(twin.named_parameters()))
    with pytest.raises(ValueError, match="matrices must be names of linear layers that are trained, and whose .*, got"):
        MuonAdamW(model, matrices=("query",))
    with pytest.raises(ValueError, match=r"betas must be in \[0, 1\), got lr=0.1, weight_decay=0.1 and betas=\(1, 0.9\)"):
        MuonAdamW(model, lr=0.1, betas=(1, 0.9))
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ImportError, match="MuonAdamW needs PyTorch 2.9, and this is"):
        MuonAdamW(model)


class Colours(Dataset):
    """Noisy pictures of one of five colours, each a class; or of several labels, whose loss is a mean in any case."""

    def __init__(self, count: int = 64, seed: int = 0, several: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        colours = torch.randn(5, 3, 1, 1, generator=torch.Generator().manual_seed(1))
        numbers = torch.randint(5, (count,), generator=generator)
        self.labels = torch.eye(5)[numbers] if several else numbers
        self.images = 2 * colours[numbers] + 0.5 * torch.randn(count, 3, 32, 32, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def image_trainer(folder, model, several: bool = False, **options) -> Trainer:
    run = trainer(folder, model, Colours(several=several), collator=None, held_out=Colours(20, seed=5), **options)
    run.compute_metrics = lambda answers: {"accuracy": (answers.predictions.argmax(-1) == answers.label_ids).mean()}
    run.train(resume_from_checkpoint=folder.name == "resumed")
    return run


@pytest.mark.parametrize("family", VISION_FAMILIES.values(), ids=VISION_FAMILIES)
def test_trainer_learns_images(family, tmp_path):
    whole = image_trainer(tmp_path / "whole", family.fresh(), muon=True)
    assert len(losses(whole)) == 20
    assert sum(losses(whole)[-3:]) / 3 < 0.8 * losses(whole)[0]
    assert whole.evaluate()["eval_accuracy"] > 0.5
    assert whole.predict(Colours(20, seed=5)).predictions.shape == (20, 5)

    saving = {"save_strategy": "steps", "save_steps": 10, "muon": True}
    first = image_trainer(tmp_path / "two", family.fresh(), callbacks=[StopAtTen()], **saving)
    assert first.state.global_step == 10
    (tmp_path / "two").rename(tmp_path / "resumed")
    second = image_trainer(tmp_path / "resumed", family.fresh(seed=9), **saving)
    assert losses(second) == losses(whole)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "resumed" / "checkpoint-20")
    for model in (second.model, loaded):
        small_models.same_tensors(model.state_dict(), whole.model.state_dict())


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("family", VISION_FAMILIES.values(), ids=VISION_FAMILIES)
def test_accumulated_gradients_of_images_are_those_of_the_whole_batch(family, tmp_path, several):
    """Trainer divides by the number of steps only for a model that says that it does not take the number of items."""
    found = []
    for steps in (1, 2):
        options = {"per_device_train_batch_size": 8 // steps, "gradient_accumulation_steps": steps, "max_steps": 1}
        found.append(losses(image_trainer(tmp_path, family.fresh(), several=several, **options)))
    assert found[1] == pytest.approx(found[0], rel=0.1)  # a batch norm sees half the images at a time


def test_trainer_evaluates(tmp_path):
    """evaluate() and predict() run although the model returns its state; predictions are the logits."""
    run = trainer(tmp_path, small_model(), per_device_eval_batch_size=5)
    data = [collate([text]) for text in Cycles(texts=12, uneven=True)]
    predicted = run.predict(run.eval_dataset)
    assert isinstance(predicted.predictions, numpy.ndarray)
    assert (predicted.predictions.shape, predicted.label_ids.shape) == ((12, 21, VOCAB_SIZE), (12, 21))
    with torch.no_grad():
        for row, (batch, label) in enumerate(zip(data, predicted.label_ids)):
            length, own = batch["input_ids"].shape[1], run.model(batch["input_ids"]).logits[0]
            # Trainer pads shorter batches at the end, within a batch the collator pads in front
            there = torch.tensor(label != -100).nonzero().squeeze(1)
            assert len(there) == length - 1
            close(torch.tensor(predicted.predictions[row])[there], own[1:])

    metrics = run.evaluate()
    batches = [collate([run.eval_dataset[i] for i in rows]) for rows in (range(5), range(5, 10), range(10, 12))]
    expected = numpy.average([run.model(**batch).loss.item() for batch in batches], weights=[5, 5, 2])
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-4)


def test_trainer_with_the_collators_of_transformers(tmp_path, tokenizer):
    """Language modelling with padding, whose loss is that of the texts alone, and documents flattened into one row."""
    data, model = Cycles(texts=8, uneven=True), small_model()
    ids = [torch.tensor([data[index]["input_ids"]]) for index in range(8)]
    padded = DataCollatorForLanguageModeling(tokenizer, mlm=False)([{"input_ids": each[0]} for each in ids])
    sizes = torch.tensor([each.shape[1] - 1 for each in ids])
    expected = (torch.stack([model(each, labels=each).loss for each in ids]) * sizes).sum() / sizes.sum()
    # the first token of a left-padded text is predicted from padding: not so when the texts run alone
    first = (padded["attention_mask"].cumsum(-1) == 1) & (padded["attention_mask"] == 1)
    close(model(**(padded | {"labels": padded["labels"].masked_fill(first, -100)})).loss, expected, 1e-5)
    texts = [{"input_ids": Cycles(uneven=True)[index]["input_ids"]} for index in range(64)]
    for collator in (DataCollatorForLanguageModeling(tokenizer, mlm=False), transformers.DataCollatorWithFlattening()):
        run = trainer(tmp_path, data=texts, collator=collator)
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


def lora(model, **overrides) -> PeftModel:
    fields = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return get_peft_model(copy.deepcopy(model), LoraConfig(**(fields | overrides)))


def same_gradients(one, other, **batch) -> tuple:
    """Of two models in training, under the same random numbers; their outputs."""
    outputs = []
    for model in (one, other):
        torch.manual_seed(7)
        outputs.append(model.train()(**batch))
        outputs[-1].loss.backward()
    close(outputs[0].loss, outputs[1].loss, 1e-6)
    pairs = [each for each in zip(one.parameters(), other.parameters(), strict=True) if each[1].requires_grad]
    assert pairs
    for mine, theirs in pairs:
        close(mine.grad, theirs.grad, 1e-6)
    return tuple(outputs)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("use_cache", [None, True, False])
def test_gradient_checkpointing(model, reentrant, use_cache):
    """Loss and every gradient are the same, and the layers are run again in the backward pass. In eval(), it is as ever."""
    checkpointed, runs = copy.deepcopy(model), []
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    for layer in checkpointed.model.layers:
        layer.mixer.register_forward_hook(lambda *_: runs.append(1))
    ids, mask = left_padded([random_ids(1, 21), random_ids(1, 6, seed=1)])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100), "use_cache": use_cache}
    output, _ = same_gradients(checkpointed, copy.deepcopy(model), **batch)
    assert len(runs) == 2 * len(model.model.layers)
    assert output.past_key_values is None
    checkpointed.eval()
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


def test_peft_lora(model, tmp_path):
    base, ids = copy.deepcopy(model).double(), random_ids(2, 21)  # in which a merged weight is as good as two
    base.save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    frozen = {name: parameter.clone() for name, parameter in base.named_parameters()}
    tuned = get_peft_model(base, LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    assert adapted(tuned) == linear_layers(model, "lm_head")
    with torch.no_grad():
        close(tuned(ids).logits.float(), model(ids).logits, 1e-5)
    run = trainer(tmp_path, tuned, max_steps=30, learning_rate=3e-2)
    run.train()
    assert learned(run)
    for name, parameter in tuned.get_base_model().named_parameters():
        if "lora" not in name:
            assert parameter.equal(frozen[name.replace(".base_layer", "")]), name
    tuned.eval().save_pretrained(tmp_path / "adapter")
    tokens = greedy(tuned, input_ids=ids[:, :7])
    with torch.no_grad():
        expected = tuned(ids).logits
        loaded = [each.from_pretrained(tmp_path / "adapter") for each in (AutoPeftModelForCausalLM, AutoModelForCausalLM)]
        merged = loaded[0].merge_and_unload()
        assert type(merged) is type(model)
        merged.save_pretrained(tmp_path / "merged")
        for each in (*loaded, merged, AutoModelForCausalLM.from_pretrained(tmp_path / "merged")):
            close(each.eval()(ids).logits, expected, 1e-11)
    assert greedy(merged, ids[:, :7]).equal(tokens)


def test_adapters_of_transformers(model):
    """model.add_adapter(), the way of transformers itself."""
    adapted, ids = copy.deepcopy(model), random_ids(2, 9)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with as_for_a_llama(lambda llama: llama.add_adapter(config)):
        adapted.add_adapter(config)
    with torch.no_grad():
        assert not torch.allclose(adapted(ids).logits, model(ids).logits, atol=1e-3)
        adapted.disable_adapters()
        close(adapted(ids).logits, model(ids).logits, 1e-6)


def test_operations_of_a_training_step_can_be_counted():
    model, ids = small_model(), random_ids(1, 21)
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
    small_models.same_state(again, state)
    close(gradients, expected, 1e-5)


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


def adapted(tuned) -> set[str]:
    return {name.removeprefix("base_model.model.") for name, module in tuned.named_modules() if hasattr(module, "lora_A")}


def linear_layers(model, head: str) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name != head}


POOLING = {"token_mixers": ["pooling"], "patch_sizes": [7], "strides": [4], "padding": [2], "num_attention_heads": [1]}
POOLING |= {"depths": [2], "hidden_sizes": [8]}
IMAGES = {name: family.model for name, family in VISION_FAMILIES.items()}
IMAGES["without linear token mixers"] = lambda: VISION_FAMILIES["metaformer"].model(**POOLING)
IMAGES["projections of heads"] = lambda: small_vir("pulfer")


@pytest.mark.parametrize("name", IMAGES)
def test_lora_without_target_modules_in_image_models(name, tmp_path):
    """All linear layers but the head are adapted, train, are saved, and merge to the same logits."""
    size = 24 if name == "projections of heads" else 32
    model, images = IMAGES[name]().double(), torch.rand(8, 3, size, size, generator=torch.Generator().manual_seed(0))
    tuned, losses = get_peft_model(copy.deepcopy(model), LoraConfig(modules_to_save=["classifier"])), []
    assert adapted(tuned) == linear_layers(model, "classifier")
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=2e-2)
    for _ in range(8):
        losses.append(tuned(pixel_values=images, labels=torch.arange(8) % 2).loss)
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    tuned.eval().save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = tuned(images).logits
        loaded = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "adapter").eval()
        close(loaded(images).logits, expected, 1e-11)
        merged = loaded.merge_and_unload()
        close(merged(images).logits, expected, 1e-11)
        merged.save_pretrained(tmp_path / "merged")
        close(AutoModelForImageClassification.from_pretrained(tmp_path / "merged")(images).logits, expected, 1e-11)


def test_target_modules_that_are_named_and_defaults_of_other_models_are_kept(fla_model):
    tuned = get_peft_model(copy.deepcopy(fla_model), LoraConfig(target_modules=["v_proj"], task_type="CAUSAL_LM"))
    assert adapted(tuned) == {f"model.layers.{layer}.retention.v_proj" for layer in range(2)}
    assert TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING["llama"] == ["q_proj", "v_proj"]


TASKS = {
    "CAUSAL_LM": (retnet_hf.RetNetForCausalLM, "lm_head"),
    "SEQ_CLS": (retnet_hf.RetNetForSequenceClassification, "score"),
    "TOKEN_CLS": (retnet_hf.RetNetForTokenClassification, "score"),
    "QUESTION_ANS": (retnet_hf.RetNetForQuestionAnswering, "qa_outputs"),
    "FEATURE_EXTRACTION": (retnet_hf.RetNetModel, "none"),
}


@pytest.mark.parametrize(
    ("dialect", "task", "method"),
    [(dialect, task, "Lora") for dialect in ("fla", "hybrid") for task in TASKS]
    + [("fla", task, method) for task in ("CAUSAL_LM", "TOKEN_CLS") for method in ("LoHa", "OFT", "AdaLora")],
)
def test_every_task_and_method_without_target_modules(dialect, task, method, tmp_path, monkeypatch):
    """All linear layers but the head, which tasks of classes train whole."""
    monkeypatch.delitem(TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, "retnet", raising=False)  # as before any model
    model_class, head = TASKS[task]
    model = small_model(dialect, model_class)
    options = {"init_r": 4, "target_r": 2, "total_step": 10} if method == "AdaLora" else {}
    config = getattr(peft, f"{method}Config")(task_type=task, **options)
    tuned = get_peft_model(copy.deepcopy(model), config)
    found = {name for name, each in tuned.named_modules() if isinstance(each, BaseTunerLayer)}
    assert {name.removeprefix("base_model.model.") for name in found} == linear_layers(model, head)
    outputs = tuned(input_ids=random_ids(2, 9))
    sum(each.float().sum() for each in outputs.to_tuple() if isinstance(each, torch.Tensor)).backward()
    trained = {name for name, parameter in tuned.named_parameters() if parameter.grad is not None}
    assert any(f".{head}.modules_to_save" in name for name in trained) == (task in ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS"))
    tuned.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(model, tmp_path)
    close(loaded.eval()(input_ids=random_ids(2, 9))[0], tuned.eval()(input_ids=random_ids(2, 9))[0], 1e-6)


def test_prompt_tuning_generates(fla_model):
    """Virtual tokens come as embeddings, in front of the prompt, with and without the state."""

    def generates(model) -> None:
        config = peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM")
        tuned, ids = get_peft_model(copy.deepcopy(model), config).eval(), random_ids(2, 7)
        with torch.no_grad():
            embeddings = torch.cat([tuned.get_prompt(batch_size=2), model.model.embed_tokens(ids)], dim=1)
            close(tuned(ids).logits[:, 5:], model(inputs_embeds=embeddings).logits[:, 5:])
        expected = greedy(model, inputs_embeds=embeddings, tokens=9)
        for use_cache in (True, False):
            assert greedy(tuned, input_ids=ids, tokens=9, use_cache=use_cache)[:, 7:].equal(expected)

    with as_for_a_llama(generates):
        generates(fla_model)


def test_prefix_tuning_is_refused(fla_model):
    """Its prefix is a key/value cache, of which a retention knows nothing: an error, and no wrong answer."""
    tuned = get_peft_model(copy.deepcopy(fla_model), peft.PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="cache must be a RetNetState or an empty cache"):
        tuned(random_ids(1, 7))
