# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNet configuration: every option of the published models, their names for it, and named sizes."""

import math
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import CONFIG_MAPPING, GenerationConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from ..arguments.checks import READ_BY_TRANSFORMERS, WITHOUT_EFFECT_IN_TRANSFORMERS, ConfigMixin, scheduled_decays
from ..ops.choices import FORMS, KERNELS
from ..state.state_fingerprint import state_fingerprint


logger = logging.get_logger(__name__)

INITIALIZATIONS = ("xavier", "deepnet", "normal", "fan_in")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
OF_HYBRIDS: dict[str, Any] = {}  # fields of RetNetHybridConfig, which fills it, and their values in a model without them

# These keys choose kernels, are read only in training, or are never read by RetNet layers.
_WITHOUT_EFFECT_IN_FLA = frozenset((
    "attn_mode", "use_short_conv", "conv_size", "share_conv_kernel", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy",
    "fuse_linear_cross_entropy", "use_l2warp", "attnres_block_size",
))  # fmt: skip
_WITHOUT_EFFECT_IN_TORCHSCALE = frozenset((
    "checkpoint_activations", "chunkwise_recurrent", "ddp_rank", "drop_path_rate", "encoder_normalize_before",
    "forward_impl", "fsdp", "max_target_positions", "max_rel_pos", "moe_eval_capacity_token_fraction",
    "moe_expert_count", "moe_gating_use_fp32", "moe_normalize_gate_prob_before_dropping", "moe_second_expert_policy",
    "moe_top1_expert", "no_output_layer", "output_retentions", "rel_pos_buckets", "subln", "use_ffn_rms_norm",
    "use_xmoe", "xpos_scale_base", "z_loss_coeff",
))  # fmt: skip
# Keys that change what a model computes: the only value that RetNetConfig supports, and the reason.
_EXPRESSIBLE = {
    "moe_freq": (0, "RetNetConfig has no experts"),
    "multiway": (False, "RetNetConfig has one set of weights for all tokens"),
    "xpos_rel_pos": (False, "RetNetConfig rotates without the magnitudes of xPos"),
    "use_glu": (
        True,
        "without it, the feed-forward has biases and an inner LayerNorm (fc1.bias, fc2.bias, ffn_layernorm), which "
        "RetNetConfig does not support",
    ),
    "attn": (None, "it describes softmax layers. Load the folder with AutoConfig or RetNetHybridConfig"),
}

_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "value_expansion")
_SHAPES = {
    # sizes for training from scratch, with the proportions of the paper
    "tiny": (128, 4, 2, 384, 2.0),
    "mini": (256, 6, 4, 768, 2.0),
    "small": (512, 8, 8, 1408, 2.0),
    "base": (768, 12, 6, 2048, 2.0),
    "medium": (1024, 24, 8, 2816, 2.0),
    # arXiv 2307.08621, table 2, with a plain feed-forward and the decays of the paper's training runs
    "1.3B": (2048, 24, 8, 4096, 2.0),
    "2.7B": (2560, 32, 10, 5120, 2.0),
    "6.7B": (4096, 32, 16, 8192, 2.0),
    # microsoft/torchscale's recipes: values and feed-forward are about 5/3 of the hidden size
    "torchscale-base": (512, 6, 2, 864, 864 / 512),
    "torchscale-medium": (1024, 16, 4, 1728, 1728 / 1024),
    "torchscale-xl": (2048, 24, 8, 3456, 3456 / 2048),
    "torchscale-3b": (2560, 32, 10, 4280, 4280 / 2560),
    "torchscale-7b": (4096, 32, 16, 6912, 6912 / 4096),
    "torchscale-13b": (5120, 40, 20, 8560, 8560 / 5120),
    "torchscale-65b": (8192, 64, 32, 13824, 13824 / 8192),
}
# Small models learn best with these fields (docs/results.md). The sizes for training from scratch have them.
_FROM_SCRATCH = ("tiny", "mini", "small", "base", "medium")
_LEARNS_BEST = {
    "initialization": "fan_in",
    "use_embedding_norm": True,
    "use_head_norm": False,
    "use_qk_norm": True,
    "decay_schedule": "geometric",
}


