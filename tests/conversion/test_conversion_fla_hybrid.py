# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Hybrids of flash-linear-attention: RetNets with layers of softmax attention, which config.json describes as `attn`."""

import json

import pytest
import torch
from foreign_folders import write_folder
from golden import SMALL, Golden, golden
from small_models import close, greedy
from transformers import AutoConfig, AutoModelForCausalLM

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridConfig, RetNetHybridForCausalLM, RetNetState
from retnet_hf.conversion.fla import from_fla, hybrid_fields, to_fla


FORMS = ("parallel", "recurrent", "chunkwise")
of_each_case = pytest.mark.parametrize("case", ["fla/hybrid_full", "fla/hybrid_window"])


def read(case: str) -> tuple[RetNetHybridForCausalLM, Golden]:
    data = golden(case, SMALL)
    return from_fla(data.state_dict, data.config).eval(), data


@pytest.mark.parametrize("form", FORMS)
@of_each_case
def test_logits_are_those_of_fla_in_every_form(case, form):
    model, data = read(case)
    ids, mask = data.tensors["input_ids"], data.tensors["attention_mask"]
    with torch.no_grad():
        whole = model(ids, retention_form=form).logits
        padded = model(ids, attention_mask=mask, retention_form=form).logits
    bound = 1e-5 * data.tensors["logits"].abs().max().item()
    close(whole, data.tensors["logits"], bound)
    close(padded[mask.bool()], data.tensors["logits_padded"][mask.bool()], bound)


@of_each_case
def test_a_folder_loads_as_it_is_and_generates_with_padding_beams_and_a_state(case, tmp_path):
    data = golden(case, SMALL)
    write_folder(tmp_path / "published", data.state_dict, data.config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "published").eval()
    assert type(model) is RetNetHybridForCausalLM
    assert type(AutoConfig.from_pretrained(tmp_path / "published")) is RetNetHybridConfig
    ids, mask = data.tensors["input_ids"], data.tensors["attention_mask"]
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    alone, padded = {"attention_mask": mask[1:, 7:]}, {"attention_mask": mask}
    assert torch.equal(greedy(model, ids, 8, **padded)[1:, 20:], greedy(model, ids[1:, 7:], 8, **alone)[:, 13:])
    beams = [greedy(model, ids, 8, num_beams=3, use_cache=use_cache, **padded) for use_cache in (True, False)]
    assert torch.equal(*beams)

    state = RetNetState(model.config)
    with torch.no_grad():
        model(ids[:, :12], past_key_values=state, use_cache=True)
        state.activate_past_recording()
        whole = model(ids).logits
        first = model(ids[:, 12:], past_key_values=state, use_cache=True).logits
        state.crop(-8)
        again = model(ids[:, 12:], past_key_values=state, use_cache=True).logits
        state.save(tmp_path / "state.safetensors")
        loaded = RetNetState.load(tmp_path / "state.safetensors", model)
        more = [model(ids[:, :3], past_key_values=each, use_cache=True).logits for each in (state, loaded)]
    close(first, whole[:, 12:], 1e-4)
    assert torch.equal(again, first)
    close(*more, 1e-5)


@of_each_case
def test_it_is_written_so_that_fla_reads_it(case, tmp_path):
    model, data = read(case)
    state_dict, config = to_fla(model)
    stated = data.config["attn"]
    assert config["attn"] == stated | {"num_kv_heads": stated["num_kv_heads"] or stated["num_heads"]}
    renamed = {name.replace("g_norm.", "g_norm_swish_gate."): tensor for name, tensor in data.state_dict.items()}
    assert state_dict.keys() == renamed.keys()
    assert all(torch.equal(state_dict[name], tensor) for name, tensor in renamed.items())


def test_full_and_windowed_layers_are_two_specifications():
    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
    kinds = ["full_attention", "linear_attention", "sliding_attention"]
    options = {"decay_schedule": "power_of_two", "layer_types": kinds, "sliding_window": 4, "attention_num_heads": 4}
    model = RetNetHybridForCausalLM(RetNetHybridConfig(**sizes, **options, attention_head_dim=8)).eval()
    state_dict, config = to_fla(model)
    assert [(spec["layers"], spec["window_size"]) for spec in config["attn"]] == [([0], None), ([2], 4)]
    again = from_fla(state_dict, json.loads(json.dumps(config))).eval()
    ids = torch.arange(20)[None]
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert again.config.layer_types == kinds


def test_what_attn_does_not_state_has_the_values_of_fla():
    content = {"num_hidden_layers": 3, "hidden_size": 32, "attn": {"layers": [1], "num_heads": 4}}
    config = RetNetHybridConfig(num_attention_heads=4, **hybrid_fields(content))
    assert (config.attention_rope_theta, config.attention_qkv_bias) == (10000.0, False)
    assert config.mixer_sizes(1) == (4, 4, 8, 8)


def test_no_softmax_layer_is_a_plain_retnet(tmp_path):
    model, data = read("fla/hybrid_full")
    config = data.config | {"attn": {"layers": [], "num_heads": 2}}
    weights = {name: tensor for name, tensor in data.state_dict.items() if ".layers.1." not in name}
    config["num_hidden_layers"] = 1
    weights = {name: tensor for name, tensor in weights.items() if ".layers.2." not in name}
    assert type(from_fla(weights, config)) is RetNetForCausalLM


@pytest.mark.parametrize(
    ("attn", "words"),
    [
        ({"layers": [3], "num_heads": 4}, "layers of attn in config.json must be distinct numbers below 3, got 3"),
        ({"layers": [1, 1], "num_heads": 4}, "must be distinct numbers below 3, got 1"),
        ({"layers": ["1"], "num_heads": 4}, "must be distinct numbers below 3, got '1'"),
        ({"layers": [True], "num_heads": 4}, "must be distinct numbers below 3, got True"),
        ({"layers": [1]}, "attn in config.json must have num_heads"),
        ({"layers": [1], "num_heads": None}, "attn in config.json must have num_heads"),
        ({"layers": 1, "num_heads": 4}, "attn in config.json must have num_heads, a number, layers, a list"),
        ({"layers": [1], "num_heads": 4, "gate": True}, "attn in config.json must have num_heads, .* and no key but "),
        ("full", "attn in config.json must have num_heads"),
        (
            [{"layers": [0], "num_heads": 4}, {"layers": [1], "num_heads": 2}],
            "num_heads of attn in config.json must be the same",
        ),
        (
            [{"layers": [0], "num_heads": 4, "window_size": 3}, {"layers": [1], "num_heads": 4, "window_size": 2}],
            "window_size of attn in config.json must be the same",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused(attn, words, tmp_path):
    data = golden("fla/hybrid_full", SMALL)
    config = data.config | {"attn": attn}
    with pytest.raises(ValueError, match=words):
        from_fla(data.state_dict, config)
    write_folder(tmp_path / "published", data.state_dict, config)
    with pytest.raises(ValueError, match=words):
        AutoConfig.from_pretrained(tmp_path / "published")


def test_a_plain_retnet_says_how_a_hybrid_is_loaded(tmp_path):
    data = golden("fla/hybrid_full", SMALL)
    write_folder(tmp_path / "published", data.state_dict, data.config)
    with pytest.raises(ValueError, match="RetNetForCausalLM"):
        RetNetForCausalLM.from_pretrained(tmp_path / "published")
    with pytest.raises(ValueError, match="Load the folder with AutoConfig or RetNetHybridConfig"):
        RetNetConfig(**data.config)
