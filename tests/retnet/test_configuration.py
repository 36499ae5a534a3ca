# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNetConfig: presets, aliases and foreign spellings, and errors that are sentences."""

import inspect
import json
import math

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from small_models import CHANGES, HYBRID, config_class_of
from transformers import AutoConfig

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridConfig, RetNetModel
from retnet_hf.retnet.configuration_retnet import OF_HYBRIDS
from retnet_hf.state.state_fingerprint import WITHOUT_EFFECT


# flash-linear-attention's config.json of its hub checkpoints, keys and values
FLA = {"model_type": "retnet", "architectures": ["RetNetForCausalLM"], "attn_mode": "fused_chunk", "hidden_size": 2048}
FLA |= {"expand_k": 1, "expand_v": 2, "hidden_ratio": 2, "intermediate_size": None, "num_hidden_layers": 24, "num_heads": 8}
FLA |= {"num_kv_heads": None, "feature_map": None, "hidden_act": "swish", "use_short_conv": False, "conv_size": 4}
FLA |= {"share_conv_kernel": True, "use_output_gate": True, "max_position_embeddings": 2048, "elementwise_affine": True}
FLA |= {"norm_eps": 1e-6, "rms_norm_eps": 1e-6, "use_cache": True, "fuse_norm": True, "fuse_cross_entropy": True}
FLA |= {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "vocab_size": 32000}
# syncdoth's, the shape of isek-ai's checkpoints
SYNCDOTH = {"model_type": "retnet", "vocab_size": 50000, "decoder_embed_dim": 1280, "decoder_value_embed_dim": 2560}
SYNCDOTH |= {"decoder_retention_heads": 8, "decoder_ffn_embed_dim": 2560, "decoder_layers": 12, "activation_fn": "swish"}
SYNCDOTH |= {"decoder_normalize_before": True, "dropout": 0.0, "drop_path_rate": 0.0, "no_scale_embedding": False}
SYNCDOTH |= {"layernorm_embedding": True, "deepnorm": False, "subln": True, "use_glu": True, "use_lm_decay": True}
SYNCDOTH |= {"use_ffn_rms_norm": False, "layernorm_eps": 1e-6, "recurrent_chunk_size": 512, "forward_impl": "parallel"}
SYNCDOTH |= {"output_retentions": False, "z_loss_coeff": 0.0, "tie_word_embeddings": False}


def parameters(config):
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in RetNetForCausalLM(config).parameters())


def test_the_default_is_fla_hub_1_3b(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FLA))
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, RetNetConfig)
    assert (config.head_dim, config.value_head_dim, config.intermediate_size) == (256, 512, 2816)
    assert config.dtype == torch.bfloat16
    assert parameters(config) == 1_351_727_104  # of the published checkpoint
    ours, default = config.to_dict(), RetNetConfig().to_dict()
    assert not {"attn_mode", "fuse_norm", "num_heads"} & set(ours)
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "value_expansion", "decay_schedule"):
        assert ours[field] == default[field]


def test_deepnorm_multiplies_the_stream():
    config = RetNetConfig(**(SYNCDOTH | {"deepnorm": True, "decoder_normalize_before": False}))
    assert (config.residual_multiplier, config.norm_position) == (pytest.approx(24**0.25), "post")


ALIASES = [("num_heads", 4), ("num_kv_heads", 2), ("expand_k", 0.5), ("norm_eps", 1e-5), ("elementwise_affine", False)]


@pytest.mark.parametrize(("field", "value"), [*ALIASES, ("expand_v", 1.0)])
def test_aliases_read_and_write_the_field(field, value):
    config = RetNetConfig(**{field: value})
    assert getattr(config, RetNetConfig.attribute_map[field]) == getattr(config, field) == value


@pytest.mark.parametrize(("name", "billions"), [("1.3B", 1.3), ("2.7B", 2.7), ("6.7B", 6.7)])
def test_paper_sizes_have_the_paper_s_number_of_parameters(name, billions):
    assert parameters(RetNetConfig.from_preset(name, vocab_size=32000)) / 1e9 == pytest.approx(billions, rel=0.06)


