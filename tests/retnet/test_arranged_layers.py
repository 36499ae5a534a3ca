# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Layers that are cut, copied or moved keep their decays, feature maps, windows and rotations, also when they are saved."""

import copy

import pytest
import torch
from small_models import close, greedy, random_ids, shake, small_config
from torch import nn

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridForCausalLM, RetNetState


ORDERS = {"cut": [0, 1], "cut in front": [1, 2, 3], "moved": [2, 1, 0, 3], "copied": [0, 1, 1, 2, 3, 2]}
PLAIN = RetNetConfig.from_preset("tiny", vocab_size=100, eos_token_id=None)  # decays and feature maps differ by layer
MODELS = {
    "plain": (RetNetForCausalLM, PLAIN),
    **{name: (RetNetHybridForCausalLM, small_config(name)) for name in ("sinks", "hypenet", "minimax")},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("change", ORDERS)
@torch.no_grad()
def test_layers_keep_what_they_compute_and_what_is_saved_computes_the_same(name, change, tmp_path):
    model_class, config = MODELS[name]
    model, order, ids = shake(model_class(copy.deepcopy(config))).eval(), ORDERS[change], random_ids(2, 20)
    order = [layer for layer in order if layer < config.num_hidden_layers]
    network, layers = model.model, model.model.layers
    hidden = network.embed_tokens(ids) * config.embedding_multiplier
    hidden = hidden if network.embed_norm is None else network.embed_norm(hidden)
    plans = network.plan(hidden)
    for layer in order:
        hidden = layers[layer](hidden, plan=plans[layer])
    expected = model.lm_head(network.norm(hidden)) / (getattr(config, "logits_scaling", None) or 1)

    network.layers = nn.ModuleList(copy.deepcopy(layers[layer]) for layer in order)
    close(model(ids, use_cache=False).logits, expected)
    model.save_pretrained(tmp_path)
    again = model_class.from_pretrained(tmp_path)
    close(again(ids).logits, expected)
    assert again.config.num_hidden_layers == len(order)
    assert greedy(model, ids, 6).equal(greedy(again, ids, 6, use_cache=False))
    model(ids, use_cache=True).cache.save(tmp_path / "state")
    assert RetNetState.load(tmp_path / "state", again).get_seq_length() == 20


@torch.no_grad()
def test_layers_are_moved_in_one_model_and_no_layer_stands_twice():
    config, ids = copy.deepcopy(PLAIN), random_ids(2, 20)
    model, other = shake(RetNetForCausalLM(config)).eval(), shake(RetNetForCausalLM(config)).eval()
    expected, layers = other(ids).logits, model.model.layers
    model.model.layers = nn.ModuleList([layers[2], layers[0]])
    model(ids)
    assert (model.config.num_hidden_layers, config.num_hidden_layers) == (2, 4)
    assert other(ids).logits.equal(expected)
    model.model.layers = nn.ModuleList([layers[2], layers[0], layers[0]])
    with pytest.raises(ValueError, match="each layer must be a module of its own"):
        model(ids)
    model.model.layers = nn.ModuleList()
    with pytest.raises(ValueError, match="must have at least one layer"):
        model(ids)
