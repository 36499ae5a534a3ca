# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNet: a transformer with retention instead of attention (arXiv 2307.08621).

Read from top to bottom: decays, rotation, the token mixer (equation 8), the feed-forward, the layer, the model, its heads.
Each call makes one plan (plan.py) for all layers, in training, prefill and decoding. The layers call `Plan.retain`, which
reads and writes the state (retention_state.py) and computes retention (retention_forms.py).

Shapes in comments: B batch, T tokens, H heads, G key/value heads, M matrices of a state, K key size, V value size, D hidden
size.
"""

import copy
import functools
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MaskedLMOutput,
    MoeCausalLMOutputWithPast,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from ..arguments.checks import cache_of_call, require_known_arguments, with_arguments_of
from ..hub.loading import SharedLoading
from ..hub.saving import SavedWithCard
from ..modules.layers import (
    ComputedBuffer,
    HeadDecay,
    RetNetRMSNorm,
    has_hooks,
    init_weights,
    projection,
    rotary_frequencies,
)
from ..ops.gradients import mean_cross_entropy
from ..ops.kernels import kernels_of_call, load_kernels, verified_kernels
from ..ops.layout import Layout, layout_of
from ..ops.plan import Plan
from ..ops.retention_forms import default_chunk_size, is_traced
from ..state.retention_state import RetNetState, StateLayer, UpdatedOnce, first_in_use, past_of_call
from ..state.state_file import first_tokens_of
from .configuration_retnet import RetNetConfig
from .generation_retnet import CACHE, RetNetGeneration, replayed


# Without gradients, a long sequence is read piece by piece, so that intermediate tensors are as large as one piece.
PIECE_SIZE_ON_CPU = 2**11  # tokens times sequences of a piece. On every device, smaller calls are one piece.
PIECE_SIZE_ELSEWHERE = 2**15


class RetNetDecay(HeadDecay):
    """ln γ of every head of every layer.

    Attributes:
        rank_share: this rank and the number of ranks among which tensor parallelism splits the heads.
    """

    rank_share: tuple[int, int] = (0, 1)

    def __init__(self, config: RetNetConfig) -> None:
        layers = range(config.num_hidden_layers)
        self.heads_per_state = [config.num_attention_heads // config.state_heads(layer) for layer in layers]
        super().__init__([config.decays(layer) for layer in layers] if config.has_decays_per_layer else config.decays())

    def of_layers(self, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """Returns ln γ (M,) of each layer on this rank: one value for each matrix of the state."""
        (rank, ranks), layers = self.rank_share, []
        log_decay = self.log_decay.to(device).to(torch.promote_types(dtype, torch.float32)) * 2**-56  # (H,), or (layers, H)
        for layer, step in enumerate(self.heads_per_state):
            if log_decay.dim() == 1 and layer > 0 and step == self.heads_per_state[0]:
                layers.append(layers[0])
            else:
                own = log_decay if log_decay.dim() == 1 else log_decay[layer]
                layers.append(own[::step].chunk(ranks)[rank])
        return layers


class RetNetRotaryEmbedding(ComputedBuffer):
    """Computes cosines and sines of position times frequency, exact at any position: see `layers.py`."""

    COMPUTED = "frequency"

    def __init__(self, config: RetNetConfig, head_dim: int | None = None) -> None:
        super().__init__()
        self.config, self.head_dim = config, head_dim or config.head_dim
        self.frequency = nn.Buffer(self.compute(), persistent=False)

    def compute(self, device: torch.device | None = None) -> Tensor:
        """Returns the frequencies of a head's pairs, (K/2,) int64."""
        frequency, self.attention_scaling = rotary_frequencies(self.config, self.head_dim, device)
        return frequency

    def forward(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, (B|1, 1, T, K/2), float32 or wider, for positions (B|1, T) int64."""
        phase = position[:, None, :, None] * self.frequency.to(position.device)
        angle = phase.to(torch.promote_types(dtype, torch.float32)) * (2 * math.pi / 2**64)
        if self.attention_scaling != 1.0:
            return angle.cos() * self.attention_scaling, angle.sin() * self.attention_scaling
        return angle.cos(), angle.sin()


class PlansRetention:
    """Mixin of a module that makes the `Plan` of each of its calls, from decays, rotation, kernels and sizes."""

    def prepare_plans(self, config: RetNetConfig) -> None:
        self.decay = RetNetDecay(config)
        self.rotary = RetNetRotaryEmbedding(config) if config.use_rotary else None
        self.kernels = load_kernels(config.kernels)
        self.head_dims = config.head_dim, config.value_head_dim  # compilers may treat config fields as symbols
        self.chunk_size = config.chunk_size or default_chunk_size(*self.head_dims)
        self.scaling = config.head_dim**-0.5

    def plan_of_layout(
        self,
        layout: Layout,
        past: StateLayer | None,
        form: str,
        dtype: torch.dtype,
        maps: bool = False,
        plan_class: type[Plan] = Plan,
    ) -> Plan:
        """Returns the plan of a call with hidden states of `dtype`. `past` is the first layer in use of its state."""
        is_wide = past is not None and past.is_initialized and past.dtype == torch.float64  # the precision of a state lasts
        log_decays = self.decay.of_layers(torch.float64 if is_wide else dtype, layout.position.device)
        config, matrices = self.config, log_decays[0].numel()
        heads = matrices * self.decay.heads_per_state[0]  # on this rank
        groups = max(1, heads * config.num_key_value_heads // config.num_attention_heads)
        sizes = heads, groups, matrices, *self.head_dims, self.chunk_size, config.bidirectional
        kernels = kernels_of_call(self.kernels, layout, dtype, sizes)
        options = {"bidirectional": config.bidirectional, "maps": maps, "kernels": kernels}
        options["with_final"] = past is not None
        angles = None if self.rotary is None else self.rotary(layout.call_position, dtype)
        return plan_class(layout, angles, self.scaling, log_decays, form, self.chunk_size, **options)


class RetNetTokenMixer(nn.Module):
    """Base class of token mixers: projections to queries, keys, values and gate, and the output projection.

    Args:
        gate_act: activation of the output gate; None for no gate.
        gain, output_gain: gains of the initialisation of the projections to heads, and of the output projection.
    """

    def __init__(
        self, config: RetNetConfig, layer_idx: int, gate_act: str | None, gain: float = 1.0, output_gain: float = 1.0
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        heads, groups, self.head_dim, self.value_head_dim = config.mixer_sizes(layer_idx)
        self.num_key_value_groups = heads // groups
        hidden_size, values = config.hidden_size, heads * self.value_head_dim
        bias, norm_eps = config.mixer_options(layer_idx)
        self.q_proj = projection(hidden_size, heads * self.head_dim, gain, on_value_path=False, bias=bias)
        self.k_proj = projection(hidden_size, groups * self.head_dim, gain, on_value_path=False, bias=bias)
        self.v_proj = projection(hidden_size, groups * self.value_head_dim, gain, bias=bias)
        self.g_proj = None if gate_act is None else projection(hidden_size, values, gain, on_value_path=False)
        self.o_proj = projection(values, hidden_size, output_gain)
        self.gate_fn = None if gate_act is None else ACT2FN[gate_act]
        self.q_norm = self.k_norm = self.feature_map = None
        if norm_eps is not None:
            self.q_norm, self.k_norm = (RetNetRMSNorm(self.head_dim, norm_eps) for _ in range(2))

    def operands(self, hidden_states: Tensor, plan: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rotated queries (B, H, T, K), rotated keys (B, G, T, K), and values (B, G, T, V) of (B, T, D)."""
        shape = (*hidden_states.shape[:-1], -1)  # (B, T, heads)
        query = self.q_proj(hidden_states).view(*shape, self.head_dim).transpose(1, 2)
        key = self.k_proj(hidden_states).view(*shape, self.head_dim).transpose(1, 2)
        value = self.v_proj(hidden_states).view(*shape, self.value_head_dim).transpose(1, 2)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.feature_map is not None:
            query, key = self.feature_map(query), self.feature_map(key)
        return *plan.rotate(query, key), value


class RetNetRetention(RetNetTokenMixer):
    """Gated multi-scale retention, equation 8 of the paper:

    head_i = Retention(X, γ_i),    Y = HeadNorm(head_1, …, head_H),    MSR(X) = (swish(X W_G) ⊙ Y) W_O
    """

    def __init__(self, config: RetNetConfig, layer_idx: int) -> None:
        gate_act = config.output_gate_act if config.use_output_gate else None
        super().__init__(config, layer_idx, gate_act, gain=2**-2.5, output_gain=2**-1)
        self.kernels = load_kernels(config.kernels)
        feature_map = config.feature_map_of(layer_idx)
        self.feature_map = None if feature_map is None else ACT2FN[feature_map]
        for norm in filter(None, (self.q_norm, self.k_norm)):
            norm.follows_projection = True  # softmax attention needs larger queries and keys
        self.head_norm = nn.Identity()
        if config.use_head_norm:
            self.head_norm = RetNetRMSNorm(self.value_head_dim, config.rms_norm_eps, config.head_norm_affine)

    def forward(
        self, hidden_states: Tensor, plan: Plan, state: Cache | None = None, **kwargs: Unpack[TransformersKwargs]
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the mixed tokens (B, T, D), and the retention map (B, H, T, T) if the plan computes it."""
        past = None if state is None else state.layers[self.layer_idx]
        query, key, value = self.operands(hidden_states, plan)
        output, maps = plan.retain(self.layer_idx, query, key, value, past)  # (B, H, T, V); reads and writes `past`
        if self.g_proj is None:
            output = self.head_norm(output).transpose(1, 2).flatten(2).to(value.dtype)
        else:
            gate = self.g_proj(hidden_states)
            # gate_fn(X W_G) ⊙ Y
            output = verified_kernels(self.kernels, gate).normed_gate(output, self.head_norm, gate, self.gate_fn)
        return self.o_proj(output), maps


class RetNetMLP(nn.Module):
    """Feed-forward network, gated or plain."""

    def __init__(self, config: RetNetConfig, inner_size: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.up_proj = projection(size, inner_size)
        self.gate_proj = projection(size, inner_size) if config.use_gated_mlp else None
        self.down_proj = projection(inner_size, size)
        self.act_fn = ACT2FN[config.hidden_act]
        self.dropout = nn.Dropout(config.activation_dropout)
        self.kernels = load_kernels(config.kernels)

    def forward(self, hidden_states: Tensor) -> Tensor:
        inner = self.up_proj(hidden_states)
        if self.gate_proj is None:
            inner = self.act_fn(inner)
        else:
            gate = self.gate_proj(hidden_states)
            inner = verified_kernels(self.kernels, gate).gated(inner, gate, self.act_fn)
        return self.down_proj(self.dropout(inner) if self.training else inner)


class RetNetDecoderLayer(GradientCheckpointingLayer):
    """Retention and a feed-forward network, each a branch of the residual stream."""

    mixer_name = "retention"  # the attribute that is the token mixer

    def __init__(self, config: RetNetConfig, layer_idx: int) -> None:
        super().__init__()
        self.config_idx = layer_idx  # the layer of the configuration that describes this one: see `arrange_layers`
        self.add_branches(config, layer_idx)
        self.retention_norm = RetNetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp_norm = RetNetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_norm = config.norm_position == "pre"
        self.mixer_multiplier = self.mlp_multiplier = config.residual_multiplier
        self.dropout = nn.Dropout(config.hidden_dropout)

    def add_branches(self, config: RetNetConfig, layer_idx: int) -> None:
        """Creates the token mixer and the feed-forward."""
        self.retention = RetNetRetention(config, layer_idx)
        self.mlp = RetNetMLP(config, config.intermediate_size)

    @property
    def mixer(self) -> RetNetTokenMixer:
        return getattr(self, self.mixer_name)

    def forward(
        self,
        hidden_states: Tensor,  # (B, T, D)
        plan: Plan,
        state: Cache | None = None,  # transformers' gradient checkpointing does not drop this name
        **kwargs: Unpack[TransformersKwargs],
    ) -> Tensor:
        branch = self.retention_norm(hidden_states) if self.pre_norm else hidden_states
        branch, _ = getattr(self, self.mixer_name)(branch, plan=plan, state=state, **kwargs)
        branch = self.dropout(branch) if self.training else branch
        hidden_states = torch.add(branch, hidden_states, alpha=self.mixer_multiplier)
        hidden_states = hidden_states if self.pre_norm else self.retention_norm(hidden_states)

        branch = self.mlp(self.mlp_norm(hidden_states) if self.pre_norm else hidden_states)
        branch = self.dropout(branch) if self.training else branch
        hidden_states = torch.add(branch, hidden_states, alpha=self.mlp_multiplier)
        return hidden_states if self.pre_norm else self.mlp_norm(hidden_states)


class RetNetPreTrainedModel(SharedLoading, SavedWithCard, PreTrainedModel):
    config: RetNetConfig
    config_class = RetNetConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RetNetDecoderLayer"]
    _skip_keys_device_placement = ["past_key_values", "cache", "state"]
    _can_compile_fullgraph = True
    _can_record_outputs = {"hidden_states": RetNetDecoderLayer, "attentions": RetNetRetention}

    def __init__(self, config: RetNetConfig, *args: Any, **kwargs: Any) -> None:
        if config.is_hybrid != self.config_class.is_hybrid:
            raise ValueError(
                f"config must be a {self.config_class.__name__} for {type(self).__name__}, got a {type(config).__name__}."
            )
        config.validate()  # fields may have been set since it was made
        super().__init__(config, *args, **kwargs)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Saves as in transformers, with a configuration that describes the layers as they are now."""
        self.base_model.arrange_layers()
        super().save_pretrained(*args, **kwargs)

    def post_init(self) -> None:
        """Initialises as in transformers. A head has the configuration of its base model, which is a copy."""
        self.config = self.base_model.config
        super().post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ComputedBuffer):
            module.initialize()
        else:
            init_weights(module, self.config)


def pieces_of(
    model: nn.Module, shape: tuple[int, int, int], retention_form: str | None, cu_seq_lens_q: Tensor | None = None, **kwargs
) -> list[slice]:
    """Returns the tokens of each piece, for a `RetNetModel` and inputs of shape (B, T, D).

    All pieces but the last have one length, a multiple of the chunk size, so the chunks are the same as without pieces.
    """
    (batch, length, _), config, chunk_size = shape, model.config, model.chunk_size
    size = PIECE_SIZE_ON_CPU if model.device.type == "cpu" else PIECE_SIZE_ELSEWHERE
    if batch * length <= size or length <= chunk_size:
        return [slice(0, length)]
    whole = config.bidirectional or model.context is not None or cu_seq_lens_q is not None
    whole = whole or (retention_form or config.retention_form) not in ("auto", "chunkwise")
    recorded = ("output_attentions", "output_hidden_states", "output_router_logits")
    whole = whole or any(kwargs.get(name) or getattr(config, name, False) for name in recorded)
    if whole or has_hooks(module for module in model.modules() if module is not model):
        return [slice(0, length)]
    chunks = -(-length // chunk_size)
    pieces = -(-chunks // max(1, size // (batch * chunk_size)))
    tokens = -(-chunks // pieces) * chunk_size
    return [slice(start, min(start + tokens, length)) for start in range(0, length, tokens)]


def read_pieces(
    model: nn.Module, pieces: list[slice], hidden_states: Tensor, marks: Any, cache: Cache | None, form: str | None, **kwargs
) -> Tensor:
    """Returns the output of the final norm, (B, T, D), for embedded tokens. `marks`: attention_mask and position_ids."""
    state = RetNetState(model.config) if cache is None else cache
    past, output = first_in_use(state.layers), torch.empty_like(hidden_states)
    layout = layout_of(hidden_states.shape[:2], hidden_states.device, *marks, past, **kwargs)
    for tokens in pieces:
        places = (layout.position, layout.next_position, layout.present, layout.starts)
        cut = [None if place is None else place[:, tokens] for place in places]
        part, own = hidden_states[:, tokens], Layout(*cut, has_holes=layout.has_holes)
        output[:, tokens] = model.read(part, model.plan(part, None, None, state, form, own, **kwargs), state, **kwargs)
    return output


class RetNetModel(PlansRetention, RetNetPreTrainedModel):
    """The stack of RetNet layers, without a head.

    Attributes:
        context: the ranks that share a sequence, if `context_parallel` has split sequences over ranks; else None.
    """

    layer_class = RetNetDecoderLayer
    output_class = BaseModelOutputWithPast

    def __init__(self, config: RetNetConfig) -> None:
        config = copy.deepcopy(config)  # `arrange_layers` changes it, and other models may be made from the same one
        super().__init__(config)
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        norm = functools.partial(RetNetRMSNorm, config.hidden_size, config.rms_norm_eps)
        self.embed_norm = norm() if config.use_embedding_norm else None
        self.embed_dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList([self.layer_class(config, index) for index in range(config.num_hidden_layers)])
        self.norm = norm() if config.norm_position == "pre" else nn.Identity()
        self.prepare_plans(config)
        self.context: Any = None
        self.gradient_checkpointing = False
        self.post_init()

    def arrange_layers(self) -> None:
        """Makes the configuration describe layers that were cut, copied or moved since the model was made.

        Layers keep their decays, feature maps, windows and rotations, and are numbered by their places from then on.
        """
        order = []
        for place, layer in enumerate(self.layers):  # in a pipeline, the layers of other stages have no `config_idx`
            order.append(getattr(layer, "config_idx", place))
        if order == list(range(self.config.num_hidden_layers)):
            return
        if not order:
            raise ValueError("the model must have at least one layer.")
        if len(set(self.layers)) < len(order):
            raise ValueError("each layer must be a module of its own, because it has its own state: use copy.deepcopy.")
        self.config.arrange(order)
        for place, layer in enumerate(self.layers):
            layer.config_idx = layer.mixer.layer_idx = place
        share, device = self.decay.rank_share, self.decay.log_decay.device
        self.decay = RetNetDecay(self.config).to(device)
        self.decay.rank_share = share

    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        retention_form: str | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        r"""
        Args:
            input_ids: (B, T) token ids. inputs_embeds: (B, T, D) embeddings instead of token ids.
            attention_mask: (B, S), 0 where a token is padding, anywhere in the row. S is T, or T plus the number of columns
                read before. Padding affects neither other tokens nor the state.
            position_ids: (B, T). Needed only for packed documents: a position that does not exceed the one before it starts
                a new document. Alternatively pass `cu_seq_lens_q` or `seq_idx`, as transformers' collators do. One of them
                is needed if a document begins with padding.
            cache: a `RetNetState`, or an empty cache of transformers. The call updates it in place with these
                tokens, unless use_cache=False. If the state is not empty and `cu_seq_lens_q` is passed, the (D + 1,)
                boundaries of D documents in one row (1, T), document i continues from row i of the state, independently of
                the other documents. A document starts from an empty state and overwrites its row if its first position in
                `position_ids` is less than the next position of that row. Positions increase in a document.
            use_cache: whether to return a state; by default True if a state is passed, else `config.use_cache`.
            state_rows: (D,) distinct integers: the row of the state from which each packed document continues.
            retention_form: "auto", "parallel", "recurrent" or "chunkwise"; by default `config.retention_form`.
            past_key_values: the name of `cache` before transformers 5.24.
            output_attentions: whether to return every layer's retention maps Q Kᵀ ⊙ D, (B, H, T, T), in the parallel form.

        Raises:
            ValueError: for inputs that do not fit each other.
        """
        require_known_arguments(self, kwargs)
        self.arrange_layers()
        cache = cache_of_call(cache, past_key_values)
        if isinstance(attention_mask, dict):  # models such as Llava pass one mask per layer type
            attention_mask = attention_mask.get("linear_attention")
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds.")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if hidden_states.dim() != 3:
            name, given = ("inputs_embeds", inputs_embeds) if input_ids is None else ("input_ids", input_ids)
            raise ValueError(
                "input_ids must be (batch, tokens), or inputs_embeds (batch, tokens, hidden size), got "
                f"{name} {tuple(given.shape)}."
            )
        if hidden_states.shape[0] == 0:
            raise ValueError("input_ids or inputs_embeds must have at least one sequence, got a batch of 0.")
        if use_cache is None:
            use_cache = cache is not None or self.config.use_cache
        past = past_of_call(self, cache, use_cache) if use_cache or cache is not None else None
        begins = use_cache and isinstance(past, RetNetState) and not first_in_use(past.layers).is_initialized

        if not isinstance(self.layers[0], nn.Identity):  # later pipeline stages receive embedded states
            if self.config.embedding_multiplier != 1.0:
                hidden_states = hidden_states * self.config.embedding_multiplier
            hidden_states = self.embed_dropout(hidden_states if self.embed_norm is None else self.embed_norm(hidden_states))
        # Compilers and tracers must skip the comparison: it would bound the length of an exported program.
        whole = torch.is_grad_enabled() or is_traced()
        whole = whole or math.prod(hidden_states.shape[:2]) <= PIECE_SIZE_ON_CPU
        pieces = [] if whole else pieces_of(self, hidden_states.shape, retention_form, **kwargs)
        if len(pieces) > 1:
            marks = attention_mask, position_ids
            hidden_states = read_pieces(self, pieces, hidden_states, marks, past, retention_form, **kwargs)
        else:
            plans = self.plan(hidden_states, attention_mask, position_ids, past, retention_form, **kwargs)
            hidden_states = self.read(hidden_states, plans, past, **kwargs)
        # The state keeps the last ids, to refuse another text, and what it began with, to recognise other weights.
        if past is not None and self.context is None and not torch.compiler.is_compiling():
            if input_ids is not None:
                first = first_in_use(past.layers)  # packed documents have fewer rows
                first.last_ids = input_ids[:, -1].clone() if input_ids.shape[0] == first.batch_size else None
            if self.training:
                past.first_tokens = ()
            elif begins and kwargs.get("cu_seq_lens_q") is None:
                inputs = {"input_ids": input_ids, "inputs_embeds": inputs_embeds, "attention_mask": attention_mask}
                position_ids = None if position_ids is None else position_ids.view(-1, position_ids.shape[-1])
                inputs |= {"position_ids": position_ids, "seq_idx": kwargs.get("seq_idx")}
                past.first_tokens = first_tokens_of(self, hidden_states, attention_mask, **inputs)
        return self.output_class(last_hidden_state=hidden_states, **{CACHE: past if use_cache else None})

    def read(self, hidden_states: Tensor, plans: list[Plan], state: Cache | None, **kwargs) -> Tensor:
        """Returns the output (B, T, D) of all layers and the final norm for embedded tokens (B, T, D)."""
        if state is not None and self.training and self.gradient_checkpointing and torch.is_grad_enabled():
            state = UpdatedOnce(state)  # the backward pass will compute the layers again
        try:
            for layer, plan in zip(self.layers, plans):
                hidden_states = layer(hidden_states, plan=plan, state=state, **kwargs)
        finally:  # states that were written have read the tokens, whatever a later layer does
            for plan in plans:
                if isinstance(plan, Plan):  # all layers of retention share it
                    plan.layout.advance_()
                    break
        return self.norm(hidden_states)

    def plan(
        self,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        retention_form: str | None = None,
        layout: Layout | None = None,
        output_attentions: bool | None = None,
        **kwargs: Tensor | None,
    ) -> list[Plan]:
        """Returns the plan of a call for each layer. All layers share one plan.

        Distinguishes three types of calls: sequences that are split over ranks, packed documents that continue from the rows
        of a state, and rows of a batch with or without a state.

        Args:
            inputs_embeds: (B, T, D). Only shape, dtype and device are used. Other arguments as in `forward`.
            layout: a layout that was computed before; None to compute it.
        """
        config, (batch, length, _) = self.config, inputs_embeds.shape
        dtype, device = inputs_embeds.dtype, inputs_embeds.device
        layers = None if cache is None else cache.layers
        past = None if layers is None else first_in_use(layers)
        maps = config.output_attentions if output_attentions is None else output_attentions
        form, plan_class = retention_form or config.retention_form, Plan
        call = (batch, length), device, attention_mask, position_ids
        options = {"retention_form": retention_form, "output_attentions": maps, **kwargs}
        if self.context is not None:
            form, plan_class, layout = "chunkwise", self.context.plan_class, self.context.layout(past, *call, **options)
        elif past is not None and past.is_initialized and kwargs.get("cu_seq_lens_q") is not None:
            from ..state.packed_documents import PackedPlan, continued_layout  # for serving engines; do not travel

            plan_class, layout = PackedPlan, continued_layout(config, layers, self.chunk_size, *call, **options)
        elif layout is None:
            layout = layout_of(*call, past, **kwargs)
        plan = self.plan_of_layout(layout, past, form, dtype, maps, plan_class)
        return [plan] * config.num_hidden_layers


class RetNetWithLMHead(RetNetPreTrainedModel):
    """Base class of the models that predict tokens, from the tokens before them or from both sides."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}
    model_class = RetNetModel

    def __init__(self, config: RetNetConfig) -> None:
        super().__init__(config)
        self.model = self.model_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def loss_and_logits(
        self, hidden_states: Tensor, labels: Tensor | None, is_own_loss: bool, with_logits: bool = True, **kwargs: Any
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns the loss, or None without labels, and the logits (B, T, vocab_size) of hidden states (B, T, D).

        Args:
            is_own_loss: whether the loss is the mean cross entropy of labels (B, T) that are already shifted.
            with_logits: whether to return the logits.
        """
        if is_own_loss:
            kwargs["cross_entropy_"] = verified_kernels(self.model.kernels, hidden_states).cross_entropy_
            return mean_cross_entropy(self.lm_head, hidden_states, labels, with_logits, **kwargs)
        logits, loss = self.lm_head(hidden_states), None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return loss, logits if with_logits else None


class RetNetForCausalLM(RetNetGeneration, RetNetWithLMHead, GenerationMixin):
    """RetNet with a language modelling head: trained in parallel or chunkwise form, decoded recurrently."""

    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config: RetNetConfig) -> None:
        if config.bidirectional:
            raise ValueError("bidirectional must be False for RetNetForCausalLM, which may not see the token it predicts.")
        super().__init__(config)
        self.vocab_size = config.vocab_size

    @can_return_tuple
    @replayed
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        retention_form: str | None = None,
        skip_logits: bool = False,
        past_key_values: Cache | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        r"""
        Arguments as in `RetNetModel.forward`, and

        Args:
            labels: (B, T) token ids, -100 where there is nothing to predict. They are shifted here. As in transformers, the
                token before the first label predicts it, even if that token is padding.
            logits_to_keep: number of last tokens for which to return logits (0: all tokens), or indices of tokens.
            skip_logits: whether to return only the loss. The logits (B, T, vocab_size) then never exist all at once.

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
                "labels must come with shift_labels if sequences are split over ranks, because the label of a rank's last "
                "token is on another rank. shard_sequence returns both."
            )
        if isinstance(attention_mask, dict):  # models such as Llava pass one mask per layer type
            attention_mask = attention_mask.get("linear_attention")
        if skip_logits and labels is None:
            raise ValueError("skip_logits must be False without labels: nothing would be computed.")
        outputs: BaseModelOutputWithPast = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            retention_form=retention_form,
            return_dict=True,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_states = outputs.last_hidden_state[:, kept, :]
        is_own = labels is not None and self.loss_function is ForCausalLMLoss and labels.shape == hidden_states.shape[:2]
        if is_own:
            shifted = kwargs.pop("shift_labels", None)
            if shifted is None:
                shifted = F.pad(labels[:, 1:], (0, 1), value=kwargs.get("ignore_index", -100))
            labels = shifted
        loss, logits = self.loss_and_logits(hidden_states, labels, is_own, not skip_logits, **kwargs)
        return self.outputs_of(outputs, loss, logits, attention_mask)

    def outputs_of(
        self, outputs: BaseModelOutputWithPast, loss: Tensor | None, logits: Tensor | None, attention_mask: Tensor | None
    ) -> CausalLMOutputWithPast:
        """Returns the output of `forward`."""
        recorded = {"hidden_states": outputs.hidden_states, "attentions": outputs.attentions}
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE: getattr(outputs, CACHE)}, **recorded)


class RetNetForMaskedLM(RetNetWithLMHead):
    """RetNet encoder with a head that predicts masked tokens. `config.bidirectional` must be True."""

    def __init__(self, config: RetNetConfig) -> None:
        if not config.bidirectional:
            raise ValueError("bidirectional must be True for RetNetForMaskedLM, which predicts a token from both sides.")
        super().__init__(config)

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
            labels: (B, T) token ids of masked tokens, -100 for all other tokens.
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
        is_own = labels is not None and self.loss_function is ForMaskedLMLoss
        loss, logits = self.loss_and_logits(outputs.last_hidden_state, labels, is_own, **kwargs)
        return MaskedLMOutput(loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions)


class RetNetWithHead(RetNetPreTrainedModel):
    """Base class of the models with transformers' generic heads, without their constructors.

    Those build the base model that is registered for the configuration's class. A derived configuration, or the copy in code
    that is saved with a model, may have none.
    """

    model_class = RetNetModel
    accepts_loss_kwargs = False  # so Trainer divides the loss by the number of accumulation steps

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.forward is not nn.Module.forward:
            cls.forward = with_arguments_of(RetNetModel.forward, cls.forward)

    def __init__(self, config: RetNetConfig) -> None:
        super().__init__(config)
        registered = MODEL_MAPPING.get(type(config), self.model_class)
        self.model = (registered if issubclass(registered, self.model_class) else self.model_class)(config)
        self.num_labels = config.num_labels


class RetNetForSequenceClassification(GenericForSequenceClassification, RetNetWithHead):
    """RetNet with a classifier on the last token that is not padding."""

    def __init__(self, config: RetNetConfig) -> None:
        super(GenericForSequenceClassification, self).__init__(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class RetNetForTokenClassification(GenericForTokenClassification, RetNetWithHead):
    """RetNet with a classifier on every token."""

    def __init__(self, config: RetNetConfig) -> None:
        super(GenericForTokenClassification, self).__init__(config)
        dropout = getattr(config, "classifier_dropout", None)  # of a derived configuration
        self.dropout = nn.Dropout(config.hidden_dropout if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class RetNetForQuestionAnswering(GenericForQuestionAnswering, RetNetWithHead):
    """RetNet with a head that predicts the span of an answer."""

    def __init__(self, config: RetNetConfig) -> None:
        super(GenericForQuestionAnswering, self).__init__(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()
