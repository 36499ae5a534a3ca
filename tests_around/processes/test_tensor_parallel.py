# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: two processes that hold half the heads each, with their decays, compute what one does."""

import pytest
import torch
from foreign_folders import FOREIGN, foreign, write_folder
from small_models import random_ids, small_model
from torchrun import run_ranks


RANK = """
import gc; gc.disable()
import os, sys, torch
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
from transformers import AutoModelForCausalLM
import retnet_hf
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder + "/model", tp_plan="auto").eval()
assert model.model.layers[0].retention.q_proj.weight.to_local().shape[0] == 16
inputs = torch.load(folder + "/inputs.pt")
with torch.no_grad():
    logits = model(**inputs).logits
tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)
loss = model(input_ids=inputs["input_ids"], labels=inputs["input_ids"], use_cache=False).loss
if torch.distributed.get_rank() == 0:
    torch.save({"logits": logits, "tokens": tokens, "loss": loss.detach()}, folder + "/outputs.pt")

model = AutoModelForCausalLM.from_pretrained(folder + "/hybrid", tp_plan="auto").eval()
with torch.no_grad():
    logits = model(**inputs).logits
outputs = model.generate(**inputs, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
state = outputs.past_key_values
try:
    state.save(folder + "/share")
except ValueError as error:
    refusal = str(error)
if torch.distributed.get_rank() == 0:
    heads = [state.layers[index].recurrent_states.shape[1] for index in (0, 3)]
    torch.save(
        {"logits": logits, "tokens": outputs.sequences, "heads": heads, "refusal": refusal}, folder + "/of_the_hybrid.pt"
    )

for published in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(published, tp_plan="auto")
    weights = {name: getattr(value, "full_tensor", lambda: value)() for name, value in model.state_dict().items()}
    if torch.distributed.get_rank() == 0:
        torch.save(weights, published + "/loaded.pt")
torch.distributed.destroy_process_group()
"""


# the last layer's heads share states, two by two, the first one's have their own
DECAYS = [[0.6, 0.8, 0.9, 0.99], *[[1.0] * 4] * 2, [0.6, 0.6, 0.97, 0.97]]
HYBRID = {"num_attention_heads": 4, "num_key_value_heads": 2, "decay_schedule": DECAYS, "qkv_bias": True} | {
    "use_qk_norm": True
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model, what it was given, and the folder with what two ranks made of it; and published folders that they read."""
    folder = tmp_path_factory.mktemp("ranks")
    model = small_model("fla")
    model.save_pretrained(folder / "model")
    small_model("hybrid", **HYBRID).save_pretrained(folder / "hybrid")
    ids = random_ids(2, 19)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    torch.save(inputs, folder / "inputs.pt")
    published = {}
    for dialect in FOREIGN:
        theirs, state_dict, config = foreign(dialect)
        published[dialect] = theirs, write_folder(folder / dialect.replace(" ", "_"), state_dict, config)
    (folder / "rank.py").write_text(RANK, encoding="utf-8")
    run_ranks([2], folder / "rank.py", folder, *(path for _, path in published.values()))
    return model, inputs, folder, published


def test_two_ranks_compute_what_one_process_does(run):
    model, inputs, folder, _ = run
    outputs, ids = torch.load(folder / "outputs.pt"), inputs["input_ids"]
    with torch.no_grad():
        expected = model(**inputs).logits
        loss = model(ids, labels=ids).loss
    assert (outputs["logits"] - expected).abs().max().item() < 1e-4
    assert outputs["tokens"].tolist() == model.generate(**inputs, max_new_tokens=6, do_sample=False).tolist()
    assert torch.allclose(outputs["loss"], loss, atol=1e-5)


def test_two_ranks_share_the_heads_of_softmax_attention_and_states(run):
    _, inputs, folder, _ = run
    model, outputs = small_model("hybrid", **HYBRID), torch.load(folder / "of_the_hybrid.pt")
    assert outputs["heads"] == [2, 1]
    assert "state of all 4 heads can be saved, not a rank's share of 2" in outputs["refusal"]
    with torch.no_grad():
        expected = model(**inputs).logits
    assert (outputs["logits"] - expected).abs().max().item() < 1e-4
    assert outputs["tokens"].tolist() == model.generate(**inputs, max_new_tokens=6, do_sample=False).tolist()


def test_two_ranks_read_published_folders_to_the_same_weights(run):
    *_, published = run
    for dialect, (model, folder) in published.items():
        loaded = torch.load(folder / "loaded.pt")
        assert set(loaded) == set(model.state_dict())
        for name, value in model.state_dict().items():
            assert torch.equal(loaded[name], value), (dialect, name)
