# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism: two processes that hold half the heads each, with their decays, compute what one does."""

import pytest
import torch
from foreign_folders import FOREIGN, foreign, write_folder
from small_models import close, greedy, random_ids, small_model
from torchrun import run_ranks


RANK = """
import gc; gc.disable()
import sys, torch
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
from transformers import AutoModelForCausalLM
import retnet_hf
folder, first = sys.argv[1], torch.distributed.get_rank() == 0
inputs = torch.load(folder + "/inputs.pt")
for name in ("model", "hybrid"):
    model = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}", tp_plan="auto").eval()
    assert model.model.layers[0].retention.q_proj.weight.to_local().shape[0] == 16
    with torch.no_grad():
        found = {"logits": model(**inputs).logits}
    outputs = model.generate(**inputs, max_new_tokens=6, do_sample=False, return_dict_in_generate=True)
    state, found["tokens"] = outputs.past_key_values, outputs.sequences
    found["heads"] = [state.layers[index].recurrent_states.shape[1] for index in (0, -1)]
    found["loss"] = model(input_ids=inputs["input_ids"], labels=inputs["input_ids"], use_cache=False).loss.detach()
    try:
        state.save(folder + "/share")
    except ValueError as error:
        found["refusal"] = str(error)
    if first:
        torch.save(found, f"{folder}/{name}.pt")

for published in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(published, tp_plan="auto")
    weights = {name: getattr(value, "full_tensor", lambda: value)() for name, value in model.state_dict().items()}
    if first:
        torch.save(weights, published + "/loaded.pt")
torch.distributed.destroy_process_group()
"""


# the last layer's heads share states, two by two, the first one's have their own
DECAYS = [[0.6, 0.8, 0.9, 0.99], *[[1.0] * 4] * 2, [0.6, 0.6, 0.97, 0.97]]
HYBRID = {"num_attention_heads": 4, "num_key_value_heads": 2, "decay_schedule": DECAYS, "qkv_bias": True} | {
    "use_qk_norm": True
}


MODELS = {"model": small_model("fla"), "hybrid": small_model("hybrid", **HYBRID)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder, published = tmp_path_factory.mktemp("ranks"), {}
    for name, model in MODELS.items():
        model.save_pretrained(folder / name)
    inputs = {"input_ids": random_ids(2, 19), "attention_mask": (torch.arange(19) >= torch.tensor([[4], [0]])).long()}
    torch.save(inputs, folder / "inputs.pt")
    for dialect in FOREIGN:
        theirs, state_dict, config = foreign(dialect)
        published[dialect] = theirs, write_folder(folder / dialect.replace(" ", "_"), state_dict, config)
    (folder / "rank.py").write_text(RANK, encoding="utf-8")
    run_ranks([2], folder / "rank.py", folder, *(path for _, path in published.values()))
    return inputs, folder, published


@pytest.mark.parametrize(("name", "heads"), [("model", [2, 2]), ("hybrid", [2, 1])])
def test_two_ranks_compute_what_one_process_does(run, name, heads):
    inputs, folder, _ = run
    model, outputs, ids = MODELS[name], torch.load(folder / f"{name}.pt"), inputs["input_ids"]
    assert outputs["heads"] == heads
    assert "state of all 4 heads can be saved, not a rank's share of 2" in outputs["refusal"]
    with torch.no_grad():
        close(outputs["logits"], model(**inputs).logits)
        close(outputs["loss"], model(ids, labels=ids).loss, 1e-5)
    assert outputs["tokens"].equal(greedy(model, tokens=6, **inputs))


def test_two_ranks_read_published_folders_to_the_same_weights(run):
    for dialect, (model, folder) in run[2].items():
        loaded = torch.load(folder / "loaded.pt")
        assert set(loaded) == set(model.state_dict())
        for name, value in model.state_dict().items():
            assert torch.equal(loaded[name], value), (dialect, name)
