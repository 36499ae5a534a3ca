# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Configuration of RMT: lists with a value per stage, and the published sizes by name."""

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from .configuration_stages import StagedConfigMixin


ATTENTION_TYPES = ("decomposed", "whole")
TOKEN_CLASSIFIER_INPUTS = ("hidden_states", "projection")

# arXiv 2309.11523 and the authors' code
_SIZES = {
    name: {
        "hidden_sizes": sizes,
        "depths": depths,
        "num_attention_heads": heads,
        "mlp_ratios": mlp_ratios,
        "attention_types": ["decomposed"] * decomposed + ["whole"] * (4 - decomposed),
        "decay_exponent_ranges": ranges,
        "use_layer_scale": [False] * (4 - scaled) + [True] * scaled,
        "drop_path_rate": drop_path_rate,
    }
    for name, sizes, depths, heads, mlp_ratios, decomposed, ranges, scaled, drop_path_rate in (
        ("tiny", [64, 128, 256, 512], [2, 2, 8, 2], [4, 4, 8, 16], [3, 3, 3, 3], 2, [4, 4, 6, 6], 0, 0.1),
        ("small", [64, 128, 256, 512], [3, 4, 18, 4], [4, 4, 8, 16], [4, 4, 3, 3], 3, [4, 4, 6, 6], 0, 0.15),
        ("base", [80, 160, 320, 512], [4, 8, 25, 8], [5, 5, 10, 16], [4, 4, 3, 3], 3, [5, 5, 6, 6], 2, 0.4),
        ("large", [112, 224, 448, 640], [4, 8, 25, 8], [7, 7, 14, 20], [4, 4, 3, 3], 3, [6, 6, 6, 6], 2, 0.5),
    )
}
_TOKEN_LABEL = {name: _SIZES[name] | {"token_classifier_input": "hidden_states"} for name in ("small", "base", "large")}


