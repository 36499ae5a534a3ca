# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNets of fla, torchscale and syncdoth: each tensor is used once or named, and so is what has no counterpart."""

import json
import math

import pytest
import torch
from foreign_folders import write_folder
from golden import SMALL, golden
from small_models import close, small_model
from transformers import AutoConfig

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridConfig
from retnet_hf.conversion.changes import known
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.conversion.fla import from_fla, hybrid_fields, to_fla
from retnet_hf.conversion.moves import Conversion, Move, shapes_of
from retnet_hf.conversion.syncdoth import to_syncdoth
from retnet_hf.conversion.torchscale import from_torchscale, to_torchscale


EXPRESSIBLE = {"rotary_endpoint": True, "head_norm_affine": False}


INEXPRESSIBLE = [
    (to_fla, {"rotary_endpoint": True}, "rotary_endpoint"),
    (to_fla, {"hidden_act": "gelu"}, "hidden_act"),
    (to_fla, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
    (to_torchscale, EXPRESSIBLE | {"use_qk_norm": True}, "use_qk_norm"),
    (to_torchscale, {}, "rotary_endpoint"),
    (to_torchscale, EXPRESSIBLE | {"embedding_multiplier": 3.0}, "embedding_multiplier"),
    (to_syncdoth, EXPRESSIBLE | {"decay_schedule": "none"}, "decay_schedule"),
]


@pytest.mark.parametrize(("writer", "fields", "named"), INEXPRESSIBLE)
def test_what_a_format_cannot_express_is_refused_by_the_field(writer, fields, named):
    with pytest.raises(ValueError, match=rf"^{named} must"):
        writer(small_model(**fields))


NAME = "model.layers.1.attn.k_proj.weight"


PLACES = [
    (NAME, None, rf"tensor {NAME} is missing"),
    ("model.layers.0.attn.extra.weight", torch.ones(2), "tensor model.layers.0.attn.extra.weight has no place"),
    (NAME, torch.ones(32, 31), rf"tensor {NAME} has shape \(32, 31\), but .* \(32, 32\)"),
    (NAME, torch.full((32, 32), math.nan), rf"tensor {NAME} holds values that are not finite"),
    (NAME, torch.ones(32, 32, dtype=torch.complex64), rf"{NAME} is of type torch.complex64: only checkpoints of 16 bits or"),
    (NAME, torch.ones(32, 32).to(torch.float8_e4m3fn), rf"{NAME} is of type torch.float8_e4m3fn: only checkpoints of 16"),
    (NAME, torch.ones(32, 32, dtype=torch.int32), rf"tensor {NAME} has dtype torch.int32, but .* cannot have it"),
    ("model.layers.0.retention.q_proj.weight", torch.ones(32, 32), r"2 tensors .* would become .*\.0\.retention\.q_proj\."),
]


@pytest.mark.parametrize(("name", "tensor", "sentence"), PLACES)
def test_every_tensor_is_used_once_or_named(name, tensor, sentence):
    state_dict, config = to_fla(small_model())
    changed = {key: value for key, value in (state_dict | {name: tensor}).items() if value is not None}
    with pytest.raises(CheckpointError, match=sentence):
        from_fla(changed, config)


def test_a_tensor_that_would_be_used_twice_is_refused():
    model = small_model()
    names = {name: name for name in model.state_dict()} | {"model.norm.weight": "model.layers.0.mlp_norm.weight"}
    plan = Conversion("ours", RetNetForCausalLM, model.config, [Move((names[name],), (name,)) for name in names])
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.mlp_norm\.weight would be used 2 times"):
        plan.check(shapes_of(model.state_dict()))


def test_buffers_and_heads_that_contradict_the_configuration_are_refused():
    state_dict, config = to_torchscale(small_model(**EXPRESSIBLE))
    decay = torch.full_like(state_dict["retnet_rel_pos.decay"], -0.5)
    with pytest.raises(CheckpointError, match=r"retnet_rel_pos\.decay holds other values"):
        from_torchscale(state_dict | {"retnet_rel_pos.decay": decay}, config)
    without = {name: value for name, value in state_dict.items() if "retnet_rel_pos" not in name}
    assert from_torchscale(without, config).num_parameters() == small_model(**EXPRESSIBLE).num_parameters()
    state_dict, config = to_torchscale(small_model(**EXPRESSIBLE, tie_word_embeddings=True))
    state_dict["output_projection.weight"] = state_dict["output_projection.weight"] + 1
    with pytest.raises(CheckpointError, match="output_projection.weight differs"):
        from_torchscale(state_dict, config)


def test_the_frequencies_of_another_convention_are_told_at_any_size():
    size = 256  # at which the two conventions are nowhere further apart than 0.003
    angle = 10000 ** -torch.linspace(0, 1, size // 2)
    known(angle).forward([angle.bfloat16()])
    with pytest.raises(CheckpointError, match="other values"):
        known(angle).forward([10000 ** -(torch.arange(0, size, 2) / size)])


@pytest.mark.parametrize("write", [to_fla, to_syncdoth])
def test_a_model_that_trainer_has_left_without_cache_is_written_with_it(write):
    model = small_model(**({} if write is to_fla else EXPRESSIBLE))
    model.config.use_cache = False  # as Trainer does
    assert write(model)[1]["use_cache"] is True


def test_a_torchscale_preset_of_another_width_is_still_expressible():
    config = RetNetConfig.from_preset("torchscale-base", hidden_size=96, intermediate_size=64, vocab_size=31)
    assert to_torchscale(RetNetForCausalLM(config))[1]["no_scale_embedding"] is False


def test_full_and_windowed_layers_are_two_specifications():
    kinds = ["full_attention", "linear_attention", "sliding_attention"]
    options = {"num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 4, "attention_head_dim": 8}
    model, ids = small_model(**options), torch.arange(20)[None]
    state_dict, config = to_fla(model)
    assert [(spec["layers"], spec["window_size"]) for spec in config["attn"]] == [([0], None), ([2], 4)]
    again = from_fla(state_dict, json.loads(json.dumps(config))).eval()
    close(again(ids).logits, model(ids).logits, 1e-5)
    assert again.config.layer_types == kinds


def test_what_attn_does_not_state_has_the_values_of_fla():
    content = {"num_hidden_layers": 3, "hidden_size": 32, "attn": {"layers": [1], "num_heads": 4}}
    config = RetNetHybridConfig(num_attention_heads=4, **hybrid_fields(content))
    assert (config.attention_rope_theta, config.attention_qkv_bias) == (10000.0, False)
    assert config.mixer_sizes(1) == (4, 4, 8, 8)


def test_no_softmax_layer_is_a_plain_retnet():
    data = golden("fla/hybrid_full", SMALL)
    config = data.config | {"attn": {"layers": [], "num_heads": 2}, "num_hidden_layers": 1}
    weights = {name: tensor for name, tensor in data.state_dict.items() if ".1." not in name and ".2." not in name}
    assert type(from_fla(weights, config)) is RetNetForCausalLM


SPECIFICATION = "attn in config.json must have num_heads, a number, layers, a list.* and no key but "
REFUSED = [
    ({"layers": [3], "num_heads": 4}, "layers of attn in config.json must be distinct numbers below 3, got 3"),
    ({"layers": [1, 1], "num_heads": 4}, "must be distinct numbers below 3, got 1"),
    ({"layers": ["1"], "num_heads": 4}, "must be distinct numbers below 3, got '1'"),
    ({"layers": [True], "num_heads": 4}, "must be distinct numbers below 3, got True"),
    ({"layers": [1], "num_heads": None}, SPECIFICATION),
    ({"layers": 1, "num_heads": 4}, SPECIFICATION),
    ({"layers": [1], "num_heads": 4, "gate": True}, SPECIFICATION),
    ("full", SPECIFICATION),
    ([{"layers": [0], "num_heads": 4}, {"layers": [1], "num_heads": 2}], "num_heads of attn in config.json must be the"),
    (
        [{"layers": [layer], "num_heads": 4, "window_size": 3 - layer} for layer in (0, 1)],
        "window_size of attn in config.json must be the same",
    ),
]


@pytest.mark.parametrize(("attn", "words"), REFUSED)
def test_softmax_layers_without_a_counterpart_are_refused(attn, words, tmp_path):
    data = golden("fla/hybrid_full", SMALL)
    with pytest.raises(ValueError, match=words):
        from_fla(data.state_dict, data.config | {"attn": attn})
    write_folder(tmp_path, {}, data.config | {"attn": attn})
    with pytest.raises(ValueError, match=words):
        AutoConfig.from_pretrained(tmp_path)


def test_a_plain_retnet_says_how_a_hybrid_is_loaded(tmp_path):
    data = golden("fla/hybrid_full", SMALL)
    write_folder(tmp_path, data.state_dict, data.config)
    with pytest.raises(ValueError, match="RetNetForCausalLM"):
        RetNetForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Load the folder with AutoConfig or RetNetHybridConfig"):
        RetNetConfig(**data.config)
