# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""ViR: a vision transformer with retention over the patches, row by row, instead of attention (arXiv 2310.19731).

Shapes in comments: B images, R rows and L columns of patches, P = R · L patches counted row by row, T tokens (the patches,
then the class token if the model has one), H heads, K head size, D hidden size.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput, MaskedImageModelingOutput
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..arguments.checks import require_known_arguments
from ..modules.layers import HeadDecay, has_hooks
from ..ops.kernels import kernels_of_call, load_kernels
from ..ops.layout import layout_of
from ..ops.plan import Plan
from ..ops.retention_forms import default_chunk_size
from .configuration_vir import ViRConfig
from .vision_blocks import (
    FeedForward,
    ImageClassifierMixin,
    ResidualBranch,
    VisionBackboneMixin,
    VisionPreTrainedModel,
    asks_for_maps,
    check_pixel_values,
    drop_path_rates,
)


# Without gradients, a block on a CPU reads this many patches at a time, so that its intermediate results stay in the cache.
PIECE_SIZE = 2048


class ViREmbeddings(nn.Module):
    """Computes the tokens of images: patches with learned positions, and the class token after them."""

    def __init__(self, config: ViRConfig, use_mask_token: bool = False) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.patch_embeddings = nn.Conv2d(config.num_channels, size, config.patch_shape, stride=config.patch_shape)
        self.position_embeddings = nn.Parameter(torch.zeros(1, math.prod(config.grid_shape), size))
        self.class_token = nn.Parameter(torch.zeros(1, 1, size)) if config.pooling == "class_token" else None
        self.mask_token = nn.Parameter(torch.zeros(1, 1, size)) if use_mask_token else None
        self.dropout = nn.Dropout(config.embedding_dropout)

    def forward(
        self, pixel_values: Tensor, image_shape: tuple[int, int], first_row: int = 0, bool_masked_pos: Tensor | None = None
    ) -> Tensor:
        """Returns the tokens (B, T, D) of images of shape `image_shape`, or of a band of them that begins at `first_row`."""
        patches = self.patch_embeddings(pixel_values.to(self.patch_embeddings.weight.dtype))  # (B, D, R, L)
        last_row = first_row + patches.shape[2]
        patches = patches.flatten(2).transpose(1, 2)
        if bool_masked_pos is not None:
            patches = torch.where(bool_masked_pos.to(torch.bool)[..., None], self.mask_token.to(patches.dtype), patches)
        rows, columns = self.config.grid_of(image_shape)
        hidden_states = patches + self.positions(rows, columns, first_row, last_row)
        if self.class_token is not None and last_row == rows:
            class_token = self.class_token.expand(hidden_states.shape[0], -1, -1).to(hidden_states.dtype)
            hidden_states = torch.cat([hidden_states, class_token], dim=1)
        hidden_states = self.dropout(hidden_states)
        return torch.cat([hidden_states, hidden_states.flip(1)], dim=1) if self.config.mirror_sequence else hidden_states

    def positions(self, rows: int, columns: int, first_row: int, last_row: int) -> Tensor:
        """Returns the positions of some rows of a grid, (1, (last_row - first_row) L, D), as in ViT.

        One matrix interpolates the rows and one the columns, so that a few rows do not cost more in a higher image.
        """
        own_rows, own_columns = self.config.grid_shape
        if (rows, columns) == (own_rows, own_columns):
            return self.position_embeddings[:, first_row * columns : last_row * columns]
        table = self.position_embeddings.unflatten(1, (own_rows, own_columns))[0]
        dtype = torch.promote_types(table.dtype, torch.float32)

        def weights(learned: int, wanted: int) -> Tensor:  # (wanted, learned)
            unit_vectors = torch.eye(learned, dtype=dtype, device=table.device)[None, :, :, None]
            resized = F.interpolate(unit_vectors, size=(wanted, 1), mode="bicubic", align_corners=False)
            return resized[0, :, :, 0].T

        with torch.autocast(table.device.type, enabled=False):
            positions = torch.einsum("ri,ijd->rjd", weights(own_rows, rows)[first_row:last_row], table.to(dtype))
            positions = torch.einsum("lj,rjd->rld", weights(own_columns, columns), positions)
        return positions.flatten(0, 1)[None].to(table.dtype)


