# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RMT: a vision transformer of four stages, with attention that decays with Manhattan distance (arXiv 2309.11523).

Shapes in comments: B images, R rows and L columns of tokens, T = R · L tokens counted row by row, H heads, K head size,
C channels of a stage.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..modules.layers import ComputedBuffer, HeadDecay, angles, attention_map, eager_attention_forward, integer_frequencies
from ..ops.gradients import rotate
from ..ops.layout import OnDevice
from .configuration_rmt import RMTConfig
from .vision_blocks import (
    ChannelsLast,
    ImageClassifierMixin,
    ResidualBranch,
    StagedBackboneMixin,
    StagedModelMixin,
    VisionPreTrainedModel,
    asks_for_maps,
    drop_path_rates,
)


class RMTGeometry(OnDevice):
    """Rotations and decays of all blocks of a stage in one call.

    Attributes:
        cos, sin: (T, 1, K/2), float32 or wider.
        decay: (1, H, T, T), ln γ^(|Δrow| + |Δcolumn|), added to the scores; None in a decomposed stage.
        row_decay: (1, H, L, L), ln γ^|Δcolumn| between the tokens of a row; None in a whole stage.
        column_decay: (1, H, R, R), ln γ^|Δrow| between the tokens of a column; None in a whole stage.
    """

    def __init__(self, angle: Tensor, decay=None, row_decay=None, column_decay=None) -> None:
        self.cos, self.sin = angle.cos(), angle.sin()
        self.decay, self.row_decay, self.column_decay = decay, row_decay, column_decay


