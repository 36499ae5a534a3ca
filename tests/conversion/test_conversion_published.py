# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Ling-2.5 and Ling-2.6, MiniCPM-SALA and Ring-lite-linear-preview are the published models.

The expected outputs were computed in float64 by plain programs.
"""

import pytest
import torch
from foreign_folders import write_folder
from golden import SMALL, golden
from published_outputs import read
from small_models import close, greedy
from transformers import AutoModelForCausalLM

from retnet_hf import RetNetHybridForCausalLM
from retnet_hf_conversion.formats import FORMATS


FAMILIES = ("ling", "minicpm_sala", "ring_lite")
WITHOUT_EFFECT = ("attention_dropout", "linear_mode", "num_nextn_predict_layers")
CASES = [f"{family}/{case}" for family in FAMILIES for case in ("published_like", "other_options")]
of_each_case = pytest.mark.parametrize("case", CASES)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("form", ["parallel", "recurrent", "chunkwise"])
@of_each_case
def test_logits_and_loss_are_the_published_ones_in_every_form(case, form):
    model, data = read(case)
    ids, logits = data.tensors["input_ids"], data.tensors["logits"]
    output = model(ids, labels=ids, retention_form=form)
    close(output.logits, logits, 1e-5 * logits.abs().max().item())
    close(output.loss, data.tensors["loss"][0], 1e-5)


@of_each_case
def test_a_folder_is_read_and_padded_rows_are_what_they_are_alone(case, tmp_path):
    data = golden(case, SMALL)
    write_folder(tmp_path / "published", data.state_dict, data.config)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "published").eval()
    assert type(model) is RetNetHybridForCausalLM
    ids = data.tensors["input_ids"][:, :20]
    ids = ids if len(ids) > 1 else ids.repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    padded = model(ids, attention_mask=mask).logits
    close(padded[1, 6:], model(ids[1:, 6:]).logits[0], 2e-5)
    close(padded[0], data.tensors["logits"][0, :20], 5e-5)
    model.generation_config.eos_token_id = None
    assert torch.equal(greedy(model, ids, 6), greedy(model, ids, 6, use_cache=False))
    beams = {"num_beams": 3, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(ids, **beams), model.generate(ids, **beams, use_cache=False))


@of_each_case
def test_it_is_written_as_it_was_published_without_layers_that_predict_further_tokens(case):
    model, data = read(case)
    family = case.split("/")[0]
    state_dict, config = getattr(FORMATS[family], f"to_{family}")(model)
    assert all(config.get(name) == value or name in WITHOUT_EFFECT for name, value in data.config.items())
    layers = data.config["num_hidden_layers"]
    assert {name for name in data.state_dict if f"layers.{layers}." not in name} == state_dict.keys()
    assert all(torch.equal(tensor, data.state_dict[name]) for name, tensor in state_dict.items())