class ViRPerHeadLinear(nn.Module):
    """Projects each head's slice of the hidden state separately, (B, T, D) -> (B, T, D)."""

    def __init__(self, heads: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, head_dim, head_dim))  # (H, out, in)
        self.bias = nn.Parameter(torch.zeros(heads, head_dim)) if bias else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        slices = hidden_states.unflatten(-1, (len(self.weight), -1))  # (B, T, H, K)
        projected = torch.einsum("bthi,hoi->btho", slices, self.weight)
        return (projected if self.bias is None else projected + self.bias).flatten(2)


class ViRRetentionLayerNorm(nn.LayerNorm):
    """A layer norm that computes in the dtype of its input, which is float32 or wider for the output of retention."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        return F.layer_norm(hidden_states, self.normalized_shape, self.weight.to(dtype), self.bias.to(dtype), self.eps)


class ViRRetention(nn.Module):
    """Multi-head retention over the tokens."""

    def __init__(self, config: ViRConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        size = config.hidden_size
        kind, sizes = nn.Linear, (size, size)
        if config.use_per_head_projections:
            kind, sizes = ViRPerHeadLinear, (config.num_attention_heads, config.head_dim)
        self.q_proj, self.k_proj, self.v_proj = (kind(*sizes, bias=config.qkv_bias) for _ in range(3))
        self.norm = ViRRetentionLayerNorm(size, eps=config.layer_norm_eps) if config.use_retention_norm else None
        self.act_fn = nn.Identity() if config.retention_act is None else ACT2FN[config.retention_act]
        self.o_proj = nn.Linear(size, size)

    def forward(
        self, hidden_states: Tensor, plan: Plan, states: dict[nn.Module, Tensor] | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the mixed tokens (B, T, D), and the retention map (B, H, T, T) if the call asks for it, else None.

        `states`: the state (B, H, K, K) of each layer after earlier tokens, updated.
        """
        projected = (projection(hidden_states) for projection in (self.q_proj, self.k_proj, self.v_proj))
        query, key, value = (each.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in projected)  # (B, H, T, K)
        state = None if states is None else states.get(self)
        output, state, maps = plan.compute(0, *plan.rotate(query, key), value, state)
        if states is not None:
            states[self] = state
        output = output.transpose(1, 2).flatten(2)  # (B, T, D)
        if self.norm is not None:
            output = self.norm(output)
        return self.o_proj(self.act_fn(output.to(hidden_states.dtype))), maps


class ViRBlock(GradientCheckpointingLayer):
    """Retention and feed-forward network, each a branch of the residual stream."""

    def __init__(self, config: ViRConfig, drop_path_rate: float) -> None:
        super().__init__()
        size = config.hidden_size
        layer_scale = config.layer_scale_init_value if config.use_layer_scale else None
        self.retention_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.retention = ViRRetention(config)
        self.retention_branch = ResidualBranch(size, layer_scale, drop_path_rate, config.hidden_dropout)
        self.mlp_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.mlp = FeedForward(size, config.intermediate_size, config.hidden_act, config.activation_dropout)
        self.mlp_branch = ResidualBranch(size, layer_scale, drop_path_rate, config.hidden_dropout)

    def forward(
        self, hidden_states: Tensor, plans: list[Plan], states: dict[nn.Module, Tensor] | None = None, **kwargs: Any
    ) -> Tensor:
        """Returns the output (B, T, D). There is a plan for each piece of the tokens. `states` as in `ViRRetention`."""
        if len(plans) > 1:
            states = {} if states is None else states
            output, size = torch.empty_like(hidden_states), plans[0].layout.tokens
            for piece, place, plan in zip(hidden_states.split(size, dim=1), output.split(size, dim=1), plans):
                place.copy_(self.forward(piece, [plan], states, **kwargs))
            return output
        branch, _ = self.retention(self.retention_norm(hidden_states), plan=plans[0], states=states, **kwargs)
        hidden_states = self.retention_branch(hidden_states, branch)
        return self.mlp_branch(hidden_states, self.mlp(self.mlp_norm(hidden_states)))


class ViRPreTrainedModel(VisionPreTrainedModel):
    config: ViRConfig
    base_model_prefix = "vir"
    _no_split_modules = ["ViREmbeddings", "ViRBlock"]
    _input_embed_layer = "patch_embeddings"
    _can_record_outputs = {"hidden_states": ViRBlock, "attentions": ViRRetention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Conv2d, ViRPerHeadLinear)):
            init.trunc_normal_(module.weight, std=std)
        if isinstance(module, ViRPerHeadLinear) and module.bias is not None:
            init.zeros_(module.bias)
        if isinstance(module, ViREmbeddings):
            for parameter in module.parameters(recurse=False):
                init.trunc_normal_(parameter, std=std)


