# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Feed-forward networks of experts: who computes a token, with which weight, and what training and tools make of them."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from small_models import close, random_ids, small_config, small_model

from retnet_hf import RetNetHybridForCausalLM
from retnet_hf.hybrid.experts import Router
from retnet_hf.retnet import modeling_retnet


FAMILIES = ("minimax", "ring")


def chosen_by_hand(logits: list[float], bias: list[float], config) -> dict[int, float]:
    if config.router_act == "softmax":
        total = sum(math.exp(logit) for logit in logits)
        scores = [math.exp(logit) / total for logit in logits]
    else:
        scores = [1 / (1 + math.exp(-logit)) for logit in logits]
    choice = [score + extra for score, extra in zip(scores, bias)]
    size = len(choice) // (config.n_group or 1)
    groups = [choice[start : start + size] for start in range(0, len(choice), size)]
    best = sorted(range(len(groups)), key=lambda group: -sum(sorted(groups[group])[-2:]))[: config.topk_group or 1]
    allowed = [expert for expert in range(len(choice)) if expert // size in best]
    chosen = sorted(allowed, key=lambda expert: -choice[expert])[: config.num_experts_per_tok]
    total = sum(scores[expert] for expert in chosen) if config.norm_topk_prob else 1
    return {expert: scores[expert] / total * config.routed_scaling_factor for expert in chosen}


OPTIONS = {
    "softmax": {"num_experts": 6, "num_experts_per_tok": 2},
    "softmax, as scores are": {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False},
    "sigmoid": {"num_experts": 6, "num_experts_per_tok": 2, "router_act": "sigmoid", "routed_scaling_factor": 2.5},
    "a bias": {"num_experts": 6, "num_experts_per_tok": 2, "router_act": "sigmoid", "use_router_bias": True},
    "groups": {"num_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "use_router_bias": True},
    "one group of many": {"num_experts": 12, "num_experts_per_tok": 4, "n_group": 3, "topk_group": 1},
    "groups of one expert": {"num_experts": 4, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 3},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_experts_and_weights_are_those_chosen_by_hand(options):
    config = small_config(**OPTIONS[options])
    router = Router(config).double()
    torch.nn.init.normal_(router.weight)
    if router.bias is not None:
        router.bias.normal_()
    rows = torch.randn(50, config.hidden_size, dtype=torch.float64)
    logits, weights, experts = router(rows)
    assert logits.equal(rows @ router.weight.T)
    bias = [0.0] * config.num_experts if router.bias is None else router.bias.tolist()
    for token in range(50):
        by_hand = chosen_by_hand(logits[token].tolist(), bias, config)
        assert dict(zip(experts[token].tolist(), weights[token].tolist())) == pytest.approx(by_hand, rel=1e-12)


def test_the_loss_of_unbalanced_routing_is_added_with_its_weight_where_it_is_asked_for():
    model, ids = small_model("minimax", router_aux_loss_coef=0.1), random_ids(2, 23)
    plain = model(ids, labels=ids)
    assert plain.aux_loss is None
    assert plain.router_logits is None
    output = model(ids, labels=ids, output_router_logits=True)
    assert [logits.shape for logits in output.router_logits] == [(46, 4)] * 3
    close(output.loss, plain.loss + 0.1 * output.aux_loss)
    probability = torch.cat(output.router_logits).softmax(-1)
    times = torch.nn.functional.one_hot(probability.topk(2).indices, 4).double().sum(1).mean(0)
    close(output.aux_loss.double(), 4 * (times * probability.double().mean(0)).sum(), 1e-5)


def test_padding_counts_for_no_expert_in_the_loss_of_unbalanced_routing():
    model, ids = small_model("minimax"), random_ids(1, 20)
    padded, mask = torch.cat([ids[:, :9], ids], dim=1), (torch.arange(29) >= 9).long()[None]
    alone = model(ids, output_router_logits=True).aux_loss
    close(model(padded, attention_mask=mask, output_router_logits=True).aux_loss, alone, 1e-5)
    with torch.no_grad():
        state, whole = model(ids, use_cache=True).past_key_values, torch.ones(1, 29, dtype=torch.int64)
        options = {"attention_mask": whole, "output_router_logits": True}
        given = model(padded[:, :9], past_key_values=state.clone(), **options).aux_loss
        close(given, model(padded[:, :9], past_key_values=state, output_router_logits=True).aux_loss)


def test_router_logits_of_a_long_text_are_those_of_all_its_tokens(monkeypatch):
    model, ids = small_model("minimax", chunk_size=8), random_ids(2, 40)
    with torch.no_grad():
        expected = model(ids, output_router_logits=True)
        monkeypatch.setattr(modeling_retnet, "PIECE_SIZE_ON_CPU", 32)
        output = model(ids, labels=ids, attention_mask=torch.ones_like(ids), output_router_logits=True)
    close(output.router_logits, expected.router_logits)


def test_weights_that_are_made_have_the_spread_of_the_configuration():
    model = RetNetHybridForCausalLM(small_config("ring", hidden_size=64, initializer_range=0.1))
    for layer in model.model.layers[1:]:
        assert 0.09 < layer.mlp.experts.gate_up_proj.std() < 0.11
        assert 0.09 < layer.mlp.experts.down_proj.std() < 0.11


def test_lora_on_linear_layers_leaves_experts_as_they_are_and_learns():
    model, ids = small_model("ring"), random_ids(2, 15)
    tuned = get_peft_model(model, LoraConfig(target_modules="all-linear", r=2))
    names = {name.split(".lora_A")[0].split(".")[-1] for name, _ in tuned.named_parameters() if ".lora_A." in name}
    assert names == {f"{name}_proj" for name in ("q", "k", "v", "g", "o", "gate", "up", "down")}
    tuned(input_ids=ids, labels=ids).loss.backward()
    learning = {name for name, parameter in tuned.named_parameters() if parameter.grad is not None}
    assert learning
    assert all(".lora_" in name for name in learning)
