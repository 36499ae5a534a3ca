# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""ViR configuration: the options of both public implementations, and named sizes."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneConfigMixin
from transformers.configuration_utils import PreTrainedConfig

from .configuration_checks import FieldChecks
from .decay_schedules import DECAY_SCHEDULES, scheduled_decays
from .retention_forms import FORMS


POOLINGS = ("class_token", "last_patch", "mean", "mean_but_first")

# name: (hidden_size, num_hidden_layers, num_attention_heads, patch_size)
_SHAPES = {
    "tiny-16": (192, 12, 3, 16),
    "small-16": (384, 12, 6, 16),
    "base-16": (768, 12, 12, 16),
    "large-16": (1024, 24, 16, 16),
    "large-14": (1024, 24, 16, 14),
    "pulfer-tiny-14": (192, 12, 3, 14),
    "pulfer-base-14": (768, 12, 12, 14),
}
_PAPER_NAMES = {
    "ViR-T/16": "tiny-16",
    "ViR-S/16": "small-16",
    "ViR-B/16": "base-16",
    "ViR-L/16": "large-16",
    "ViR-L/14": "large-14",
}
# What the two public implementations do differently; the sizes without a prefix are the authors'.
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


@strict
class ViRConfig(BackboneConfigMixin, PreTrainedConfig):
    r"""Configuration of a ViR, a vision retention network (arXiv 2310.19731). The defaults are those of ViR-B/16, without
    layer scale.

    Args:
        image_size (`int` or a pair): height and width of the images that the positions are learned for.
        patch_size (`int` or a pair): height and width of a patch.
        num_channels (`int`): colour channels of the images.
        hidden_size (`int`), num_hidden_layers (`int`): width and number of the blocks.
        num_attention_heads (`int`): heads of each retention, each with its own decay.
        intermediate_size (`int`, *optional*): width of the feed-forward, four times the hidden size if absent. `mlp_ratio`
            says it as a multiple.
        hidden_act (`str`): activation of the feed-forward, a name of `transformers.activations.ACT2FN`.
        pooling (`str`): what `pooler_output` is, and the classifier reads. "class_token": a learned token after all patches,
            the last of the sequence; "last_patch"; "mean" of the patches, normalised after it has been taken;
            "mean_but_first", the same without the first patch, as the authors' code averages.
        decay_schedule (`str` or `list[float]`): γ of each head: "log_linear", 1 - exp(linspace(ln 1/32, ln 1/512)) (the
            authors' code); "power_of_two", 1 - 2^(-5-i) (RetNet's, equation 8); "geometric", exp(-1/τ), whose time constants
            τ grow by one factor from head to head; "alibi", exp(-2^(-8(i+1)/H)), ALiBi's slopes; "none", 1; or one number in
            (0, 1] per head.
        decay_range (pair of `float`): τ of the first and of the last head of "geometric", in patches.
        bidirectional (`bool`): every token sees those after it too, with decay γ^|n-m|.
        mirror_sequence (`bool`): every token and then every token again, in reverse: the authors' bidirectional mode. The
            second half of the sequence has seen all of it. It needs a pooling of patches.
        qkv_bias (`bool`): biases of queries, keys and values.
        use_per_head_projections (`bool`): queries, keys and values of a head see its slice of the hidden state alone.
        use_retention_norm (`bool`), retention_act (`str`, *optional*): layer norm over all heads' outputs, and the
            activation after it, a name of ACT2FN.
        use_layer_scale (`bool`), layer_scale_init_value (`float`): factors on the branches of a block, and what they start
            from.
        layer_norm_eps (`float`): epsilon of every norm.
        embedding_dropout (`float`), hidden_dropout (`float`), activation_dropout (`float`): dropout of the embeddings, of
            the output of each branch, and inside the feed-forward.
        drop_path_rate (`float`): stochastic depth of the last block; it rises linearly from 0 at the first.
        initializer_range (`float`): standard deviation of the truncated normal distribution that weights are drawn from.
        retention_form (`str`): "auto", "parallel", "recurrent" or "chunkwise"; also an argument of `forward`.
        chunk_size (`int`, *optional*): tokens in a chunk of the chunkwise form; chosen from the head size if absent.
        segment_size (`int`, *optional*): tokens that a block takes at a time in the chunkwise form, in evaluation without
            gradients, so that the memory within it does not grow with the image; None: all of them.
        apply_layernorm (`bool`): whether the feature maps of a backbone go through the last norm.
        out_features (`list[str]`, *optional*), out_indices (`list[int]`, *optional*): feature maps of a backbone, among
            "stem", "stage1", … ; the last stage if both are absent.

    Raises:
        huggingface_hub.errors.StrictDataclassError: for a value of the wrong type or one that is not allowed, in a sentence
            that names the field, the value and what is allowed.
        ValueError: for out_features and out_indices that do not fit the blocks.

    Example:

    ```python
    >>> from retnet_hf import ViRConfig, ViRForImageClassification

    >>> model = ViRForImageClassification(ViRConfig.from_preset("tiny-16", num_labels=1000))
    ```
    """

    model_type = "vir"
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
    segment_size: int | None = 2048
    apply_layernorm: bool = True
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """Names that `from_preset` knows."""
        return (*_SHAPES, *_PAPER_NAMES)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any) -> "ViRConfig":
        """Configuration of a named size; any field may be overridden.

        "tiny-16" to "large-14" follow the authors' code, those that begin with "pulfer" follow
        BrianPulfer/vision-retention-networks.

        Raises:
            ValueError: for an unknown name.
        """
        if name not in cls.presets():
            raise ValueError(f"preset must be one of {', '.join(cls.presets())}, got {name!r}.")
        name = _PAPER_NAMES.get(name, name)
        hidden_size, layers, heads, patch_size = _SHAPES[name]
        fields = {
            "hidden_size": hidden_size,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "patch_size": patch_size,
            **(_PULFER if name.startswith("pulfer") else _AUTHORS),
        }
        return cls(**(fields | overrides))

    def __post_init__(self, **kwargs: Any) -> None:
        mlp_ratio = kwargs.pop("mlp_ratio", 4)
        if self.intermediate_size is None:
            self.intermediate_size = int(self.hidden_size * mlp_ratio)
        self.stage_names = ["stem"] + [f"stage{number}" for number in range(1, self.num_hidden_layers + 1)]
        self.set_output_features_output_indices(
            out_features=kwargs.pop("out_features", None), out_indices=kwargs.pop("out_indices", None)
        )
        self.base_model_tp_plan = self._tensor_parallel_plan()
        super().__post_init__(**kwargs)

    def _tensor_parallel_plan(self) -> dict[str, str]:
        """How tensor parallelism shares out the weights. Each rank computes all heads: a norm may span them."""
        plan = {"retention.o_proj": "rowwise_split_input", "mlp.fc1": "colwise", "mlp.fc2": "rowwise"}
        if not self.use_per_head_projections:
            plan |= {f"retention.{name}_proj": "colwise_gather_output" for name in "qkv"}
        return {f"layers.*.{name}": style for name, style in plan.items()}

    @property
    def head_dim(self) -> int:
        """K, the size of a query, key and value head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of the images."""
        return _pair(self.image_size)

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Height and width of a patch."""
        return _pair(self.patch_size)

    @property
    def grid_shape(self) -> tuple[int, int]:
        """Rows and columns of patches in an image."""
        return self.grid_of(self.image_shape)

    def grid_of(self, image_shape: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches in an image of that height and width."""
        return image_shape[0] // self.patch_shape[0], image_shape[1] // self.patch_shape[1]

    def decays(self) -> list[float]:
        """γ of each head, in double precision."""
        return scheduled_decays(self.decay_schedule, self.num_attention_heads, self.decay_range)

    def validate_architecture(self) -> None:
        """Part of `@strict` validation: the fields fit each other, and each is one of the allowed values."""
        check = FieldChecks(self)
        check.positive_integer(
            "num_channels", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"
        )
        for field in ("image_size", "patch_size"):
            size = _pair(getattr(self, field))
            check.require(len(size) == 2 and min(size) > 0, field, "a positive integer, or height and width")
        check.require(
            all(image % patch == 0 for image, patch in zip(self.image_shape, self.patch_shape)),
            "image_size",
            f"a multiple of patch_size ({self.patch_size})",
        )
        for field in ("chunk_size", "segment_size"):
            size = getattr(self, field)
            check.require(size is None or size > 0, field, "a positive integer or None")
        check.require(
            self.hidden_size % self.num_attention_heads == 0,
            "num_attention_heads",
            f"a divisor of hidden_size ({self.hidden_size})",
        )
        check.one_of("pooling", POOLINGS)
        check.one_of("retention_form", FORMS)
        check.activation("hidden_act")
        check.require(
            self.retention_act is None or self.retention_act in ACT2FN,
            "retention_act",
            "None, or a name of transformers.activations.ACT2FN",
        )
        check.require(
            not (self.mirror_sequence and self.bidirectional),
            "mirror_sequence",
            "False where bidirectional is True: either lets a token see those after it",
        )
        check.require(
            not (self.mirror_sequence and self.pooling == "class_token"),
            "pooling",
            "last_patch, mean or mean_but_first where mirror_sequence is True",
        )
        check.rate("embedding_dropout", "hidden_dropout", "activation_dropout", "drop_path_rate")
        check.positive("layer_norm_eps", "initializer_range", "layer_scale_init_value")
        check.decay_schedule(DECAY_SCHEDULES)
        check.decay_range()


def _pair(size: int | list[int] | tuple[int, int]) -> tuple[int, ...]:
    """Height and width, where one number stands for both."""
    return (size, size) if isinstance(size, int) else tuple(size)


__all__ = ["ViRConfig"]
