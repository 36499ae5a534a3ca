# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Ling-2.5 and Ling-2.6, against a plain program in float64: retention, multi-head latent attention and experts."""

import json

import accelerate
import pytest
import torch
import transformers
from foreign_folders import published_minimax, write_folder
from golden import SMALL, golden, read
from peft import LoraConfig, get_peft_model
from small_models import close, random_ids
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from retnet_hf import RetNetHybridForCausalLM, RetNetState
from retnet_hf.conversion.family_model_types import MODEL_TYPES


pytestmark = pytest.mark.usefixtures("no_gradients")
pytest_plugins = ("foreign_folders",)  # the fixture `plain_minimax`


def test_the_state_holds_one_vector_of_a_token_for_all_heads(tmp_path):
    model, data = read("ling/published_like")
    ids, config = data.tensors["input_ids"], model.config
    expected = model(ids).logits
    state = model(ids[:, :10], use_cache=True).past_key_values
    for layer in (1, 3, 4):
        held = state.layers[layer]
        assert held.keys.shape == (2, 1, 10, config.kv_lora_rank + config.qk_rope_head_dim)
        assert held.values.numel() == 0
    assert config.cache_size_per_token == 3 * (10 + 4)
    state.activate_past_recording()
    model(random_ids(2, 5) % config.vocab_size, past_key_values=state)
    state.crop(-5)
    state.save(tmp_path / "state.safetensors")
    for each, rows in ((RetNetState.load(tmp_path / "state.safetensors", model), [0, 1]), (state.select([1]), [1])):
        close(model(ids[rows, 10:], past_key_values=each).logits, expected[rows, 10:], 2e-5)
    packed = model(ids, seq_idx=torch.tensor([[0] * 9 + [1] * 16] * 2)).logits
    close(packed, torch.cat([expected[:, :9], model(ids[:, 9:]).logits], dim=1), 2e-5)


def test_sdpa_and_eager_agree_and_flash_is_refused():
    model, data = read("ling/published_like")
    expected = model(data.tensors["input_ids"]).logits
    model.set_attn_implementation("eager")
    outputs = model(data.tensors["input_ids"], output_attentions=True)
    close(outputs.logits, expected, 2e-5)
    close(outputs.attentions[1].sum(-1), torch.ones(2, 4, 25), 1e-5)
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation must be sdpa or eager for latent attention"):
        model(data.tensors["input_ids"])


def test_an_offloaded_model_and_a_hooked_projection_compute_the_same():
    model, data = read("ling/published_like")
    handle = model.model.layers[1].attention.kv_b_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    hooked = model(data.tensors["input_ids"]).logits
    handle.remove()
    assert (hooked - data.tensors["logits"]).abs().max() > 1e-3
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    close(model(data.tensors["input_ids"]).logits, data.tensors["logits"], 5e-5)


def test_an_adapter_of_the_projection_to_keys_and_values_is_read_and_learns():
    """Its weight is multiplied by queries and outputs, and not by hidden states."""
    model, data = read("ling/published_like")
    ids = data.tensors["input_ids"]
    with torch.enable_grad():
        adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["kv_b_proj"], init_lora_weights=False))
        adapted(ids, labels=ids).loss.backward()
    assert all(weight.grad.abs().max() > 0 for name, weight in adapted.named_parameters() if "lora" in name)
    expected = adapted(ids).logits
    assert (expected - data.tensors["logits"]).abs().max() > 1e-3
    close(adapted.merge_and_unload()(ids).logits, expected, 5e-5)


@pytest.mark.parametrize("fields", [{}, {"architectures": None}, {"architectures": ["Other"], "group_norm_size": None}])
def test_a_file_of_a_type_that_transformers_has_is_of_whom_it_describes(fields, plain_minimax, tmp_path):
    """Never a model with random weights. Ling-3.0 has the type of Ling-2.5."""
    assert set(MODEL_TYPES) & set(CONFIG_MAPPING_NAMES) <= {"bailing_hybrid", "minimax"}  # test others here
    data = golden("ling/published_like", SMALL)
    state_dict, config = published_minimax(plain_minimax)
    for weights, content in ((data.state_dict, data.config), (state_dict, config | {"model_type": "minimax"})):
        content = {name: value for name, value in (content | fields).items() if value is not None}
        folder = write_folder(tmp_path / content["model_type"], weights, content)
        model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert type(model) is RetNetHybridForCausalLM
        assert not report["missing_keys"]

    config_class = getattr(transformers, CONFIG_MAPPING_NAMES.get("bailing_hybrid", "none"), None)
    if config_class is None:
        pytest.skip("this version of transformers has no Ling-3.0")
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "num_local_experts"), 16)
    sizes |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_experts_per_tok", "n_group", "topk_group"), 2)
    sizes |= dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 8)
    sizes |= {"vocab_size": 64, "num_hidden_layers": 6, "pad_token_id": 0, "eos_token_id": 1}
    theirs = AutoModelForCausalLM.from_config(config_class(**sizes))
    theirs.save_pretrained(tmp_path / "theirs")
    content = json.loads((tmp_path / "theirs" / "config.json").read_text()) | fields
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(content))
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert type(loaded) is type(theirs)
    assert not report["missing_keys"]
    assert type(AutoConfig.for_model("bailing_hybrid", **sizes)) is config_class


@pytest.mark.parametrize("family", ["ling", "ring", "ring_lite"])
@pytest.mark.parametrize("load", [AutoModelForCausalLM.from_pretrained, RetNetHybridForCausalLM.from_pretrained])
def test_one_of_two_formulas_for_decays_is_chosen_and_saved_as_decays(family, load, tmp_path):
    data = golden(f"{family}/published_like", SMALL)
    folder = write_folder(tmp_path / "published", data.state_dict, data.config)
    layers, default = data.config["num_hidden_layers"], -1 if family == "ring" else 0
    for offset in (None, -1, 0):
        model = load(folder, **({} if offset is None else {"slope_offset": offset}))
        model.save_pretrained(tmp_path / str(offset))
        saved = AutoConfig.from_pretrained(tmp_path / str(offset))
        for layer in range(layers):
            factor = 1 - (layer + (default if offset is None else offset)) / (layers - 1) + 1e-5
            if model.config.layer_types[layer] == "linear_attention":
                slopes = -torch.tensor(model.config.decays(layer)).log()
                close(slopes[0], torch.tensor(2 ** (-8 / len(slopes)) * factor))
            assert saved.decays(layer) == model.config.decays(layer)
    with pytest.raises(ValueError, match="slope_offset must be -1 or 0, .* got 1"):
        load(folder, slope_offset=1)
    with pytest.raises(ValueError, match="not for this file"):
        load(tmp_path / "0", slope_offset=0)
