# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""RetNet: a transformer whose attention is retention (arXiv 2307.08621).

Shapes in comments: B batch, T tokens, H heads, G key/value heads, K key size, V value size, D hidden size.
"""

import math
import os
from dataclasses import replace
from functools import wraps
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin, GenerationMode
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast, MaskedLMOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto import AutoModel
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple, logging
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .block_functions import gated, rms_norm, rotate, rotate_step, step_rotation
from .cards import ModelCardMixin
from .checkpoint_dialects import TORCHSCALE
from .checkpoint_loading import loading_transforms, names_in
from .configuration_retnet import RetNetConfig
from .continuous_batching import register, requests_of
from .decoding_programs import CHANGED, HeadProduct, LayerProgram, compile_layers, default_folder
from .fused_projections import FusesProjections, is_hooked, is_plain, lay_out_where_faster
from .kernels import load_kernels
from .linear_cross_entropy import linear_cross_entropy
from .retention_forms import (
    FORMS,
    bidirectional_retention,
    choose_form,
    default_chunk_size,
    multiplies_bfloat16,
    recurrent_step_,
    retention,
    retention_map,
)
from .retention_packed import packed_layout, packed_retention, packed_step_
from .retention_plan import PackedDocuments, RetentionPlan
from .retention_split import Context, context_layout, context_retention
from .retention_state import RetNetState, RetNetStateLayer, TakenIn, install_retention_layers, require_retention_alone
from .sequence_layout import SequenceLayout, packed_positions, sequence_layout
from .softmax_attention import attention_plan, softmax_attention
from .state_layer import StateLayer, first_in_use


logger = logging.get_logger(__name__)


class RetNetDecay(nn.Module):
    """ln γ of every head, never narrower than float32, whatever the model is cast to.

    Attributes:
        log_decay: (H,), or (layers, H) where layers have decays of their own.
    """

    def __init__(self, config: RetNetConfig) -> None:
        super().__init__()
        self.config = config
        layers = range(config.num_hidden_layers)
        self.heads_per_state = [config.num_attention_heads // config.state_heads(layer) for layer in layers]
        dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.log_decay = nn.Buffer(self.compute_log_decay(dtype), persistent=False)

    def compute_log_decay(self, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """ln γ from the configuration, computed in double precision."""
        config = self.config
        layers = range(config.num_hidden_layers) if config.has_decays_per_layer else range(1)
        log_decay = torch.tensor(
            [[math.log(decay) for decay in config.decays(layer)] for layer in layers], dtype=dtype, device=device
        )
        return log_decay if config.has_decays_per_layer else log_decay[0]

    def of_layer(self, layer: int) -> Tensor:
        """ln γ of the heads of a layer, (H,), or (G,) where those that a key/value head serves share their state."""
        log_decay = self.log_decay[layer] if self.log_decay.dim() == 2 else self.log_decay
        return log_decay[:: self.heads_per_state[layer]]

    def _apply(self, fn, recurse: bool = True) -> "RetNetDecay":
        super()._apply(fn, recurse)
        dtype = self.log_decay.dtype
        if dtype != torch.float32:  # a decay near 1, rounded to bfloat16, would forget at another rate
            self.log_decay = self.compute_log_decay(torch.promote_types(dtype, torch.float32), self.log_decay.device)
        return self


class RetNetRotaryEmbedding(nn.Module):
    """Cosines and sines of position times frequency, exact at any position.

    A frequency is kept as an integer, in units of 2^-64 turns per token. Its product with a position wraps around modulo
    2^64, which drops whole turns and nothing else: after a million tokens the angle is as accurate as after one. No cast
    of the model to another type touches integers.
    """

    def __init__(self, config: RetNetConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_scaling = 1.0  # yarn's, of queries and of keys
        self.frequency = nn.Buffer(self.compute_frequency(), persistent=False)

    def compute_frequency(self, device: torch.device | None = None) -> Tensor:
        """(K/2,) int64: theta^(-2i/K), or theta^(-linspace(0, 1, K/2)) with the end point, in units of 2^-64 turns.

        Those of other types are transformers', in its float32. Pairs that a partial rotation leaves out have 0.
        """
        config, parameters = self.config, self.config.rope_parameters
        pairs = int(config.head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
        if parameters["rope_type"] == "default":
            last = max(pairs - 1, 1) if config.rotary_endpoint else pairs
            radians = [parameters["rope_theta"] ** (-pair / last) for pair in range(pairs)]
        else:
            with torch.device("cpu"):  # whatever device models are made on, these are numbers
                found, self.attention_scaling = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
            radians = found.tolist()
        turns = [angle / (2 * math.pi) for angle in radians] + [0.0] * (config.head_dim // 2 - pairs)
        return torch.tensor([round(turn * 2**64) for turn in turns], dtype=torch.int64, device=device)

    def forward(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position (B|1, T) int64 -> cos, sin (B|1, 1, T, K/2), float32 or wider."""
        dtype = torch.promote_types(dtype, torch.float32)
        phase = position[:, None, :, None] * self.frequency.to(position.device)
        angle = phase.to(dtype) * (2 * math.pi / 2**64)
        if self.attention_scaling != 1.0:
            return angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling
        return angle.cos(), angle.sin()


def projection(
    in_features: int, out_features: int, gain: float = 1.0, on_value_path: bool = True, bias: bool = False
) -> nn.Linear:
    """A projection of a block, which knows how the paper initialises it.

    It is an `nn.Linear` and of no class derived from it, which bitsandbytes would leave unquantised.

    Args:
        gain: of the Xavier initialisation.
        on_value_path: whether DeepNet's initialisation shrinks it with depth.
    """
    linear = nn.Linear(in_features, out_features, bias=bias)
    linear.xavier_gain, linear.on_value_path = gain, on_value_path
    return linear


class RetNetRMSNorm(nn.RMSNorm):
    """RMS norm of the residual stream."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)


class RetNetHeadRMSNorm(nn.Module):
    """RMS norm of each head, in the precision it comes in; after retention it undoes the scale of queries and keys."""

    def __init__(self, head_size: int, eps: float, affine: bool) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(head_size)) if affine else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)


class RetNetHeadScale(nn.Module):
    """A learned factor on each head's output."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads))

    def forward(self, hidden_states: Tensor, heads: slice) -> Tensor:
        """(B, T, H, V), of some of the heads, -> the same."""
        return hidden_states * self.weight[heads, None].to(hidden_states.dtype)


