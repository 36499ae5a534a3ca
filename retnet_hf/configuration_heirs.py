# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The config.json files of families that are RetNets by other names: HypeNet and TransNormerLLM.

HypeNet (arXiv 2601.22156) has layers of retention, which rotate queries and keys, and of softmax attention, which usually
do not, and scale their queries by the logarithm of the position. TransNormerLLM (arXiv 2307.14995) has retention in every
layer. None of its norms has a weight, gate and feed-forward have no activation, and the first layer learns its angles.
"""

import math
import re
from collections.abc import Callable
from typing import Any

from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig

from .configuration_dialects import WITHOUT_EFFECT_IN_TRANSFORMERS


LINEAR = ("lightning-attn", "lightning_attn")
LOG_BASE = 362.0  # of an attn_logits_scaling that names no number
# options that change what a layer computes, and the one value of each that has a counterpart here
FIXED_IN_HYPENET = {
    "attention_bias": False,
    "lightning_use_short_conv": False,
    "lightning_use_output_norm": True,
    "lightning_use_output_gate": True,
    "lightning_use_qk_norm": True,
    "use_sliding_window": False,
    "rope_scaling": None,
}
# of mixers that no layer has, of training and of kernels
WITHOUT_EFFECT_IN_HYPENET = (
    r"(gdn|kda|mamba2)_\w+|lightning_conv_size|expand_kv_proj|loss_fn|fused_ce_loss|shift_labels|rand_init|attention_dropout|"
    r"lightning_rope_scaling|max_window_layers|sliding_window"
)

ACTIVATIONS = {  # theirs, and ours; of two with one meaning the last is written
    "swish": "silu",
    "silu": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "leak": "leaky_relu",
    "none": None,
}
EPSILON = 1e-16  # theirs is 1e-8 beside the root, ours stands below it


class ForeignConfig(dict):
    """A foreign config.json that notes which of its fields are read.

    A field that is not read, though it has a value, may change what the model computes: such a file is refused.

    Args:
        target_format: name of the format. without_effect: pattern of fields that no layer reads when it computes its output.
    """

    def __init__(self, content: dict[str, Any], target_format: str, without_effect: str = "") -> None:
        super().__init__(content)
        self.target_format, self.without_effect, self.read = target_format, without_effect, set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, or the default."""
        self.read.add(name)
        return super().get(name, default)

    def require_one_value(self, **values: Any) -> None:
        """Options that change what a layer computes, with the one value of each that has a counterpart here.

        Raises:
            ValueError: where the file has another.
        """
        for name, value in values.items():
            if self.get(name) not in (value, None):
                raise ValueError(
                    f"{name} in config.json must be {value!r} or absent for the format {self.target_format}, "
                    f"got {self[name]!r}"
                )

    def require_all_read(self) -> None:
        """Raises ValueError for a field with a value that was not read and is not known to be without effect."""
        of_transformers = {*PreTrainedConfig().to_dict(), *GenerationConfig().to_dict(), *WITHOUT_EFFECT_IN_TRANSFORMERS}
        others = {"initializer_range", "model_type", "torch_dtype", "use_cache"}
        for name in self.keys() - self.read - of_transformers - others:
            off = self.get(name) in (None, False, "", [], {})
            if not off and not name.startswith("_") and not re.fullmatch(self.without_effect, name):
                raise ValueError(
                    f"{name} in config.json, {self[name]!r}, is no field that the format {self.target_format} is known to "
                    "have, and may change what the model computes"
                )


def alibi_schedule(heads: int) -> str | list[float]:
    """The `decay_schedule`: γ = exp(-slope), with slopes of two interleaved schedules where heads are no power of two."""
    if heads & (heads - 1) == 0:
        return "alibi"
    power = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (head + 1) / power) for head in range(power)]
    slopes += [2 ** (-4 * (2 * head + 1) / power) for head in range(heads - power)]
    return [math.exp(-slope) for slope in slopes]