def test_decay_schedules():
    assert RetNetConfig(num_attention_heads=4).decays() == [1 - 1 / 32, 1 - 1 / 64, 1 - 1 / 128, 1 - 1 / 256]
    factor = (1 / 16) ** (1 / 3)
    for schedule, heads, expected in (
        ("log_linear", 4, pytest.approx([1 - factor**head / 32 for head in range(4)])),
        ("none", 2, [1.0, 1.0]),
        ("alibi", 2, pytest.approx([math.exp(-1 / 16), math.exp(-1 / 256)])),
        ([0.5, 1], 2, [0.5, 1.0]),
    ):
        assert RetNetConfig(num_attention_heads=heads, decay_schedule=schedule).decays() == expected
    layers = RetNetConfig(num_attention_heads=2, num_hidden_layers=2, decay_schedule=[[0.5, 0.9], [1, 0.2]])
    assert (layers.decays(0), layers.decays(1)) == ([0.5, 0.9], [1.0, 0.2])


def test_heads_of_one_group_with_one_decay_share_a_state():
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "value_expansion": 1.0}

    def config(groups, decays, **fields):
        return config_class_of(fields)(**sizes, num_key_value_heads=groups, decay_schedule=decays, **fields)

    for groups, decays, heads in (
        (2, [0.5, 0.5, 0.9, 0.9], [2, 2]),
        (2, [0.5, 0.9, 0.5, 0.9], [4, 4]),
        (2, [0.5, 0.5, 0.8, 0.9], [4, 4]),
        (1, "none", [1, 1]),
        (1, "power_of_two", [4, 4]),
        (4, "none", [4, 4]),
        (2, [[0.5, 0.5, 0.9, 0.9], [0.5, 0.6, 0.9, 0.9]], [2, 4]),
    ):
        found = config(groups, decays)
        assert ([found.state_heads(layer) for layer in range(2)], found.state_size) == (heads, sum(heads) * 8 * 8)
    assert config(2, "none", layer_types=["linear_attention", "full_attention"]).state_size == 2 * 8 * 8


def test_each_layer_may_have_a_range_of_its_own():
    sizes = {"hidden_size": 240, "num_attention_heads": 3, "decay_schedule": "geometric"}
    config = RetNetConfig(**sizes, num_hidden_layers=2, decay_range=[[1, 32], [2, 512]])
    assert config.has_decays_per_layer
    again = RetNetConfig.from_dict(json.loads(config.to_json_string()))
    for layer, span in enumerate(config.decay_range):
        assert again.decays(layer) == config.decays(layer) == RetNetConfig(**sizes, decay_range=span).decays()


@pytest.mark.parametrize(
    ("span", "constants"),
    [((2, 512), [2, 8, 32, 128, 512]), ((2, 512), [32]), ([4, 4], [4, 4, 4]), ([0.5, 1e6], [0.5, 1e6])],
)
def test_geometric_decays_have_time_constants_that_grow_by_one_factor(span, constants):
    sizes = {"hidden_size": 240, "num_attention_heads": len(constants)}
    config = RetNetConfig(**sizes, decay_schedule="geometric", decay_range=span)
    assert [-1 / math.log(decay) for decay in config.decays()] == pytest.approx(constants, rel=1e-9)


def test_sizes_for_training_from_scratch_have_what_learns_best_and_published_ones_keep_theirs():
    for name in RetNetConfig.presets():
        config = RetNetConfig.from_preset(name)
        best = name in {"tiny", "mini", "small", "base", "medium"}
        assert config.decay_schedule == ("geometric" if best else "power_of_two" if "scale" in name else "log_linear")
        assert (not config.use_head_norm) is config.use_embedding_norm is config.use_qk_norm is best
        assert config.feature_map == (["relu"] * (config.num_hidden_layers - 1) + [None] if best else None)
        assert config.initialization == ("fan_in" if best else "xavier")
    plain = RetNetConfig()  # of config.json files that do not say
    assert (plain.decay_schedule, plain.use_head_norm) == ("power_of_two", True)
    assert RetNetConfig.from_preset("tiny", decay_schedule="log_linear").decay_schedule == "log_linear"


