# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Modules common to ViR, RMT and MetaFormer: parts of their blocks, and the forward passes of their heads.

Shapes in comments: B images, R rows and L columns of tokens, T tokens, C channels.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import PreTrainedModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..arguments.checks import require_known_arguments, with_arguments_of
from ..hub.saving import SavedWithCard
from ..modules.layers import ComputedBuffer


class ChannelsLast:
    """Applies the next base class, a module for (B, C, R, L), to tokens (B, R, L, C)."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class FeedForward(nn.Sequential):
    """Applies a feed-forward network to each token."""

    def __init__(self, size: int, inner_size: int, activation: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, inner_size)
        self.act_fn = ACT2FN[activation]
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(inner_size, size)


class ResidualBranch(nn.Module):
    """Adds a branch to the residual stream, after dropout, stochastic depth per image, and factors of channels if given."""

    def __init__(self, size: int, layer_scale: float | None, drop_path_rate: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer_scale, self.drop_path_rate = layer_scale, drop_path_rate
        self.dropout = nn.Dropout(dropout)
        self.scale = None if layer_scale is None else nn.Parameter(torch.full((size,), float(layer_scale)))

    def forward(self, hidden_states: Tensor, branch: Tensor) -> Tensor:
        branch = self.dropout(branch)  # (B, ..., C)
        if self.training and self.drop_path_rate > 0:
            keep_rate = 1 - self.drop_path_rate
            one_per_image = (branch.shape[0],) + (1,) * (branch.dim() - 1)
            kept = torch.rand(one_per_image, device=branch.device) < keep_rate
            branch = branch * (kept / keep_rate).to(branch.dtype)
        return hidden_states + branch if self.scale is None else torch.addcmul(hidden_states, branch, self.scale)

    def extra_repr(self) -> str:
        return f"drop_path_rate={self.drop_path_rate:.3g}"


def drop_path_rates(last: float, depths: Sequence[int]) -> list[list[float]]:
    """Returns the rate of stochastic depth of each block of each stage. It rises linearly from 0 to `last`."""
    blocks, last_block = itertools.count(), max(sum(depths) - 1, 1)
    return [[last * next(blocks) / last_block for _ in range(depth)] for depth in depths]


def asks_for_maps(config: PreTrainedConfig, output_attentions: bool | None) -> bool:
    """Returns whether a call returns maps: the argument decides or, if it is None, the configuration."""
    return bool(config.output_attentions if output_attentions is None else output_attentions)


def check_pixel_values(pixel_values: Tensor | None, num_channels: int) -> None:
    if pixel_values is None:
        raise ValueError("You have to specify pixel_values.")
    if pixel_values.dim() != 4 or pixel_values.shape[1] != num_channels:
        needed = f"(batch, {num_channels}, height, width), since {num_channels} is num_channels of the configuration"
        raise ValueError(f"pixel_values must be of shape {needed}, got {tuple(pixel_values.shape)}.")
    if 0 in pixel_values.shape:
        raise ValueError(f"pixel_values must hold at least one image with pixels, got {tuple(pixel_values.shape)}.")


class VisionPreTrainedModel(SavedWithCard, PreTrainedModel):
    """Base class of the image models: attributes that transformers reads, and initial values of the modules above."""

    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ComputedBuffer):
            module.initialize()
        elif isinstance(module, ResidualBranch) and module.scale is not None:
            init.constant_(module.scale, module.layer_scale)


class StagedModelMixin:
    """A model with a stem of type `stem_class` and stages of type `stage_class`, such as RMT and MetaFormer."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.stem = self.stem_class(config)
        self.stages = nn.ModuleList([self.stage_class(config, stage) for stage in range(len(config.depths))])
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self, pixel_values: torch.FloatTensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPooling:
        r"""
        Args:
            pixel_values: (B, num_channels, height, width), of any height and width that the stem accepts.
            output_hidden_states: returns the outputs of the stem and of each stage, (B, C, R, L).
            output_attentions: returns the attention or retention map (B, H, T, T) of each block that has one. This takes
                memory quadratic in T.

        Returns:
            last_hidden_state: (B, C, R, L), with height and width divided by the strides of stem and stages.
            pooler_output: (B, C), its mean over the tokens.

        Raises:
            ValueError: if pixel_values is missing or has another number of channels than the configuration.
        """
        require_known_arguments(self, kwargs)
        check_pixel_values(pixel_values, self.config.num_channels)
        hidden_states = self.stem(pixel_values.to(next(self.stem.parameters()).dtype))
        for stage in self.stages:
            hidden_states = stage(hidden_states, **kwargs)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=hidden_states.mean(dim=(2, 3)))