class RetNetTokenMixer(FusesProjections):
    """What retention and softmax attention share: the projections of heads, and the norms of queries and keys.

    Args:
        gated: whether there is one for a gate.
        gain, output_gain: of the initialisation of those that lead to heads, and of the one that leads back.
    """

    def __init__(
        self, config: RetNetConfig, layer_idx: int, gated: bool = False, gain: float = 1.0, output_gain: float = 1.0
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim, self.value_head_dim = config.head_dim, config.value_head_dim
        self.scaling = config.head_dim**-0.5
        hidden_size, heads, groups = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        self.num_heads, self.num_key_value_groups = heads, heads // groups
        bias = config.qkv_bias
        self.q_proj = projection(hidden_size, heads * self.head_dim, gain, on_value_path=False, bias=bias)
        self.k_proj = projection(hidden_size, groups * self.head_dim, gain, on_value_path=False, bias=bias)
        self.v_proj = projection(hidden_size, groups * self.value_head_dim, gain, bias=bias)
        if gated:
            self.g_proj = projection(hidden_size, heads * self.value_head_dim, gain, on_value_path=False)
        self.projections = ("q_proj", "k_proj", "v_proj", *(["g_proj"] if gated else []))
        self.o_proj = projection(heads * self.value_head_dim, hidden_size, output_gain)
        self.q_norm = self.k_norm = None
        if config.use_qk_norm:
            self.q_norm, self.k_norm = (RetNetHeadRMSNorm(self.head_dim, config.rms_norm_eps, affine=True) for _ in range(2))

    def heads(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Of hidden states (B, T, D): queries (B, H, T, K), keys (B, G, T, K), values (B, G, T, V), further projections."""
        batch, length, _ = hidden_states.shape

        def split(projected: Tensor, size: int) -> Tensor:  # (B, T, H * size) -> (B, H, T, size)
            if length == 1:
                return projected.view(batch, -1, 1, size)
            return projected.view(batch, length, -1, size).transpose(1, 2)

        query, key, value, *others = self.project(hidden_states)
        query, key, value = split(query, self.head_dim), split(key, self.head_dim), split(value, self.value_head_dim)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        return query, key, value, *others


class RetNetRetention(RetNetTokenMixer):
    """Gated multi-scale retention, equation 8 of the paper; with a window, softmax attention over the last tokens beside it.

    Attributes:
        rank: in a tensor parallel model that `from_pretrained` has loaded, whose share of the heads this is. Quantised
            weights do not say so themselves.
    """

    rank: int | None = None

    def __init__(self, config: RetNetConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx, config.use_output_gate, gain=2**-2.5, output_gain=2**-1)
        self.gated = config.use_output_gate
        self.bidirectional = config.bidirectional
        self.gate_fn = ACT2FN[config.output_gate_act] if self.gated else None
        feature_map = config.feature_map_of(layer_idx)
        self.feature_map = None if feature_map is None else ACT2FN[feature_map]
        self.head_norm = None
        if config.use_head_norm:
            self.head_norm = RetNetHeadRMSNorm(self.value_head_dim, config.rms_norm_eps, config.head_norm_affine)
        self.window_scale = None if config.retention_window is None else RetNetHeadScale(self.num_heads)

    def forward(
        self,
        hidden_states: Tensor,  # (B, T, D)
        plan: RetentionPlan,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        initial_state: Tensor | None = None,  # (B, H, K, V), or (B, G, K, V) if shared, in the place of past_key_values
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns the mixed tokens (B, T, D), the retention map (B, H, T, T) if the plan asks for it, and the state."""
        batch, length, _ = hidden_states.shape
        query, key, value, *gate = self.heads(hidden_states)
        own_heads = slice(None)
        if query.shape[1] != self.num_heads:  # tensor parallel: this rank's heads, and their decays
            rank, decays = self.tensor_parallel_rank(), plan.log_decay.shape[0] * query.shape[1] // self.num_heads
            own_heads = slice(rank * query.shape[1], (rank + 1) * query.shape[1])
            plan = plan.of_heads(slice(rank * decays, (rank + 1) * decays))

        # Rotated vectors are float32, and are rounded again only where products of narrower ones take less time.
        in_chunks = plan.form == "chunkwise" and value.dtype == torch.bfloat16 and not torch.compiler.is_compiling()
        narrow = plan.kernels is not None or (in_chunks and multiplies_bfloat16(value.device))

        def rotated(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
            if plan.key_rotation is None:
                return query * self.scaling, key
            turn = rotate_step if plan.key_rotation[0].shape[-1] == self.head_dim else rotate
            query, key = turn(query, *plan.query_rotation), turn(key, *plan.key_rotation)
            return (query.to(value.dtype), key.to(value.dtype)) if narrow else (query, key)

        unmapped = None if self.window_scale is None else rotated(query, key)
        if self.feature_map is not None:
            query, key = self.feature_map(query), self.feature_map(key)
        query, key = rotated(query, key) if unmapped is None or self.feature_map is not None else unmapped

        maps = None
        if plan.output_maps:  # the output is made of them, so that a gradient reaches them
            maps = retention_map(query, key, plan.tables, plan.backward_tables)
        past = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        output, state = self._retain(query, key, value, plan, maps, past, use_cache, initial_state)  # (B, H, T, V)
        if self.head_norm is not None:
            output = self.head_norm(output)
        output = output.transpose(1, 2).reshape(batch, length, -1).to(hidden_states.dtype)
        if self.gated:
            output = gated(output, *gate, self.gate_fn)
        if unmapped is not None:
            window = None if past is None else past.window
            if plan.packed is not None:
                windowed = window.attend(*unmapped, value)
            else:
                windowed, _ = softmax_attention(
                    self, *unmapped, value.to(unmapped[0].dtype), plan.attention, "linear_attention", window, use_cache, 1.0
                )
            output = output + self.window_scale(windowed, own_heads).reshape(batch, length, -1).to(output.dtype)
        return self.o_proj(output), maps, state

    def tensor_parallel_rank(self) -> int:
        """Whose share of the heads this layer holds."""
        mesh = getattr(self.q_proj.weight, "device_mesh", None)
        if mesh is None and self.rank is None:
            raise RuntimeError(
                "a layer holds a share of the heads and cannot tell which: its weights are quantised and were not loaded by "
                "from_pretrained with a tensor parallel plan."
            )
        return self.rank if mesh is None else mesh.get_local_rank()

    def _retain(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        plan: RetentionPlan,
        maps: Tensor | None,
        past: RetNetStateLayer | None,
        use_cache: bool | None,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Retention over what the state holds and the new tokens, which `past` then takes in; and the state after them."""
        layout = plan.layout
        if plan.context is not None:
            keeps = past is not None and bool(use_cache)
            state = None if past is None else past.past[0]
            output, state = context_retention(query, key, value, plan.tables, plan.context, state, keeps)
            if keeps:
                past.advance(state, plan.context.next_position, plan.context.tokens)
            return output, None
        if plan.packed is not None:
            packed = plan.packed
            if packed.layout.is_step and use_cache and past.can_be_overwritten:
                states, rows = past.rows_in_place(packed.rows)
                output = packed_step_(query, key, value, plan.log_decay, states, rows, packed.begins)
                past.move_on(packed.next_position, packed.rows, 1)
                return output, None
            before = packed.before(past.past[0])
            output, after = packed_retention(query, key, value, plan.log_decay, packed.layout, before)
            if use_cache:
                past.advance_rows(after, packed.next_position, packed.rows, packed.layout.longest)
            return output, None
        if self.bidirectional:
            tables = (plan.tables, plan.backward_tables)
            output = bidirectional_retention(
                query,
                key,
                value,
                plan.log_decay,
                mask=layout.mask,
                reset=layout.reset,
                form=plan.form,
                tables=tables,
                scores=maps,
            )
            return output, None
        if past is not None:
            state, _ = past.past
        one_token, kernels = plan.step_decay is not None, plan.kernels
        if one_token and use_cache and past is not None and state is not None and past.can_be_overwritten:
            step_ = recurrent_step_ if kernels is None else kernels.step_
            output = step_(query, key, value, plan.step_decay, state)
        elif kernels is not None and plan.form == "chunkwise":
            output, state = kernels.chunkwise(
                query, key, value, plan.log_decay, state, layout.mask, layout.reset, plan.chunk_size
            )
        else:
            output, state = retention(
                query,
                key,
                value,
                plan.log_decay,
                initial_state=state,
                mask=layout.mask,
                reset=layout.reset,
                form=plan.form,
                tables=plan.tables,
                scores=maps,
            )
        if past is not None and use_cache:
            taken_in = TakenIn(key, value, plan.log_decay, layout.mask, layout.reset, layout.next_position)
            past.update(key, value, state=state, taken_in=taken_in)
        return output, state


class RetNetAttention(RetNetTokenMixer):
    """Softmax attention, in the layers of a hybrid that are not retention."""

    is_causal = True

    def __init__(self, config: RetNetConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.kind = config.layer_types[layer_idx]

    def forward(
        self,
        hidden_states: Tensor,  # (B, T, D)
        plan: RetentionPlan,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> tuple[Tensor, Tensor | None, None]:
        """Returns the mixed tokens (B, T, D), the weights (B, H, T, S) where there are any, and None."""
        batch, length, _ = hidden_states.shape
        query, key, value = self.heads(hidden_states)
        if plan.key_rotation is not None:
            turn = rotate_step if plan.key_rotation[0].shape[-1] == self.head_dim else rotate
            query, key = (turn(vectors, *plan.key_rotation).to(value.dtype) for vectors in (query, key))
        past = None if past_key_values is None else past_key_values.layers[self.layer_idx]
        if plan.packed is not None:
            output, weights = past.attend(query, key, value), None
        else:
            output, weights = softmax_attention(
                self, query, key, value, plan.attention, self.kind, past, use_cache, self.scaling, **kwargs
            )
        return self.o_proj(output.reshape(batch, length, -1)), weights, None


class RetNetMLP(FusesProjections):
    """Feed-forward network, gated or plain."""

    def __init__(self, config: RetNetConfig) -> None:
        super().__init__()
        self.up_proj = projection(config.hidden_size, config.intermediate_size)
        if config.use_gated_mlp:
            self.gate_proj = projection(config.hidden_size, config.intermediate_size)
        self.down_proj = projection(config.intermediate_size, config.hidden_size)
        self.act_fn = ACT2FN[config.hidden_act]
        self.gated = config.use_gated_mlp
        self.dropout = nn.Dropout(config.activation_dropout)
        self.projections = ("up_proj", *(["gate_proj"] if self.gated else []))

    def forward(self, hidden_states: Tensor) -> Tensor:
        inner, *gate = self.project(hidden_states)
        inner = gated(inner, *gate, self.act_fn) if self.gated else self.act_fn(inner)
        return self.down_proj(self.dropout(inner) if self.training else inner)


class RetNetDecoderLayer(GradientCheckpointingLayer):
    """Retention, or in a hybrid softmax attention, and feed-forward, each a branch of the residual stream.

    Attributes:
        step_program: computes steps of one token, where `compile_decoding` made it.
    """

    step_program: LayerProgram | None = None

    def __init__(self, config: RetNetConfig, layer_idx: int) -> None:
        super().__init__()
        self.is_retention = config.layer_types[layer_idx] == "linear_attention"
        if self.is_retention:
            self.retention = RetNetRetention(config, layer_idx)
        else:
            self.attention = RetNetAttention(config, layer_idx)
        self.mlp = RetNetMLP(config)
        self.retention_norm = RetNetRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp_norm = RetNetRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.pre_norm = config.norm_position == "pre"
        self.residual_multiplier = config.residual_multiplier
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(
        self,
        hidden_states: Tensor,  # (B, T, D)
        plan: RetentionPlan,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> Tensor:
        if self.step_program is not None and not self.training and not torch.compiler.is_compiling():
            past = None if past_key_values is None else past_key_values.layers[self.retention.layer_idx]
            if self.step_program.serves(hidden_states, plan, past, use_cache):
                if self.step_program.layer.is_as_it_was():
                    return self.step_program(hidden_states, plan, past)
                self.step_program = None
                logger.warning_once(CHANGED)
        # a layer that is compiled by itself may be given segments, which would be unrolled into its program
        whole = plan.segment_length is None or not self.is_retention or self.retention.window_scale is not None
        if whole or torch.compiler.is_compiling() or self._is_watched():
            mixed, _ = self._mix(hidden_states, plan, past_key_values=past_key_values, use_cache=use_cache, **kwargs)
            return mixed
        past = None if past_key_values is None else past_key_values.layers[self.retention.layer_idx]
        state = None if past is None else past.past[0]
        mixed = None
        for tokens in plan.segments():
            part, state = self._mix(hidden_states[:, tokens], plan.of_tokens(tokens), initial_state=state, **kwargs)
            mixed = torch.empty_like(hidden_states, dtype=part.dtype) if mixed is None else mixed
            mixed[:, tokens] = part
        if past is not None and use_cache:
            past.advance(state, plan.layout.next_position[:, -1], hidden_states.shape[1])
        return mixed

    def _is_watched(self) -> bool:
        """Whether hooks in this layer, as those that fetch offloaded weights, would be called for every segment."""
        return any(is_hooked(module) for module in self.modules() if module is not self)

    def _mix(self, hidden_states: Tensor, plan: RetentionPlan, **kwargs) -> tuple[Tensor, Tensor | None]:
        """What the layer makes of these tokens, and the state after them."""
        branch = self.retention_norm(hidden_states) if self.pre_norm else hidden_states
        mixer = self.retention if self.is_retention else self.attention
        branch, _, state = mixer(branch, plan=plan, **kwargs)
        hidden_states = self._join(hidden_states, branch, self.retention_norm)

        branch = self.mlp_norm(hidden_states) if self.pre_norm else hidden_states
        return self._join(hidden_states, self.mlp(branch), self.mlp_norm), state

    def _join(self, stream: Tensor, branch: Tensor, norm: nn.Module) -> Tensor:
        if self.residual_multiplier != 1.0:
            stream = stream * self.residual_multiplier
        stream = stream + (self.dropout(branch) if self.training else branch)
        return stream if self.pre_norm else norm(stream)


class RetNetPreTrainedModel(ModelCardMixin, PreTrainedModel):
    config: RetNetConfig
    config_class = RetNetConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RetNetDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values"]
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": RetNetDecoderLayer, "attentions": [RetNetRetention, RetNetAttention]}
    _supports_sdpa = True  # in the layers of a hybrid that are not retention
    _supports_flash_attn = True
    _supports_attention_backend = True
    _keys_to_ignore_on_load_unexpected = [TORCHSCALE.unused]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RetNetDecay):
            init.copy_(module.log_decay, module.compute_log_decay(module.log_decay.dtype, module.log_decay.device))
        elif isinstance(module, RetNetRotaryEmbedding):
            init.copy_(module.frequency, module.compute_frequency(module.frequency.device))
        elif isinstance(module, (RetNetHeadRMSNorm, RetNetHeadScale)):
            if module.weight is not None:
                init.ones_(module.weight)
        elif hasattr(module, "xavier_gain") and self.config.initialization != "normal":
            depth = (8 * self.config.num_hidden_layers) ** 0.25
            shrink = depth if module.on_value_path and self.config.initialization == "deepnet" else 1.0
            init.xavier_uniform_(module.weight, gain=module.xavier_gain / shrink)

    def fuse_projections(self, measure: bool = True) -> bool:
        """Lays the weights out in memory so that a CPU decodes one sequence faster, eagerly and compiled, where it does.

        Projections of one input then take one product, and wide weights are read at nearly the full bandwidth. Names, shapes
        and values of all parameters stay. It is for inference: training mode, a forward pass that records a gradient, and
        saving put the weights back, and so does `unfuse_projections`. Layers that are not plain (quantised, adapted,
        sharded) are left as they are, as is a head that shares its weight with the embedding.

        Args:
            measure: tries each kind of product first, once in a process and for a second or two in all, and leaves the
                weights where that gains nothing: it depends on the processor, the dtype and the number of threads, and where
                it gains little, on chance. Without it, everything is laid out.

        Returns:
            Whether any weights were laid out.
        """
        head = self.get_output_embeddings()
        tied = head is not None and getattr(head, "weight", None) is self.get_input_embeddings().weight
        modules = (module for module in self.modules() if isinstance(module, FusesProjections))
        return lay_out_where_faster([module for module in modules if not (module is self and tied)], measure)

    def unfuse_projections(self) -> None:
        """Gives each weight memory of its own again."""
        for module in self.modules():
            if isinstance(module, FusesProjections):
                module.put_back()

    def compile_decoding(self, folder: str | os.PathLike | None = None) -> int:
        """Compiles the steps of decoding one sequence on a CPU, once: the programs are kept, and loaded from then on.

        A program is that of a layer, and serves all that are alike. It reads weights of torchao (`Int8WeightOnlyConfig`, and
        `IntxWeightOnlyConfig` with `torch.int4` in groups) by PyTorch's kernels for packed integers, those of 4 bits from a
        copy, and weights in half precision by whichever kernel is faster here, which is tried. `generate` and every other
        call with a state and one token use it; whatever else the model is asked for, it computes as ever.

        After `fuse_projections`, not before. Values of weights may change, but for quantised ones; weights that lie
        elsewhere, as fused ones do after saving the model or in training mode, and other modules end it with a warning.
        Numbers that layers hold, as the eps of a norm, are part of the program. Layers of softmax attention, with a window,
        or with linear layers that are adapted or quantised in another way have no program.

        Args:
            folder: of the programs, which are code that is executed: one that nobody else writes to. By default, a folder
                in the cache of huggingface_hub.

        Returns:
            How many layers have a program.

        Raises:
            ValueError: for a model that is not on a CPU, in float64, or bidirectional.
            OSError: for a folder that cannot be written to.
            RuntimeError: if there is no program yet and none can be compiled: without a C++ compiler.
        """
        if self.device.type != "cpu" or self.dtype == torch.float64 or self.config.bidirectional:
            raise ValueError(
                "compile_decoding is for models that decode on a CPU, in float32 or half precision, got "
                f"device {self.device}, {self.dtype} and bidirectional={self.config.bidirectional}."
            )
        self.uncompile_decoding()
        layers = [
            module
            for module in self.modules()
            if isinstance(module, RetNetDecoderLayer) and module.is_retention and module.retention.window_scale is None
        ]
        programs = compile_layers(layers, self.config, default_folder() if folder is None else Path(folder))
        for layer, program in zip(layers, programs):
            layer.step_program = program
        if isinstance(self, RetNetForCausalLM):
            self.head_product = HeadProduct.of(self.lm_head)
        return sum(program is not None for program in programs)

    def uncompile_decoding(self) -> None:
        """Computes every step by operations of PyTorch again."""
        for module in self.modules():
            if isinstance(module, RetNetDecoderLayer):
                module.step_program = None
        if isinstance(self, RetNetForCausalLM):
            self.head_product = None

    @staticmethod
    def _load_pretrained_model(model: "RetNetPreTrainedModel", state_dict, checkpoint_files, load_config, *args, **kwargs):
        """Transformers' loading, which is told what the names in these files mean, if they are of another dialect.

        It would keep that for saving, to write the weights as it found them; what saves here are our own names.
        """
        mesh = getattr(load_config, "device_mesh", None)
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ["tp"]):  # one without names is of one dimension
            named = mesh["tp"] if mesh.mesh_dim_names else mesh
            if model.config.num_key_value_heads % named.size():
                raise ValueError(
                    f"num_key_value_heads must be a multiple of the {named.size()} ranks of tensor parallelism, which share "
                    f"the heads, got {model.config.num_key_value_heads}."
                )
            for module in model.modules():
                if isinstance(module, RetNetRetention):
                    module.rank = named.get_local_rank()
        names = names_in(checkpoint_files) if state_dict is None and checkpoint_files else state_dict or ()
        transforms = loading_transforms(names, model.config)
        load_config = replace(load_config, weight_mapping=[*(load_config.weight_mapping or []), *transforms])
        loaded = PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
        kept = getattr(model, "_weight_conversions", None) or []
        model._weight_conversions = [transform for transform in kept if transform not in transforms]
        return loaded


def updates_the_state_given(forward):
    """Makes `use_cache` default to True where a state is given, whatever the configuration says.

    Trainer leaves `config.use_cache` False behind: a state handed to such a model would be read, and silently not updated.
    """

    @wraps(forward)
    def wrapper(self, *args, **kwargs):
        if kwargs.get("past_key_values") is not None and kwargs.get("use_cache") is None:
            kwargs["use_cache"] = True
        return forward(self, *args, **kwargs)

    return wrapper


STATE_UNDER_CHECKPOINTING = "past_key_values must be empty when training with gradient checkpointing, which drops the state."


def _checked_rows(rows: Tensor | list[int] | None, sequences: int, documents: int, device: torch.device) -> Tensor | None:
    """`state_rows` as a tensor on the device. Values are checked where that needs no device to be waited for.

    Raises:
        ValueError: for rows that are not one for each document, each once, of those that the state has.
    """
    if rows is None:
        if sequences != documents:
            raise ValueError(
                f"past_key_values holds {sequences} sequences, and cu_seq_lens_q {documents} documents: there must be one "
                "for each, or state_rows."
            )
        return None
    rows = torch.as_tensor(rows)
    if rows.dtype not in (torch.int32, torch.int64) or rows.shape != (documents,):
        given = f"{tuple(rows.shape)} {rows.dtype}"
        raise ValueError(f"state_rows must be integers, one for each of the {documents} documents, got {given}.")
    if rows.device.type == "cpu" and not torch.compiler.is_compiling():
        named = rows.tolist()
        if len(set(named)) < documents or min(named) < 0 or max(named) >= sequences:
            raise ValueError(f"state_rows must be different rows of the {sequences} of past_key_values, got {named}.")
    return rows.to(device=device, dtype=torch.int64)


class RetNetModel(RetNetPreTrainedModel):
    """The stack of RetNet blocks, without a head."""

    def __init__(self, config: RetNetConfig) -> None:
        super().__init__(config)
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_norm = RetNetRMSNorm(config.hidden_size, eps=config.rms_norm_eps) if config.use_embedding_norm else None
        self.embed_dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList([RetNetDecoderLayer(config, index) for index in range(config.num_hidden_layers)])
        pre_norm = config.norm_position == "pre"
        self.norm = RetNetRMSNorm(config.hidden_size, eps=config.rms_norm_eps) if pre_norm else nn.Identity()
        self.decay = RetNetDecay(config)
        self.rotary = RetNetRotaryEmbedding(config) if config.use_rotary else None
        self.kernels = None if config.bidirectional else load_kernels(config.kernels)
        self.context: Context | None = None  # of ranks that share sequences: context_parallel.py
        self.gradient_checkpointing = False
        self.post_init()

    @updates_the_state_given
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        retention_form: str | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        r"""
        Args:
            input_ids: (B, T) token ids. inputs_embeds: (B, T, D) in their place.
            attention_mask: (B, S), 0 where a token is padding, anywhere in the row; S = T, or T and all columns before.
                What is padding changes nothing for the other tokens, nor for the state.
            position_ids: (B, T). Needed only for packed documents: a position that is not beyond the one before it starts a
                new document. `cu_seq_lens_q` and `seq_idx`, as transformers' collators give them, say the same, and are
                needed where a document begins with padding.
            past_key_values: a `RetNetState`, or an empty cache of transformers'. With use_cache=True it takes in these
                tokens, in place; with use_cache=False it is read and left as it is. Given together with `cu_seq_lens_q`, the
                (D + 1,) boundaries of D documents in one row (1, T), a state of D sequences that is not empty is gone on
                from: each document from its own row, as if it were alone. A document whose first position in `position_ids`
                is 0, or behind that of its row, starts from an empty state, which overwrites the row.
            state_rows: (D,) integers, for documents that go on: the row of each in past_key_values, no two of them the same.
                Absent, row i is that of document i.
            retention_form: "auto", "parallel", "recurrent" or "chunkwise"; `config.retention_form` if absent.
            output_attentions: returns the retention maps Q Kᵀ ⊙ D of every layer, (B, H, T, T), in the parallel form.

        Raises:
            ValueError: for inputs that do not fit each other, in a sentence.
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds.")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if inputs_embeds.dim() != 3:
            given = ("inputs_embeds", inputs_embeds) if input_ids is None else ("input_ids", input_ids)
            raise ValueError(
                "input_ids must be (batch, tokens), or inputs_embeds (batch, tokens, hidden size), got "
                f"{given[0]} {tuple(given[1].shape)}."
            )
        if self.config.bidirectional:
            if past_key_values is not None:
                raise ValueError("past_key_values must be None in a bidirectional model: a token sees those after it too.")
            use_cache = False
        if kwargs.get("cache") is not None:  # of transformers' continuous batching
            past_key_values, kwargs["state_rows"] = requests_of(
                kwargs["cache"], kwargs["cu_seq_lens_q"], kwargs["write_index"]
            )
            use_cache = True
        if past_key_values is not None:
            past_key_values = install_retention_layers(past_key_values, self.config)
        elif use_cache:
            past_key_values = RetNetState(self.config)
        packed = kwargs.get("cu_seq_lens_q") is not None
        first = None if past_key_values is None else first_in_use(past_key_values.layers)
        goes_on = packed and first is not None and first.is_initialized
        if kwargs.get("state_rows") is not None and not goes_on:
            raise ValueError(
                "state_rows are for packed documents, cu_seq_lens_q, that go on from rows of past_key_values, which must "
                "have some: RetNetState.zeros(config, sequences) makes them."
            )
        if self.context is not None:
            plan = self._context_plan(inputs_embeds, attention_mask, position_ids, past_key_values, retention_form, kwargs)
        elif goes_on:
            plan = self._packed_plan(inputs_embeds, attention_mask, position_ids, past_key_values, retention_form, kwargs)
        else:
            plan = self._plan(inputs_embeds, attention_mask, position_ids, past_key_values, retention_form, kwargs)
        hidden_states = inputs_embeds
        if not isinstance(self.layers[0], nn.Identity):  # as in the later stages of transformers' pipelines
            if self.config.embedding_multiplier != 1.0:
                hidden_states = hidden_states * self.config.embedding_multiplier
            if self.embed_norm is not None:
                hidden_states = self.embed_norm(hidden_states)
            hidden_states = self.embed_dropout(hidden_states)

        for index, layer in enumerate(self.layers[: self.config.num_hidden_layers]):
            own = self._plan_of_layer(plan, index)
            hidden_states = layer(hidden_states, plan=own, past_key_values=past_key_values, use_cache=use_cache, **kwargs)
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values if use_cache else None
        )

    @property
    def _chunk_size(self) -> int:
        """Tokens in a chunk of the forms that have chunks."""
        config = self.config
        return config.chunk_size or default_chunk_size(config.head_dim, config.value_head_dim)

    def _first_decay(self, inputs_embeds: Tensor) -> Tensor:
        """ln γ of the first layer, where the inputs are, in float32 at least."""
        dtype = torch.promote_types(inputs_embeds.dtype, torch.float32)
        return self.decay.of_layer(0).to(device=inputs_embeds.device, dtype=dtype)

    def _rotations(
        self, position: Tensor, dtype: torch.dtype, one_token: bool = False
    ) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor, Tensor] | None]:
        """Of queries and keys, cosines and sines; those of queries times their scale."""
        if self.rotary is None:
            return None, None
        rotation = self.rotary(position, dtype)
        if one_token and not torch.compiler.is_compiling():  # which counts operations otherwise
            rotation = step_rotation(*rotation)
        return tuple(part * self.config.head_dim**-0.5 for part in rotation), rotation

    def _packed_plan(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        state: Cache,
        retention_form: str | None,
        kwargs: dict,
    ) -> RetentionPlan:
        """The plan of documents of one row, each of which goes on from its own row of the state."""
        config, device, dtype = self.config, inputs_embeds.device, inputs_embeds.dtype
        first, length = first_in_use(state.layers), inputs_embeds.shape[1]
        if not all(layer.goes_on_packed for layer in state.layers):
            require_retention_alone(config)
        if self.training and self.gradient_checkpointing:
            raise ValueError(STATE_UNDER_CHECKPOINTING)
        if inputs_embeds.shape[0] != 1:
            raise ValueError(f"packed documents are one row, (1, tokens), got {inputs_embeds.shape[0]} rows.")
        others = {"attention_mask": attention_mask, "retention_form": retention_form, "seq_idx": kwargs.get("seq_idx")}
        others["output_attentions"] = kwargs.get("output_attentions") or None
        if unfit := [name for name, value in others.items() if value is not None]:
            raise ValueError(f"{unfit[0]} cannot be given with packed documents that go on from past_key_values.")
        if first.record_past:
            raise ValueError("cu_seq_lens_q cannot be used with a state that records its past (activate_past_recording).")

        layout = packed_layout(kwargs["cu_seq_lens_q"], self._chunk_size, device)
        boundaries, documents = layout.boundaries, len(layout.order)
        if len(layout.places) != length:
            raise ValueError(f"cu_seq_lens_q must end at the {length} tokens of the row, got {len(layout.places)}.")
        rows = _checked_rows(kwargs.get("state_rows"), first.batch_size, documents, device)
        past_position = first.past[1] if rows is None else first.past[1][rows]
        position, next_position = packed_positions(boundaries, past_position, length, position_ids)
        begins = None
        if position_ids is not None:
            starts = position[0, boundaries[:-1].clamp(max=length - 1)]
            begins = ((starts == 0) | (starts < past_position)) & (boundaries.diff() > 0)
            if device.type == "cpu" and not begins.any():  # elsewhere the host would have to wait for the answer
                begins = None
        packed = PackedDocuments(layout, rows, begins, next_position)
        query_rotation, key_rotation = self._rotations(position, dtype)
        plan = RetentionPlan(
            form="packed",
            query_rotation=query_rotation,
            key_rotation=key_rotation,
            layout=SequenceLayout(None, None, position, position + 1),
            attention=None,
            output_maps=False,
            chunk_size=None,
            bidirectional=False,
            packed=packed,
        )
        return plan.with_decay(self._first_decay(inputs_embeds))

    def _context_plan(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        retention_form: str | None,
        kwargs: dict,
    ) -> RetentionPlan:
        """The plan of this rank's segments of sequences that are split over ranks."""
        shape, device, dtype = inputs_embeds.shape[:2], inputs_embeds.device, inputs_embeds.dtype
        first = None if past_key_values is None else first_in_use(past_key_values.layers)
        others = {"cu_seq_lens_q": kwargs.get("cu_seq_lens_q"), "output_attentions": kwargs.get("output_attentions") or None}
        others["retention_form"] = None if retention_form in (None, "auto", "chunkwise") else retention_form
        if unfit := [name for name, value in others.items() if value is not None]:
            raise ValueError(
                f"{unfit[0]} cannot be given to a model whose sequences are split over ranks: documents are told by "
                "position_ids or seq_idx, and the form is the chunkwise one."
            )
        if first is not None and first.record_past:
            raise ValueError("a state that records its past (activate_past_recording) cannot be split over ranks.")
        self._check_past(first, shape[0])
        if attention_mask is not None and attention_mask.shape != shape:
            raise ValueError(
                f"attention_mask must be that of this rank's tokens, {tuple(shape)}, got {tuple(attention_mask.shape)}."
            )
        past_position = None if first is None else first.past[1]
        layout, context = context_layout(
            self.context, shape, device, attention_mask, position_ids, kwargs.get("seq_idx"), past_position
        )
        position = self.context.unfold(layout.position)
        query_rotation, key_rotation = self._rotations(position, dtype)
        plan = RetentionPlan(
            form="chunkwise",
            query_rotation=query_rotation,
            key_rotation=key_rotation,
            layout=layout,
            attention=None,
            output_maps=False,
            chunk_size=self._chunk_size,
            bidirectional=False,
            context=context,
        )
        return plan.with_decay(self._first_decay(inputs_embeds))

    def _check_past(self, first: StateLayer | None, batch: int) -> None:
        """Raises ValueError if the state, of which this is the first layer, is not one that this batch can go on from."""
        if first is None or not first.is_initialized:
            return
        if first.batch_size != batch:
            raise ValueError(
                f"past_key_values holds {first.batch_size} sequences, but the batch has {batch}: select or repeat its rows "
                "to fit."
            )
        if self.training and self.gradient_checkpointing:
            raise ValueError(STATE_UNDER_CHECKPOINTING)

    def _plan_of_layer(self, plan: RetentionPlan, index: int) -> RetentionPlan:
        """The plan of a call, which is that of the first layer, for another."""
        if index == 0 or not self.config.has_decays_per_layer:
            return plan
        return plan.with_decay(self.decay.of_layer(index).to(plan.log_decay))

    def _plan(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        past_key_values: Cache | None,
        retention_form: str | None,
        kwargs: dict,
    ) -> RetentionPlan:
        """Masks, positions, rotations and decays of one call, computed once for all layers that share their decays."""
        config = self.config
        length, device, dtype = inputs_embeds.shape[1], inputs_embeds.device, inputs_embeds.dtype
        first = None if past_key_values is None else first_in_use(past_key_values.layers)
        self._check_past(first, inputs_embeds.shape[0])
        layout = sequence_layout(
            inputs_embeds.shape[:2],
            device,
            attention_mask,
            position_ids,
            cu_seq_lens_q=kwargs.get("cu_seq_lens_q"),
            seq_idx=kwargs.get("seq_idx"),
            past_length=0 if first is None else first.get_seq_length(),
            past_position=None if first is None else first.past[1],
        )

        form = retention_form or config.retention_form
        if form not in FORMS:
            raise ValueError(f"retention_form must be one of {', '.join(FORMS)}, got {form!r}.")
        output_maps = bool(kwargs.get("output_attentions", config.output_attentions))
        if output_maps and form not in ("auto", "parallel"):
            raise ValueError(
                f"retention_form must be auto or parallel with output_attentions=True, got {form!r}: "
                "the other forms never compute the retention map."
            )
        chunk_size = self._chunk_size
        kernels = self.kernels if self.kernels is not None and self.kernels.runs_on(device) else None
        if form == "auto" and output_maps:
            form = "parallel"
        elif form == "auto" and kernels is not None:  # for which one chunk is no case of its own
            form = "recurrent" if length == 1 else "chunkwise"
        elif form == "auto":
            form = choose_form(length, chunk_size)

        query_rotation, key_rotation = self._rotations(layout.position, dtype, form == "recurrent" and length == 1)
        chunk_size = chunk_size if form == "chunkwise" else None
        attention = attention_plan(config, layout, inputs_embeds.shape[0], past_key_values, dtype, output_maps)
        plan = RetentionPlan(
            form, query_rotation, key_rotation, layout, attention, output_maps, chunk_size, config.bidirectional, kernels
        )
        plan = plan.with_decay(self._first_decay(inputs_embeds))
        # a gradient keeps the whole, and so does a record of the past
        whole = torch.is_grad_enabled() or torch.compiler.is_compiling() or (first is not None and first.record_past)
        if form != "chunkwise" or config.bidirectional or whole:
            return plan
        return plan.in_segments(inputs_embeds.shape[0])


def head_and_loss(
    model: RetNetPreTrainedModel,
    loss_of_transformers,
    hidden_states: Tensor,  # (B, T, D)
    labels: Tensor | None,  # (B, T)
    with_logits: bool = True,
    **kwargs,
) -> tuple[Tensor | None, Tensor | None]:
    """Loss of a language model, where there are labels, and its logits (B, T, vocab_size).

    Together, and not one after the other, where the head is nothing but its weight and the loss that of transformers; and
    not in a compiled program, which has plans of its own. The loss is in float32, or float64 where the hidden states are.
    """
    head, loss_function = model.lm_head, model.loss_function
    model.put_back_for_gradient()  # the weight alone is used below, too
    own_loss = labels is not None and loss_function is loss_of_transformers and hidden_states.shape[:2] == labels.shape
    together = own_loss and is_plain(head) and not torch.compiler.is_compiling()
    logits = None if together else model.project(hidden_states)[0]
    if not own_loss:
        loss = None
        if labels is not None:
            loss = loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size, **kwargs)
        return loss, logits if with_logits else None

    ignore_index, items = kwargs.get("ignore_index", -100), kwargs.get("num_items_in_batch")
    if loss_of_transformers is ForCausalLMLoss:
        shifted = kwargs.get("shift_labels")
        labels = F.pad(labels[:, 1:], (0, 1), value=ignore_index) if shifted is None else shifted
    labels = labels.to(hidden_states.device).flatten()
    if together:
        total, logits = linear_cross_entropy(hidden_states.flatten(0, 1), head.weight, labels, ignore_index, with_logits)
        logits = None if logits is None else logits.unflatten(0, hidden_states.shape[:2])
    else:
        wide = logits.flatten(0, 1).to(torch.promote_types(logits.dtype, torch.float32))
        total = F.cross_entropy(wide, labels, ignore_index=ignore_index, reduction="sum")
    items = (labels != ignore_index).sum() if items is None else items
    loss = total / (items.to(total.device) if isinstance(items, Tensor) else items)
    return loss, logits if with_logits else None


