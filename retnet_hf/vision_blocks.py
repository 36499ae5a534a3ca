# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What ViR, RMT and MetaFormer are built of, where they are built of the same.

Shapes in comments: B images, R rows and L columns of tokens, T tokens, H heads, K key size, V value size, C channels.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import PreTrainedModel

from .cards import ModelCardMixin


class HeadDecay(nn.Module):
    """ln γ of every head, kept as integers, which no cast of the model to another type rounds."""

    def __init__(self, decays: list[float]) -> None:
        super().__init__()
        self.decays = decays
        self.log_decay = nn.Buffer(self.compute_log_decay(), persistent=False)

    def compute_log_decay(self, device: torch.device | None = None) -> Tensor:
        """(H,) int64: ln γ in units of 2^-56, but not below -100, where nothing is left of a token."""
        log_decays = [round(max(math.log(decay), -100.0) * 2**56) for decay in self.decays]
        return torch.tensor(log_decays, dtype=torch.int64, device=device)

    def forward(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """(H,) ln γ, float32 or wider."""
        return self.log_decay.to(device).to(torch.promote_types(dtype, torch.float32)) * 2**-56


class FeedForward(nn.Module):
    """Feed-forward network on each token."""

    def __init__(self, size: int, inner_size: int, activation: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, inner_size)
        self.act_fn = ACT2FN[activation]
        self.dropout = nn.Dropout(dropout)
        self.fc2 = nn.Linear(inner_size, size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.fc2(self.dropout(self.act_fn(self.fc1(hidden_states))))


class ResidualBranch(nn.Module):
    """What happens to a branch before it joins the residual stream: dropout, layer scale, stochastic depth per image.

    Args:
        layer_scale: what the factor of each channel starts from; None for no factors.
    """

    def __init__(self, size: int, layer_scale: float | None, drop_path_rate: float, dropout: float = 0.0) -> None:
        super().__init__()
        self.layer_scale = layer_scale
        self.drop_path_rate = drop_path_rate
        self.dropout = nn.Dropout(dropout)
        self.scale = None if layer_scale is None else nn.Parameter(torch.full((size,), float(layer_scale)))

    def forward(self, branch: Tensor) -> Tensor:
        """(B, ..., C) -> (B, ..., C)."""
        branch = self.dropout(branch)
        if self.scale is not None:
            branch = branch * self.scale
        if self.training and self.drop_path_rate > 0:
            keep_rate = 1 - self.drop_path_rate
            one_per_image = (branch.shape[0],) + (1,) * (branch.dim() - 1)
            kept = torch.rand(one_per_image, device=branch.device) < keep_rate
            branch = branch * (kept / keep_rate).to(branch.dtype)
        return branch

    def extra_repr(self) -> str:
        return f"drop_path_rate={self.drop_path_rate:.3g}"


def drop_path_rates(last: float, depths: Sequence[int]) -> list[list[float]]:
    """The rate of stochastic depth of each block of each stage: from 0 to `last`, linearly over all blocks."""
    blocks, last_block = itertools.count(), max(sum(depths) - 1, 1)
    return [[last * next(blocks) / last_block for _ in range(depth)] for depth in depths]


def attention_map(
    query: Tensor, key: Tensor, attention_mask: Tensor | None, scaling: float, is_causal: bool = False
) -> Tensor:
    """softmax(scaling · Q Kᵀ + mask): query, key (..., H, T, K) -> (..., H, T, T)."""
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(dim=-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)


def eager_attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float, **kwargs
) -> tuple[Tensor, Tensor]:
    """Attention written out, in the form of transformers' attention functions: (B, H, T, V) -> (B, T, H, V)."""
    attention = attention_map(query, key, attention_mask, scaling, module.is_causal)
    return (attention @ value).transpose(1, 2), attention


class VisionPreTrainedModel(ModelCardMixin, PreTrainedModel):
    """What transformers is told of every family, and how their common blocks are initialised."""

    main_input_name = "pixel_values"
    input_modalities = ("image",)
    supports_gradient_checkpointing = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HeadDecay):
            init.copy_(module.log_decay, module.compute_log_decay(module.log_decay.device))
        elif isinstance(module, ResidualBranch) and module.scale is not None:
            init.constant_(module.scale, module.layer_scale)


def check_pixel_values(pixel_values: Tensor | None, num_channels: int) -> None:
    """Raises ValueError for what is not a batch of images of so many channels."""
    if pixel_values is None:
        raise ValueError("You have to specify pixel_values.")
    if pixel_values.dim() != 4 or pixel_values.shape[1] != num_channels:
        raise ValueError(
            f"pixel_values must be of shape (batch, {num_channels}, height, width), {num_channels} being the num_channels "
            f"of the configuration, got {tuple(pixel_values.shape)}."
        )


def image_classifier_output(
    model: VisionPreTrainedModel,
    logits: Tensor,  # (B, num_labels)
    labels: Tensor | None,
    outputs: BaseModelOutputWithPooling,
    **kwargs,
) -> ImageClassifierOutput:
    """What a classifier returns, with the loss of its logits if there are labels."""
    loss = None if labels is None else model.loss_function(labels, logits, model.config, **kwargs)
    return ImageClassifierOutput(
        loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
    )


def feature_pyramid(backbone: BackboneMixin, outputs: BaseModelOutputWithPooling) -> BackboneOutput:
    """What a backbone of stages returns: a map (B, C, R, L) of each stage that it is to give, under that stage's norm."""
    feature_maps = tuple(
        backbone.norms[name](hidden_states.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        for name, hidden_states in zip(backbone.stage_names, outputs.hidden_states)
        if name in backbone.out_features
    )
    return BackboneOutput(feature_maps=feature_maps, hidden_states=outputs.hidden_states, attentions=outputs.attentions)
