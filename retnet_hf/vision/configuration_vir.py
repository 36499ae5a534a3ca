# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Configuration of ViR: the options of both public implementations, and named sizes."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from ..arguments.checks import scheduled_decays
from ..ops.choices import FORMS
from .configuration_stages import VisionConfigMixin


POOLINGS = ("class_token", "last_patch", "mean", "mean_but_first")

# differences between the two public implementations
_AUTHORS = {"use_layer_scale": True}
_PULFER = {
    "pooling": "last_patch",
    "decay_schedule": "power_of_two",
    "use_per_head_projections": True,
    "use_retention_norm": True,
    "retention_act": "gelu",
    "hidden_dropout": 0.1,
    "layer_norm_eps": 1e-5,
}
_SIZES = {
    name: {"hidden_size": size, "num_hidden_layers": layers, "num_attention_heads": heads, "patch_size": patch} | recipe
    for name, size, layers, heads, patch, recipe in (
        ("tiny-16", 192, 12, 3, 16, _AUTHORS),
        ("small-16", 384, 12, 6, 16, _AUTHORS),
        ("base-16", 768, 12, 12, 16, _AUTHORS),
        ("large-16", 1024, 24, 16, 16, _AUTHORS),
        ("large-14", 1024, 24, 16, 14, _AUTHORS),
        ("pulfer-tiny-14", 192, 12, 3, 14, _PULFER),
        ("pulfer-base-14", 768, 12, 12, 14, _PULFER),
    )
}
_PAPER_NAMES = {f"ViR-{name[0].upper()}/{name[-2:]}": name for name in _SIZES if not name.startswith("pulfer")}