class ViRModel(ViRPreTrainedModel):
    """Embeddings and blocks, without a head.

    Args:
        use_mask_token: whether the model has a learned token that replaces masked patches.
    """

    def __init__(self, config: ViRConfig, use_mask_token: bool = False) -> None:
        super().__init__(config)
        self.embeddings = ViREmbeddings(config, use_mask_token)
        self.decay = HeadDecay(config.decays())
        self.kernels = load_kernels("auto")
        self.first_pooled = {"mean": 0, "mean_but_first": 1}.get(config.pooling)  # the first token of the mean, if any
        [rates] = drop_path_rates(config.drop_path_rate, [config.num_hidden_layers])
        self.layers = nn.ModuleList([ViRBlock(config, rate) for rate in rates])
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.FloatTensor | None = None,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        retention_form: str | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPooling:
        r"""
        Args:
            pixel_values: (B, num_channels, height, width).
            bool_masked_pos: (B, P) bool, True for patches that the mask token replaces.
            interpolate_pos_encoding: interpolates the positions, so that images may have any whole number of patches.
            retention_form: "auto", "parallel", "recurrent" or "chunkwise"; `config.retention_form` if absent. Memory is
                quadratic in the number of patches in the parallel form, linear in the others.
            output_attentions: returns the retention maps Q Kᵀ ⊙ D of every layer, (B, H, T, T), in the parallel form.

        Returns:
            last_hidden_state: (B, T, D), after the last norm: the patches row by row, then the class token if
            `config.pooling` is "class_token"; twice as many tokens with `config.mirror_sequence`. pooler_output: (B, D),
            as `config.pooling` says.

        Raises:
            ValueError: if the inputs do not fit the configuration or each other.
        """
        require_known_arguments(self, kwargs)
        self._check(pixel_values)
        image_shape = tuple(pixel_values.shape[2:])
        self._check_mean("pixel_values", image_shape)
        if not interpolate_pos_encoding and image_shape != self.config.image_shape:
            needed = f"{self.config.image_shape}, the image_size of the configuration, got {image_shape}"
            advice = "Pass interpolate_pos_encoding=True for other sizes."
            raise ValueError(f"pixel_values must be of height and width {needed}. {advice}")
        if bool_masked_pos is not None and self.embeddings.mask_token is None:
            advice = "Create the model with use_mask_token=True."
            raise ValueError(f"bool_masked_pos must be None in a model without a mask token. {advice}")
        mask_shape = (pixel_values.shape[0], math.prod(self.config.grid_of(image_shape)))
        if bool_masked_pos is not None and bool_masked_pos.shape != mask_shape:
            needed = f"(batch, patches), {mask_shape} for these images"
            raise ValueError(f"bool_masked_pos must be of shape {needed}, got {tuple(bool_masked_pos.shape)}.")
        # No variable holds the embeddings, so that they are freed after the first block.
        hidden_states = self._read(self.embeddings(pixel_values, image_shape, 0, bool_masked_pos), retention_form, kwargs)
        tokens = self.norm(hidden_states)
        first = self.first_pooled
        pooled = tokens[:, -1] if first is None else self.norm(hidden_states[:, first:].mean(dim=1))
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=pooled)

    @torch.no_grad()
    def stream_bands(
        self, bands: Iterable[Tensor], image_size: tuple[int, int], retention_form: str | None = None
    ) -> Iterator[BaseModelOutputWithPooling]:
        r"""
        Reads images from top to bottom in bands of rows, with memory that does not grow with the height of the images.

        Only the state of each layer, (B, H, K, K), is kept from one band to the next. The outputs equal the outputs of
        `forward` for the whole images, with interpolated positions if `image_size` differs from the configuration's.

        Args:
            bands: bands of (B, num_channels, band height, width), with heights that are multiples of the patch height.
            image_size: height and width of the whole images.
            retention_form: as in `forward`.

        Yields:
            for each band, last_hidden_state: (B, T, D), its patches and, in the last band, the class token if the model has
                one. pooler_output: (B, D) for the last band, None before.

        Raises:
            ValueError: if the bands do not fit the configuration or `image_size`, or if the model lets tokens see later
                tokens.

        Example:

        ```python
        >>> import torch
        >>> from retnet_hf import ViRConfig, ViRModel

        >>> model = ViRModel(ViRConfig.from_preset("tiny-16", num_hidden_layers=2)).eval()
        >>> bands = (torch.rand(1, 3, 32, 512) for _ in range(16))
        >>> [outputs.last_hidden_state.shape[1] for outputs in model.stream_bands(bands, image_size=(512, 512))][-3:]
        [64, 64, 65]
        ```
        """
        if self.config.bidirectional or self.config.mirror_sequence:
            raise ValueError("bidirectional and mirror_sequence must be False to read an image in bands.")
        height, width = image_size
        patch_shape = patch_height, patch_width = self.config.patch_shape
        if height % patch_height or width % patch_width:
            raise ValueError(f"image_size must be a multiple of the patch_size {patch_shape}, got {(height, width)}.")
        self._check_mean("image_size", (height, width))
        states, top, total, patches, batch = {}, 0, 0, 0, None
        for band in bands:
            self._check(band)
            if batch is not None and len(band) != batch:
                raise ValueError(f"bands must all have the same batch size, got {len(band)} images after bands of {batch}.")
            batch = len(band)
            if band.shape[3] != width or top + band.shape[2] > height:
                given = f"{tuple(band.shape[2:])} after {top} rows of pixels"
                raise ValueError(f"bands must fill an image of height and width {(height, width)}, got one of {given}.")
            hidden_states = self.embeddings(band, (height, width), first_row=top // patch_height)
            hidden_states = self._read(hidden_states, retention_form, {"output_attentions": False}, states)
            tokens, pooled = self.norm(hidden_states), None
            if self.first_pooled is not None:
                averaged = hidden_states[:, self.first_pooled if top == 0 else 0 :]
                total = total + averaged.sum(dim=1, dtype=torch.promote_types(hidden_states.dtype, torch.float32))
                patches += averaged.shape[1]
            top += band.shape[2]
            if top == height:
                pooled = self.norm((total / patches).to(tokens.dtype)) if patches else tokens[:, -1]
            yield BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=pooled)
        if top < height:
            raise ValueError(f"bands must fill an image of height {height}, got {top} rows of pixels.")

    def _check(self, pixel_values: Tensor | None) -> None:
        check_pixel_values(pixel_values, self.config.num_channels)
        patch_shape = self.config.patch_shape
        if any(size % patch or size == 0 for size, patch in zip(pixel_values.shape[2:], patch_shape)):
            needed, given = f"that the patch_size {patch_shape} divides", tuple(pixel_values.shape[2:])
            raise ValueError(f"pixel_values must have a height and width {needed}, got {given}.")

    def _check_mean(self, argument: str, image_shape: tuple[int, int]) -> None:
        config = self.config
        if config.pooling == "mean_but_first" and not config.mirror_sequence and config.grid_of(image_shape) == (1, 1):
            raise ValueError(f"{argument} must have more than one patch if pooling is mean_but_first.")

    def _read(self, hidden_states: Tensor, retention_form: str | None, kwargs: dict, states: dict | None = None) -> Tensor:
        """Returns the output of the last block, (B, T, D). `kwargs` are further arguments of `forward`."""
        config, length = self.config, hidden_states.shape[1]
        maps = asks_for_maps(config, kwargs.get("output_attentions"))
        form = retention_form or config.retention_form
        chunk_size = config.chunk_size or default_chunk_size(config.head_dim, config.head_dim)
        log_decays = [self.decay(hidden_states.dtype, hidden_states.device)]  # of all layers
        whole = config.bidirectional or self.training or torch.is_grad_enabled() or form in ("parallel", "recurrent")
        whole = whole or hidden_states.device.type != "cpu" or has_hooks(self.layers.modules())
        lengths = [length]
        if not (whole or maps) and isinstance(length, int):  # in an exported program, the length may be symbolic
            size = math.ceil(length / (math.ceil(length / PIECE_SIZE) * chunk_size)) * chunk_size  # whole chunks
            lengths = [min(size, length - start) for start in range(0, length, size)]
        heads, head_dim, scale = config.num_attention_heads, config.head_dim, config.head_dim**-0.5
        sizes, fixed = (heads, heads, heads, head_dim, head_dim, chunk_size, config.bidirectional), (form, chunk_size)
        options = {"with_final": states is not None or len(lengths) > 1, "bidirectional": config.bidirectional, "maps": maps}

        plans = []
        for tokens in lengths:
            layout = layout_of((1, tokens), hidden_states.device)
            options["kernels"] = kernels_of_call(self.kernels, layout, hidden_states.dtype, sizes)
            plans.append(Plan(layout, None, scale, log_decays, *fixed, **options))
        for layer in self.layers:
            hidden_states = layer(hidden_states, plans=plans, states=states, **kwargs)
        return hidden_states