@strict
class RMTConfig(StagedConfigMixin, PreTrainedConfig):
    r"""Configuration of an RMT (arXiv 2309.11523). The defaults describe RMT-T.

    Every list has one value per stage. The presets also have their names of the paper, "T" to "L"; a star marks training
    with token labels.

    Args:
        num_channels (`int`): colour channels of the images.
        image_size (`int` or a pair): size of the training images, for tools that read it. The model accepts any size.
        hidden_sizes (`list[int]`): width of each stage. The first must be even, because the stem begins with half of it.
        depths, num_attention_heads (`list[int]`): number of blocks, and of heads, each with its own decay, in each stage.
        mlp_ratios (`list[float]`): inner width of the feed-forward network divided by the stage's width, rounded down.
        attention_types (`list[str]`): "whole": all tokens attend to all tokens, with decay γ^(|Δrow| + |Δcolumn|).
            "decomposed": tokens attend along the rows with γ^|Δcolumn|, then along the columns with γ^|Δrow|.
        decay_exponents, decay_exponent_ranges (`list[float]`): γ of head i of N is 1 - 2^(-exponent - range · i / N).
        rope_theta (`float`): the tokens, counted row by row, are rotated by frequencies rope_theta^(-linspace(0, 1, K/2)).
        use_layer_scale (`list[bool]`), layer_scale_init_value (`float`): learned factors on branches, and their first value.
        projection_size (`int`): width of the classifier's hidden layer.
        token_classifier_input (`str`, *optional*): adds the classifier of single tokens that the token-label (starred)
            releases have, on the last stage's "hidden_states" or on their "projection".
        hidden_act (`str`): activation of stem and feed-forward, a name of `transformers.activations.ACT2FN`.
        projection_act (`str`): activation of the classifier's hidden layer.
        layer_norm_eps, batch_norm_eps (`float`): epsilons of the norms; 1e-5 in a backbone's norms of feature maps.
        drop_path_rate (`float`): stochastic depth of the last block. The rate rises linearly from 0 in the first block.
        initializer_range (`float`): standard deviation of the weights of linear layers.
        out_features, out_indices (lists, *optional*): maps of a backbone, from "stem", "stage1", …; if absent, the last.

    Raises:
        huggingface_hub.errors.StrictDataclassError: names a field of the wrong type or value, the value and what is allowed.
        ValueError: if out_features and out_indices do not fit the stages.

    Example:

    ```python
    >>> from retnet_hf import RMTConfig, RMTForImageClassification

    >>> model = RMTForImageClassification(RMTConfig.from_preset("tiny", num_labels=1000))
    ```
    """

    model_type = "rmt"
    _presets = (
        _SIZES
        | {f"{name}-token-label": fields for name, fields in _TOKEN_LABEL.items()}
        | {name[0].upper(): fields for name, fields in _SIZES.items()}
        | {f"{name[0].upper()}*": fields for name, fields in _TOKEN_LABEL.items()}
    )
    _per_stage = (
        *("hidden_sizes", "depths", "num_attention_heads", "mlp_ratios", "attention_types"),
        *("decay_exponents", "decay_exponent_ranges", "use_layer_scale"),
    )
    # Outputs are gathered, because convolutions between the sharded layers read the channels of all ranks.
    base_model_tp_plan = {
        **{f"stages.*.blocks.*.attention.{name}_proj": "colwise_gather_output" for name in "qkv"},
        "stages.*.blocks.*.attention.o_proj": "rowwise_split_input",
        "stages.*.blocks.*.mlp.fc1": "colwise_gather_output",
        "stages.*.blocks.*.mlp.fc2": "rowwise_split_input",
    }

    num_channels: int = 3
    image_size: int | list[int] | tuple[int, int] = 224
    hidden_sizes: list[int] | tuple[int, ...] = (64, 128, 256, 512)
    depths: list[int] | tuple[int, ...] = (2, 2, 8, 2)
    num_attention_heads: list[int] | tuple[int, ...] = (4, 4, 8, 16)
    mlp_ratios: list[float | int] | tuple[float | int, ...] = (3, 3, 3, 3)
    attention_types: list[str] | tuple[str, ...] = ("decomposed", "decomposed", "whole", "whole")
    decay_exponents: list[float | int] | tuple[float | int, ...] = (2, 2, 2, 2)
    decay_exponent_ranges: list[float | int] | tuple[float | int, ...] = (4, 4, 6, 6)
    rope_theta: float | int = 10000.0
    use_layer_scale: list[bool] | tuple[bool, ...] = (False, False, False, False)
    layer_scale_init_value: float | int = 1e-6
    projection_size: int = 1024
    token_classifier_input: str | None = None
    hidden_act: str = "gelu"
    projection_act: str = "silu"
    layer_norm_eps: float = 1e-6
    batch_norm_eps: float = 1e-5
    drop_path_rate: float | int = 0.1
    initializer_range: float = 0.02
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def decays(self, stage: int) -> list[float]:
        """Returns γ of each head of a stage, in double precision."""
        heads = self.num_attention_heads[stage]
        exponent, span = self.decay_exponents[stage], self.decay_exponent_ranges[stage]
        return [1 - 2.0 ** (-exponent - span * head / heads) for head in range(heads)]

    def validate_architecture(self) -> None:
        """Checks the fields, each alone and together, as part of `@strict` validation."""
        self._check_stages()
        sizes = self.hidden_sizes
        self._check("positive integers", "hidden_sizes", "depths", "num_attention_heads")
        allowed = "even in the first stage, because the stem begins with half that width"
        self._require(sizes[0] % 2 == 0, "hidden_sizes", allowed)
        even = all(size % (2 * number) == 0 for size, number in zip(sizes, self.num_attention_heads))
        allowed = f"for each stage a divisor of half its hidden size (hidden_sizes is {sizes}), since head sizes are even"
        self._require(even, "num_attention_heads", allowed)
        not_empty = all(int(ratio * size) > 0 for ratio, size in zip(self.mlp_ratios, sizes))
        self._require(not_empty, "mlp_ratios", f"large enough that times hidden_sizes ({sizes}) each is at least 1")
        self._check(f"a list of {' and '.join(ATTENTION_TYPES)}", "attention_types", allows=set(ATTENTION_TYPES).issuperset)
        between = all(0 < decay < 1 for stage in range(len(self.depths)) for decay in self.decays(stage))
        ranges, decay = self.decay_exponent_ranges, "every decay 1 - 2^(-exponent - range · head / heads)"
        allowed = f"such that with decay_exponent_ranges ({ranges}) {decay} lies between 0 and 1"
        self._require(between, "decay_exponents", allowed)
        inputs = (None, *TOKEN_CLASSIFIER_INPUTS)
        self._check(f"None, {' or '.join(inputs[1:])}", "token_classifier_input", allows=inputs.__contains__)
        self._check("a name of transformers.activations.ACT2FN", "hidden_act", "projection_act")
        self._check("positive", "projection_size", "batch_norm_eps")
        self._require(self.rope_theta >= 1, "rope_theta", "1 or more")
