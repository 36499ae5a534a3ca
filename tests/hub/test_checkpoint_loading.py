# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""from_pretrained reads folders of fla and syncdoth as they are, and saves them under our own names."""

import json
import logging

import pytest
import torch
from foreign_folders import FOREIGN, foreign, write_folder
from golden import at_hand, golden
from safetensors.torch import load_file
from small_models import same_tensors, small_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from retnet_hf import RetNetConfig, RetNetForCausalLM
from retnet_hf.vllm.weights import canonical_weights


pytestmark = pytest.mark.usefixtures("no_gradients")
CASES = [f"fla/{case}" for case in ("hub_options", "gqa_noaffine", "unfused_nogate_relu")]
CASES = at_hand([*CASES, "fla_2025_02/fused_gate_proj", "syncdoth/published_options", "syncdoth/lm_decay_tied"])


@pytest.mark.parametrize("layout", ["safetensors", "sharded", "bin"])
@pytest.mark.parametrize("case", CASES)
def test_a_published_folder_loads_with_no_key_missing_or_unexpected_and_unwarned(
    case, layout, tmp_path, caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    data = golden(case)
    folder = write_folder(tmp_path, data.state_dict, data.config, layout)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text
    logits = model(data.tensors["input_ids"]).logits
    torch.testing.assert_close(logits, data.tensors["logits"], atol=2e-4, rtol=1e-4)
    config = AutoConfig.from_pretrained(folder)
    assert type(config) is RetNetConfig
    config.save_pretrained(folder / "again")
    assert AutoConfig.from_pretrained(folder / "again").to_diff_dict() == config.to_diff_dict()


@pytest.mark.parametrize("dialect", FOREIGN)
def test_what_was_read_is_saved_under_our_names_bit_for_bit(dialect, tmp_path):
    model, state_dict, config = foreign(dialect)
    folder = write_folder(tmp_path, state_dict, config)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "saved")
    same_tensors(load_file(tmp_path / "saved" / "model.safetensors"), model.state_dict())
    same_tensors(RetNetForCausalLM.from_pretrained(tmp_path / "saved").state_dict(), model.state_dict())
    same_tensors(AutoModel.from_pretrained(folder).state_dict(), model.model.state_dict())


@pytest.mark.parametrize("dialect", FOREIGN)
def test_half_precision_and_device_maps(dialect, tmp_path):
    model, state_dict, config = foreign(dialect)
    write_folder(tmp_path, state_dict, config, "sharded")
    homes = dict.fromkeys([f"model.{name}" for name, _ in model.model.named_children() if name != "layers"], "cpu")
    homes |= {"lm_head": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
    offloaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=homes, offload_folder=tmp_path / "offload")
    ids = torch.arange(7)[None]
    assert torch.equal(offloaded(ids).logits, model(ids).logits)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="auto")
    assert half.dtype == torch.bfloat16
    same_tensors(half.state_dict(), model.bfloat16().state_dict())


def test_a_state_dict_given_directly_is_understood():
    model, state_dict, config = foreign("fla of 2024")
    loaded = RetNetForCausalLM.from_pretrained(None, config=RetNetConfig(**config), state_dict=state_dict)
    same_tensors(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("layout", ["ours", *FOREIGN])
@pytest.mark.parametrize("headless", [False, True])
def test_the_plugin_for_vllm_reads_the_same_names_and_values(layout, headless):
    model, state_dict, config = foreign("fla" if layout == "ours" else layout)
    expected = model.state_dict()
    state_dict = dict(expected) if layout == "ours" else state_dict
    if headless:
        state_dict = {name.removeprefix("model."): value for name, value in state_dict.items() if "lm_head" not in name}
        del expected["lm_head.weight"]
    found = list(canonical_weights(state_dict.items(), RetNetConfig(**config)))
    assert len(found) == len(expected)
    same_tensors(dict(found), expected)


def test_a_published_config_may_name_remote_code_that_is_not_needed(tmp_path):
    _, state_dict, config = foreign("syncdoth")
    remote = {"AutoConfig": "configuration_retnet.RetNetConfig"}
    remote["AutoModelForCausalLM"] = "modeling_retnet.RetNetForCausalLM"
    write_folder(tmp_path, state_dict, config | {"auto_map": remote, "transformers_version": "4.38.0"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is RetNetForCausalLM
    model.save_pretrained(tmp_path / "saved")
    assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text()), "that code is not beside it"


def test_defaults_of_an_old_transformers_are_not_saved_again(tmp_path):
    data = golden("syncdoth/published_options")  # its config.json was written in full
    assert data.config["max_length"] == 20
    model = AutoModelForCausalLM.from_pretrained(write_folder(tmp_path, data.state_dict, data.config))
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert not {"max_length", "torchscript", "pruned_heads", "is_decoder", "tokenizer_class"} & set(saved)


def test_a_folder_of_ours_loads_without_what_only_dialects_need_of_transformers(tmp_path, monkeypatch):
    small_model().save_pretrained(tmp_path)
    monkeypatch.setattr("retnet_hf.hub.loading.conversion", None)  # nobody asks
    same_tensors(AutoModelForCausalLM.from_pretrained(tmp_path).state_dict(), small_model().state_dict())
