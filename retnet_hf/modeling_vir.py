# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""ViR: a vision transformer whose attention is retention over the patches, row by row (arXiv 2310.19731).

Shapes in comments: B images, R rows and L columns of patches, P = R · L patches counted row by row, T tokens (the patches
and, where there is one, the class token after them), H heads, K head size, D hidden size.
"""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.backbone_utils import BackboneMixin, filter_output_hidden_states
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPooling,
    ImageClassifierOutput,
    MaskedImageModelingOutput,
)
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_vir import ViRConfig
from .retention_forms import (
    FORMS,
    DecayTables,
    bidirectional_retention,
    choose_form,
    decay_tables,
    default_chunk_size,
    retention,
    retention_map,
)
from .vision_blocks import (
    FeedForward,
    HeadDecay,
    ResidualBranch,
    VisionPreTrainedModel,
    check_pixel_values,
    drop_path_rates,
    image_classifier_output,
)


class ViRStates:
    """What each layer remembers of the tokens that it has read, (B, H, K, K); None before the first.

    Not a list, of which a layer on another device would be given a copy.
    """

    def __init__(self, layers: int) -> None:
        self.layers: list[Tensor | None] = [None] * layers


class ViRPlan(NamedTuple):
    """What all layers of one forward call share."""

    form: str  # "parallel", "recurrent" or "chunkwise"
    log_decay: Tensor  # (H,), float32 or wider
    tables: DecayTables | None  # None where the recurrence runs token by token
    output_maps: bool
    states: ViRStates | None  # which the layers take up and leave behind; None where an image is read at once
    segments: list[tuple[int, "ViRPlan"]] | None = None  # lengths of what a block reads part by part, and their plans


class ViREmbeddings(nn.Module):
    """Images to tokens: patches, their positions, and the class token after them."""

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
        self,
        pixel_values: Tensor,  # (B, num_channels, height, width)
        image_shape: tuple[int, int],
        first_row: int = 0,
        bool_masked_pos: Tensor | None = None,  # (B, P)
    ) -> Tensor:
        """The tokens (B, T, D) of whole images, or of a band of them.

        Args:
            image_shape: height and width of the whole images.
            first_row: of the patches of the whole image, that with which `pixel_values` begin.
        """
        pixel_values = pixel_values.to(self.patch_embeddings.weight.dtype)
        patches = self.patch_embeddings(pixel_values)  # (B, D, R, L)
        last_row = first_row + patches.shape[2]
        patches = patches.flatten(2).transpose(1, 2)
        if bool_masked_pos is not None:
            patches = torch.where(bool_masked_pos.to(torch.bool)[..., None], self.mask_token.to(patches.dtype), patches)
        rows, columns = (image // patch for image, patch in zip(image_shape, self.config.patch_shape))
        hidden_states = patches + self.positions(rows, columns, first_row, last_row)
        if self.class_token is not None and last_row == rows:
            class_token = self.class_token.expand(hidden_states.shape[0], -1, -1).to(hidden_states.dtype)
            hidden_states = torch.cat([hidden_states, class_token], dim=1)
        return self.dropout(hidden_states)

    def positions(self, rows: int, columns: int, first_row: int, last_row: int) -> Tensor:
        """The learned positions of some rows of a grid of rows x columns patches, (1, (last_row - first_row) · L, D).

        On another grid than the one they were learned for they are interpolated, bicubically as ViT's are, which is a
        product with one matrix for the rows and one for the columns. So a few rows cost no more than themselves.
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
    """A projection of each head's slice of the hidden state, (B, T, D) -> (B, T, D)."""

    def __init__(self, heads: int, head_dim: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, head_dim, head_dim))  # (H, out, in)
        self.bias = nn.Parameter(torch.zeros(heads, head_dim)) if bias else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        slices = hidden_states.unflatten(-1, (len(self.weight), -1))  # (B, T, H, K)
        projected = torch.einsum("bthi,hoi->btho", slices, self.weight)
        return (projected if self.bias is None else projected + self.bias).flatten(2)