@pytest.mark.parametrize(("name", "softmax"), [("tiny", [3]), ("small", [7]), ("base", [3, 11]), ("medium", [7, 15, 23])])
def test_hybrids_for_training_from_scratch_end_with_softmax_attention_and_have_it_in_every_eighth_layer(name, softmax):
    hybrid, plain = RetNetHybridConfig.from_preset(name), RetNetConfig.from_preset(name)
    assert [layer for layer, kind in enumerate(hybrid.layer_types) if kind == "full_attention"] == softmax
    assert hybrid.layer_types.count("linear_attention") == len(hybrid.layer_types) - len(softmax)
    assert hybrid.rotary_layers == "linear_attention"
    assert RetNetHybridConfig.from_preset(name, num_hidden_layers=9).layer_types.index("full_attention") == 8
    assert (hybrid.feature_map, hybrid.decay_range) == (plain.feature_map, plain.decay_range)
    assert "full_attention" not in RetNetHybridConfig.from_preset("1.3B").layer_types
    for fields in ({"num_hidden_layers": 1}, {"layer_types": ["linear_attention"] * 24}):
        assert not RetNetHybridConfig.from_preset(name, **fields).has_softmax_attention


@pytest.mark.parametrize(
    ("fields", "has_softmax"),
    [
        ({"use_rotary": False}, True),
        ({"bidirectional": True}, False),
        ({"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, True),
        ({"attention_rope_theta": 1e6}, True),
        ({"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}, True),
    ],
)
def test_fields_of_a_hybrid_preset_that_contradict_its_own_replace_them(fields, has_softmax):
    config = RetNetHybridConfig.from_preset("tiny", **fields)
    assert config.rotary_layers is None
    assert config.has_softmax_attention is has_softmax


def test_decays_of_sizes_for_training_from_scratch_reach_further_from_layer_to_layer():
    config = RetNetConfig.from_preset("tiny", num_hidden_layers=3, num_attention_heads=2)
    for layer, expected in enumerate([[1, 32], [2**0.5, 32 * 4], [2, 512]]):
        assert [-1 / math.log(decay) for decay in config.decays(layer)] == pytest.approx(expected, rel=1e-3)


REFUSED = [
    ({"hidden_size": 0}, "hidden_size must be a positive integer, got 0"),
    ({"hidden_size": 100}, "key_expansion must be such that hidden_size .100. times it is a multiple of"),
    ({"num_key_value_heads": 3}, r"num_key_value_heads must be a divisor of num_attention_heads \(8\), got 3"),
    ({"decay_schedule": "fast"}, "decay_schedule must be one of power_of_two, log_linear, .*, got 'fast'"),
    ({"decay_schedule": [0.5]}, r"decay_schedule must be a list of num_attention_heads \(8\) numbers in \(0, 1\]"),
    ({"decay_schedule": [1.5] * 8}, "decay_schedule must be a list"),
    ({"decay_schedule": [[0.5] * 8]}, r"decay_schedule must be one list per layer \(num_hidden_layers is 24\) of"),
    ({"decay_schedule": [[0.5] * 7] * 24}, r"one list per layer .* num_attention_heads \(8\) numbers"),
    ({"feature_map": ["relu"]}, r"feature_map must be one name, or a list with one name for .*, got \['relu'\]"),
    ({"feature_map": ["swush"] * 24}, "feature_map must be a name of"),
    ({"decay_range": [2]}, r"decay_range must be a pair of time constants in tokens.*, got \[2\]"),
    ({"decay_range": [0, 8]}, r"decay_range must be .* the first at least 0.1 .*, got \[0, 8\]"),
    ({"decay_range": [8, 2]}, r"decay_range must be .* the second not below it, got \[8, 2\]"),
    ({"decay_range": [[2, 8]]}, r"decay_range must be .* one pair for each of the 24 layers, got \[\[2, 8\]\]"),
    ({"decay_range": [[2, 8]] * 23 + [[8, 2]]}, r"decay_range must be .* a list of one pair for each of the 24 layers"),
    ({"hidden_act": "swush"}, "hidden_act must be a name of .*, got 'swush'"),
    ({"feature_map": "swush"}, "feature_map must be a name of"),
    ({"retention_form": "fast"}, "retention_form must be one of auto, parallel, recurrent, chunkwise, got 'fast'"),
    ({"norm_position": "mid"}, "norm_position must be one of pre, post, got 'mid'"),
    ({"initialization": "he"}, "initialization must be one of xavier, deepnet, normal, fan_in, got 'he'"),
    ({"chunk_size": 0}, "chunk_size must be a positive integer or None, got 0"),
    ({"hidden_dropout": 1.0}, r"hidden_dropout must be in \[0, 1\), got 1.0"),
    ({"rms_norm_eps": 0.0}, "rms_norm_eps must be positive, got 0.0"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "a rope_type of default, linear, llama3, yarn"),
    ({"rope_parameters": {"rope_theta": 0.5}}, "rope_parameters must be a dict with a rope_theta of at least 1"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}, "rotary_endpoint": True}, "since rotary_endpoint is"),
    ({"rope_parameters": {"partial_rotary_factor": 1.5}}, r"a partial_rotary_factor in \(0, 1\] .* query head \(256\)"),
    ({"rope_parameters": {"partial_rotary_factor": 0.005}}, "an even number, 2 or more"),
    ({"key_expansion": 24 / 2048 * 1}, "the size of a query head .3. is even"),
    ({"hidden_size": "wide"}, "hidden_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
    ({"max_position_embeddings": -1}, "max_position_embeddings must be a positive integer, or absent, got -1"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_errors_name_the_field_the_value_and_what_is_allowed_however_fields_are_set(fields, sentence, tmp_path):
    def changed() -> RetNetConfig:
        config = RetNetConfig()
        for name, value in fields.items():
            setattr(config, name, value)
        return config

    RetNetConfig().save_pretrained(tmp_path)
    for make in (
        lambda: RetNetConfig(**fields),
        lambda: RetNetConfig.from_dict(RetNetConfig().to_dict(), **fields),
        lambda: RetNetModel.from_pretrained(tmp_path, **fields),
        lambda: RetNetModel(changed()),
        lambda: changed().save_pretrained(tmp_path),
    ):
        with pytest.raises((StrictDataclassError, ValueError), match=sentence):
            make()


YARN = {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (YARN, "max_position_embeddings must be the sequence length of training if rope_type is"),
        (SYNCDOTH | {"use_glu": False}, "use_glu must be True.*ffn_layernorm"),
        (FLA | {"attn": {"layers": [3]}}, "attn must be absent or None"),
        (SYNCDOTH | {"moe_freq": 2}, "moe_freq must be 0"),
    ],
)
def test_what_cannot_be_expressed_is_refused(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        RetNetConfig(**fields)
    with pytest.raises(ValueError, match="preset must be one of tiny, .*, got 'huge'"):
        RetNetConfig.from_preset("huge")


@pytest.mark.parametrize("foreign", [FLA, SYNCDOTH])
def test_keys_of_a_foreign_config_that_nobody_knows_are_dropped_with_one_warning_that_names_them(foreign, caplog):
    RetNetConfig(**foreign)
    assert not caplog.records
    known = {"quantization_config": {"quant_method": "gptq"}, "num_labels": 3, "tokenizer_class": "LlamaTokenizer"}
    config = RetNetConfig(**foreign, **known, use_new_gate=True, note="mine", max_length=7)
    [record] = caplog.records
    assert "unknown keys of another library's config.json: note, use_new_gate." in record.getMessage()
    assert not {"note", "use_new_gate"} & set(config.to_dict())
    assert (config.num_labels, config.tokenizer_class) == (3, "LlamaTokenizer")
    assert config.quantization_config == {"quant_method": "gptq"}


SMALL = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
# another value of each field without an effect
SAME = {"vocab_size": 60, "output_router_logits": True, "router_aux_loss_coef": 0.1, "hidden_dropout": 0.1}
SAME |= {"activation_dropout": 0.1, "initialization": "normal", "initializer_range": 0.1, "retention_form": "recurrent"}
SAME |= {"chunk_size": 8, "kernels": "triton", "use_cache": False, "tie_word_embeddings": True}
SAME |= {"pad_token_id": 3, "bos_token_id": 4, "eos_token_id": [5, 6]}


def fingerprint(config_class=RetNetConfig, **fields):
    return config_class(**(SMALL | fields)).state_fingerprint


def test_a_plain_configuration_knows_the_fields_of_hybrids_and_their_defaults():
    config = RetNetHybridConfig()
    defaults = {name: getattr(config, name) for name in inspect.get_annotations(RetNetHybridConfig)}
    assert defaults | {"layer_types": None} == OF_HYBRIDS
    assert RetNetConfig.from_dict(RetNetConfig().to_dict() | OF_HYBRIDS).to_dict() == RetNetConfig().to_dict()


@pytest.mark.parametrize("field", ["norm_affine", "num_experts", "layer_types", "head_norm_groups", "value_act"])
def test_a_plain_configuration_refuses_what_only_a_hybrid_computes(field, tmp_path):
    value, _ = change if isinstance(change := CHANGES[field], tuple) else (change, {})
    sentence = f"{field} is a field of RetNetHybridConfig .model_type retnet_hybrid."
    with pytest.raises(ValueError, match=sentence):
        RetNetConfig(**SMALL, **{field: value})
    (tmp_path / "config.json").write_text(json.dumps(SMALL | {"model_type": "retnet", field: value}))
    with pytest.raises(ValueError, match=sentence):
        AutoConfig.from_pretrained(tmp_path)


FIELDS = set(inspect.get_annotations(RetNetConfig)) | set(inspect.get_annotations(RetNetHybridConfig))


@pytest.mark.parametrize("field", sorted(FIELDS))
def test_a_field_changes_the_fingerprint_of_a_state_or_is_named_as_without_effect(field):
    """A new field needs a line in CHANGES, or in SAME and WITHOUT_EFFECT."""
    change = (CHANGES | SAME)[field]
    value, others = change if isinstance(change, tuple) else (change, {})
    config_class = config_class_of(others | {field: value})
    same = fingerprint(config_class, **others) == fingerprint(config_class, **(others | {field: value}))
    assert same == (field in SAME) == (field in WITHOUT_EFFECT)


SPELLINGS = [
    ({}, {"layer_types": ["linear_attention"] * 2}),
    ({}, {"num_key_value_heads": 4, "key_expansion": 1, "embedding_multiplier": 1, "hidden_act": "swish"}),
    ({}, {"decay_schedule": [1 - 2.0 ** (-5 - head) for head in range(4)], "decay_range": [3, 9]}),
    ({}, {"rope_parameters": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 1.0}}),
    ({"num_heads": 2, "expand_k": 1.0, "norm_eps": 1e-5}, {"num_attention_heads": 2, "rms_norm_eps": 1e-5}),
    ({"decay_schedule": [[1, 1, 1, 1]] * 2}, {"decay_schedule": "none"}),
    ({"decay_schedule": [1.0, 1, 1, 1], "feature_map": ["relu"] * 2}, {"decay_schedule": "none", "feature_map": "relu"}),
    ({"use_output_gate": False}, {"use_output_gate": False, "output_gate_act": "gelu"}),
    ({"use_head_norm": False}, {"use_head_norm": False, "head_norm_affine": False}),
    ({"use_rotary": False}, {"use_rotary": False, "rotary_endpoint": True, "rope_parameters": {"rope_theta": 5.0}}),
]


@pytest.mark.parametrize(("one", "other"), SPELLINGS)
def test_one_model_in_two_spellings_has_one_fingerprint(one, other):
    assert fingerprint(**one) == fingerprint(**other)


def test_the_length_trained_on_is_in_the_fingerprint_where_the_rotation_depends_on_it():
    assert fingerprint(**YARN, max_position_embeddings=64) != fingerprint(**YARN, max_position_embeddings=128)


SAVED = [SMALL, SMALL | HYBRID, SMALL | YARN | {"max_position_embeddings": 64}, FLA, SYNCDOTH]
SAVED += [SMALL | {"decay_schedule": "geometric", "decay_range": (2, 64), "feature_map": [None, "relu"]}]


@pytest.mark.parametrize("fields", SAVED)
def test_a_configuration_has_the_same_fingerprint_after_it_was_saved(fields, tmp_path):
    config = config_class_of(fields)(**fields)
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).state_fingerprint == config.state_fingerprint
    type(config).from_dict(json.loads(config.to_json_string(use_diff=False))).save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).state_fingerprint == config.state_fingerprint


def test_the_fingerprint_follows_the_number_of_layers_and_does_not_change_from_process_to_process():
    config = RetNetConfig(**SMALL)
    assert config.state_fingerprint == "b0b540ff1729b799"
    config.num_hidden_layers = 3
    assert config.state_fingerprint == fingerprint(num_hidden_layers=3)