class RetNetForCausalLM(FusesProjections, RetNetPreTrainedModel, GenerationMixin):
    """RetNet with a language modelling head: trained in parallel or chunkwise form, decoded recurrently.

    Attributes:
        head_product: computes the logits of one token, where `compile_decoding` found a faster way to.
    """

    head_product: HeadProduct | None = None
    projections = ("lm_head",)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config: RetNetConfig) -> None:
        super().__init__(config)
        if config.bidirectional:
            raise ValueError("bidirectional must be False for RetNetForCausalLM: it would see the token it is to predict.")
        self.model = RetNetModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def project(self, hidden_states: Tensor) -> list[Tensor] | tuple[Tensor, ...]:
        """The logits of hidden states (B, T, D)."""
        product = self.head_product
        if product is not None and not torch.compiler.is_compiling() and product.serves(self.lm_head, hidden_states):
            return (product(hidden_states),)
        return super().project(hidden_states)

    def init_continuous_batching(self, *args, **kwargs):
        """As transformers has it, for `generate_batch` and `transformers serve --continuous-batching`.

        Raises:
            ValueError: for a model with softmax attention. RuntimeError: for a version of transformers that is built
                otherwise.
        """
        register(self.config)
        return super().init_continuous_batching(*args, **kwargs)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        retention_form: str | None = None,
        skip_logits: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast:
        r"""
        Arguments as in `RetNetModel.forward`, and

        Args:
            labels: (B, T) token ids, -100 where there is nothing to predict; shifted inside.
            logits_to_keep: logits of the last so many tokens only (0: all), or of the tokens with these indices.
            skip_logits: returns the loss alone. The logits of all tokens, (B, T, vocab_size), then never exist at once.

        Example:

        ```python
        >>> import torch
        >>> from retnet_hf import RetNetConfig, RetNetForCausalLM

        >>> model = RetNetForCausalLM(RetNetConfig.from_preset("tiny", vocab_size=100))
        >>> model.generate(torch.tensor([[1, 5, 7]]), max_new_tokens=4, min_new_tokens=4).shape
        torch.Size([1, 7])
        ```
        """
        if self.model.context is not None and labels is not None and kwargs.get("shift_labels") is None:
            raise ValueError(
                "labels need shift_labels beside them where sequences are split over ranks: the label of a rank's last "
                "token is another rank's. shard_sequence gives both."
            )
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            retention_form=retention_form,
            return_dict=True,
            **kwargs,
        )
        if skip_logits and labels is None:
            raise ValueError("skip_logits must be False without labels: nothing would be computed.")
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states = outputs.last_hidden_state[:, kept, :]
        loss, logits = head_and_loss(self, ForCausalLMLoss, hidden_states, labels, not skip_logits, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict, generation_mode: GenerationMode, *args, **kwargs
    ) -> None:
        """Lets transformers check the request, then puts a `RetNetState` in the place of the cache that it made."""
        if self.model.context is not None:
            raise ValueError(
                "generate() writes where the whole sequence is: end context_parallel(model, ...) by context_parallel(model, "
                "None) first. The state that a prompt left on each rank goes on."
            )
        implementation = generation_config.cache_implementation
        if implementation == "quantized":
            raise ValueError(
                'cache_implementation must be None, "dynamic" or "static", got "quantized": '
                "a retention state is constant in size and accumulates, so it is kept in full precision."
            )
        if implementation is not None and implementation.startswith("offloaded"):
            logger.warning_once(
                f"cache_implementation={implementation!r} moves nothing: a retention state does not grow, so it stays where "
                "the layers are."
            )
        given = model_kwargs.get("past_key_values")
        if generation_mode == GenerationMode.ASSISTED_GENERATION and RetNetState.length_of(given):
            raise ValueError(
                "past_key_values must be empty or absent for assisted decoding, in which transformers reads the whole "
                f"prompt again; the state given has read {RetNetState.length_of(given)} tokens."
            )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)
        cache = model_kwargs.get("past_key_values")
        if given is not None:
            install_retention_layers(given, self.config)
        elif cache is not None:
            state = RetNetState(self.config, compileable=implementation is not None and "static" in implementation)
            if generation_config.is_assistant:
                state.activate_past_recording()
            model_kwargs["past_key_values"] = state

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict) -> None:
        """None: the state knows which position comes next."""

    def _prepare_attention_mask_for_generation(self, inputs_tensor, generation_config, model_kwargs: dict) -> Tensor:
        """Transformers' mask; where a state and only the tokens after it were given, with columns for what it has read."""
        attention_mask = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        past = RetNetState.length_of(model_kwargs.get("past_key_values"))
        if past and attention_mask.shape[1] <= past:
            attention_mask = torch.cat([attention_mask.new_ones(attention_mask.shape[0], past), attention_mask], dim=1)
        return attention_mask

    @staticmethod
    def create_masks_for_generate(
        config: RetNetConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None,
        position_ids: Tensor | None = None,
        **kwargs,
    ) -> Tensor | None:
        """The mask of the new tokens alone, (B, T): nothing that was read before needs one."""
        if attention_mask is None:
            return None
        attention_mask = attention_mask[:, -inputs_embeds.shape[1] :]
        return None if bool(attention_mask.all()) else attention_mask


