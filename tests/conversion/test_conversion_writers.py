# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Writers are closed: a foreign file says what every field of a configuration means, or the writer refuses it."""

import inspect
import json

import pytest
import torch
from small_models import CHANGES, DIALECTS, FAMILIES, random_ids, shake, small_config

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridConfig, RetNetHybridForCausalLM
from retnet_hf.conversion import minimax, ring
from retnet_hf.conversion.foreign_config import decays_with_factors
from retnet_hf.conversion.formats import FORMATS
from retnet_hf.conversion.transnormer import EPSILON


CONFIGS = (RetNetConfig, RetNetHybridConfig)
DEEP = {"decay_schedule": "power_of_two", "residual_multiplier": 4**0.25}
FROM_0 = decays_with_factors("alibi", 4, ring.depth_factors(3, 0))
# for each writer, a model that it takes
TAKEN = {
    "fla": DIALECTS["fla"],
    "torchscale": DIALECTS["torchscale"] | DEEP,
    "syncdoth": DIALECTS["torchscale"] | DEEP,
    "hypenet": FAMILIES["hypenet"],
    "minicpm_sala": FAMILIES["hypenet"] | {"attention_use_qk_norm": False, "attention_log_base": None},
    "minimax": FAMILIES["minimax"]
    | {"decay_schedule": decays_with_factors("alibi", 4, minimax.depth_factors(3)), "head_norm_eps": 1e-6 / 8},
    "transnormer": FAMILIES["transnormer"]
    | {"decay_schedule": decays_with_factors("alibi", 4, ring.depth_factors(2, 0))}
    | {"rms_norm_eps": EPSILON, "head_norm_eps": EPSILON / 8},
    "ring": FAMILIES["ring"] | {"decay_schedule": decays_with_factors("alibi", 4, ring.depth_factors(3))},
    "ring_lite": FAMILIES["ring"]
    | {"decay_schedule": FROM_0, "head_norm_groups": 1, "use_qk_norm": False}
    | {"router_act": "softmax", "use_router_bias": False, "n_group": None, "topk_group": None, "routed_scaling_factor": 1.0}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "ling": FAMILIES["ring"]
    | {"decay_schedule": FROM_0, "attention_num_key_value_heads": None}
    | {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4},
}
# other values than those that change a fingerprint: what REVIEW found, and fields without an effect of their own
FURTHER = {
    "head_norm_eps": [1e-2, 1e-5],
    "rotary_layers": ["softmax_attention"],
    "value_act": ["gelu", "silu"],
    "attention_log_base": [1000000.5, 20.123456789],
    "n_group": [1],
    "rope_parameters": [
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ],
    "tie_word_embeddings": [True, False],
    "layer_types": [["sliding_attention", "linear_attention", "linear_attention"]],
}


def model_of(fields: dict) -> RetNetForCausalLM | None:
    """A model of these fields, or None where a configuration cannot have them together."""
    try:
        config = small_config(**fields)
        model = (RetNetHybridForCausalLM if config.is_hybrid else RetNetForCausalLM)(config).eval()
    except Exception:
        return None
    shake(model)
    model.tie_weights()
    if getattr(model.config, "num_experts", None):
        model.set_experts_implementation("eager")
    return model


def read_back(name: str, state_dict: dict, config: dict) -> RetNetForCausalLM:
    weights = {key: tensor.clone() for key, tensor in state_dict.items()}
    return getattr(FORMATS[name], f"from_{name}")(weights, json.loads(json.dumps(config))).eval()


@pytest.mark.parametrize("field", [name for kind in CONFIGS for name in inspect.get_annotations(kind)])
@pytest.mark.parametrize("name", TAKEN)
def test_a_field_is_written_so_that_it_reads_back_or_refused(name, field):
    changed = CHANGES.get(field, ())
    value, others = changed if isinstance(changed, tuple) and changed else (changed, {})
    for each in ([] if changed == () else [value]) + FURTHER.get(field, []):
        model = model_of(TAKEN[name] | others | {field: each})
        if model is None:
            continue
        try:
            written = getattr(FORMATS[name], f"to_{name}")(model)
        except ValueError:
            continue
        again = read_back(name, *written)
        if getattr(again.config, "num_experts", None):
            again.set_experts_implementation("eager")
        ids = random_ids(2, 20) % model.config.vocab_size
        with torch.no_grad():
            expected, found = model(ids).logits, again(ids).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("name", TAKEN)
def test_every_writer_takes_the_model_that_its_fields_are_changed_from(name):
    model = model_of(TAKEN[name])
    written = getattr(FORMATS[name], f"to_{name}")(model)
    assert read_back(name, *written).config.state_fingerprint == model.config.state_fingerprint