class ViRRetentionLayerNorm(nn.LayerNorm):
    """A layer norm that computes in the precision of its input, which for a retention's output is float32 or wider."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        return F.layer_norm(hidden_states, self.normalized_shape, self.weight.to(dtype), self.bias.to(dtype), self.eps)


class ViRRetention(nn.Module):
    """Multi-head retention over the tokens."""

    def __init__(self, config: ViRConfig, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.scaling = config.head_dim**-0.5
        self.bidirectional = config.bidirectional
        size = config.hidden_size

        def projection() -> nn.Module:
            if config.use_per_head_projections:
                return ViRPerHeadLinear(config.num_attention_heads, config.head_dim, bias=config.qkv_bias)
            return nn.Linear(size, size, bias=config.qkv_bias)

        self.q_proj, self.k_proj, self.v_proj = projection(), projection(), projection()
        self.norm = ViRRetentionLayerNorm(size, eps=config.layer_norm_eps) if config.use_retention_norm else None
        self.act_fn = nn.Identity() if config.retention_act is None else ACT2FN[config.retention_act]
        self.o_proj = nn.Linear(size, size)

    def forward(
        self,
        hidden_states: Tensor,  # (B, T, D)
        plan: ViRPlan,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the mixed tokens (B, T, D) and, if the plan asks for it, the retention map (B, H, T, T)."""

        def heads(projected: Tensor) -> Tensor:  # (B, T, D) -> (B, H, T, K)
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query = heads(self.q_proj(hidden_states) * self.scaling)
        key, value = heads(self.k_proj(hidden_states)), heads(self.v_proj(hidden_states))
        maps = None
        if plan.output_maps:  # the output is made of them, so that a gradient reaches it
            maps = retention_map(query, key, plan.tables, plan.tables if self.bidirectional else None)
        output = self._retain(query, key, value, plan, maps).transpose(1, 2).flatten(2)  # (B, T, D)
        if self.norm is not None:
            output = self.norm(output)
        return self.o_proj(self.act_fn(output.to(hidden_states.dtype))), maps

    def _retain(self, query: Tensor, key: Tensor, value: Tensor, plan: ViRPlan, maps: Tensor | None) -> Tensor:
        """Retention among the tokens, (B, H, T, K), and over what the state holds, which then takes them in."""
        arguments = {"form": plan.form, "scores": maps}
        if self.bidirectional:  # without gaps, a sequence turned around decays as it does forwards
            tables = (plan.tables, plan.tables)
            return bidirectional_retention(query, key, value, plan.log_decay, tables=tables, **arguments)
        state = None if plan.states is None else plan.states.layers[self.layer_idx]
        output, state = retention(query, key, value, plan.log_decay, state, tables=plan.tables, **arguments)
        if plan.states is not None:
            plan.states.layers[self.layer_idx] = state
        return output


class ViRBlock(GradientCheckpointingLayer):
    """Retention and feed-forward, each a branch of the residual stream."""

    def __init__(self, config: ViRConfig, layer_idx: int, drop_path_rate: float) -> None:
        super().__init__()
        size = config.hidden_size
        layer_scale = config.layer_scale_init_value if config.use_layer_scale else None
        self.retention_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.retention = ViRRetention(config, layer_idx)
        self.retention_branch = ResidualBranch(size, layer_scale, drop_path_rate, config.hidden_dropout)
        self.mlp_norm = nn.LayerNorm(size, eps=config.layer_norm_eps)
        self.mlp = FeedForward(size, config.intermediate_size, config.hidden_act, config.activation_dropout)
        self.mlp_branch = ResidualBranch(size, layer_scale, drop_path_rate, config.hidden_dropout)

    def forward(
        self,
        hidden_states: Tensor,  # (B, T, D)
        plan: ViRPlan,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Tensor:
        if plan.segments is None:
            return self._transform(hidden_states, plan, **kwargs)
        parts = hidden_states.split([length for length, _ in plan.segments], dim=1)
        return torch.cat([self._transform(part, own, **kwargs) for part, (_, own) in zip(parts, plan.segments)], dim=1)

    def _transform(self, hidden_states: Tensor, plan: ViRPlan, **kwargs: Unpack[TransformersKwargs]) -> Tensor:
        branch, _ = self.retention(self.retention_norm(hidden_states), plan=plan, **kwargs)
        hidden_states = hidden_states + self.retention_branch(branch)
        return hidden_states + self.mlp_branch(self.mlp(self.mlp_norm(hidden_states)))


class ViRPreTrainedModel(VisionPreTrainedModel):
    config: ViRConfig
    config_class = ViRConfig
    base_model_prefix = "vir"
    _no_split_modules = ["ViREmbeddings", "ViRBlock"]
    _input_embed_layer = "patch_embeddings"
    _can_record_outputs = {"hidden_states": ViRBlock, "attentions": ViRRetention}

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            init.trunc_normal_(module.weight, std=std)
        elif isinstance(module, ViRPerHeadLinear):
            init.trunc_normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, ViREmbeddings):
            init.trunc_normal_(module.position_embeddings, std=std)
            for token in (module.class_token, module.mask_token):
                if token is not None:
                    init.trunc_normal_(token, std=std)


