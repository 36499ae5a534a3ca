# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism with layers that torchao has quantised."""

import copy

import pytest
import torch
from small_models import random_ids, small_model
from torchrun import run_ranks


RANK = """
import sys, torch
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
from transformers import AutoModelForCausalLM
import retnet_hf
folder = sys.argv[1]
inputs = torch.load(folder + "/inputs.pt")
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig
from transformers import TorchAoConfig

for name, config in (("int8", Int8WeightOnlyConfig()), ("float8", Float8WeightOnlyConfig())):
    options = {"tp_plan": "auto", "quantization_config": TorchAoConfig(config)}
    model = AutoModelForCausalLM.from_pretrained(folder + "/model", **options)
    modules = {key: module for key, module in model.named_modules() if key.endswith("_proj")}
    # what this rank computes with, along the axis of which it has a share
    mine = {key: (each.weight.dequantize(), key.endswith(("o_proj", "down_proj"))) for key, each in modules.items()}
    shares = [None, None]
    torch.distributed.all_gather_object(shares, mine)
    with torch.no_grad():
        logits = model(**inputs).logits
    tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    if torch.distributed.get_rank() == 0:
        weights = {key: torch.cat([share[key][0] for share in shares], dim=int(mine[key][1])) for key in mine}
        torch.save({"logits": logits, "tokens": tokens, "weights": weights}, folder + f"/{name}.pt")
torch.distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model, what it was given, and the folder with what two ranks made of it."""
    folder = tmp_path_factory.mktemp("ranks")
    model, ids = small_model("fla"), random_ids(2, 19)
    model.save_pretrained(folder / "model")
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(19) >= torch.tensor([[4], [0]])).long()}
    torch.save(inputs, folder / "inputs.pt")
    (folder / "rank.py").write_text(RANK, encoding="utf-8")
    run_ranks([2], folder / "rank.py", folder)
    return model, inputs, folder


@pytest.mark.parametrize("quantisation", ["int8", "float8"])
def test_two_ranks_compute_with_quantised_weights(run, quantisation):
    """As one process does with the weights that the quantised shares of both stand for."""
    model, inputs, folder = run
    outputs, rounded = torch.load(folder / f"{quantisation}.pt"), copy.deepcopy(model)
    for name, weight in outputs["weights"].items():
        layer = rounded.get_submodule(name)
        assert 0 < (weight - layer.weight).abs().max() < 0.1 * layer.weight.abs().max(), name
        layer.weight.data = weight
    assert len(outputs["weights"]) == 2 * 8
    with torch.no_grad():
        expected = rounded(**inputs).logits
    kept = inputs["attention_mask"].bool()
    torch.testing.assert_close(outputs["logits"][kept], expected[kept], rtol=1e-4, atol=1e-4)
    assert outputs["tokens"].tolist() == rounded.generate(**inputs, max_new_tokens=6, do_sample=False).tolist()
