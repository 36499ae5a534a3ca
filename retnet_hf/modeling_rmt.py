# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""RMT: a vision transformer of four stages whose attention fades with Manhattan distance (arXiv 2309.11523).

Shapes in comments: B images, R rows and L columns of tokens, T = R · L tokens counted row by row, H heads, K head size,
C channels of a stage.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BackboneOutput, BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .block_functions import rotate
from .configuration_rmt import RMTConfig
from .vision_blocks import (
    HeadDecay,
    ResidualBranch,
    VisionPreTrainedModel,
    attention_map,
    check_pixel_values,
    drop_path_rates,
    eager_attention_forward,
    feature_pyramid,
    image_classifier_output,
)


class RMTGeometry(NamedTuple):
    """What all blocks of a stage share in one forward call."""

    cos: Tensor  # (T, 1, K/2), float32 or wider, as sin
    sin: Tensor
    decay: Tensor | None  # (1, H, T, T) ln γ^(|Δrow| + |Δcolumn|), added to the scores; None in a decomposed stage
    row_decay: Tensor | None  # (1, H, L, L) ln γ^|Δcolumn|, between the tokens of a row; None in a whole stage
    column_decay: Tensor | None  # (1, H, R, R) ln γ^|Δrow|, between the tokens of a column


class RMTPositions(HeadDecay):
    """Decay of each head and rotation of each position, for a grid of any size.

    Both are kept as integers, which no cast of the model to another type rounds. A frequency is in units of 2^-64 turns per
    token, so that its product with a position drops whole turns and nothing else.
    """

    def __init__(self, config: RMTConfig, stage: int) -> None:
        super().__init__(config.decays(stage))
        self.config = config
        self.stage = stage
        self.decomposed = config.attention_types[stage] == "decomposed"
        self.frequency = nn.Buffer(self.compute_frequency(), persistent=False)

    def compute_frequency(self, device: torch.device | None = None) -> Tensor:
        """(K/2,) int64: theta^(-linspace(0, 1, K/2)) in units of 2^-64 turns."""
        pairs = self.config.hidden_sizes[self.stage] // self.config.num_attention_heads[self.stage] // 2
        turns = [self.config.rope_theta ** (-pair / max(pairs - 1, 1)) / (2 * math.pi) for pair in range(pairs)]
        return torch.tensor([round(turn * 2**64) for turn in turns], dtype=torch.int64, device=device)

    def forward(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> RMTGeometry:
        """The geometry of a grid of rows x columns tokens, computed in float32 or wider; its decays are of type `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        phase = torch.arange(rows * columns, device=device)[:, None, None] * self.frequency.to(device)
        angle = phase.to(wide) * (2 * math.pi / 2**64)
        log_decay = super().forward(dtype, device)[:, None, None]

        def decay_along(length: int) -> Tensor:  # (1, H, length, length)
            position = torch.arange(length, device=device)
            return ((position[:, None] - position).abs() * log_decay)[None]

        if self.decomposed:
            return RMTGeometry(angle.cos(), angle.sin(), None, decay_along(columns).to(dtype), decay_along(rows).to(dtype))
        between_rows = decay_along(rows)[:, :, :, None, :, None]
        between_columns = decay_along(columns)[:, :, None, :, None, :]
        decay = (between_rows + between_columns).reshape(1, -1, rows * columns, rows * columns)
        return RMTGeometry(angle.cos(), angle.sin(), decay.to(dtype), None, None)


class RMTAttention(nn.Module):
    """Manhattan self-attention, whole or decomposed, with locally enhanced position encoding (LePE).

    The decay is added to the scores as a logarithm, under the softmax, as the released models have it; the paper multiplies
    the softmax by it.
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
        self,
        hidden_states: Tensor,  # (B, R, L, C)
        geometry: RMTGeometry,
        output_attentions: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the mixed tokens (B, R, L, C) and, if asked for, which token attends to which, (B, H, T, T)."""
        batch, rows, columns, size = hidden_states.shape
        value = self.v_proj(hidden_states)
        position_encoding = self.lepe(value)

        def heads(projected: Tensor) -> Tensor:  # (B, R, L, C) -> (B, T, H, K)
            return projected.reshape(batch, rows * columns, -1, self.head_dim)

        query = rotate(heads(self.q_proj(hidden_states)), geometry.cos, geometry.sin).to(value.dtype)
        key = rotate(heads(self.k_proj(hidden_states)), geometry.cos, geometry.sin).to(value.dtype)
        value, attention = heads(value), None
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_attentions:  # the output is made of the map, so that a gradient reaches it
            attention = self._map(query, key, geometry, (rows, columns))
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
        """Attention among the T tokens of (..., T, H, K), for each of what stands before them by itself."""
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        shape = value.shape
        query, key, value = (tensor.reshape(-1, *shape[-3:]).transpose(1, 2) for tensor in (query, key, value))
        output, _ = attend(self, query, key, value, decay.to(query.dtype), scaling=self.scaling, dropout=0.0)
        return output.reshape(shape)

    def _map(self, query: Tensor, key: Tensor, geometry: RMTGeometry, grid: tuple[int, int]) -> Tensor:
        """Which token attends to which, (B, H, T, T).

        A decomposed stage goes along the rows, then along the columns. The two together are one map, since a token reaches
        another in a single way: along its own column to the row of the other, and along that row.
        """
        if not self.decomposed:
            return attention_map(query.transpose(1, 2), key.transpose(1, 2), geometry.decay, self.scaling)
        query, key = (tensor.unflatten(1, grid).permute(0, 3, 1, 2, 4) for tensor in (query, key))  # (B, H, R, L, K)
        in_row = attention_map(query, key, geometry.row_decay[:, :, None], self.scaling)  # (B, H, R, L, L)
        query, key = query.transpose(2, 3), key.transpose(2, 3)
        in_column = attention_map(query, key, geometry.column_decay[:, :, None], self.scaling)  # (B, H, L, R, R)
        attention = torch.einsum("bhlrs,bhslm->bhrlsm", in_column, in_row)
        return attention.flatten(4, 5).flatten(2, 3)


class RMTDepthwiseConvolution(nn.Conv2d):
    """A convolution of each channel by itself, over tokens (B, R, L, C)."""

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return super().forward(hidden_states.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)


class RMTMLP(nn.Module):
    """Feed-forward network with a convolution in its middle."""

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
    """Conditional position encoding, attention and feed-forward, each a branch of the residual stream."""

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

    def forward(
        self,
        hidden_states: Tensor,  # (B, R, L, C)
        geometry: RMTGeometry,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Tensor:
        hidden_states = hidden_states + self.position_encoding(hidden_states)
        branch, _ = self.attention(self.attention_norm(hidden_states), geometry=geometry, **kwargs)
        hidden_states = hidden_states + self.attention_branch(branch)
        return hidden_states + self.mlp_branch(self.mlp(self.mlp_norm(hidden_states)))


class RMTConvolution(nn.Module):
    """3x3 convolution and batch norm; a stride of 2 halves the size, rounded up."""

    def __init__(
        self, config: RMTConfig, in_channels: int, out_channels: int, stride: int = 1, activate: bool = False
    ) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1)
        self.norm = nn.BatchNorm2d(out_channels, eps=config.batch_norm_eps)
        self.act_fn = ACT2FN[config.hidden_act] if activate else nn.Identity()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.act_fn(self.norm(self.convolution(hidden_states)))


class RMTStem(nn.Module):
    """Images to tokens of a quarter of their size, by four convolutions."""

    def __init__(self, config: RMTConfig) -> None:
        super().__init__()
        size = config.hidden_sizes[0]
        self.layers = nn.ModuleList(
            [
                RMTConvolution(config, config.num_channels, size // 2, stride=2, activate=True),
                RMTConvolution(config, size // 2, size // 2, activate=True),
                RMTConvolution(config, size // 2, size, stride=2, activate=True),
                RMTConvolution(config, size, size),
            ]
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        """(B, num_channels, height, width) -> (B, C, R, L)."""
        hidden_states = pixel_values.to(self.layers[0].convolution.weight.dtype)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


class RMTStage(nn.Module):
    """Patch merging, but in the first stage, and the blocks of one resolution."""

    def __init__(self, config: RMTConfig, stage: int) -> None:
        super().__init__()
        self.merging = None
        if stage > 0:
            self.merging = RMTConvolution(config, config.hidden_sizes[stage - 1], config.hidden_sizes[stage], stride=2)
        self.positions = RMTPositions(config, stage)
        rates = drop_path_rates(config.drop_path_rate, config.depths)[stage]
        self.blocks = nn.ModuleList([RMTBlock(config, stage, rate) for rate in rates])

    def forward(self, hidden_states: Tensor, **kwargs: Unpack[TransformersKwargs]) -> Tensor:
        """(B, C, R, L) of the stage before -> (B, C, R, L)."""
        if self.merging is not None:
            hidden_states = self.merging(hidden_states)
        geometry = self.positions(*hidden_states.shape[2:], hidden_states.dtype, hidden_states.device)
        hidden_states = hidden_states.permute(0, 2, 3, 1).contiguous()
        for block in self.blocks:
            hidden_states = block(hidden_states, geometry=geometry, **kwargs)
        return hidden_states.permute(0, 3, 1, 2)


class RMTPreTrainedModel(VisionPreTrainedModel):
    config: RMTConfig
    config_class = RMTConfig
    base_model_prefix = "rmt"
    _no_split_modules = ["RMTBlock"]
    _input_embed_layer = "stem"
    _supports_sdpa = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": RMTStage, "attentions": RMTAttention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RMTPositions):
            init.copy_(module.frequency, module.compute_frequency(module.frequency.device))
        elif isinstance(module, nn.Conv2d):  # as the authors leave them, in PyTorch's own initialisation
            init.kaiming_uniform_(module.weight, a=math.sqrt(5))
            bound = module.weight[0].numel() ** -0.5
            init.uniform_(module.bias, -bound, bound)


class RMTModel(RMTPreTrainedModel):
    """Stem and stages, without a head."""

    def __init__(self, config: RMTConfig) -> None:
        super().__init__(config)
        self.stem = RMTStem(config)
        self.stages = nn.ModuleList([RMTStage(config, stage) for stage in range(len(config.depths))])
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self, pixel_values: torch.FloatTensor | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> BaseModelOutputWithPooling:
        r"""
        Args:
            pixel_values: (B, num_channels, height, width), of any height and width.
            output_hidden_states: returns what the stem and each stage put out, (B, C, R, L) with C, R and L of the stage.
            output_attentions: returns which token attends to which in each block, (B, H, T, T). Every attention is then
                written out, which takes memory quadratic in T, in decomposed stages too.

        Returns:
            last_hidden_state: (B, C, R, L), R and L being height and width over 32, rounded up. pooler_output: (B, C), its
            mean over the tokens.

        Raises:
            ValueError: for missing pixel_values, or of another number of channels than the configuration says.
        """
        check_pixel_values(pixel_values, self.config.num_channels)
        hidden_states = self.stem(pixel_values)
        for stage in self.stages:
            hidden_states = stage(hidden_states, **kwargs)
        return BaseModelOutputWithPooling(last_hidden_state=hidden_states, pooler_output=hidden_states.mean(dim=(2, 3)))


class RMTProjection(nn.Module):
    """The classifier's hidden layer, on each token."""

    def __init__(self, config: RMTConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_sizes[-1], config.projection_size)
        self.norm = nn.BatchNorm2d(config.projection_size, eps=config.batch_norm_eps)
        self.act_fn = ACT2FN[config.projection_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, R, L, C) -> (B, R, L, projection size)."""
        projected = self.norm(self.dense(hidden_states).permute(0, 3, 1, 2))
        return self.act_fn(projected).permute(0, 2, 3, 1)


class RMTForImageClassification(RMTPreTrainedModel):
    """RMT with a classifier of images and, in the token-label releases, one of tokens beside it."""

    accepts_loss_kwargs = False

    def __init__(self, config: RMTConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.rmt = RMTModel(config)
        self.projection = RMTProjection(config)

        def classifier(size: int) -> nn.Module:
            return nn.Linear(size, config.num_labels) if config.num_labels > 0 else nn.Identity()

        self.classifier = classifier(config.projection_size)
        self.token_classifier = None
        if config.token_classifier_input is not None and config.num_labels > 0:
            on_projection = config.token_classifier_input == "projection"
            self.token_classifier = classifier(config.projection_size if on_projection else config.hidden_sizes[-1])
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.FloatTensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        r"""
        Arguments as in `RMTModel.forward`, and

        Args:
            labels: (B,) class numbers; (B,) numbers for a regression; (B, num_labels) zeros and ones for several labels an
                image. `config.problem_type` says which, or else `config.num_labels` and the type of the labels.

        Returns:
            logits: (B, num_labels). With a token classifier they are those of the image plus half of the largest over its
            tokens, in training too.

        Example:

        ```python
        >>> import torch
        >>> from retnet_hf import RMTConfig, RMTForImageClassification

        >>> config = RMTConfig.from_preset("tiny", depths=[1, 1, 1, 1], num_labels=10)
        >>> RMTForImageClassification(config).eval()(torch.rand(1, 3, 64, 96)).logits.shape
        torch.Size([1, 10])
        ```
        """
        outputs: BaseModelOutputWithPooling = self.rmt(pixel_values, return_dict=True, **kwargs)
        tokens = outputs.last_hidden_state.permute(0, 2, 3, 1)  # (B, R, L, C)
        projected = self.projection(tokens)
        logits = self.classifier(projected.mean(dim=(1, 2)))
        if self.token_classifier is not None:
            on_projection = self.config.token_classifier_input == "projection"
            token_logits = self.token_classifier(projected if on_projection else tokens)  # (B, R, L, num_labels)
            logits = logits + 0.5 * token_logits.amax(dim=(1, 2))
        return image_classifier_output(self, logits, labels, outputs, **kwargs)


class RMTBackbone(BackboneMixin, RMTPreTrainedModel):
    """RMT as a pyramid of feature maps, each under a layer norm of its own, for detection and segmentation.

    A folder is loaded by this class: `AutoBackbone.from_pretrained` takes names of the Hub alone, whatever the model.
    """

    def __init__(self, config: RMTConfig) -> None:
        super().__init__(config)
        self.num_features = [config.hidden_sizes[0], *config.hidden_sizes]
        self.rmt = RMTModel(config)
        # with PyTorch's own epsilon, as the authors' backbones for dense prediction
        self.norms = nn.ModuleDict({name: nn.LayerNorm(size) for name, size in zip(self.out_features, self.channels)})
        self.post_init()

    @can_return_tuple
    @filter_output_hidden_states
    def forward(self, pixel_values: torch.FloatTensor | None = None, **kwargs: Unpack[TransformersKwargs]) -> BackboneOutput:
        r"""
        Arguments as in `RMTModel.forward`.

        Returns:
            feature_maps: of each of `config.out_features`, (B, C, R, L). hidden_states: those of `RMTModel`, without the
            norms of the feature maps.

        Example:

        ```python
        >>> import torch
        >>> from retnet_hf import RMTBackbone, RMTConfig

        >>> config = RMTConfig.from_preset("tiny", depths=[1, 1, 1, 1], out_features=["stage1", "stage4"])
        >>> [tuple(features.shape) for features in RMTBackbone(config).eval()(torch.rand(1, 3, 64, 96)).feature_maps]
        [(1, 64, 16, 24), (1, 512, 2, 3)]
        ```
        """
        return feature_pyramid(self, self.rmt(pixel_values, return_dict=True, **kwargs))


__all__ = ["RMTBackbone", "RMTForImageClassification", "RMTModel", "RMTPreTrainedModel"]
