# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""MetaFormer: blocks of norm, token mixer, norm and feed-forward, with a mixer for each stage (arXiv 2111.11418).

With pooling in every stage, it is PoolFormer.

Shapes in comments: B images, R rows and L columns of tokens, T = R · L tokens counted row by row, H heads, K key size,
V value size, C channels of a stage.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..modules.layers import HeadDecay, eager_attention_forward
from ..ops.kernels import kernels_of_call, load_kernels
from ..ops.layout import layout_of
from ..ops.plan import Plan
from ..ops.retention_forms import default_chunk_size
from .configuration_metaformer import MetaFormerConfig
from .manhattan_retention import manhattan_map, manhattan_retention
from .vision_blocks import (
    ChannelsLast,
    FeedForward,
    ImageClassifierMixin,
    ResidualBranch,
    StagedBackboneMixin,
    StagedModelMixin,
    VisionPreTrainedModel,
    asks_for_maps,
    drop_path_rates,
)


class MetaFormerPooling(nn.Module):
    """Subtracts each token from the mean of the window around it: equation 4 of the paper."""

    def __init__(self, config: MetaFormerConfig, stage: int) -> None:
        super().__init__()
        size = config.pool_size
        self.pool = nn.AvgPool2d(size, stride=1, padding=size // 2, count_include_pad=False)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        mean = self.pool(hidden_states.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return mean - hidden_states, None


class MetaFormerIdentity(nn.Identity):
    """Returns the tokens unchanged."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, None]:
        return hidden_states, None


class MetaFormerHeads(nn.Module):
    """Base class of the mixers with heads: projections to query, key and value, and of the output."""

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
        """Returns query and key (B, H, R, L, K) and value (B, H, R, L, V) of tokens (B, R, L, C)."""
        projected = (projection(hidden_states) for projection in (self.q_proj, self.k_proj, self.v_proj))
        return tuple(each.unflatten(-1, (self.heads, -1)).permute(0, 3, 1, 2, 4) for each in projected)


class MetaFormerRetention(MetaFormerHeads):
    """Multi-scale retention over the tokens row by row, with RetNet's gate and norm of each head."""

    def __init__(self, config: MetaFormerConfig, stage: int) -> None:
        super().__init__(config, stage)
        size, value_size = self.o_proj.out_features, self.o_proj.in_features
        self.decay = HeadDecay(config.decays(stage))
        self.g_proj = nn.Linear(size, value_size, bias=config.qkv_bias) if config.use_output_gate else None
        self.gate_fn = ACT2FN[config.output_gate_act]
        self.kernels = load_kernels("auto")

    def forward(
        self, hidden_states: Tensor, output_attentions: bool | None = None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the mixed tokens (B, R, L, C), and the retention map (B, H, T, T) if the call asks for it, else None."""
        query, key, value = self.project(hidden_states)
        operands = query * self.scaling, key, value, self.decay(query.dtype, query.device)
        output, maps = self.retain(*operands, asks_for_maps(self.config, output_attentions))  # (B, H, R, L, V)
        if self.config.use_head_norm:
            output = F.rms_norm(output, output.shape[-1:], eps=self.config.layer_norm_eps)
        output = output.permute(0, 2, 3, 1, 4).flatten(3).to(hidden_states.dtype)
        if self.g_proj is not None:
            output = output * self.gate_fn(self.g_proj(hidden_states))
        return self.o_proj(output), maps

    def retain(
        self, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, output_maps: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the retention (B, H, R, L, V) of the tokens and, with `output_maps`, its map (B, H, T, T), else None."""
        (_, heads, *grid, key_dim), value_dim, both_ways = query.shape, value.shape[-1], self.config.bidirectional
        query, key, value = (tensor.flatten(2, 3) for tensor in (query, key, value))  # (B, H, T, .)
        layout, chunk_size = layout_of((1, query.shape[2]), query.device), default_chunk_size(key_dim, value_dim)
        sizes = heads, heads, heads, key_dim, value_dim, chunk_size, both_ways
        kernels = kernels_of_call(self.kernels, layout, query.dtype, sizes)
        options = {"with_final": False, "bidirectional": both_ways, "maps": output_maps, "kernels": kernels}
        plan = Plan(layout, None, 1.0, [log_decay], self.config.retention_form, chunk_size, **options)
        output, _, maps = plan.compute(0, query, key, value)
        return output.unflatten(2, grid), maps


class MetaFormerManhattanRetention(MetaFormerRetention):
    """Multi-scale retention over the grid of tokens."""

    def retain(self, query, key, value, log_decay, output_maps):
        maps = manhattan_map(query, key, log_decay) if output_maps else None
        form = "parallel" if output_maps else self.config.retention_form
        return manhattan_retention(query, key, value, log_decay, form=form, scores=maps), maps


class MetaFormerAttention(MetaFormerHeads):
    """Multi-head softmax attention, without positions."""

    def __init__(self, config: MetaFormerConfig, stage: int) -> None:
        super().__init__(config, stage)
        self.is_causal = not config.bidirectional

    def forward(
        self, hidden_states: Tensor, output_attentions: bool | None = None, **kwargs
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the mixed tokens (B, R, L, C), and the attention map (B, H, T, T) if the call asks for it, else None."""
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
    """Normalises (B, R, L, C) over all tokens and channels of an image, with one weight and bias per channel."""

    def __init__(self, config: MetaFormerConfig, size: int) -> None:
        super().__init__(1, size, eps=config.layer_norm_eps)


class MetaFormerBlock(GradientCheckpointingLayer):
    """Token mixer and feed-forward network, each a branch of the residual stream."""

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

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        branch, _ = self.mixer(self.mixer_norm(hidden_states), **kwargs)
        hidden_states = self.mixer_branch(hidden_states, branch)
        return self.mlp_branch(hidden_states, self.mlp(self.mlp_norm(hidden_states)))


class MetaFormerPatchEmbedding(nn.Conv2d):
    """Overlapping patches at the start of a stage: (B, channels of the previous stage, rows, columns) -> (B, C, R, L)."""

    def __init__(self, config: MetaFormerConfig, stage: int = 0) -> None:
        channels = config.hidden_sizes[stage - 1] if stage > 0 else config.num_channels
        patch = config.patch_sizes[stage], config.strides[stage], config.padding[stage]
        super().__init__(channels, config.hidden_sizes[stage], *patch)


class MetaFormerStage(nn.Module):
    """The blocks of one resolution, after a patch embedding in all stages but the first."""

    def __init__(self, config: MetaFormerConfig, stage: int) -> None:
        super().__init__()
        self.patch_embedding = MetaFormerPatchEmbedding(config, stage) if stage > 0 else None
        rates = drop_path_rates(config.drop_path_rate, config.depths)[stage]
        self.blocks = nn.ModuleList([MetaFormerBlock(config, stage, rate) for rate in rates])

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
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
    _can_record_outputs = {"hidden_states": MetaFormerStage, "attentions": [MetaFormerRetention, MetaFormerAttention]}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            init.trunc_normal_(module.weight, std=self.config.initializer_range)


class MetaFormerModel(StagedModelMixin, MetaFormerPreTrainedModel):
    """Stem and stages, without a head.

    With PoolFormer's patches, the last stage has 1/32 of the image's height and width, rounded up.
    """

    stem_class, stage_class = MetaFormerPatchEmbedding, MetaFormerStage


class MetaFormerForImageClassification(ImageClassifierMixin, MetaFormerPreTrainedModel):
    """MetaFormer with a classifier on the mean of its normalised tokens."""

    model_class = MetaFormerModel

    def add_head(self, config: MetaFormerConfig, size: int) -> None:
        self.norm = MetaFormerNorm(config, size)
        super().add_head(config, size)

    def classify(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        normed = self.norm(outputs.last_hidden_state.permute(0, 2, 3, 1))  # (B, R, L, C)
        return self.classifier(normed.mean(dim=(1, 2)))


class MetaFormerBackbone(StagedBackboneMixin, MetaFormerPreTrainedModel):
    """MetaFormer as a pyramid of feature maps, each with its own norm, for detection and segmentation."""

    model_class, new_norm = MetaFormerModel, MetaFormerNorm
