# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Configuration of MetaFormer: lists with a value per stage, a token mixer for each stage, and PoolFormer's named sizes."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from ..arguments.checks import DECAY_SCHEDULES, scheduled_decays
from ..ops.choices import FORMS
from .configuration_stages import StagedConfigMixin


TOKEN_MIXERS = ("pooling", "retention", "manhattan", "attention", "identity")
MIXERS_WITH_HEADS = ("retention", "manhattan", "attention")
MIXERS_WITH_DECAY = ("retention", "manhattan")

_SIZES = {
    name: {"hidden_sizes": sizes, "depths": depths, "layer_scale_init_value": layer_scale, "drop_path_rate": drop_path_rate}
    for name, sizes, depths, layer_scale, drop_path_rate in (
        # small sizes for experiments, in the proportions of S12
        ("tiny", [16, 32, 80, 128], [2, 2, 6, 2], 1e-5, 0.0),
        ("mini", [32, 64, 160, 256], [2, 2, 6, 2], 1e-5, 0.0),
        # PoolFormer, arXiv 2111.11418 table 1, with the stochastic depth of its training runs
        ("s12", [64, 128, 320, 512], [2, 2, 6, 2], 1e-5, 0.1),
        ("s24", [64, 128, 320, 512], [4, 4, 12, 4], 1e-5, 0.1),
        ("s36", [64, 128, 320, 512], [6, 6, 18, 6], 1e-6, 0.2),
        ("m36", [96, 192, 384, 768], [6, 6, 18, 6], 1e-6, 0.3),
        ("m48", [96, 192, 384, 768], [8, 8, 24, 8], 1e-6, 0.4),
    )
}