class ViRForImageClassification(ImageClassifierMixin, ViRPreTrainedModel):
    """ViR with a classifier that reads the class token, the last patch, or the mean of the patches."""

    model_class = ViRModel

    @torch.no_grad()
    def classify_bands(
        self, bands: Iterable[Tensor], image_size: tuple[int, int], retention_form: str | None = None
    ) -> ImageClassifierOutput:
        """Returns the logits of images that are read in bands of rows, from top to bottom: see `ViRModel.stream_bands`."""
        [outputs] = deque(self.vir.stream_bands(bands, image_size, retention_form), maxlen=1)
        return ImageClassifierOutput(logits=self.classify(outputs))


class ViRForMaskedImageModeling(ViRPreTrainedModel):
    """ViR with a decoder that fills in the pixels of masked patches, as in SimMIM (arXiv 2111.09886)."""

    def __init__(self, config: ViRConfig) -> None:
        super().__init__(config)
        require_one_token_per_patch(self)
        self.vir = ViRModel(config, use_mask_token=True)
        self.decoder = nn.Conv2d(config.hidden_size, config.num_channels * math.prod(config.patch_shape), kernel_size=1)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.FloatTensor | None = None,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        retention_form: str | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedImageModelingOutput:
        r"""
        Takes the arguments of `ViRModel.forward`.

        Returns:
            reconstruction: (B, num_channels, height, width). loss: with `bool_masked_pos`, the mean absolute error of the
            pixels of masked patches.

        Example:

        ```python
        >>> import torch
        >>> from retnet_hf import ViRConfig, ViRForMaskedImageModeling

        >>> model = ViRForMaskedImageModeling(ViRConfig.from_preset("tiny-16", num_hidden_layers=2, bidirectional=True))
        >>> masked = torch.rand(1, 196) < 0.6
        >>> model(torch.rand(1, 3, 224, 224), bool_masked_pos=masked).reconstruction.shape
        torch.Size([1, 3, 224, 224])
        ```
        """
        options = {"interpolate_pos_encoding": interpolate_pos_encoding, "retention_form": retention_form, **kwargs}
        outputs = self.vir(pixel_values, bool_masked_pos=bool_masked_pos, return_dict=True, **options)
        decoded = self.decoder(feature_map(self.config, outputs.last_hidden_state, pixel_values))
        pixels = decoded.unflatten(1, (self.config.num_channels, *self.config.patch_shape))
        reconstruction = pixels.permute(0, 1, 4, 2, 5, 3).reshape(pixel_values.shape)
        loss = None
        if bool_masked_pos is not None:
            mask = bool_masked_pos.view(-1, 1, *decoded.shape[2:])
            for dim, size in zip((2, 3), self.config.patch_shape):
                mask = mask.repeat_interleave(size, dim)
            error = F.l1_loss(reconstruction, pixel_values.to(reconstruction.dtype), reduction="none")
            loss = (error * mask).sum() / (mask.sum() + 1e-5) / self.config.num_channels
        return MaskedImageModelingOutput(loss, reconstruction, outputs.hidden_states, outputs.attentions)