@strict
class ViRConfig(VisionConfigMixin, PreTrainedConfig):
    r"""Configuration of a ViR, a vision retention network (arXiv 2310.19731). The defaults describe ViR-B/16 without layer
    scale.

    The presets "tiny-16" to "large-14" follow the authors' code. The presets "pulfer-…" follow
    BrianPulfer/vision-retention-networks.

    Args:
        image_size, patch_size (`int` or a pair): height and width of an image with learned positions, and of a patch.
        num_channels (`int`): colour channels of the images.
        hidden_size (`int`), num_hidden_layers (`int`): width and number of the blocks.
        num_attention_heads (`int`): number of heads in each block. Each head has its own decay.
        intermediate_size (`int`, *optional*): inner width of the feed-forward network. If absent, `mlp_ratio` (another
            argument, 4 if absent) times the hidden size.
        hidden_act (`str`): activation of the feed-forward, a name of `transformers.activations.ACT2FN`.
        pooling (`str`): computation of `pooler_output`, the input of the classifier. "class_token": a learned token after
            all patches; "last_patch"; "mean": the last norm of the mean of the patches; "mean_but_first": the same without
            the first patch, as in the authors' code.
        decay_schedule (`str` or `list[float]`): γ of each head: a name of `RetNetConfig`, "log_linear" (the authors' code),
            "power_of_two", "geometric", "alibi" or "none"; or a list of one number in (0, 1] per head.
        decay_range (pair of `float`): τ of the first and the last head of "geometric", in patches.
        bidirectional (`bool`): whether a token also sees later tokens, with decay γ^|n-m|.
        mirror_sequence (`bool`): whether all tokens are repeated in reverse order after the sequence, so that the second
            half sees all tokens. This is the authors' bidirectional mode. It needs a pooling of patches.
        qkv_bias (`bool`): whether the projections to queries, keys and values have biases.
        use_per_head_projections (`bool`): whether each head's projections read only its slice of the hidden state.
        use_retention_norm (`bool`), retention_act (`str`, *optional*): layer norm over all heads, activation after it.
        use_layer_scale (`bool`), layer_scale_init_value (`float`): learned factors on branches, and their first value.
        layer_norm_eps (`float`): epsilon of every norm.
        embedding_dropout, hidden_dropout, activation_dropout (`float`): dropout of embeddings, branches, feed-forward.
        drop_path_rate (`float`): stochastic depth of the last block. The rate rises linearly from 0 in the first block.
        initializer_range (`float`): standard deviation of the truncated normal distribution of the initial weights.
        retention_form (`str`): "auto", "parallel", "recurrent" or "chunkwise"; also an argument of `forward`.
        chunk_size (`int`, *optional*): tokens in a chunk of the chunkwise form; chosen from the head size if absent.
        apply_layernorm (`bool`): whether the last norm is applied to the feature maps of a backbone.
        out_features, out_indices (lists, *optional*): maps of a backbone, from "stem", "stage1", …; if absent, the last.

    Raises:
        huggingface_hub.errors.StrictDataclassError: names a field of the wrong type or value, the value and what is allowed.
        ValueError: if out_features and out_indices do not fit the blocks.

    Example:

    ```python
    >>> from retnet_hf import ViRConfig, ViRForImageClassification

    >>> model = ViRForImageClassification(ViRConfig.from_preset("tiny-16", num_labels=1000))
    ```
    """

    model_type = "vir"
    _presets = _SIZES | {paper_name: _SIZES[name] for paper_name, name in _PAPER_NAMES.items()}
    base_model_fsdp_plan = {"layers.*": "free_full_weight", "norm": "keep_full_weight"}

    image_size: int | list[int] | tuple[int, int] = 224
    patch_size: int | list[int] | tuple[int, int] = 16
    num_channels: int = 3
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    pooling: str = "class_token"
    decay_schedule: str | list[float] | list[int | float] = "log_linear"
    decay_range: list[float | int] | tuple[float | int, ...] = (1, 32)
    bidirectional: bool = False
    mirror_sequence: bool = False
    qkv_bias: bool = True
    use_per_head_projections: bool = False
    use_retention_norm: bool = False
    retention_act: str | None = None
    use_layer_scale: bool = False
    layer_scale_init_value: float | int = 1e-5
    layer_norm_eps: float = 1e-6
    embedding_dropout: float | int = 0.0
    hidden_dropout: float | int = 0.0
    activation_dropout: float | int = 0.0
    drop_path_rate: float | int = 0.0
    initializer_range: float = 0.02
    retention_form: str = "auto"
    chunk_size: int | None = None
    apply_layernorm: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        mlp_ratio = kwargs.pop("mlp_ratio", 4)
        if self.intermediate_size is None:
            self.intermediate_size = int(self.hidden_size * mlp_ratio)
        # Each rank computes all heads, since a norm may span them.
        plan = {"retention.o_proj": "rowwise_split_input", "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
        if not self.use_per_head_projections:
            plan |= {f"retention.{name}_proj": "colwise_gather_output" for name in "qkv"}
        self.base_model_tp_plan = {f"layers.*.{name}": style for name, style in plan.items()}
        super().__post_init__(**kwargs)

    @property
    def head_dim(self) -> int:
        """Returns K, the size of the queries, keys and values of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def image_shape(self) -> tuple[int, int]:
        """Returns height and width of the images."""
        return (self.image_size,) * 2 if isinstance(self.image_size, int) else tuple(self.image_size)

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Returns height and width of a patch."""
        return (self.patch_size,) * 2 if isinstance(self.patch_size, int) else tuple(self.patch_size)

    @property
    def grid_shape(self) -> tuple[int, int]:
        """Returns the numbers of rows and columns of patches in an image."""
        return self.grid_of(self.image_shape)

    def grid_of(self, image_shape: tuple[int, int]) -> tuple[int, int]:
        """Returns the numbers of rows and columns of patches in an image of this height and width."""
        return image_shape[0] // self.patch_shape[0], image_shape[1] // self.patch_shape[1]

    def decays(self) -> list[float]:
        """Returns γ of each head, in double precision."""
        return scheduled_decays(self.decay_schedule, self.num_attention_heads, self.decay_range)

    def validate_architecture(self) -> None:
        """Checks the fields, each alone and together, as part of `@strict` validation."""
        self._check("a positive integer", "num_channels", "hidden_size", "num_hidden_layers")
        self._check("a positive integer", "num_attention_heads", "intermediate_size")
        for field, shape in (("image_size", self.image_shape), ("patch_size", self.patch_shape)):
            self._require(len(shape) == 2 and min(shape) > 0, field, "a positive integer, or a pair of height and width")
        whole_patches = all(image % patch == 0 for image, patch in zip(self.image_shape, self.patch_shape))
        self._require(whole_patches, "image_size", f"a multiple of patch_size ({self.patch_size})")
        self._check("a positive integer or None", "chunk_size")
        divides = self.hidden_size % self.num_attention_heads == 0
        self._require(divides, "num_attention_heads", f"a divisor of hidden_size ({self.hidden_size})")
        self._check(POOLINGS, "pooling")
        self._check(FORMS, "retention_form")
        self._check("a name of transformers.activations.ACT2FN", "hidden_act")
        self._check("None, or a name of transformers.activations.ACT2FN", "retention_act")
        if self.mirror_sequence:
            allowed = "False if bidirectional is True, since either option lets tokens see later tokens"
            self._require(not self.bidirectional, "mirror_sequence", allowed)
            allowed = "last_patch, mean or mean_but_first if mirror_sequence is True"
            self._require(self.pooling != "class_token", "pooling", allowed)
        self._check("in [0, 1)", "embedding_dropout", "hidden_dropout", "activation_dropout", "drop_path_rate")
        self._check("positive", "layer_norm_eps", "initializer_range", "layer_scale_init_value")
        self._check_decay_schedule()
        self._check_decay_range()