class RetNetForMaskedLM(FusesProjections, RetNetPreTrainedModel):
    """The encoder with a head that fills in masked tokens: `config.bidirectional` must be True."""

    projections = ("lm_head",)
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: RetNetConfig) -> None:
        super().__init__(config)
        if not config.bidirectional:
            raise ValueError("bidirectional must be True for RetNetForMaskedLM: a masked token is told by both its sides.")
        self.model = RetNetModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        retention_form: str | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> MaskedLMOutput:
        r"""
        Arguments as in `RetNetModel.forward`, and

        Args:
            labels: (B, T) token ids at masked places, -100 everywhere else.
        """
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            retention_form=retention_form,
            return_dict=True,
            **kwargs,
        )
        loss, logits = head_and_loss(self, ForMaskedLMLoss, outputs.last_hidden_state, labels, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions)


class RetNetWithHead(RetNetPreTrainedModel):
    """What transformers' generic heads need: they find their base model by the class of the configuration.

    Where this file is code that came with a checkpoint, that is not the class imported above, but another copy of it.
    """

    def __init__(self, config: RetNetConfig) -> None:
        if type(config).__name__ == RetNetConfig.__name__:  # a configuration derived from it has a model of its own
            AutoModel.register(type(config), RetNetModel, exist_ok=True)
        super().__init__(config)


class RetNetForSequenceClassification(GenericForSequenceClassification, RetNetWithHead):
    """RetNet with a classifier that reads the last token that is not padding."""


class RetNetForTokenClassification(GenericForTokenClassification, RetNetWithHead):
    """RetNet with a classifier on every token."""


class RetNetForQuestionAnswering(GenericForQuestionAnswering, RetNetWithHead):
    """RetNet that marks the span of an answer."""


__all__ = [
    "RetNetForCausalLM",
    "RetNetForMaskedLM",
    "RetNetForQuestionAnswering",
    "RetNetForSequenceClassification",
    "RetNetForTokenClassification",
    "RetNetModel",
    "RetNetPreTrainedModel",
]
