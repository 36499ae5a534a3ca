# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Configuration of a hybrid: a RetNet with other token mixers, norms, rotations or feed-forward networks in some layers."""

from typing import Any

from huggingface_hub.dataclasses import strict

from ..hub.foreign import conversion
from ..retnet.configuration_retnet import OF_HYBRIDS, RetNetConfig


ROTARY_LAYERS = ("linear_attention", "softmax_attention")
OF_ATTENTION = (  # options that latent attention does not have
    *("attention_num_heads", "attention_num_key_value_heads", "attention_head_dim", "attention_gate_act"),
    *("attention_qkv_bias", "attention_use_qk_norm", "attention_log_base"),
)
KINDS = ("linear_attention", "full_attention", "sliding_attention")
ROTATES_SOFTMAX = ("attention_rope_theta", "kv_lora_rank")  # fields of softmax layers that rotate
SOFTMAX_EVERY = 8  # layers from one layer of softmax attention to the next, in presets for training from scratch


def fields_of(content: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a config.json of any supported family, under the names used here.

    `slope_offset` is taken from `options`, the keyword arguments of `from_pretrained`. Raises ValueError for an option that
    changes what the model computes and has no counterpart here.
    """
    if "slope_offset" in options:
        content = content | {"slope_offset": options.pop("slope_offset")}
    is_ours = content.get("model_type") in (RetNetConfig.model_type, RetNetHybridConfig.model_type)
    foreign = not is_ours or content.get("attn") or "slope_offset" in content  # attn: softmax layers of a hybrid of fla
    families = conversion("families") if foreign else None
    return content if families is None else families.fields_of(content)


@strict
class RetNetHybridConfig(RetNetConfig):
    r"""Configuration of a RetNet with layers of softmax attention, experts, and the options of other families of models.

    Published `config.json` files of HypeNet, TransNormerLLM, MiniMax, Ring and Ling are read unchanged. For Ring and Ling,
    whose files contain no decays, `from_pretrained(folder, slope_offset=…)` of configurations and models chooses between two
    formulas, -1 or 0: ALiBi's slopes of layer l of L times 1 - (l + slope_offset) / (L - 1).

    Args:
        layer_types (`list[str]`, *optional*): token mixer of each layer, by the names of transformers: "linear_attention" is
            retention (all layers, if absent), "full_attention" is softmax attention, "sliding_attention" is softmax
            attention over the last `sliding_window` tokens. Softmax attention has no decays and no norm of its output.
        attention_num_heads, attention_num_key_value_heads, attention_head_dim (`int`, *optional*): heads of softmax layers,
            and the size of their queries, keys and values; the same as in retention if absent.
        attention_gate_act (`str`, *optional*): activation of a gate on the output of softmax layers; no gate if absent.
        kv_lora_rank (`int`, *optional*): if given, layers of "full_attention" have multi-head latent attention (arXiv
            2405.04434), and this is the size of the latent vector of a token. Those layers have no gate, no biases and none
            of the other options of softmax attention. q_lora_rank (`int`, *optional*): size of the vector from which queries
            are computed; the hidden states if absent.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim (`int`, *optional*): sizes of a head in latent attention: the parts of
            its query and key without and with rotation, and its values.
        attention_qkv_bias, attention_use_qk_norm (`bool`, *optional*), attention_rope_theta (`float`, *optional*):
            `qkv_bias`, `use_qk_norm` and the `rope_theta` of softmax layers; the same as in retention if absent.
        attention_max_length (`int`, *optional*): the most tokens of a row, with padding, that "full_attention" accepts; any
            number if absent. For models that attend to blocks of longer texts, which is not supported.
        attention_log_base (`float`, *optional*): a in ln(t + a) / ln a, a factor on softmax queries at position t, if given.
        sliding_window (`int`, *optional*): tokens that a token of "sliding_attention" sees, itself included.
        attention_sinks (`int`): first tokens of a document that stay visible beside the window (arXiv 2309.17453).
        attention_sink_distance (`int`, *optional*): the largest distance, in positions, at which a token sees the first
            token, so that windows work in texts longer than the training texts: at least the window plus
            attention_sinks, minus 1. None for the real distance.
        rotary_layers (`str`, *optional*): limits use_rotary to layers of "linear_attention" or of "softmax_attention".
        learned_rotary_layers (`list[int]`, *optional*): layers of retention in which queries and keys become
            (x cos θt, x sin θt), twice as long, with a learned angle θ for each element of each head.
        head_norm_groups (`int`, *optional*): number of groups of consecutive heads, each normalised as one vector, with a
            weight per element; by head if absent. head_norm_eps (`float`, *optional*): epsilon; `rms_norm_eps` if absent.
        num_experts (`int`, *optional*), num_experts_per_tok (`int`), moe_intermediate_size (`int`, *optional*): number of
            experts in a feed-forward network, how many of them compute each token, and their inner size
            (`intermediate_size` if absent). Without num_experts, the feed-forward is one network.
        first_k_dense_replace (`int`): how many of the first layers have no experts.
        n_shared_experts (`int`): number of additional experts that compute every token, as one network.
        router_act (`str`): "softmax" or "sigmoid", for the scores. use_router_bias (`bool`): adds a bias to choose experts.
        n_group, topk_group (`int`, *optional*): number of groups of experts, and in how many of them experts are chosen.
        norm_topk_prob (`bool`), routed_scaling_factor (`float`): whether the scores of a token's experts are divided by
            their sum, and a factor on them.
        output_router_logits (`bool`), router_aux_loss_coef (`float`, *optional*): whether the loss of unbalanced routing is
            added, and its weight; 0.001 if absent.
        value_act (`str`, *optional*): activation of the values of retention, a name of ACT2FN.
        attention_residual_multiplier, mlp_residual_multiplier (`float`, *optional*): factor on the residual stream where
            softmax attention, or the feed-forward network, joins it; `residual_multiplier` if absent.
        norm_affine (`bool`): whether the norms of the residual stream have weights. qk_norm_eps (`float`, *optional*):
            epsilon of the norms of queries and keys; `rms_norm_eps` if absent. logits_scaling (`float`, *optional*):
            divisor of the logits of a language model.

    The other arguments are those of `RetNetConfig`. In presets for training from scratch, the last layer and every eighth
    layer before it are softmax attention without rotation, unless `layer_types` is given.

    Example:

    ```python
    >>> from retnet_hf import RetNetHybridConfig, RetNetHybridForCausalLM

    >>> model = RetNetHybridForCausalLM(RetNetHybridConfig.from_preset("tiny", vocab_size=1000))
    ```
    """

    model_type = "retnet_hybrid"
    is_hybrid = True

    layer_types: list[str] | None = None
    sliding_window: int | None = None
    attention_sinks: int = 0
    attention_sink_distance: int | None = None
    attention_num_heads: int | None = None
    attention_num_key_value_heads: int | None = None
    attention_head_dim: int | None = None
    attention_gate_act: str | None = None
    attention_qkv_bias: bool | None = None
    attention_use_qk_norm: bool | None = None
    attention_rope_theta: float | int | None = None
    attention_log_base: float | int | None = None
    attention_max_length: int | None = None
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    rotary_layers: str | None = None
    learned_rotary_layers: list[int] | None = None
    head_norm_groups: int | None = None
    head_norm_eps: float | None = None
    value_act: str | None = None
    norm_affine: bool = True
    qk_norm_eps: float | None = None
    logits_scaling: float | int | None = None
    attention_residual_multiplier: float | int | None = None
    mlp_residual_multiplier: float | int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    first_k_dense_replace: int = 0
    n_shared_experts: int = 0
    router_act: str = "softmax"
    use_router_bias: bool = False
    n_group: int | None = None
    topk_group: int | None = None
    norm_topk_prob: bool = True
    routed_scaling_factor: float | int = 1.0
    output_router_logits: bool = False
    router_aux_loss_coef: float | int | None = None

    @classmethod
    def _learns_best_by_layer(cls, layers: int, overrides: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields as `RetNetConfig` does, the types of the layers, and which of them rotate."""
        fields = super()._learns_best_by_layer(layers, overrides)
        if "layer_types" in overrides or overrides.get("bidirectional"):
            return fields
        # Softmax layers do not rotate, so they learn the order of the tokens from retention in the first layer.
        softmax = range(layers - 1, 0, -SOFTMAX_EVERY)
        fields["layer_types"] = [KINDS[layer in softmax] for layer in range(layers)]
        if overrides.get("use_rotary", True) and overrides.keys().isdisjoint(ROTATES_SOFTMAX):
            fields["rotary_layers"] = KINDS[0]
        return fields

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        content, kwargs = super().get_config_dict(*args, **kwargs)
        return fields_of(content, kwargs), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "RetNetHybridConfig":
        return super().from_dict(fields_of(config_dict, kwargs), **kwargs)

    def _read(self, kwargs: dict[str, Any]) -> None:
        super()._read(kwargs)
        self.layer_types = (self.layer_types or [KINDS[0]] * self.num_hidden_layers)[: self.num_hidden_layers]
        if self.moe_intermediate_size is None and self.num_experts is not None:
            self.moe_intermediate_size = self.intermediate_size
        if self.router_aux_loss_coef is None:  # TRL assumes that a model with this weight has experts
            self.router_aux_loss_coef = 0.0 if self.num_experts is None else 0.001

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets a field. `layer_types` is cut with `num_hidden_layers`, and restored when the number of layers is."""
        super().__setattr__(name, value)
        if name == "layer_types":
            vars(self)["_all_layer_types"] = value
        elif name == "num_hidden_layers" and vars(self).get("_all_layer_types"):
            vars(self)["layer_types"] = self._all_layer_types[:value]

    def to_dict(self) -> dict[str, Any]:
        content = super().to_dict()
        content.pop("_all_layer_types", None)
        if "sliding_attention" not in self.layer_types:  # all layers with a window may have been cut
            content |= {"attention_sinks": 0, "attention_sink_distance": None}
        learned = [layer for layer in self.learned_rotary_layers or () if layer < self.num_hidden_layers]
        return content | {"learned_rotary_layers": learned or None}

    def arrange(self, order: list[int]) -> None:
        """Changes the configuration as `RetNetConfig` does. Raises ValueError if a dense layer would follow experts."""
        kinds, learned = [self._all_layer_types[layer] for layer in order], self.learned_rotary_layers or ()
        dense = [not self.has_experts(layer) for layer in order]
        if self.num_experts is not None and dense != sorted(dense, reverse=True):
            raise ValueError(f"layers without experts must come first (first_k_dense_replace), got the layers {order}.")
        self.first_k_dense_replace = sum(dense) if self.num_experts is not None else self.first_k_dense_replace
        self.learned_rotary_layers = [place for place, layer in enumerate(order) if layer in learned] or None
        if "sliding_attention" not in kinds:
            self.attention_sinks, self.attention_sink_distance = 0, None
        super().arrange(order)
        self.layer_types = kinds

    def has_experts(self, layer: int) -> bool:
        """Returns whether the feed-forward network of a layer consists of experts."""
        return self.num_experts is not None and layer >= self.first_k_dense_replace

    def mixer_sizes(self, layer: int) -> tuple[int, int, int, int]:
        """Returns the sizes as `RetNetConfig` does, also for layers of softmax attention."""
        own, size = super().mixer_sizes(layer), self.attention_head_dim
        if self.layer_types[layer] == "linear_attention":
            return own
        if self.kv_lora_rank is not None:  # one vector per token serves all heads, and holds the values
            return own[0], 1, self.kv_lora_rank + self.qk_rope_head_dim, 0
        given = self.attention_num_heads, self.attention_num_key_value_heads, size, size
        return tuple(default if number is None else number for number, default in zip(given, own))

    def mixer_options(self, layer: int) -> tuple[bool, float | None]:
        """Returns the options as `RetNetConfig` does, also for layers of softmax attention."""
        bias, normalised = self.qkv_bias, self.use_qk_norm
        if self.layer_types[layer] != "linear_attention":
            bias = bias if self.attention_qkv_bias is None else self.attention_qkv_bias
            normalised = normalised if self.attention_use_qk_norm is None else self.attention_use_qk_norm
        return bias, (self.qk_norm_eps or self.rms_norm_eps) if normalised else None

    def state_shape(self, layer: int) -> tuple[int, int, int]:
        """Returns the shape as `RetNetConfig` does. Keys are twice as long in layers with learned rotation."""
        heads, key_size, value_size = super().state_shape(layer)
        return heads, key_size * (2 if layer in (self.learned_rotary_layers or ()) else 1), value_size

    @property
    def cache_size_per_token(self) -> int:
        """Returns how many elements each token adds to the cache in softmax layers; in sliding ones, up to the window."""
        layers = (layer for layer, kind in enumerate(self.layer_types) if kind != "linear_attention")
        return sum(groups * (key + value) for _, groups, key, value in map(self.mixer_sizes, layers))

    def _tensor_parallel_plan(self) -> dict[str, str]:
        plan = super()._tensor_parallel_plan()
        if self.learned_rotary_layers:
            plan["layers.*.retention.learned_rotation"] = "replicated_with_grad_allreduce"
        if self.has_softmax_attention and self.kv_lora_rank is None:  # latent attention is computed by every rank
            normed = self.use_qk_norm if self.attention_use_qk_norm is None else self.attention_use_qk_norm
            plan |= self._tensor_parallel_mixer("attention", self.attention_gate_act is not None, normed)
        if "linear_attention" not in self.layer_types:
            plan = {name: style for name, style in plan.items() if ".retention." not in name}
        if self.num_experts is not None:
            experts = {"experts.gate_up_proj": "packed_colwise", "experts.down_proj": "rowwise", "experts": "moe_tp_experts"}
            shared = {"shared.gate_proj": "colwise", "shared.up_proj": "colwise", "shared.down_proj": "rowwise"}
            plan |= {f"layers.*.mlp.{name}": style for name, style in (shared | experts).items()}
        return plan

    def validate_hybrid(self) -> None:
        """Checks the fields of a hybrid, as part of `@strict` validation."""
        layers, heads = self.num_hidden_layers, self.num_attention_heads
        valid = len(self.layer_types) == layers and all(kind in KINDS for kind in self.layer_types)
        allowed = f"a list of num_hidden_layers ({layers}) names, each one of {', '.join(KINDS)}"
        self._require(valid, "layer_types", allowed)
        valid = not (self.bidirectional and self.has_softmax_attention)
        self._require(valid, "layer_types", "all linear_attention in an encoder")

        # windows and sinks
        slides, window, sinks = "sliding_attention" in self._all_layer_types, self.sliding_window, self.attention_sinks
        valid = window > 0 if slides and window is not None else not slides
        self._require(valid, "sliding_window", "a positive number of tokens, since layer_types has sliding_attention")
        allowed = "0, or a positive number of tokens if layer_types has sliding_attention"
        self._require(sinks == 0 or (sinks > 0 and slides), "attention_sinks", allowed)
        distance, least = self.attention_sink_distance, (window or 0) + sinks - 1
        self._require(distance is None or sinks > 0, "attention_sink_distance", "None if attention_sinks is 0")
        allowed = f"{least} (sliding_window + attention_sinks - 1) or more, or None"
        self._require(distance is None or distance >= least, "attention_sink_distance", allowed)

        # latent attention
        sizes = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        self._check("a positive integer or None", "kv_lora_rank", "q_lora_rank", *sizes)
        if self.kv_lora_rank is None:
            self._check("None without kv_lora_rank", "q_lora_rank", *sizes, allows=lambda value: value is None)
        else:
            self._check("a number if kv_lora_rank is given", *sizes, allows=lambda value: value is not None)
            self._require(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", "even")
            allowed = "without sliding_attention if kv_lora_rank is given"
            self._require("sliding_attention" not in self.layer_types, "layer_types", allowed)
            self._check("None if kv_lora_rank is given", *OF_ATTENTION, allows=lambda value: value is None)
            valid = rope_type == "default" or not self.use_rotary
            self._require(valid, "rope_parameters", "of rope_type default if kv_lora_rank is given")

        # heads
        self._check("a name of transformers.activations.ACT2FN", "value_act", "attention_gate_act")
        self._check("positive, or None", "head_norm_eps", "attention_residual_multiplier", "mlp_residual_multiplier")
        self._check("positive, or None", "qk_norm_eps", "logits_scaling")
        self._check("a positive integer or None", "attention_num_heads", "attention_num_key_value_heads")
        self._check("a positive integer or None", "attention_head_dim", "attention_max_length")
        self._require(self.logits_scaling is None or not self.bidirectional, "logits_scaling", "None in an encoder")
        groups = self.head_norm_groups
        valid = groups is None or (groups > 0 and heads % groups == 0 and self.use_head_norm)
        allowed = f"None, or a divisor of num_attention_heads ({heads}) with use_head_norm=True"
        self._require(valid, "head_norm_groups", allowed)
        valid = self.rotary_layers is None or (self.use_rotary and self.rotary_layers in ROTARY_LAYERS)
        self._require(valid, "rotary_layers", f"{' or '.join(ROTARY_LAYERS)} with use_rotary=True, or None")
        learned = self.learned_rotary_layers or []
        retains = [layer for layer, kind in enumerate(self._all_layer_types) if kind == "linear_attention"]
        valid = set(learned) <= set(retains) and (not learned or self.num_key_value_heads == heads)
        allowed = f"a subset of the layers of retention, {retains}, in a model with as many key/value heads as heads"
        self._require(valid, "learned_rotary_layers", allowed)
        of_softmax = self.attention_num_heads or heads
        of_keys = self.attention_num_key_value_heads or self.num_key_value_heads
        valid = not self.has_softmax_attention or of_softmax % of_keys == 0
        allowed = f"a divisor of the number of heads of softmax layers ({of_softmax})"
        self._require(valid, "attention_num_key_value_heads", allowed)
        size = self.attention_head_dim
        valid = size in (None, self.head_dim) or (rope_type == "default" and (size % 2 == 0 or not self.use_rotary))
        allowed = f"head_dim ({self.head_dim}), None or, if rope_type (here {rope_type}) is default, an even number"
        self._require(valid, "attention_head_dim", allowed)
        theta, rotates = self.attention_rope_theta, self.use_rotary and self.rotary_layers != "linear_attention"
        valid = theta is None or (theta >= 1 and rope_type == "default" and rotates)
        allowed = "a number of at least 1 if softmax layers rotate and rope_type is default, or None"
        self._require(valid, "attention_rope_theta", allowed)
        base = self.attention_log_base
        self._require(base is None or base > 1, "attention_log_base", "a number above 1, or None")

        # experts
        experts, groups, chosen = self.num_experts, self.n_group or 1, self.topk_group or 1
        self._check(("softmax", "sigmoid"), "router_act")
        self._check("a positive integer or None", "num_experts", "moe_intermediate_size")
        valid = experts is None or (self.use_gated_mlp and experts % groups == 0 and chosen <= groups)
        allowed = f"None, or a multiple of n_group ({groups}) with topk_group ({chosen}) <= n_group and use_gated_mlp=True"
        self._require(valid, "num_experts", allowed)
        valid = experts is None or 0 < self.num_experts_per_tok <= experts * chosen // groups
        of_groups = f"to the experts in topk_group ({chosen}) of {groups} groups"
        allowed = f"from 1 to num_experts ({experts}) or, with groups, {of_groups}"
        self._require(valid, "num_experts_per_tok", allowed)


OF_HYBRIDS |= {name: getattr(RetNetHybridConfig, name) for name in RetNetHybridConfig.__annotations__}
OF_HYBRIDS["router_aux_loss_coef"] = 0.0
