# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""PEFT finds by itself what to adapt: a configuration that names no target modules trains, merges, saves and reloads."""

import copy

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from small_models import as_for_a_llama, close, greedy, random_ids, small_model
from small_vision_models import VISION_FAMILIES, small_vir
from torch import nn
from transformers import AutoModelForImageClassification

import retnet_hf


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


@pytest.mark.parametrize("use_cache", [True, False])
def test_prompt_tuning_generates(fla_model, use_cache):
    """Virtual tokens come as embeddings, in front of the prompt, with and without the state."""

    def generates(model) -> None:
        config = peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM")
        tuned, ids = get_peft_model(copy.deepcopy(model), config).eval(), random_ids(2, 7)
        with torch.no_grad():
            embeddings = torch.cat([tuned.get_prompt(batch_size=2), model.model.embed_tokens(ids)], dim=1)
            close(tuned(ids).logits[:, 5:], model(inputs_embeds=embeddings).logits[:, 5:])
        expected = greedy(model, inputs_embeds=embeddings, tokens=9)
        assert greedy(tuned, input_ids=ids, tokens=9, use_cache=use_cache)[:, 7:].equal(expected)

    with as_for_a_llama(generates):
        generates(fla_model)


def test_prefix_tuning_is_refused(fla_model):
    """Its prefix is a key/value cache, of which a retention knows nothing: an error, and no wrong answer."""
    tuned = get_peft_model(copy.deepcopy(fla_model), peft.PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match="cache must be a RetNetState or an empty cache"):
        tuned(random_ids(1, 7))