class ViRModel(ViRPreTrainedModel):
    """Embeddings and blocks, without a head.

    Args:
        use_mask_token: whether there is a token to put in the place of masked patches.
    """

    def __init__(self, config: ViRConfig, use_mask_token: bool = False) -> None:
        super().__init__(config)
        self.embeddings = ViREmbeddings(config, use_mask_token)
        self.decay = HeadDecay(config.decays())
        [rates] = drop_path_rates(config.drop_path_rate, [config.num_hidden_layers])
        self.layers = nn.ModuleList([ViRBlock(config, index, rate) for index, rate in enumerate(rates)])
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
            bool_masked_pos: (B, P) bool, True where the mask token takes the place of a patch.
            interpolate_pos_encoding: takes images of any size that patches divide, and interpolates the positions.
            retention_form: "auto", "parallel", "recurrent" or "chunkwise"; `config.retention_form` if absent. Memory is
                quadratic in the number of patches in the parallel form, linear in the others.
            output_attentions: returns the retention maps Q Kᵀ ⊙ D of every layer, (B, H, T, T), in the parallel form.

        Returns:
            last_hidden_state: (B, T, D), after the last norm: the patches row by row and, with a `config.pooling` of
            "class_token", that token; twice as many with `config.mirror_sequence`. pooler_output: (B, D), as
            `config.pooling` says.

        Raises:
            ValueError: for inputs that do not fit the configuration or each other, in a sentence.
        """
        self._check(pixel_values)
        image_shape = tuple(pixel_values.shape[2:])
        if not interpolate_pos_encoding and image_shape != self.config.image_shape:
            raise ValueError(
                f"pixel_values must be of height and width {self.config.image_shape}, the image_size of the configuration, "
                f"got {image_shape}; with interpolate_pos_encoding=True any size is taken."
            )
        if bool_masked_pos is not None and self.embeddings.mask_token is None:
            raise ValueError(
                "bool_masked_pos must be None in a model without a mask token (use_mask_token=True gives it one)."
            )
        rows, columns = (image // patch for image, patch in zip(image_shape, self.config.patch_shape))
        mask_shape = (pixel_values.shape[0], rows * columns)
        if bool_masked_pos is not None and bool_masked_pos.shape != mask_shape:
            raise ValueError(
                f"bool_masked_pos must be of shape (batch, patches), {mask_shape} for these images, "
                f"got {tuple(bool_masked_pos.shape)}."
            )
        if rows * columns == 1 and self.config.pooling == "mean_but_first" and not self.config.mirror_sequence:
            raise ValueError("pixel_values must have more than one patch with a pooling of mean_but_first.")
        hidden_states = self.embeddings(pixel_values, image_shape, bool_masked_pos=bool_masked_pos)
        if self.config.mirror_sequence:
            hidden_states = torch.cat([hidden_states, hidden_states.flip(1)], dim=1)
        output_maps = bool(kwargs.get("output_attentions", self.config.output_attentions))
        plan = self._plan(hidden_states, retention_form, output_maps)
        for layer in self.layers:
            hidden_states = layer(hidden_states, plan=plan, **kwargs)

        tokens = self.norm(hidden_states)
        pooled = tokens[:, -1]
        if self.config.pooling.startswith("mean"):
            pooled = self.norm(self._averaged(hidden_states).mean(dim=1))
        return BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=pooled)

    @torch.no_grad()
    def stream_bands(
        self, bands: Iterable[Tensor], image_size: tuple[int, int], retention_form: str | None = None
    ) -> Iterator[BaseModelOutputWithPooling]:
        r"""
        Reads images from top to bottom in bands of rows, in memory that does not grow with their height.

        Nothing but the state of each layer, (B, H, K, K), goes from one band to the next. What comes out is what `forward`
        gives for the whole images, their positions interpolated where `image_size` is not the configuration's.

        Args:
            bands: (B, num_channels, band height, width) each, their heights multiples of the patch height.
            image_size: height and width of the whole images.
            retention_form: as in `forward`.

        Yields:
            for each band, last_hidden_state: (B, T, D) its patches and, after those of the last band, the class token, if
                there is one. pooler_output: (B, D) with the last band, None before.

        Raises:
            ValueError: for bands that do not fit the configuration or `image_size`, and in a model in which a token sees
                those after it.

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
        patch_height, patch_width = self.config.patch_shape
        if height % patch_height or width % patch_width:
            raise ValueError(
                f"image_size must be a multiple of the patch_size {self.config.patch_shape}, got {(height, width)}."
            )
        if height * width == patch_height * patch_width and self.config.pooling == "mean_but_first":
            raise ValueError("image_size must hold more than one patch with a pooling of mean_but_first.")
        states, top, total, patches, batch = ViRStates(len(self.layers)), 0, 0, 0, None
        for band in bands:
            self._check(band)
            if batch is not None and len(band) != batch:
                raise ValueError(f"bands must be of the same images, got one of {len(band)} images after bands of {batch}.")
            batch = len(band)
            if band.shape[3] != width or top + band.shape[2] > height:
                raise ValueError(
                    f"bands must fill an image of height and width {(height, width)}, got one of {tuple(band.shape[2:])} "
                    f"after {top} rows of pixels."
                )
            hidden_states = self.embeddings(band, (height, width), first_row=top // patch_height)
            plan = self._plan(hidden_states, retention_form, states=states)
            for layer in self.layers:
                hidden_states = layer(hidden_states, plan=plan)

            tokens, pooled = self.norm(hidden_states), None
            if self.config.pooling.startswith("mean"):
                averaged = self._averaged(hidden_states) if top == 0 else hidden_states
                total = total + averaged.sum(dim=1, dtype=plan.log_decay.dtype)
                patches += averaged.shape[1]
            top += band.shape[2]
            if top == height:
                mean = self.config.pooling.startswith("mean")
                pooled = self.norm((total / patches).to(tokens.dtype)) if mean else tokens[:, -1]
            yield BaseModelOutputWithPooling(last_hidden_state=tokens, pooler_output=pooled)
        if top < height:
            raise ValueError(f"bands must fill an image of height {height}, got {top} rows of pixels.")

    def _averaged(self, hidden_states: Tensor) -> Tensor:
        """The tokens that are averaged, of all from the first."""
        return hidden_states[:, 1:] if self.config.pooling == "mean_but_first" else hidden_states

    def _check(self, pixel_values: Tensor | None) -> None:
        """Raises ValueError for what is not a batch of images, or a band of them, that patches divide."""
        check_pixel_values(pixel_values, self.config.num_channels)
        patch_shape = self.config.patch_shape
        if any(size % patch or size == 0 for size, patch in zip(pixel_values.shape[2:], patch_shape)):
            raise ValueError(
                f"pixel_values must have a height and width that the patch_size {patch_shape} divides, "
                f"got {tuple(pixel_values.shape[2:])}."
            )

    def _plan(
        self,
        hidden_states: Tensor,
        retention_form: str | None,
        output_maps: bool = False,
        states: ViRStates | None = None,
    ) -> ViRPlan:
        """Form and decays of one call, computed once for all layers."""
        config, length = self.config, hidden_states.shape[1]
        form = retention_form or config.retention_form
        if form not in FORMS:
            raise ValueError(f"retention_form must be one of {', '.join(FORMS)}, got {form!r}.")
        if output_maps and form not in ("auto", "parallel"):
            raise ValueError(
                f"retention_form must be auto or parallel with output_attentions=True, got {form!r}: "
                "the other forms never compute the retention map."
            )
        chunk_size = config.chunk_size or default_chunk_size(config.head_dim, config.head_dim)
        if form == "auto":
            form = "parallel" if output_maps else choose_form(length, chunk_size)

        log_decay = self.decay(hidden_states.dtype, hidden_states.device)

        def plan_of(length: int) -> ViRPlan:
            tables = None
            if form != "recurrent" or length == 1:
                tables = decay_tables(log_decay, length, chunk_size if form == "chunkwise" else None)
            return ViRPlan(form, log_decay, tables, output_maps, states)

        lengths = self._segment_lengths(length, chunk_size) if form == "chunkwise" else [length]
        if len(lengths) == 1:
            return plan_of(length)
        states = states or ViRStates(len(self.layers))
        plans = {length: plan_of(length) for length in set(lengths)}
        return plans[lengths[0]]._replace(segments=[(length, plans[length]) for length in lengths])

    def _segment_lengths(self, length: int, chunk_size: int) -> list[int]:
        """Tokens that a block reads at a time, in whole chunks but for the last; all at once in training."""
        segment_size = self.config.segment_size
        training = self.training or torch.is_grad_enabled()
        if segment_size is None or length <= segment_size or self.config.bidirectional or training:
            return [length]
        even = math.ceil(length / math.ceil(length / segment_size))
        segment = math.ceil(even / chunk_size) * chunk_size
        return [min(segment, length - start) for start in range(0, length, segment)]


class ViRForImageClassification(ViRPreTrainedModel):
    """ViR with a classifier that reads the class token, the last patch, or the mean of the patches."""

    accepts_loss_kwargs = False

    def __init__(self, config: ViRConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.vir = ViRModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels) if config.num_labels > 0 else nn.Identity()
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.FloatTensor | None = None,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        retention_form: str | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> ImageClassifierOutput:
        r"""
        Arguments as in `ViRModel.forward`, and

        Args:
            labels: (B,) class numbers; (B,) numbers for a regression; (B, num_labels) zeros and ones for several labels an
                image. `config.problem_type` says which, or else `config.num_labels` and the type of the labels.

        Example:

        ```python
        >>> import torch
        >>> from retnet_hf import ViRConfig, ViRForImageClassification

        >>> model = ViRForImageClassification(ViRConfig.from_preset("tiny-16", num_hidden_layers=2, num_labels=10)).eval()
        >>> model(torch.rand(1, 3, 512, 384), interpolate_pos_encoding=True).logits.shape
        torch.Size([1, 10])
        ```
        """
        outputs: BaseModelOutputWithPooling = self.vir(
            pixel_values,
            interpolate_pos_encoding=interpolate_pos_encoding,
            retention_form=retention_form,
            return_dict=True,
            **kwargs,
        )
        return image_classifier_output(self, self.classifier(outputs.pooler_output), labels, outputs, **kwargs)

    @torch.no_grad()
    def classify_bands(
        self, bands: Iterable[Tensor], image_size: tuple[int, int], retention_form: str | None = None
    ) -> ImageClassifierOutput:
        """The logits of images that are read in bands of rows, from top to bottom: see `ViRModel.stream_bands`."""
        for outputs in self.vir.stream_bands(bands, image_size, retention_form):
            pooled = outputs.pooler_output
        return ImageClassifierOutput(logits=self.classifier(pooled))


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
        Arguments as in `ViRModel.forward`.

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
        outputs: BaseModelOutputWithPooling = self.vir(
            pixel_values,
            bool_masked_pos=bool_masked_pos,
            interpolate_pos_encoding=interpolate_pos_encoding,
            retention_form=retention_form,
            return_dict=True,
            **kwargs,
        )
        decoded = self.decoder(feature_map(self.config, outputs.last_hidden_state, pixel_values))
        pixels = decoded.unflatten(1, (self.config.num_channels, *self.config.patch_shape))
        reconstruction = pixels.permute(0, 1, 4, 2, 5, 3).reshape(pixel_values.shape)
        loss = None
        if bool_masked_pos is not None:
            patch_height, patch_width = self.config.patch_shape
            mask = bool_masked_pos.view(-1, 1, *decoded.shape[2:])
            mask = mask.repeat_interleave(patch_height, dim=2).repeat_interleave(patch_width, dim=3)
            error = F.l1_loss(reconstruction, pixel_values.to(reconstruction.dtype), reduction="none")
            loss = (error * mask).sum() / (mask.sum() + 1e-5) / self.config.num_channels
        return MaskedImageModelingOutput(
            loss=loss, reconstruction=reconstruction, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class ViRBackbone(BackboneMixin, ViRPreTrainedModel):
    """The patches after some of the blocks, as feature maps for detection and segmentation, for images of any size.

    A folder is loaded by this class: `AutoBackbone.from_pretrained` takes names of the Hub alone, whatever the model.
    """

    def __init__(self, config: ViRConfig) -> None:
        super().__init__(config)
        require_one_token_per_patch(self)
        self.num_features = [config.hidden_size] * (config.num_hidden_layers + 1)
        self.vir = ViRModel(config)
        self.post_init()

    @can_return_tuple
    @filter_output_hidden_states
    def forward(
        self,
        pixel_values: torch.FloatTensor | None = None,
        retention_form: str | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BackboneOutput:
        r"""
        Arguments as in `ViRModel.forward`; positions are interpolated where the size asks for it.

        Returns:
            feature_maps: of each of `config.out_features`, (B, D, R, L), after the last norm if `config.apply_layernorm`.
            hidden_states: those of `ViRModel`, without that norm.

        Example:

        ```python
        >>> import torch
        >>> from retnet_hf import ViRBackbone, ViRConfig

        >>> config = ViRConfig.from_preset("tiny-16", num_hidden_layers=4, out_features=["stage2", "stage4"])
        >>> [tuple(features.shape) for features in ViRBackbone(config).eval()(torch.rand(1, 3, 64, 96)).feature_maps]
        [(1, 192, 4, 6), (1, 192, 4, 6)]
        ```
        """
        outputs: BaseModelOutputWithPooling = self.vir(
            pixel_values, interpolate_pos_encoding=True, retention_form=retention_form, return_dict=True, **kwargs
        )
        feature_maps = tuple(
            feature_map(self.config, self.vir.norm(tokens) if self.config.apply_layernorm else tokens, pixel_values)
            for name, tokens in zip(self.stage_names, outputs.hidden_states)
            if name in self.out_features
        )
        return BackboneOutput(feature_maps=feature_maps, hidden_states=outputs.hidden_states, attentions=outputs.attentions)


def require_one_token_per_patch(model: ViRPreTrainedModel) -> None:
    """Raises ValueError where the model's configuration puts every patch into the sequence twice."""
    if model.config.mirror_sequence:
        raise ValueError(f"mirror_sequence must be False for {type(model).__name__}, which wants one token for each patch.")


def feature_map(config: ViRConfig, tokens: Tensor, pixel_values: Tensor) -> Tensor:
    """The patches among the tokens (B, T, D) of these images, as a map (B, D, R, L)."""
    rows, columns = (image // patch for image, patch in zip(pixel_values.shape[2:], config.patch_shape))
    return tokens[:, : rows * columns].transpose(1, 2).unflatten(2, (rows, columns))


__all__ = ["ViRBackbone", "ViRForImageClassification", "ViRForMaskedImageModeling", "ViRModel", "ViRPreTrainedModel"]