class ImageClassifierMixin:
    """An image classifier on the outputs of a base model of type `model_class`, by default on its pooler_output."""

    accepts_loss_kwargs = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.forward = with_arguments_of(cls.model_class.forward, cls.forward)

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.model_class(config))
        self.add_head(config, config.hidden_size)
        self.post_init()

    def add_head(self, config: PreTrainedConfig, size: int) -> None:
        """Creates the modules that compute logits from tokens of `size` channels."""
        self.classifier = nn.Linear(size, config.num_labels) if config.num_labels > 0 else nn.Identity()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.FloatTensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        r"""
        Takes all arguments of the base model's `forward`, by name, and labels.

        Args:
            labels: (B,) class indices; (B,) values for a regression; (B, num_labels) zeros and ones for several labels per
                image. `config.problem_type` decides, or else `config.num_labels` and the dtype of the labels.

        Returns:
            logits: (B, num_labels). loss: with labels, the mean over the images.

        Example:

        ```python
        >>> import torch
        >>> from retnet_hf import ViRConfig, ViRForImageClassification

        >>> model = ViRForImageClassification(ViRConfig.from_preset("tiny-16", num_hidden_layers=2, num_labels=10)).eval()
        >>> model(torch.rand(1, 3, 512, 384), interpolate_pos_encoding=True).logits.shape
        torch.Size([1, 10])
        ```
        """
        outputs = self.base_model(pixel_values, return_dict=True, **kwargs)
        logits = self.classify(outputs)
        loss = None if labels is None else self.loss_function(labels, logits, self.config, **kwargs)
        return ImageClassifierOutput(loss, logits, outputs.hidden_states, outputs.attentions)

    def classify(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        """Returns the logits (B, num_labels)."""
        return self.classifier(outputs.pooler_output)


class VisionBackboneMixin(BackboneMixin):
    """A backbone on the hidden states of a base model of type `model_class`, called with `model_arguments`.

    Load a saved one with its own class: `AutoBackbone.from_pretrained` accepts names on the Hub, but no folders.
    """

    model_arguments: dict[str, Any] = {}

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, self.model_class(config))

    @can_return_tuple
    @filter_output_hidden_states
    def forward(self, pixel_values: torch.FloatTensor | None = None, **kwargs: Unpack[TransformersKwargs]) -> BackboneOutput:
        r"""
        Takes all arguments of the base model's `forward`, by name.

        Returns:
            feature_maps: (B, C, R, L) for each of `config.out_features`. hidden_states: the hidden states of the base model,
            without the norms of the feature maps.

        Example:

        ```python
        >>> import torch
        >>> from retnet_hf import RMTBackbone, RMTConfig

        >>> config = RMTConfig.from_preset("tiny", depths=[1, 1, 1, 1], out_features=["stage1", "stage4"])
        >>> [tuple(features.shape) for features in RMTBackbone(config).eval()(torch.rand(1, 3, 64, 96)).feature_maps]
        [(1, 64, 16, 24), (1, 512, 2, 3)]
        ```
        """
        outputs = self.base_model(pixel_values, return_dict=True, **self.model_arguments, **kwargs)
        stages = [each for each in zip(self.stage_names, outputs.hidden_states) if each[0] in self.out_features]
        feature_maps = tuple(self.feature_map(*stage, pixel_values) for stage in stages)  # (B, C, R, L) each
        return BackboneOutput(feature_maps, outputs.hidden_states, outputs.attentions)


class StagedBackboneMixin(VisionBackboneMixin):
    """A backbone with stages. A subclass defines `new_norm(config, size)`, the norm of a map of `size` channels."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.num_features = [config.hidden_sizes[0], *config.hidden_sizes]
        norms = {name: self.new_norm(config, size) for name, size in zip(self.out_features, self.channels)}
        self.norms = nn.ModuleDict(norms)
        self.post_init()

    def feature_map(self, name: str, hidden_states: Tensor, pixel_values: Tensor) -> Tensor:
        return self.norms[name](hidden_states.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
