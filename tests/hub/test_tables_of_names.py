# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Tools decide by tables of names, and by what a signature or a configuration has: our models stand in them."""

import inspect
import re

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_models import greedy, random_ids, small_config, small_model
from small_vision_models import VISION_FAMILIES
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.models.auto import modeling_auto

import retnet_hf


CLASSES = {name: getattr(retnet_hf, name) for name in retnet_hf.__all__ if re.search("[a-zTR]For[A-Z]", name)}


def settings(folder, **options) -> TrainingArguments:
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(folder, max_steps=1, logging_steps=1, **quiet, **options)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_stands_in_the_table_of_its_task(name):
    task = re.search("(?<=[a-zTR])For[A-Z].*", name)[0].replace("LM", "Lm")
    table = "MODEL" + re.sub("(?=[A-Z])", "_", task).upper()
    names = [
        getattr(modeling_auto, f"{each}_MAPPING_NAMES", {}) for each in (table, table.replace("_FOR_MASKED", "_MASKED"))
    ]
    assert name in [each.get(CLASSES[name].config_class.model_type) for each in names]


def test_heads_take_what_a_user_registers_and_register_nothing():
    """A derived configuration may have no model of its own, as a copy in saved code."""

    class OwnModel(retnet_hf.RetNetModel):
        pass

    class OwnConfig(retnet_hf.RetNetConfig):
        model_type = "own_of_a_user"

    class ModelOfOwnConfig(retnet_hf.RetNetModel):
        config_class = OwnConfig

    names = [name for name in dir(modeling_auto) if re.fullmatch("MODEL.*MAPPING", name)]
    tables = [getattr(modeling_auto, name)._extra_content for name in names]
    before = [dict(table) for table in tables]
    for config_class, registered in ((OwnConfig, None), (retnet_hf.RetNetConfig, OwnModel), (OwnConfig, ModelOfOwnConfig)):
        if registered:
            AutoModel.register(config_class, registered, exist_ok=True)
        now = [dict(table) for table in tables]
        for cls in CLASSES.values():
            if cls.config_class is retnet_hf.RetNetConfig and not cls.__name__.endswith("LM"):
                model = cls(config_class(**small_config().to_diff_dict()))
                assert type(model.model) is (registered or retnet_hf.RetNetModel)
        assert [dict(table) for table in tables] == now
    for table, content in zip(tables, before):
        table.clear()
        table.update(content)


class Derived(retnet_hf.RetNetForCausalLM):
    """Derived by a user, and not registered."""


TRAINED = {
    "a model": small_model,
    "a derived class": lambda: small_model(model_class=Derived),
    "a hybrid": lambda: small_model("hybrid"),
    "adapters": lambda: get_peft_model(small_model(), LoraConfig(target_modules=["q_proj"])),
    "a state": lambda: retnet_hf.StateTuning(small_model()),
}


@pytest.mark.parametrize("trained", TRAINED)
def test_label_smoothing_shifts_labels(trained, tmp_path):
    ids, model = random_ids(4, 12), TRAINED[trained]()
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1).item()
    trainer = Trainer(model, settings(tmp_path, label_smoothing_factor=0.1))
    assert trainer.compute_loss(model, {"input_ids": ids, "labels": ids}).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("model_class", [retnet_hf.RetNetForSequenceClassification, retnet_hf.RetNetForTokenClassification])
def test_losses_of_classifiers_do_not_grow_with_the_steps_of_gradient_accumulation(model_class, tmp_path):
    of_tokens, logged = model_class is retnet_hf.RetNetForTokenClassification, []
    rows = [{"input_ids": ids, "labels": ids % 3 if of_tokens else ids[0] % 3} for ids in random_ids(8, 6)]
    for steps in (1, 4):
        arguments = settings(tmp_path, per_device_train_batch_size=8 // steps, gradient_accumulation_steps=steps)
        trainer = Trainer(small_model(model_class=model_class, num_labels=3), arguments, train_dataset=rows)
        trainer.train()
        logged.append([trainer.state.log_history[0][name] for name in ("loss", "grad_norm")])
    assert logged[1] == pytest.approx(logged[0], rel=1e-4)


@pytest.mark.parametrize("name", CLASSES)
def test_the_signature_of_a_head_names_what_its_base_model_takes(name):
    base = retnet_hf.RetNetModel if name.startswith("RetNet") else retnet_hf.ViRModel if name.startswith("ViR") else None
    taken = inspect.signature(CLASSES[name].forward).parameters
    wanted = {"pixel_values"} if base is None else set(inspect.signature(base.forward).parameters)
    if name in ("RetNetForMaskedLM", "RetNetHybridForMaskedLM"):  # an encoder has no state
        wanted -= {"past_key_values", "cache", "use_cache"}
    assert wanted <= set(taken)
    assert list(taken)[-1] == "kwargs"


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_classifier_takes_positional_arguments_as_before(family):
    model, pixels, labels = VISION_FAMILIES[family].model(), torch.rand(2, 3, 32, 32), torch.tensor([0, 1])
    assert torch.equal(model(pixels, labels).loss, model(pixel_values=pixels, labels=labels).loss)


def test_a_length_that_was_not_given_is_no_attribute(tmp_path):
    """sentence-transformers takes the smaller of the tokenizer's length and this attribute, if there is one."""
    small_config().save_pretrained(tmp_path)
    without = [small_config(), retnet_hf.RetNetConfig(max_position_embeddings=None)]
    without.append(retnet_hf.RetNetConfig.from_pretrained(tmp_path, max_position_embeddings=None))
    assert not any(hasattr(config, "max_position_embeddings") for config in without)
    assert retnet_hf.RetNetConfig.from_dict(small_config(max_position_embeddings=77).to_dict()).max_position_embeddings == 77
    for reads in (retnet_hf.RetNetConfig, AutoConfig):
        assert reads.from_pretrained(tmp_path, max_position_embeddings=77).max_position_embeddings == 77


def test_the_hooks_of_accelerate_leave_the_state_where_it_is():
    """By whatever name it is given: accelerate moves every other argument to the device of a module."""
    assert {"past_key_values", "cache", "state"} <= set(small_model()._skip_keys_device_placement)


@pytest.mark.parametrize("layers", [2, 3])
def test_fewer_layers_of_a_preset_are_saved_and_read_back(layers, tmp_path):
    kinds, ids = ["linear_attention", "full_attention"] * 2, random_ids(1, 9) % 40
    config = retnet_hf.RetNetHybridConfig.from_preset("tiny", vocab_size=40, num_hidden_layers=4, layer_types=kinds)
    retnet_hf.RetNetHybridForCausalLM(config).save_pretrained(tmp_path / "whole")
    fewer = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", num_hidden_layers=layers)
    fewer.save_pretrained(tmp_path / "fewer")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "fewer")
    assert again.config.layer_types == kinds[:layers]
    assert torch.equal(again(ids).logits, fewer(ids).logits)


@pytest.mark.parametrize("dialect", ["fla", "hybrid", "from scratch"])
def test_drafts_by_early_exit_change_no_token_and_leave_the_configuration(dialect):
    model, ids = small_model(dialect), random_ids(1, 6)
    stated = model.config.to_dict()
    assert torch.equal(greedy(model, ids, 8, assistant_early_exit=1), greedy(model, ids, 8))
    assert model.config.to_dict() == stated