def fields_of_hypenet(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of RetNetConfig of a HypeNet.

    Raises:
        ValueError: for an option that changes what the model computes and has no counterpart here.
    """
    config = ForeignConfig(content, "hypenet", WITHOUT_EFFECT_IN_HYPENET)
    config.require_one_value(**FIXED_IN_HYPENET)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    own_heads = config.get("lightning_nh") or heads
    groups = config.get("lightning_nkv") or config["num_key_value_heads"]
    own_size = config.get("lightning_head_dim") or size
    kinds = []
    for mixer in config.get("mixer_types") or ["attn"] * config["num_hidden_layers"]:
        if mixer not in (*LINEAR, "attn"):
            raise ValueError(f"mixer_types must be of lightning-attn and attn, got {mixer!r}")
        kinds.append("linear_attention" if mixer in LINEAR else "full_attention")
    turns = config.get("lightning_use_rope", True), config.get("attn_use_rope", True)
    scale = {"1/sqrt(d)": None, "1/d": 1 / own_size}.get(config.get("lightning_scale", "1/sqrt(d)"), 1.0)
    fields = dict(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=own_heads,
        num_key_value_heads=groups,
        key_expansion=own_heads * own_size / hidden,
        value_expansion=own_heads * own_size / hidden,
        layer_types=kinds,
        attention_num_heads=None if heads == own_heads else heads,
        attention_num_key_value_heads=None if config["num_key_value_heads"] == groups else config["num_key_value_heads"],
        attention_head_dim=None if size == own_size else size,
        attention_gate_act="sigmoid" if config.get("attn_use_output_gate") else None,
        attention_log_base=log_base(config.get("attn_logits_scaling")),
        decay_schedule=alibi_schedule(own_heads),
        use_rotary=any(turns),
        rotary_layers=None if all(turns) or not any(turns) else "linear_attention" if turns[0] else "softmax_attention",
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta(config)},
        use_qk_norm=True,
        query_scale=scale,
        head_norm_groups=1,
        output_gate_act="sigmoid",
        hidden_act=config.get("hidden_act", "silu"),
        intermediate_size=config["intermediate_size"],
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        initialization="normal",
        initializer_range=config.get("initializer_range", 0.02),
        max_position_embeddings=config.get("max_position_embeddings"),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        **{name: config.get(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    )
    config.require_all_read()
    return fields


def rope_theta(config: dict[str, Any]) -> float:
    """The base of the rotation, which newer files keep among `rope_parameters`."""
    return (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta", 10000.0)


def log_base(scaling: str | float | None) -> float | None:
    """The number a of "hype a".

    Raises:
        ValueError: for a scaling by another rule.
    """
    if scaling is None or scaling == 1:
        return None
    found = re.fullmatch(r"hype(?: (\d+(?:\.\d*)?))?", str(scaling))
    if found is None:
        raise ValueError(f'attn_logits_scaling must be None or "hype a" with a number a, got {scaling!r}')
    return float(found[1] or LOG_BASE)


def depth_factors(layers: int) -> list[float]:
    """Factors on ALiBi's slopes, which the last layer almost loses."""
    return [1 - layer / max(layers - 1, 1) + 1e-5 for layer in range(layers)]


def fields_of_transnormer(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of RetNetConfig of a TransNormerLLM.

    Raises:
        ValueError: for an option that changes what the model computes and has no counterpart here.
    """
    config = ForeignConfig(content, "transnormer", "add_bos_token")
    config.require_one_value(bias=False, norm_type="simplermsnorm")
    activation = config.get("linear_act_fun", "silu")
    if activation not in ACTIVATIONS:
        raise ValueError(f"linear_act_fun must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    hidden, heads, layers = config["decoder_embed_dim"], config["decoder_attention_heads"], config["decoder_layers"]
    inner, width = config["hidden_dim"], config.get("glu_dim", -1)
    turned = config.get("linear_use_lrpe_list") or []
    fields = dict(
        vocab_size=config["vocab_size"],
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        key_expansion=inner / hidden,
        value_expansion=inner / hidden,
        decay_schedule=alibi_schedule(heads),
        layer_decay_factors=depth_factors(layers),
        use_rotary=False,
        learned_rotary_layers=[layer for layer, turns in enumerate(turned) if turns] or None,
        feature_map=ACTIVATIONS[activation],
        query_scale=1.0,
        head_norm_groups=1,
        head_norm_affine=False,
        norm_affine=False,
        output_gate_act="linear",
        hidden_act="linear",
        intermediate_size=hidden if width == -1 else width,
        embedding_multiplier=1.0 if config.get("no_scale_embedding") else hidden**0.5,
        rms_norm_eps=EPSILON,
        initialization="normal",
        initializer_range=config.get("init_std", 0.02),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        **{name: config.get(name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    )
    config.require_all_read()
    return fields


READERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "hypenet": fields_of_hypenet,
    "transnormer": fields_of_transnormer,
}
CONVERTED = ("minimax", "minimax_text_01", "minimax_m1", "bailing_moe_linear", "bailing_moe_linear_v2")


def family_of(content: dict[str, Any]) -> str | None:
    """The family that a config.json is of, a key of `READERS`, or None.

    Raises:
        ValueError: for a family that has to be converted.
    """
    model_type = content.get("model_type")
    if model_type in CONVERTED:
        raise ValueError(
            f"model_type must be one that is read as it is, got {model_type!r}, of which `retnet-hf convert` makes a folder."
        )
    if "linear_use_lrpe_list" in content:  # published files name no model_type
        return "transnormer"
    return model_type if model_type in READERS else None


def fields_of(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of RetNetConfig that a config.json states, whichever family it is of.

    Raises:
        ValueError: for an option that changes what the model computes and has no counterpart here, or a family that has to
            be converted.
    """
    family = family_of(content)
    if family is None:
        return content
    kept = ("torch_dtype", "dtype", "quantization_config", "num_labels", "attn_implementation", "_commit_hash")
    others = {name: content[name] for name in kept if content.get(name) is not None}
    return {"model_type": "retnet"} | READERS[family](content) | others