@strict
class RetNetConfig(ConfigMixin, PreTrainedConfig):
    r"""Configuration of a RetNet (arXiv 2307.08621). The defaults describe the 1.3B checkpoint of fla-hub.

    A `config.json` of flash-linear-attention, torchscale or syncdoth can be read without changes: its keys are translated.
    It is saved with the field names below.

    Args:
        vocab_size (`int`): number of tokens. hidden_size (`int`): width of the residual stream.
        num_hidden_layers (`int`): number of blocks. num_attention_heads (`int`, alias `num_heads`): query heads, each with
            its own decay.
        num_key_value_heads (`int`, *optional*, alias `num_kv_heads`): key and value heads, a divisor of
            `num_attention_heads`, which is the default. Where the query heads of each key/value head have equal decays, they
            share one matrix of the state.
        intermediate_size (`int`, *optional*): width of the feed-forward; by default two thirds of `hidden_ratio` (2) times
            the hidden size, rounded up to a multiple of 256.
        hidden_act (`str`): activation of the feed-forward, a name of `transformers.activations.ACT2FN`.
        key_expansion, value_expansion (`float`, aliases `expand_k`, `expand_v`): total size of all query heads, and of the
            values of all query heads, divided by `hidden_size`.
        decay_schedule (`str`, `list[float]` or `list[list[float]]`): γ of each head: "power_of_two", 1 - 2^(-5-i) (equation
            8 of the paper); "log_linear", 1 - exp(linspace(ln 1/32, ln 1/512)) (the paper's training runs); "geometric",
            exp(-1/τ), where τ grows by a constant factor from head to head (the named sizes for training from scratch;
            docs/results.md says why); "alibi", exp(-2^(-8(i+1)/H)), the slopes of ALiBi (arXiv 2108.12409); "none", 1 (a
            Linear Transformer); a list with one number in (0, 1] per head; or one list per layer.
        decay_range (pair of `float`): τ of the first and of the last head of "geometric", in tokens; or one pair per layer.
            A single head has the geometric mean of both.
        use_rotary (`bool`): whether queries and keys are rotated by position (RoPE, or xPos without magnitudes).
        rotary_endpoint (`bool`): whether frequencies are theta^(-linspace(0, 1, K/2)), as in torchscale, not theta^(-2i/K).
        rope_parameters (`dict`, *optional*): `rope_theta` (10000); `rope_type`, "default", "linear", "llama3" or "yarn",
            with its parameters in transformers; and `partial_rotary_factor` (1), the share of a head's pairs that is
            rotated, from the first on.
        qkv_bias (`bool`): whether the projections to queries, keys and values have biases, as in Qwen2.
        use_qk_norm (`bool`): whether queries and keys pass an RMS norm by head before rotation, with shared weights (Qwen3).
        use_output_gate (`bool`), output_gate_act (`str`): whether retention has an output gate, and its activation.
        use_head_norm (`bool`), head_norm_affine (`bool`, alias `elementwise_affine`): whether each head's output passes an
            RMS norm, and whether that norm has a weight, shared by all heads.
        use_gated_mlp (`bool`): whether the feed-forward is down(act(gate x) * up x) instead of down(act(up x)).
        feature_map (`str` or `list[str]`, *optional*): activation applied to queries and keys, a name of ACT2FN; or a list
            with a name or None for each layer.
        embedding_multiplier (`float`): factor on the embeddings. use_embedding_norm (`bool`): whether an RMS norm follows.
        norm_position (`str`): "pre", branches read norm(x); "post", the sum of stream and branch is normalised, and no final
            norm follows.
        residual_multiplier (`float`): factor on the residual stream when a branch is added to it (DeepNet's alpha).
        bidirectional (`bool`): whether tokens also see later tokens, with decay γ^|n-m|, in an encoder without a state.
        rms_norm_eps (`float`, alias `norm_eps`): epsilon of every norm.
        hidden_dropout (`float`), activation_dropout (`float`): dropout on embeddings and branches, and in the feed-forward.
        initialization (`str`): "xavier", the paper's (gain 2^-2.5 for q, k, v and gate, 2^-1 for the output projection);
            "deepnet", the same divided by (8 L)^(1/4) for values, output projection and feed-forward; "normal",
            N(0, initializer_range) everywhere; "fan_in", U(-1/√n, 1/√n) for matrices with n columns, and 1/√3 for norms of
            queries and keys of retention: with `use_embedding_norm`, small models learn fastest.
        initializer_range (`float`): standard deviation of embeddings, of heads unless "fan_in", of all matrices if "normal".
        retention_form (`str`): "auto", "parallel", "recurrent" or "chunkwise"; also an argument of `forward`.
        chunk_size (`int`, *optional*): tokens in a chunk of the chunkwise form; by default chosen from the head sizes.
        kernels (`str`): retention on a GPU, read when a model is created: "auto", kernels of this package if they support
            the device; "triton", the same kernels; or "torch", PyTorch, which also computes calls that the kernels do not
            cover, fail on or compute wrongly. The variable RETNET_HF_KERNELS overrides it.
        max_position_embeddings (`int`, *optional*): sequence length of training, for tools that read it. It limits nothing.
            The attribute exists only if it is passed.
        tie_word_embeddings (`bool`), use_cache (`bool`), pad_token_id, bos_token_id, eos_token_id: as in transformers.

    Raises:
        huggingface_hub.errors.StrictDataclassError: names a field of the wrong type or value, the value and what is allowed.
        ValueError: for an unknown name, and for an option of another library's config.json without a counterpart here.

    Example:

    ```python
    >>> from retnet_hf import RetNetConfig, RetNetForCausalLM

    >>> model = RetNetForCausalLM(RetNetConfig.from_preset("tiny", vocab_size=1000))
    ```
    """

    model_type = "retnet"
    is_hybrid = False
    _presets = {name: dict(zip(_SIZES, shape)) for name, shape in _SHAPES.items()}
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "expand_k": "key_expansion",
        "expand_v": "value_expansion",
        "norm_eps": "rms_norm_eps",
        "elementwise_affine": "head_norm_affine",
    }
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 2048
    num_hidden_layers: int = 24
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "silu"
    key_expansion: float | int = 1.0
    value_expansion: float | int = 2.0
    decay_schedule: str | list[float] | list[int | float] | list[list[int | float]] = "power_of_two"
    decay_range: list[float | int] | tuple[float | int, ...] | list[list[float | int]] = (2, 512)
    use_rotary: bool = True
    rotary_endpoint: bool = False
    rope_parameters: dict | None = None
    qkv_bias: bool = False
    use_qk_norm: bool = False
    use_output_gate: bool = True
    output_gate_act: str = "silu"
    use_head_norm: bool = True
    head_norm_affine: bool = True
    use_gated_mlp: bool = True
    feature_map: str | list[str | None] | None = None
    embedding_multiplier: float | int = 1.0
    use_embedding_norm: bool = False
    norm_position: str = "pre"
    residual_multiplier: float | int = 1.0
    bidirectional: bool = False
    rms_norm_eps: float = 1e-6
    hidden_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    initialization: str = "xavier"
    initializer_range: float = 0.02
    retention_form: str = "auto"
    chunk_size: int | None = None
    kernels: str = "auto"
    use_cache: bool = True
    tie_word_embeddings: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "RetNetConfig":
        """Returns the configuration of a named size. Any field may be overridden.

        Raises:
            ValueError: for an unknown name.
        """
        sizes, fields = cls._presets.get(name, {}) | overrides, {}
        if name in _FROM_SCRATCH:
            fields = _LEARNS_BEST | cls._learns_best_by_layer(sizes["num_hidden_layers"], overrides)
        elif name in ("1.3B", "2.7B", "6.7B"):
            fields = {"use_gated_mlp": False, "hidden_act": "gelu", "decay_schedule": "log_linear"}
        elif name in cls._presets:
            fields = {"rotary_endpoint": True, "head_norm_affine": False}
            fields["embedding_multiplier"] = math.sqrt(sizes["hidden_size"])
        return super().from_preset(name, **(fields | overrides))

    @classmethod
    def _learns_best_by_layer(cls, layers: int, overrides: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of presets for training from scratch that differ from layer to layer, unless in `overrides`."""
        # Ranges grow by constant factors, from (1, 32) tokens in the first layer to (2, 512) in the last.
        shares = (layer / max(layers - 1, 1) for layer in range(layers))
        ranges = [[round(2**share, 3), round(32 * 16**share, 3)] for share in shares]
        return {"decay_range": ranges, "feature_map": ["relu"] * (layers - 1) + [None]}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "RetNetConfig":
        """Returns the configuration of a dictionary, as in transformers.

        Raises:
            ValueError: if the dictionary describes a model of another family.
        """
        family = "transnormer" if "linear_use_lrpe_list" in config_dict else config_dict.get("model_type", cls.model_type)
        if family not in (cls.model_type, RetNetConfig.model_type):
            advice = "Load the model with AutoModelForCausalLM or RetNetHybridForCausalLM."
            found = f"a model of type {family}, which {cls.__name__} cannot read"
            raise ValueError(f"config.json describes {found}. {advice}")
        if config_dict.get("attn") and not cls.is_hybrid:  # the softmax layers of a hybrid of fla
            return CONFIG_MAPPING["retnet_hybrid"].from_dict(config_dict, **kwargs)
        positions = {name: kwargs.pop(name) for name in ("max_position_embeddings",) if name in kwargs}
        return super().from_dict(config_dict | positions, **kwargs)  # transformers sets only attributes that exist

    def __post_init__(self, **kwargs: Any) -> None:
        self._read(kwargs)
        positions = kwargs.pop("max_position_embeddings", None)
        if positions is not None:  # tools expect a number if the attribute exists
            self.max_position_embeddings = positions
        rope_type = (self.rope_parameters or kwargs.get("rope_scaling") or {}).get("rope_type")
        if positions is None and rope_type in ("llama3", "yarn"):
            needed = f"the sequence length of training if rope_type is {rope_type}"
            raise ValueError(f"max_position_embeddings must be {needed}, got None.")
        self.base_model_tp_plan = self._tensor_parallel_plan()
        super().__post_init__(**kwargs)

    def _read(self, kwargs: dict[str, Any]) -> None:
        """Moves aliases and keys of other libraries from `kwargs` to fields. Sets defaults that depend on other fields.

        The libraries are flash-linear-attention (fla), torchscale, and syncdoth, which uses torchscale's keys.
        """
        for key, (allowed, reason) in _EXPRESSIBLE.items():
            value = kwargs.pop(key, None)
            if value not in (allowed, None):
                stated = "absent or None" if allowed is None else allowed
                raise ValueError(f"{key} must be {stated}: {reason}. Got {value!r}.")
        for key in _WITHOUT_EFFECT_IN_FLA & kwargs.keys():
            del kwargs[key]
        fields, foreign = {}, not kwargs.keys().isdisjoint(("decoder_embed_dim", "expand_k"))
        if "decoder_embed_dim" in kwargs:
            hidden_size, layers = kwargs.pop("decoder_embed_dim"), kwargs.pop("decoder_layers")
            fields = {
                "hidden_size": hidden_size,
                "num_hidden_layers": layers,
                "num_attention_heads": kwargs.pop("decoder_retention_heads"),
                "intermediate_size": kwargs.pop("decoder_ffn_embed_dim"),
                "value_expansion": kwargs.pop("decoder_value_embed_dim") / hidden_size,
                "hidden_act": kwargs.pop("activation_fn", "gelu"),
                "rms_norm_eps": kwargs.pop("layernorm_eps", 1e-6),
                "decay_schedule": "log_linear" if kwargs.pop("use_lm_decay", False) else "power_of_two",
                "rotary_endpoint": True,
                "head_norm_affine": False,
                "embedding_multiplier": 1.0 if kwargs.pop("no_scale_embedding", True) else math.sqrt(hidden_size),
                "use_embedding_norm": kwargs.pop("layernorm_embedding", False),
                "norm_position": "pre" if kwargs.pop("decoder_normalize_before", True) else "post",
                "residual_multiplier": (2 * layers) ** 0.25 if kwargs.pop("deepnorm", False) else 1.0,
                "hidden_dropout": kwargs.pop("dropout", 0.0),
                "chunk_size": kwargs.pop("recurrent_chunk_size", None),
            }
            if "share_decoder_input_output_embed" in kwargs:
                fields["tie_word_embeddings"] = kwargs.pop("share_decoder_input_output_embed")
        if foreign:
            known = {*self.attribute_map, "hidden_ratio", *READ_BY_TRANSFORMERS}
            known |= {key for key in kwargs if key.startswith("_")}
            silent = _WITHOUT_EFFECT_IN_TORCHSCALE | WITHOUT_EFFECT_IN_TRANSFORMERS | GenerationConfig().to_dict().keys()
            if unknown := ", ".join(sorted(kwargs.keys() - known - silent)):
                logger.warning(f"RetNetConfig drops unknown keys of another library's config.json: {unknown}.")
            for key in [key for key, value in kwargs.items() if value is None or key not in known]:
                del kwargs[key]
        fields |= {name: kwargs.pop(alias) for alias, name in self.attribute_map.items() if alias in kwargs}
        for name, value in fields.items():
            setattr(self, name, value)
        for name in OF_HYBRIDS.keys() & kwargs.keys():
            if kwargs.pop(name) not in (OF_HYBRIDS[name], self.layer_types, None):
                reason = "RetNetConfig only has retention layers with dense feed-forwards."
                raise ValueError(f"{name} is a field of RetNetHybridConfig (model_type retnet_hybrid). {reason}")
        hidden_ratio = kwargs.pop("hidden_ratio", None) or 2
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 256 * math.ceil(int(self.hidden_size * hidden_ratio * 2 / 3) / 256)

    @property
    def layer_types(self) -> list[str]:
        """Returns the type of each layer, named as in transformers: "linear_attention" is retention."""
        return ["linear_attention"] * self.num_hidden_layers

    @property
    def has_softmax_attention(self) -> bool:
        """Returns whether some layers have softmax attention instead of retention."""
        return any(kind != "linear_attention" for kind in self.layer_types)

    def _tensor_parallel_plan(self) -> dict[str, str]:
        """Returns how tensor parallelism splits the weights of a model with this configuration."""
        plan = self._tensor_parallel_mixer("retention", self.use_output_gate, self.use_qk_norm)
        if self.use_head_norm and self.head_norm_affine:
            plan["layers.*.retention.head_norm"] = "replicated_with_grad_allreduce"
        plan |= {f"layers.*.mlp.{name}": "colwise" for name in (["gate_proj"] if self.use_gated_mlp else []) + ["up_proj"]}
        return plan | {"layers.*.mlp.down_proj": "rowwise"}

    def _tensor_parallel_mixer(self, mixer: str, gated: bool, normed: bool) -> dict[str, str]:
        """Returns the part of the plan for a token mixer."""
        styles = dict.fromkeys((f"{name}_proj" for name in ("qkvg" if gated else "qkv")), "colwise")
        styles |= dict.fromkeys(("q_norm", "k_norm") if normed else (), "replicated_with_grad_allreduce")
        return {f"layers.*.{mixer}.{name}": style for name, style in (styles | {"o_proj": "rowwise"}).items()}

    def validate_rope(self) -> None:
        """Checks what a state requires of `rope_parameters`, then runs the checks of transformers."""
        given = self.rope_parameters or {}
        rope_type, theta = given.get("rope_type", "default"), given.get("rope_theta", 10000.0)
        factor = given.get("partial_rotary_factor", 1.0)
        rotated = int(self.head_dim * factor) if isinstance(factor, (int, float)) and 0 < factor <= 1 else 0
        even = not self.use_rotary or self.head_dim % 2 == 1 or (rotated > 0 and rotated % 2 == 0)
        checks = {
            "a rope_theta of at least 1": isinstance(theta, (int, float)) and theta >= 1,
            f"a rope_type of {', '.join(ROPE_TYPES)} (positions are unlimited here, and frequencies that change with "
            "the text's length would not match the state)": rope_type in ROPE_TYPES,
            "the rope_type default, since rotary_endpoint is True": rope_type == "default" or not self.rotary_endpoint,
            "a partial_rotary_factor in (0, 1] such that an even number, 2 or more, of the elements in a query head "
            f"({self.head_dim}) are rotated": even,
        }
        for allowed, valid in checks.items():
            self._require(valid, "rope_parameters", f"a dict with {allowed}")
        super().validate_rope()

    @property
    def head_dim(self) -> int:
        """Returns K, the size of one query or key head."""
        return round(self.hidden_size * self.key_expansion) // self.num_attention_heads

    @property
    def value_head_dim(self) -> int:
        """Returns V, the size of one value head."""
        return round(self.hidden_size * self.value_expansion) // self.num_attention_heads

    def mixer_sizes(self, layer: int) -> tuple[int, int, int, int]:
        """Returns (H, G, K, V) of a layer's token mixer: heads, key/value heads, key size and value size."""
        return self.num_attention_heads, self.num_key_value_heads, self.head_dim, self.value_head_dim

    def mixer_options(self, layer: int) -> tuple[bool, float | None]:
        """Returns whether queries, keys and values have biases, and the epsilon of the norms of queries and keys or None."""
        return self.qkv_bias, self.rms_norm_eps if self.use_qk_norm else None

    @property
    def has_decays_per_layer(self) -> bool:
        """Returns whether each layer has its own decays."""
        stated = self.decay_range if self.decay_schedule == "geometric" else self.decay_schedule
        return isinstance(stated[0], list)

    def decays(self, layer: int = 0) -> list[float]:
        """Returns γ of each head of a layer, in double precision."""
        stated = (self.decay_schedule, self.decay_range)
        schedule, span = (each[layer] if isinstance(each[0], list) else each for each in stated)
        return scheduled_decays(schedule, self.num_attention_heads, span)

    def arrange(self, order: list[int]) -> None:
        """Changes this configuration to that of a model whose layers are the layers `order` of the model until now."""
        for name in ("decay_schedule", "decay_range", "feature_map"):
            stated = getattr(self, name)
            if isinstance(stated, list) and (name == "feature_map" or isinstance(stated[0], list)):
                setattr(self, name, [stated[layer] for layer in order])
        self.num_hidden_layers = len(order)

    def state_heads(self, layer: int) -> int:
        """Returns how many matrices (K, V) a retention layer's state has.

        There is one per key/value head if all query heads of each key/value head have equal decays, else one per query head.
        """
        served, decays = self.num_attention_heads // self.num_key_value_heads, self.decays(layer)
        shared = all(len(set(decays[head : head + served])) == 1 for head in range(0, len(decays), served))
        return self.num_key_value_heads if shared else self.num_attention_heads

    def state_shape(self, layer: int) -> tuple[int, int, int]:
        """Returns (M, K, V), the shape of one sequence's state in a retention layer."""
        return self.state_heads(layer), self.head_dim, self.value_head_dim

    def feature_map_of(self, layer: int) -> str | None:
        """Returns the name of a layer's feature map."""
        return self.feature_map[layer] if isinstance(self.feature_map, list) else self.feature_map

    @property
    def state_size(self) -> int:
        """Returns the number of elements that all retention layers keep of one sequence, whatever its length."""
        layers = [layer for layer, kind in enumerate(self.layer_types) if kind == "linear_attention"]
        return sum(math.prod(self.state_shape(layer)) for layer in layers)

    @property
    def state_fingerprint(self) -> str:
        """Returns a hash of every field that changes the meaning of a state. A model refuses a state with another hash."""
        return state_fingerprint(self)

    def validate_architecture(self) -> None:
        """Checks that each field has an allowed value and that the fields fit each other. Called by `@strict` validation."""
        heads, layers = self.num_attention_heads, self.num_hidden_layers
        self._check("a positive integer", "vocab_size", "hidden_size", "num_hidden_layers")
        self._check("a positive integer", "num_attention_heads", "intermediate_size")
        self._check("a positive integer or None", "chunk_size")
        divides = 0 < self.num_key_value_heads <= heads and heads % self.num_key_value_heads == 0
        self._require(divides, "num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
        for field, what in (("key_expansion", "queries"), ("value_expansion", "values")):
            size = self.hidden_size * getattr(self, field)
            self._require(
                size > 0 and abs(size - round(size)) < 1e-6 and round(size) % heads == 0,
                field,
                f"such that hidden_size ({self.hidden_size}) times it is a multiple of num_attention_heads ({heads}), "
                f"because all heads have {what} of one size",
            )
        allowed = f"such that the size of a query head ({self.head_dim}) is even, since use_rotary is True"
        self._require(not self.use_rotary or self.head_dim % 2 == 0, "key_expansion", allowed)
        positions = getattr(self, "max_position_embeddings", 1)
        valid = isinstance(positions, int) and positions > 0
        self._require(valid, "max_position_embeddings", "a positive integer, or absent")
        self._check(FORMS, "retention_form")
        self._check(KERNELS, "kernels")
        self._check(("pre", "post"), "norm_position")
        self._check(INITIALIZATIONS, "initialization")
        self._check("a name of transformers.activations.ACT2FN", "hidden_act", "output_gate_act", "feature_map")
        self._check("in [0, 1)", "hidden_dropout", "activation_dropout")
        self._check("positive", "rms_norm_eps", "initializer_range", "residual_multiplier", "embedding_multiplier")
        self._check_decay_schedule(layers)
        self._check_decay_range(layers)
        allowed = f"one name, or a list with one name for each layer (num_hidden_layers is {layers})"
        self._require(not isinstance(self.feature_map, list) or len(self.feature_map) >= layers, "feature_map", allowed)