@strict
class MetaFormerConfig(StagedConfigMixin, PreTrainedConfig):
    r"""Configuration of a MetaFormer (arXiv 2111.11418). The defaults describe PoolFormer-S12.

    Every list has one value per stage. The presets use pooling in every stage.

    Args:
        num_channels (`int`): colour channels of the images.
        image_size (`int` or a pair): size of the training images, for tools that read it. The model accepts any size.
        token_mixers (`str` or `list[str]`): the token mixer of each stage, one name for all stages or a list:
            "pooling", the mean of a window minus the token itself (PoolFormer);
            "retention", over the tokens row by row, with decay γ^|n-m|;
            "manhattan", retention over the grid, with decay γ^(|Δx| + |Δy|);
            "attention", softmax attention; "identity", no mixing.
        depths (`list[int]`): number of blocks in each stage. hidden_sizes (`list[int]`): width of each stage.
        num_attention_heads (`list[int]`, *optional*): heads of the mixer in each stage; about 32 wide if absent.
        patch_sizes, strides, padding (`list[int]`): kernel size, stride and padding of the first convolution of each stage.
        pool_size (`int`): side of the window of "pooling", odd.
        mlp_ratio (`float`): inner width of the feed-forward network divided by the stage's width, rounded down.
        hidden_act (`str`): activation of the feed-forward, a name of `transformers.activations.ACT2FN`.
        key_expansion, value_expansion (`float`): total size of the queries, and of the values, divided by the stage's width.
        qkv_bias (`bool`): whether the projections to queries, keys, values and gate have biases.
        bidirectional (`bool`): whether tokens see later ones in "retention" and "attention". Must be True with "manhattan".
        decay_schedule (`str` or `list[list[float]]`): γ of head i of H heads in "retention" and "manhattan": "rmt",
            1 - 2^(-2 - 4 i / H), the decays of RMT's first stages; a name of `RetNetConfig`, "power_of_two", "log_linear",
            "geometric", "alibi" or "none"; or a list that has, for each stage, one number in (0, 1] per head.
        decay_range (pair of `float`): τ of the first and the last head of "geometric", in tokens or in steps on the grid.
        use_output_gate (`bool`), output_gate_act (`str`): gate on the output of "retention" and "manhattan"; its activation.
        use_head_norm (`bool`): RMS norm on the output of each head in "retention" and "manhattan".
        retention_form (`str`): "auto", "parallel", "recurrent" or "chunkwise".
        use_layer_scale (`bool`), layer_scale_init_value (`float`): learned factors on branches, and their first value.
        layer_norm_eps (`float`): epsilon of every norm.
        drop_path_rate (`float`): stochastic depth of the last block. The rate rises linearly from 0 in the first block.
        initializer_range (`float`): standard deviation of the weights.
        out_features, out_indices (lists, *optional*): maps of a backbone, from "stem", "stage1", …; if absent, the last.

    Raises:
        huggingface_hub.errors.StrictDataclassError: names a field of the wrong type or value, the value and what is allowed.
        ValueError: if out_features and out_indices do not fit the stages.

    Example:

    ```python
    >>> from retnet_hf import MetaFormerConfig, MetaFormerForImageClassification

    >>> config = MetaFormerConfig.from_preset("tiny", token_mixers=["pooling", "pooling", "manhattan", "attention"])
    >>> model = MetaFormerForImageClassification(config)
    ```
    """

    model_type = "metaformer"
    _presets = _SIZES
    _per_stage = ("token_mixers", "depths", "hidden_sizes", "num_attention_heads", "patch_sizes", "strides", "padding")

    num_channels: int = 3
    image_size: int | list[int] | tuple[int, int] = 224
    token_mixers: str | list[str] | tuple[str, ...] = "pooling"
    depths: list[int] | tuple[int, ...] = (2, 2, 6, 2)
    hidden_sizes: list[int] | tuple[int, ...] = (64, 128, 320, 512)
    num_attention_heads: list[int] | tuple[int, ...] | None = None
    patch_sizes: list[int] | tuple[int, ...] = (7, 3, 3, 3)
    strides: list[int] | tuple[int, ...] = (4, 2, 2, 2)
    padding: list[int] | tuple[int, ...] = (2, 1, 1, 1)
    pool_size: int = 3
    mlp_ratio: float | int = 4.0
    hidden_act: str = "gelu"
    key_expansion: float | int = 1.0
    value_expansion: float | int = 1.0
    qkv_bias: bool = False
    bidirectional: bool = True
    decay_schedule: str | list[list[float | int]] = "rmt"
    decay_range: list[float | int] | tuple[float | int, ...] = (1, 32)
    use_output_gate: bool = True
    output_gate_act: str = "silu"
    use_head_norm: bool = True
    retention_form: str = "auto"
    use_layer_scale: bool = True
    layer_scale_init_value: float | int = 1e-5
    layer_norm_eps: float = 1e-5
    drop_path_rate: float | int = 0.0
    initializer_range: float = 0.02
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.token_mixers, str):
            self.token_mixers = [self.token_mixers] * len(self.depths)
        if self.num_attention_heads is None:
            # the largest number of heads, each at least 32 wide, that divides a hidden size
            self.num_attention_heads = [
                next((heads for heads in range(size // 32, 1, -1) if size % heads == 0), 1) for size in self.hidden_sizes
            ]
        # Outputs are gathered, so heads need not divide among ranks.
        plan = {"mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
        if set(self.token_mixers) & set(MIXERS_WITH_HEADS):
            gates = self.use_output_gate and set(self.token_mixers) & set(MIXERS_WITH_DECAY)
            plan |= {f"mixer.{name}_proj": "colwise_gather_output" for name in ("qkvg" if gates else "qkv")}
            plan["mixer.o_proj"] = "rowwise_split_input"
        self.base_model_tp_plan = {f"stages.*.blocks.*.{name}": style for name, style in plan.items()}
        super().__post_init__(**kwargs)

    def decays(self, stage: int) -> list[float]:
        """Returns γ of each head of a stage, in double precision."""
        heads = self.num_attention_heads[stage]
        if self.decay_schedule == "rmt":
            return [1 - 2.0 ** (-2 - 4 * head / heads) for head in range(heads)]
        schedule = self.decay_schedule if isinstance(self.decay_schedule, str) else self.decay_schedule[stage]
        return scheduled_decays(schedule, heads, self.decay_range)

    def validate_architecture(self) -> None:
        """Checks the fields, each alone and together, as part of `@strict` validation."""
        self._check_stages()
        sizes = self.hidden_sizes
        stages = list(zip(self.token_mixers, sizes, self.num_attention_heads))
        self._require(set(self.token_mixers) <= set(TOKEN_MIXERS), "token_mixers", f"a list of {', '.join(TOKEN_MIXERS)}")
        both_ways = self.bidirectional or "manhattan" not in self.token_mixers
        self._require(both_ways, "bidirectional", "True if token_mixers contains manhattan, which is bidirectional")
        self._check("positive integers", "depths", "hidden_sizes", "num_attention_heads", "patch_sizes", "strides")
        self._require(all(number >= 0 for number in self.padding), "padding", "0 or positive")
        self._require(self.pool_size > 0 and self.pool_size % 2 == 1, "pool_size", "odd and positive")
        not_empty = all(int(self.mlp_ratio * size) > 0 for size in sizes)
        self._require(not_empty, "mlp_ratio", f"large enough that times each of hidden_sizes ({sizes}) it is at least 1")
        self._check("positive", "key_expansion", "value_expansion")
        for field, what in (("key_expansion", "queries"), ("value_expansion", "values")):
            expansion = getattr(self, field)
            expanded = [(size * expansion, heads) for name, size, heads in stages if name in MIXERS_WITH_HEADS]
            valid = all(abs(size - round(size)) < 1e-6 and round(size) > 0 and round(size) % n == 0 for size, n in expanded)
            allowed = f"for each stage a divisor of its hidden size (hidden_sizes is {sizes}) times {field} ({expansion})"
            self._require(valid, "num_attention_heads", f"{allowed}, which is the size of the {what} of all heads")
        self._check("a name of transformers.activations.ACT2FN", "hidden_act", "output_gate_act")
        self._check(FORMS, "retention_form")
        self._check_decay_range()
        schedule = self.decay_schedule
        if isinstance(schedule, str):
            return self._check(("rmt", *DECAY_SCHEDULES), "decay_schedule")
        allowed = f"a list of one list per stage (depths has {len(stages)})"
        self._require(len(schedule) == len(stages), "decay_schedule", allowed)
        decaying = [(decays, heads) for decays, (name, _, heads) in zip(schedule, stages) if name in MIXERS_WITH_DECAY]
        valid = all(len(decays) == heads and all(0 < decay <= 1 for decay in decays) for decays, heads in decaying)
        heads = self.num_attention_heads
        allowed = f"for each stage a list of one number in (0, 1] per head (num_attention_heads is {heads})"
        self._require(valid, "decay_schedule", allowed)