class RMTPositions(ComputedBuffer):
    """Computes the decay of each head and the rotation of each position, for a grid of any size."""

    COMPUTED = "frequency"

    def __init__(self, config: RMTConfig, stage: int) -> None:
        super().__init__()
        self.config, self.stage = config, stage
        self.decomposed = config.attention_types[stage] == "decomposed"
        self.decay = HeadDecay(config.decays(stage))
        self.frequency = nn.Buffer(self.compute(), persistent=False)

    def compute(self, device: torch.device | None = None) -> Tensor:
        """Returns the `integer_frequencies` of theta^(-linspace(0, 1, K/2)), (K/2,) int64."""
        pairs = self.config.hidden_sizes[self.stage] // self.config.num_attention_heads[self.stage] // 2
        radians = [self.config.rope_theta ** (-pair / max(pairs - 1, 1)) for pair in range(pairs)]
        return integer_frequencies(radians, device)

    def forward(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> RMTGeometry:
        """Returns the geometry of a grid of rows x columns tokens, computed in float32 or wider. Decays have `dtype`."""
        angle = angles(torch.arange(rows * columns, device=device)[:, None], self.frequency, dtype)
        log_decay = self.decay(dtype, device)[:, None, None]
        places = (torch.arange(length, device=device) for length in (columns, rows))
        # (1, H, L, L) and (1, H, R, R)
        of_rows, of_columns = (((place[:, None] - place).abs() * log_decay)[None] for place in places)
        if self.decomposed:
            return RMTGeometry(angle, row_decay=of_rows.to(dtype), column_decay=of_columns.to(dtype))
        decay = of_columns[:, :, :, None, :, None] + of_rows[:, :, None, :, None, :]
        return RMTGeometry(angle, decay.reshape(1, -1, rows * columns, rows * columns).to(dtype))


class RMTAttention(nn.Module):
    """Manhattan self-attention, whole or decomposed, with locally enhanced position encoding (LePE).

    As in the released models, the logarithm of the decay is added to the scores before the softmax. The paper multiplies the
    softmax by the decay.
    """

    def __init__(self, config: RMTConfig, stage: int) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_sizes[stage]
        self.head_dim = size // config.num_attention_heads[stage]
        self.scaling = self.head_dim**-0.5
        self.decomposed = config.attention_types[stage] == "decomposed"
        self.is_causal = False
        self.q_proj = nn.Linear(size, size)
        self.k_proj = nn.Linear(size, size)
        self.v_proj = nn.Linear(size, size)
        self.lepe = RMTDepthwiseConvolution(size, kernel_size=5)
        self.o_proj = nn.Linear(size, size)

    def forward(
        self, hidden_states: Tensor, geometry: RMTGeometry, output_attentions: bool | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the mixed tokens (B, R, L, C), and the attention map (B, H, T, T) if the call asks for it, else None."""
        batch, rows, columns, size = hidden_states.shape
        value = self.v_proj(hidden_states)
        position_encoding, of_heads = self.lepe(value), (batch, rows * columns, -1, self.head_dim)  # (B, T, H, K)
        query = rotate(self.q_proj(hidden_states).reshape(of_heads), geometry.cos, geometry.sin).to(value.dtype)
        key = rotate(self.k_proj(hidden_states).reshape(of_heads), geometry.cos, geometry.sin).to(value.dtype)
        value, attention = value.reshape(of_heads), None
        if asks_for_maps(self.config, output_attentions):  # computes the output from the map, so that gradients reach it
            if self.decomposed:
                # Attention along the rows, then along the columns, has one map, the product of two, because a single path
                # leads from a token to another: along its own column, then along the other's row.
                query, key = (tensor.unflatten(1, (rows, columns)).permute(0, 3, 1, 2, 4) for tensor in (query, key))
                in_row = attention_map(query, key, geometry.row_decay[:, :, None], self.scaling)  # (B, H, R, L, L)
                query, key = query.transpose(2, 3), key.transpose(2, 3)
                in_column = attention_map(query, key, geometry.column_decay[:, :, None], self.scaling)  # (B, H, L, R, R)
                attention = torch.einsum("bhlrs,bhslm->bhrlsm", in_column, in_row).flatten(4, 5).flatten(2, 3)
            else:
                attention = attention_map(query.transpose(1, 2), key.transpose(1, 2), geometry.decay, self.scaling)
            output = torch.einsum("bhts,bshk->bthk", attention, value)
        elif self.decomposed:
            query, key, value = (tensor.unflatten(1, (rows, columns)) for tensor in (query, key, value))
            value = self._attend(query, key, value, geometry.row_decay)
            query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))  # (B, L, R, H, K)
            output = self._attend(query, key, value, geometry.column_decay).transpose(1, 2)
        else:
            output = self._attend(query, key, value, geometry.decay)
        return self.o_proj(output.reshape(batch, rows, columns, size) + position_encoding), attention

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
        """Returns the attention among the T tokens of (..., T, H, K), separately for each index of leading dimensions."""
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        shape = value.shape
        query, key, value = (tensor.reshape(-1, *shape[-3:]).transpose(1, 2) for tensor in (query, key, value))
        output, _ = attend(self, query, key, value, decay.to(query.dtype), scaling=self.scaling, dropout=0.0)
        return output.reshape(shape)


class RMTDepthwiseConvolution(ChannelsLast, nn.Conv2d):
    """A depthwise convolution over tokens (B, R, L, C)."""

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)


class RMTMLP(nn.Module):
    """Feed-forward network with a convolution of the inner activations."""

    def __init__(self, config: RMTConfig, stage: int) -> None:
        super().__init__()
        size = config.hidden_sizes[stage]
        inner_size = int(config.mlp_ratios[stage] * size)
        self.fc1 = nn.Linear(size, inner_size)
        self.act_fn = ACT2FN[config.hidden_act]
        self.convolution = RMTDepthwiseConvolution(inner_size, kernel_size=3)
        self.fc2 = nn.Linear(inner_size, size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_states = self.act_fn(self.fc1(hidden_states))
        return self.fc2(hidden_states + self.convolution(hidden_states))


class RMTBlock(GradientCheckpointingLayer):
    """Conditional position encoding, attention and feed-forward network, each a branch of the residual stream."""

    def __init__(self, config: RMTConfig, stage: int, drop_path_rate: float) -> None:
        super().__init__()
        size = config.hidden_sizes[stage]
        layer_scale = config.layer_scale_init_value if config.use_layer_scale[stage] else None
        self.position_encoding = RMTDepthwiseConvolution(size, kernel_size=3)
        self.attention_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.attention = RMTAttention(config, stage)
        self.attention_branch = ResidualBranch(size, layer_scale, drop_path_rate)
        self.mlp_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.mlp = RMTMLP(config, stage)
        self.mlp_branch = ResidualBranch(size, layer_scale, drop_path_rate)

    def forward(self, hidden_states: Tensor, geometry: RMTGeometry, **kwargs: Any) -> Tensor:
        hidden_states = hidden_states + self.position_encoding(hidden_states)
        branch, _ = self.attention(self.attention_norm(hidden_states), geometry=geometry, **kwargs)
        hidden_states = self.attention_branch(hidden_states, branch)
        return self.mlp_branch(hidden_states, self.mlp(self.mlp_norm(hidden_states)))


class RMTConvolution(nn.Sequential):
    """3x3 convolution and batch norm. A stride of 2 halves height and width, rounded up."""

    def __init__(self, config: RMTConfig, in_channels: int, out_channels: int, stride=1, activate=False) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1)
        self.norm = nn.BatchNorm2d(out_channels, eps=config.batch_norm_eps)
        self.act_fn = ACT2FN[config.hidden_act] if activate else nn.Identity()


class RMTStem(nn.Sequential):
    """Computes tokens at a quarter of the image's height and width, with four convolutions."""

    def __init__(self, config: RMTConfig) -> None:
        super().__init__()
        size = config.hidden_sizes[0]
        self.layers = nn.Sequential(
            RMTConvolution(config, config.num_channels, size // 2, stride=2, activate=True),
            RMTConvolution(config, size // 2, size // 2, activate=True),
            RMTConvolution(config, size // 2, size, stride=2, activate=True),
            RMTConvolution(config, size, size),
        )


class RMTStage(nn.Module):
    """The blocks of one resolution, after patch merging in all stages but the first."""

    def __init__(self, config: RMTConfig, stage: int) -> None:
        super().__init__()
        sizes = config.hidden_sizes
        self.merging = RMTConvolution(config, sizes[stage - 1], sizes[stage], stride=2) if stage > 0 else None
        self.positions = RMTPositions(config, stage)
        rates = drop_path_rates(config.drop_path_rate, config.depths)[stage]
        self.blocks = nn.ModuleList([RMTBlock(config, stage, rate) for rate in rates])

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        if self.merging is not None:
            hidden_states = self.merging(hidden_states)
        geometry = self.positions(*hidden_states.shape[2:], hidden_states.dtype, hidden_states.device)
        hidden_states = hidden_states.permute(0, 2, 3, 1).contiguous()
        for block in self.blocks:
            hidden_states = block(hidden_states, geometry=geometry, **kwargs)
        return hidden_states.permute(0, 3, 1, 2)


class RMTPreTrainedModel(VisionPreTrainedModel):
    config: RMTConfig
    base_model_prefix = "rmt"
    _no_split_modules = ["RMTBlock"]
    _input_embed_layer = "stem"
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": RMTStage, "attentions": RMTAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, nn.Conv2d):  # PyTorch's own initialisation, as in the authors' code
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
            bound = module.weight[0].numel() ** -0.5
            init.uniform_(module.bias, -bound, bound)


class RMTModel(StagedModelMixin, RMTPreTrainedModel):
    """Stem and stages, without a head. The last stage has 1/32 of the image's height and width, rounded up."""

    stem_class, stage_class = RMTStem, RMTStage


class RMTProjection(nn.Module):
    """The classifier's hidden layer, applied to each token."""

    def __init__(self, config: RMTConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_sizes[-1], config.projection_size)
        self.norm = nn.BatchNorm2d(config.projection_size, eps=config.batch_norm_eps)
        self.act_fn = ACT2FN[config.projection_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        projected = self.norm(self.dense(hidden_states).permute(0, 3, 1, 2))
        return self.act_fn(projected).permute(0, 2, 3, 1)


class RMTForImageClassification(ImageClassifierMixin, RMTPreTrainedModel):
    """RMT with a classifier of images and, in the token-label releases, a classifier of tokens.

    With a token classifier, half of the largest token logit of each label is added to the image's logits, in training too.
    """

    model_class = RMTModel

    def add_head(self, config: RMTConfig, size: int) -> None:
        self.projection = RMTProjection(config)
        super().add_head(config, config.projection_size)
        self.token_classifier = None
        if config.token_classifier_input is not None and config.num_labels > 0:
            sizes = {"projection": config.projection_size, "hidden_states": size}
            self.token_classifier = nn.Linear(sizes[config.token_classifier_input], config.num_labels)

    def classify(self, outputs: BaseModelOutputWithPooling) -> Tensor:
        tokens = outputs.last_hidden_state.permute(0, 2, 3, 1)  # (B, R, L, C)
        projected = self.projection(tokens)
        logits = self.classifier(projected.mean(dim=(1, 2)))
        if self.token_classifier is None:
            return logits
        on_projection = self.config.token_classifier_input == "projection"
        token_logits = self.token_classifier(projected if on_projection else tokens)  # (B, R, L, num_labels)
        return logits + 0.5 * token_logits.amax(dim=(1, 2))


class RMTBackbone(StagedBackboneMixin, RMTPreTrainedModel):
    """RMT as a pyramid of feature maps, each with its own layer norm, for detection and segmentation."""

    model_class = RMTModel

    def new_norm(self, config: RMTConfig, size: int) -> nn.Module:
        return nn.LayerNorm(size)  # the authors' backbones for dense prediction have PyTorch's default epsilon, too
