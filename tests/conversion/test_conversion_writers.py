# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Writers are closed: a foreign file says what every field of a configuration means, or the writer refuses it."""

import contextlib
import functools
import inspect
import json

import pytest
import torch
from changed_fields import CHANGES
from huggingface_hub.errors import StrictDataclassError
from random_vision import random_images
from small_metaformer import small_metaformer
from small_models import DIALECTS, FAMILIES, random_ids, shake, small_config
from small_rmt import small_rmt
from small_vir import small_vir

from retnet_hf import (
    MetaFormerBackbone,
    MetaFormerModel,
    RetNetConfig,
    RetNetForCausalLM,
    RetNetHybridConfig,
    RetNetHybridForCausalLM,
    RMTBackbone,
    ViRForMaskedImageModeling,
    ViRModel,
)
from retnet_hf.conversion import (
    fla,
    hypenet,
    ling,
    minicpm_sala,
    minimax,
    poolformer,
    ring,
    ring_lite,
    rmt,
    syncdoth,
    torchscale,
    transnormer,
    vir_official,
    vir_pulfer,
)
from retnet_hf.conversion.foreign_config import decays_with_factors
from retnet_hf.conversion.transnormer import EPSILON


CONFIGS = (RetNetConfig, RetNetHybridConfig)
DEEP = {"decay_schedule": "power_of_two", "residual_multiplier": 4**0.25}
# for each writer, a model that it takes
TAKEN = {
    fla: DIALECTS["fla"],
    torchscale: DIALECTS["torchscale"] | DEEP,
    syncdoth: DIALECTS["torchscale"] | DEEP,
    hypenet: FAMILIES["hypenet"],
    minicpm_sala: FAMILIES["hypenet"] | {"attention_use_qk_norm": False, "attention_log_base": None},
    minimax: FAMILIES["minimax"]
    | {"decay_schedule": decays_with_factors("alibi", 4, minimax.depth_factors(3)), "head_norm_eps": 1e-6 / 8},
    transnormer: FAMILIES["transnormer"]
    | {"decay_schedule": decays_with_factors("alibi", 4, transnormer.depth_factors(2)), "rms_norm_eps": EPSILON}
    | {"head_norm_eps": EPSILON / 8},
    ring: FAMILIES["ring"] | {"decay_schedule": decays_with_factors("alibi", 4, ring.depth_factors(3))},
    ring_lite: FAMILIES["ring"]
    | {"decay_schedule": decays_with_factors("alibi", 4, ring.depth_factors(3, 0))}
    | {"head_norm_groups": 1, "use_qk_norm": False}
    | {"router_act": "softmax", "use_router_bias": False, "n_group": None, "topk_group": None, "routed_scaling_factor": 1.0}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ling: FAMILIES["ring"]
    | {"decay_schedule": decays_with_factors("alibi", 4, ring.depth_factors(3, 0)), "attention_num_key_value_heads": None}
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


@pytest.mark.parametrize("field", [name for kind in CONFIGS for name in inspect.get_annotations(kind)])
@pytest.mark.parametrize("form", TAKEN, ids=lambda form: form.NAME)
def test_a_field_is_written_so_that_it_reads_back_or_refused(form, field):
    write, read = getattr(form, f"to_{form.NAME}"), getattr(form, f"from_{form.NAME}")
    changed = CHANGES.get(field, ())
    value, others = changed if isinstance(changed, tuple) and changed else (changed, {})
    for each in ([] if changed == () else [value]) + FURTHER.get(field, []):
        model = model_of(TAKEN[form] | others | {field: each})
        if model is None:
            continue
        try:
            state_dict, config = write(model)
        except ValueError:
            continue
        again = read({name: tensor.clone() for name, tensor in state_dict.items()}, json.loads(json.dumps(config))).eval()
        if getattr(again.config, "num_experts", None):
            again.set_experts_implementation("eager")
        ids = random_ids(2, 20) % model.config.vocab_size
        with torch.no_grad():
            expected, found = model(ids).logits, again(ids).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


@pytest.mark.parametrize("form", TAKEN, ids=lambda form: form.NAME)
def test_every_writer_takes_the_model_that_its_fields_are_changed_from(form):
    model = model_of(TAKEN[form])
    state_dict, config = getattr(form, f"to_{form.NAME}")(model)
    again = getattr(form, f"from_{form.NAME}")(state_dict, json.loads(json.dumps(config)))
    assert again.config.state_fingerprint == model.config.state_fingerprint


# for each writer of image models, a model that it takes
IMAGE_MODELS = {
    vir_official: small_vir,
    vir_pulfer: functools.partial(small_vir, "pulfer", patch_size=8, intermediate_size=64),
    rmt: small_rmt,
    poolformer: functools.partial(small_metaformer, "pooling"),
}
# values of every field of their configurations
IMAGE_VALUES = {
    "image_size": [[24, 48], 48],
    "patch_size": [8, [8, 12], [12, 6]],
    "num_channels": [1],
    "hidden_size": [24],
    "num_hidden_layers": [2],
    "num_attention_heads": [1, {"num_attention_heads": 4, "decay_schedule": "none"}, [2, 1, 2, 4], [1, 2, 2, 3]],
    "intermediate_size": [20, 64],
    "hidden_act": ["relu", "gelu_pytorch_tanh"],
    "pooling": ["class_token", "last_patch", "mean", "mean_but_first"],
    "decay_schedule": ["log_linear", "power_of_two", "alibi", "none", "geometric", [0.3, 0.9], [0.5, 1.0]],
    "decay_range": [[2, 9]],
    "bidirectional": [True, False],
    "mirror_sequence": [{"mirror_sequence": True, "pooling": name} for name in ("last_patch", "mean", "mean_but_first")],
    "qkv_bias": [True, False],
    "use_per_head_projections": [True, False],
    "use_retention_norm": [True, False],
    "retention_act": ["gelu", "silu", None],
    "use_layer_scale": [True, False, [True, False, True, False]],
    "layer_scale_init_value": [0.1],
    "layer_norm_eps": [1e-2, 1e-5, 1e-6],
    "embedding_dropout": [0.2],
    "hidden_dropout": [0.2],
    "activation_dropout": [0.2],
    "drop_path_rate": [0.2],
    "initializer_range": [0.1],
    "retention_form": ["recurrent"],
    "chunk_size": [3],
    "apply_layernorm": [False],
    "out_features": [["stage1"], ["stem", "stage2"]],
    "out_indices": [[1], [0, 2]],
    "hidden_sizes": [[16, 12, 16, 16], [8, 12, 16, 48]],
    "depths": [[2, 1, 1, 1], [1, 1, 1]],
    "mlp_ratios": [[1, 2, 1, 2]],
    "attention_types": [["whole"] * 4, ["decomposed"] * 4],
    "decay_exponents": [[1, 2, 3, 4]],
    "decay_exponent_ranges": [[3, 3, 3, 3]],
    "rope_theta": [100.0],
    "projection_size": [16],
    "token_classifier_input": ["hidden_states", "projection"],
    "projection_act": ["swish", "relu"],
    "batch_norm_eps": [1e-2],
    "token_mixers": [name.split() for name in ("pooling " * 4, "pooling identity " * 2, "attention " * 4, "retention " * 4)],
    "patch_sizes": [[4, 3, 2, 3]],
    "strides": [[4, 2, 1, 2]],
    "padding": [[2, 0, 1, 1]],
    "pool_size": [5],
    "mlp_ratio": [2.0],
    "key_expansion": [0.5],
    "value_expansion": [1.0],
    "use_output_gate": [False],
    "output_gate_act": ["gelu"],
    "use_head_norm": [False],
}
EACH_IMAGE_FIELD = [
    pytest.param(form, field.lstrip("_"), id=f"{form.NAME}-{field.lstrip('_')}")
    for form, small in IMAGE_MODELS.items()
    for field in inspect.get_annotations(type(small().config))
]


def check_logits_read_back(form, model, state_dict, config):
    """Holds what is read back of a written model to its logits."""
    again = getattr(form, f"from_{form.NAME}")(
        {name: tensor.clone() for name, tensor in state_dict.items()}, json.loads(json.dumps(config))
    )
    height, width = getattr(model.config, "image_shape", (64, 48))
    pixel_values = random_images(2, height, width, channels=model.config.num_channels)
    with torch.no_grad():
        expected, found = model(pixel_values).logits, again.eval()(pixel_values).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("form", IMAGE_MODELS, ids=lambda form: form.NAME)
def test_every_writer_takes_the_image_model_that_its_fields_are_changed_from(form):
    model = IMAGE_MODELS[form]()
    check_logits_read_back(form, model, *getattr(form, f"to_{form.NAME}")(model))


@pytest.mark.parametrize(("form", "field"), EACH_IMAGE_FIELD)
def test_a_field_of_an_image_model_is_written_so_that_it_reads_back_or_refused(form, field):
    models = []
    for value in IMAGE_VALUES[field]:
        with contextlib.suppress(StrictDataclassError, ValueError, TypeError, IndexError):  # no value of this family
            models.append(IMAGE_MODELS[form](**(value if isinstance(value, dict) else {field: value})))
    assert models
    for model in models:
        try:
            written = getattr(form, f"to_{form.NAME}")(model)
        except ValueError:
            continue
        check_logits_read_back(form, model, *written)


@pytest.mark.parametrize(
    ("form", "model_class", "overrides"),
    [
        (vir_official, ViRModel, {}),
        (vir_official, ViRForMaskedImageModeling, {"num_labels": 0}),
        (vir_pulfer, ViRModel, {}),
        (rmt, RMTBackbone, {"out_features": ["stage2"]}),
        (poolformer, MetaFormerBackbone, {"out_features": ["stage2"]}),
    ],
)
def test_an_image_model_with_tensors_that_the_format_does_not_hold_is_refused(form, model_class, overrides):
    """Each was written as something else, or ended in a KeyError."""
    with pytest.raises(ValueError, match=form.NAME):
        getattr(form, f"to_{form.NAME}")(IMAGE_MODELS[form](model_class=model_class, **overrides))


def test_poolformers_base_model_is_written_and_read_back():
    model = small_metaformer("pooling", MetaFormerModel)
    again = poolformer.from_poolformer(*poolformer.to_poolformer(model))
    assert type(again) is MetaFormerModel