class ViRBackbone(VisionBackboneMixin, ViRPreTrainedModel):
    """ViR as feature maps after some of the blocks, for detection and segmentation, for images of any size.

    The last norm is applied to each map if `config.apply_layernorm` is set.
    """

    model_class = ViRModel
    model_arguments = {"interpolate_pos_encoding": True}

    def __init__(self, config: ViRConfig) -> None:
        super().__init__(config)
        require_one_token_per_patch(self)
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)
        self.post_init()

    def feature_map(self, name: str, hidden_states: Tensor, pixel_values: Tensor) -> Tensor:
        tokens = self.vir.norm(hidden_states) if self.config.apply_layernorm else hidden_states
        return feature_map(self.config, tokens, pixel_values)


def require_one_token_per_patch(model: ViRPreTrainedModel) -> None:
    """Raises ValueError if the model's configuration has every patch twice in the sequence."""
    if model.config.mirror_sequence:
        raise ValueError(f"mirror_sequence must be False for {type(model).__name__}, which needs one token per patch.")


def feature_map(config: ViRConfig, tokens: Tensor, pixel_values: Tensor) -> Tensor:
    """Returns the patches among the tokens (B, T, D) of these images, as a map (B, D, R, L)."""
    rows, columns = config.grid_of(pixel_values.shape[2:])
    return tokens[:, : rows * columns].transpose(1, 2).unflatten(2, (rows, columns))
