# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""MetaFormer: norm, token mixer, norm, feed-forward, in stages that each name their mixer (arXiv 2111.11418).

With pooling in every stage it is PoolFormer.

Shapes in comments: B images, R rows and L columns of tokens, T = R · L tokens counted row by row, H heads, K key size,
V value size, C channels of a stage.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs

from ..modules.eager_attention import eager_attention_forward
from ..modules.head_decay import HeadDecay
from ..ops.retention_2d import manhattan_map, manhattan_retention
from ..ops.retention_forms import bidirectional_retention, decay_map, map_times_values, retention, retention_map
from .configuration_metaformer import MetaFormerConfig
from .vision_blocks import (
    ChannelsLast,
    FeedForward,
    ImageClassifierMixin,
    ResidualBranch,
    StagedBackboneMixin,
    StagedModelMixin,
    VisionPreTrainedModel,
    asks_for_maps,
    classifier,
    drop_path_rates,
)


class MetaFormerPooling(nn.Module):
    """The mean of the window around a token, less the token itself: equation 4 of the paper."""

    def __init__(self, config: MetaFormerConfig, stage: int) -> None:
        super().__init__()
        size = config.pool_size
        self.pool = nn.AvgPool2d(size, stride=1, padding=size // 2, count_include_pad=False)

    def forward(self, hidden_states: Tensor, **kwargs: Unpack[TransformersKwargs]) -> tuple[Tensor, None]:
        """(B, R, L, C) -> (B, R, L, C)."""
        mean = self.pool(hidden_states.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return mean - hidden_states, None


class MetaFormerIdentity(nn.Module):
    """Leaves the tokens as they are."""

    def __init__(self, config: MetaFormerConfig, stage: int) -> None:
        super().__init__()

    def forward(self, hidden_states: Tensor, **kwargs: Unpack[TransformersKwargs]) -> tuple[Tensor, None]:
        return hidden_states, None


class MetaFormerHeads(nn.Module):
    """Base of the mixers with heads: projections to queries, keys and values, and back."""

    def __init__(self, config: MetaFormerConfig, stage: int) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_sizes[stage]
        key_size, value_size = round(size * config.key_expansion), round(size * config.value_expansion)
        self.heads = config.num_attention_heads[stage]
        self.scaling = (key_size // self.heads) ** -0.5
        self.q_proj = nn.Linear(size, key_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(size, key_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(size, value_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(value_size, size)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(B, R, L, C) -> query, key (B, H, R, L, K) and value (B, H, R, L, V)."""
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return tuple(
            projection(hidden_states).unflatten(-1, (self.heads, -1)).permute(0, 3, 1, 2, 4) for projection in projections
        )


class MetaFormerRetention(MetaFormerHeads):
    """Multi-scale retention over the tokens row by row, with RetNet's norm of each head and its gate."""

    def __init__(self, config: MetaFormerConfig, stage: int) -> None:
        super().__init__(config, stage)
        size, value_size = self.o_proj.out_features, self.o_proj.in_features
        self.decay = HeadDecay(config.decays(stage))
        self.g_proj = nn.Linear(size, value_size, bias=config.qkv_bias) if config.use_output_gate else None
        self.gate_fn = ACT2FN[config.output_gate_act]

    def forward(
        self, hidden_states: Tensor, output_attentions: bool | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> tuple[Tensor, Tensor | None]:
        """(B, R, L, C) -> the mixed tokens (B, R, L, C) and, if asked for, the retention map (B, H, T, T)."""
        query, key, value = self.project(hidden_states)
        log_decay = self.decay(query.dtype, query.device)
        output_maps = asks_for_maps(self.config, output_attentions)
        output, maps = self.retain(query * self.scaling, key, value, log_decay, output_maps)  # (B, H, R, L, V)
        if self.config.use_head_norm:
            output = F.rms_norm(output, output.shape[-1:], eps=self.config.layer_norm_eps)
        output = output.permute(0, 2, 3, 1, 4).flatten(3).to(hidden_states.dtype)
        if self.g_proj is not None:
            output = output * self.gate_fn(self.g_proj(hidden_states))
        return self.o_proj(output), maps

    def retain(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, output_maps: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Retention among the tokens of (B, H, R, L, K or V) and, with `output_maps`, its map (B, H, T, T)."""
        grid, form, both_ways, maps = query.shape[2:4], self.config.retention_form, self.config.bidirectional, None
        query, key, value = (tensor.flatten(2, 3) for tensor in (query, key, value))  # (B, H, T, .)
        if output_maps:  # the output is made of the map, so that a gradient reaches it
            maps = retention_map(query, key, decay_map(log_decay, query.shape[2], bidirectional=both_ways))
            output = map_times_values(maps, value)
        elif both_ways:
            output = bidirectional_retention(query, key, value, log_decay, form=form)
        else:
            output, _ = retention(query, key, value, log_decay, form=form)
        return output.unflatten(2, grid), maps


class MetaFormerManhattanRetention(MetaFormerRetention):
    """Multi-scale retention over the grid of tokens."""

    def retain(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, output_maps: bool
    ) -> tuple[Tensor, Tensor | None]:
        maps, form = None, self.config.retention_form
        if output_maps:
            maps, form = manhattan_map(query, key, log_decay), "parallel"
        return manhattan_retention(query, key, value, log_decay, form=form, scores=maps), maps


class MetaFormerAttention(MetaFormerHeads):
    """Multi-head softmax attention, without positions."""

    def __init__(self, config: MetaFormerConfig, stage: int) -> None:
        super().__init__(config, stage)
        self.is_causal = not config.bidirectional

    def forward(
        self, hidden_states: Tensor, output_attentions: bool | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> tuple[Tensor, Tensor | None]:
        """(B, R, L, C) -> the mixed tokens (B, R, L, C) and, if asked for, the attention (B, H, T, T)."""
        query, key, value = (tensor.flatten(2, 3) for tensor in self.project(hidden_states))  # (B, H, T, .)
        gives_map = asks_for_maps(self.config, output_attentions)
        implementation = "eager" if gives_map else self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        output, attention = attend(self, query, key, value, None, scaling=self.scaling, dropout=0.0)
        output = output.reshape(*hidden_states.shape[:3], -1)
        return self.o_proj(output), attention if gives_map else None


MIXER_CLASSES = {
    "pooling": MetaFormerPooling,
    "retention": MetaFormerRetention,
    "manhattan": MetaFormerManhattanRetention,
    "attention": MetaFormerAttention,
    "identity": MetaFormerIdentity,
}


class MetaFormerNorm(ChannelsLast, nn.GroupNorm):
    """Norm over all tokens and channels of an image, with one weight and bias per channel, on (B, R, L, C)."""

    def __init__(self, config: MetaFormerConfig, size: int) -> None:
        super().__init__(1, size, eps=config.layer_norm_eps)


class MetaFormerBlock(GradientCheckpointingLayer):
    """Token mixer and feed-forward, each a branch of the residual stream."""

    def __init__(self, config: MetaFormerConfig, stage: int, drop_path_rate: float) -> None:
        super().__init__()
        size = config.hidden_sizes[stage]
        layer_scale = config.layer_scale_init_value if config.use_layer_scale else None
        self.mixer_norm = MetaFormerNorm(config, size)
        self.mixer = MIXER_CLASSES[config.token_mixers[stage]](config, stage)
        self.mixer_branch = ResidualBranch(size, layer_scale, drop_path_rate)
        self.mlp_norm = MetaFormerNorm(config, size)
        self.mlp = FeedForward(size, int(config.mlp_ratio * size), config.hidden_act)
        self.mlp_branch = ResidualBranch(size, layer_scale, drop_path_rate)

    def forward(
        self,
        hidden_states: Tensor,  # (B, R, L, C)
        **kwargs: Unpack[TransformersKwargs],
    ) -> Tensor:
        branch, _ = self.mixer(self.mixer_norm(hidden_states), **kwargs)
        hidden_states = hidden_states + self.mixer_branch(branch)
        return hidden_states + self.mlp_branch(self.mlp(self.mlp_norm(hidden_states)))


class MetaFormerPatchEmbedding(nn.Conv2d):
    """The overlapping patches with which a stage begins: (B, C of the stage before, R, L) -> (B, C, R, L)."""

    def __init__(self, config: MetaFormerConfig, stage: int = 0) -> None:
        super().__init__(
            config.hidden_sizes[stage - 1] if stage > 0 else config.num_channels,
            config.hidden_sizes[stage],
            kernel_size=config.patch_sizes[stage],
            stride=config.strides[stage],
            padding=config.padding[stage],
        )


class MetaFormerStage(nn.Module):
    """The blocks of one resolution and, in all stages but the first, the patches before them."""

    def __init__(self, config: MetaFormerConfig, stage: int) -> None:
        super().__init__()
        self.patch_embedding = MetaFormerPatchEmbedding(config, stage) if stage > 0 else None
        rates = drop_path_rates(config.drop_path_rate, config.depths)[stage]
        self.blocks = nn.ModuleList([MetaFormerBlock(config, stage, rate) for rate in rates])

    def forward(self, hidden_states: Tensor, **kwargs: Unpack[TransformersKwargs]) -> Tensor:
        """(B, C, R, L) of the stage before -> (B, C, R, L)."""
        if self.patch_embedding is not None:
            hidden_states = self.patch_embedding(hidden_states)
        hidden_states = hidden_states.permute(0, 2, 3, 1).contiguous()
        for block in self.blocks:
            hidden_states = block(hidden_states, **kwargs)
        return hidden_states.permute(0, 3, 1, 2)


class MetaFormerPreTrainedModel(VisionPreTrainedModel):
    config: MetaFormerConfig
    base_model_prefix = "metaformer"
    _no_split_modules = ["MetaFormerBlock"]
    _input_embed_layer = "stem"
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {
        "hidden_states": MetaFormerStage,
        "attentions": [MetaFormerRetention, MetaFormerAttention],
    }

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            init.trunc_normal_(module.weight, std=self.config.initializer_range)


class MetaFormerModel(StagedModelMixin, MetaFormerPreTrainedModel):
    """Stem and stages, without a head.

    With PoolFormer's patches, the last stage has a 32nd of the image's height and width, rounded up.
    """

    stem_class, stage_class = MetaFormerPatchEmbedding, MetaFormerStage


class MetaFormerForImageClassification(ImageClassifierMixin, MetaFormerPreTrainedModel):
    """MetaFormer with a classifier on the mean of its normalised tokens."""

    model_class = MetaFormerModel

    def __init__(self, config: MetaFormerConfig) -> None:
        super().__init__(config)
        self.norm = MetaFormerNorm(config, config.hidden_size)
        self.classifier = classifier(config.hidden_size, config.num_labels)
        self.post_init()

    def classify(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        normed = self.norm(outputs.last_hidden_state.permute(0, 2, 3, 1))  # (B, R, L, C)
        return self.classifier(normed.mean(dim=(1, 2)))


class MetaFormerBackbone(StagedBackboneMixin, MetaFormerPreTrainedModel):
    """MetaFormer as a pyramid of feature maps, each under a norm of its own, for detection and segmentation."""

    model_class = MetaFormerModel

    def new_norm(self, size: int) -> nn.Module:
        return MetaFormerNorm(self.config, size)


__all__ = [
    "MetaFormerBackbone",
    "MetaFormerForImageClassification",
    "MetaFormerModel",
    "MetaFormerPreTrainedModel",
]
