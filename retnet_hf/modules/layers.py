# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What layers of several models share: projections, norms, first weights, decays, frequencies, hooks, eager attention.

Decays and frequencies are integers, so that a cast of the model to another dtype does not change them. A frequency is in
units of 2^-64 revolutions per token. Its product with a position wraps around modulo 2^64, which only drops full
revolutions: after a million tokens the angle is as accurate as after one.
"""

import math
from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.output_capturing import capture_outputs

from ..ops.gradients import GLOBAL_HOOKS, rms_norm


RECORDER = capture_outputs.__module__  # module of the hooks with which transformers records hidden states


class RetNetRMSNorm(nn.RMSNorm):
    """RMS norm (arXiv 1910.07467) of the residual stream or of each head. The output has the dtype of the input."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)


def projection(
    in_features: int, out_features: int, gain: float = 1.0, on_value_path: bool = True, bias: bool = False
) -> nn.Linear:
    """Returns a projection of a layer, with attributes for `init_weights`. bitsandbytes would not quantise a derived class.

    Args:
        gain: of Xavier's initialisation. on_value_path: whether DeepNet's (arXiv 2203.00555) shrinks the weight with depth.
    """
    linear = nn.Linear(in_features, out_features, bias=bias)
    linear.xavier_gain, linear.on_value_path = gain, on_value_path
    return linear


def init_weights(module: nn.Module, config: PreTrainedConfig) -> None:
    """Initialises a module. transformers has already initialised embeddings, linear layers, and modules named *RMSNorm*."""
    if isinstance(module, nn.Linear) and config.initialization == "fan_in":
        init_by_inputs(module.weight)
    elif getattr(module, "follows_projection", False) and config.initialization == "fan_in":
        init.constant_(module.weight, 3**-0.5)  # standard deviation of `init_by_inputs` times the root of the inputs
    elif hasattr(module, "xavier_gain") and config.initialization != "normal":
        depth = (8 * config.num_hidden_layers) ** 0.25
        shrink = depth if module.on_value_path and config.initialization == "deepnet" else 1.0
        init.xavier_uniform_(module.weight, gain=module.xavier_gain / shrink)


def init_by_inputs(weight: Tensor) -> None:
    """Initialises a matrix (…, n) by "fan_in"."""
    bound = weight.shape[-1] ** -0.5
    init.uniform_(weight, -bound, bound)


class ComputedBuffer(nn.Module):
    """A module with a buffer that is computed from a configuration, again whenever weights are loaded.

    Checkpoints do not contain it, and `to_empty` leaves it with arbitrary values.
    """

    COMPUTED: str  # name of the buffer

    @abstractmethod
    def compute(self, device: torch.device | None = None) -> Tensor:
        """Returns the values of the buffer."""

    def initialize(self) -> None:
        """Fills the buffer. Called by `_init_weights`, because transformers leaves it empty when it loads a checkpoint."""
        buffer = getattr(self, self.COMPUTED)
        init.copy_(buffer, self.compute(buffer.device))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        buffer = getattr(self, self.COMPUTED)
        if not buffer.is_meta:
            buffer.copy_(self.compute(buffer.device))
        elif local_metadata.get("assign_to_params_buffers", False):
            self.register_buffer(self.COMPUTED, self.compute(), persistent=False)


class HeadDecay(ComputedBuffer):
    """ln γ of each head, stored as integers.

    Args:
        decays: γ of each head, in (0, 1]; or a list of one list per layer, of equal lengths.

    Attributes:
        log_decay: (H,) or (layers, H) int64, ln γ in units of 2^-56. Values below -100, where a token vanishes in one step,
            become -100, so that all values fit into 64 bits.
    """

    COMPUTED = "log_decay"

    def __init__(self, decays: list[float] | list[list[float]]) -> None:
        super().__init__()
        self.decays = decays
        self.log_decay = nn.Buffer(self.compute(), persistent=False)

    def compute(self, device: torch.device | None = None) -> Tensor:
        layers = self.decays if isinstance(self.decays[0], list) else [self.decays]
        units = [[round(max(math.log(decay), -100.0) * 2**56) for decay in decays] for decays in layers]
        return torch.tensor(units if layers is self.decays else units[0], dtype=torch.int64, device=device)

    def forward(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns ln γ, (H,) or (layers, H), in `dtype`, or in float32 if `dtype` is narrower."""
        return self.log_decay.to(device).to(torch.promote_types(dtype, torch.float32)) * 2**-56


def integer_frequencies(radians: list[float], device: torch.device | None = None) -> Tensor:
    """Converts angles per token in radians, in [0, π), to units of 2^-64 revolutions, (len(radians),) int64."""
    return torch.tensor([round(angle / (2 * math.pi) * 2**64) for angle in radians], dtype=torch.int64, device=device)


def angles(position: Tensor, frequency: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns radians (..., F) of positions (...) int64 and integer frequencies (F,), in `dtype`, but at least float32."""
    phase = position[..., None] * frequency.to(position.device)
    return phase.to(torch.promote_types(dtype, torch.float32)) * (2 * math.pi / 2**64)


def rotary_frequencies(config: PreTrainedConfig, head_dim: int, device: torch.device | None) -> tuple[Tensor, float]:
    """Returns the `integer_frequencies` of a head's K/2 pairs, from `config.rope_parameters`, and yarn's factor, or 1.

    The radians are theta^(-2i/K) or, with the end point, theta^(-linspace(0, 1, K/2)). For other rope types, transformers
    computes them in float32. In a partial rotation, pairs that are not rotated get 0.
    """
    parameters, factor = config.rope_parameters, 1.0
    pairs = int(head_dim * parameters.get("partial_rotary_factor", 1.0)) // 2
    if parameters["rope_type"] == "default":
        last = max(pairs - 1, 1) if config.rotary_endpoint else pairs
        radians = [parameters["rope_theta"] ** (-pair / last) for pair in range(pairs)]
    else:
        with torch.device("cpu"):  # computed on the CPU even if models are created on another device
            found, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
        radians = found.tolist()
    return integer_frequencies(radians + [0.0] * (head_dim // 2 - pairs), device), factor


def has_hooks(modules: Iterable[nn.Module]) -> bool:
    """Returns whether one of the modules has hooks, which may change what it computes, or on which device.

    Ignores hooks that record outputs, because transformers does not remove them after use.
    """
    for module in modules:
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if "forward" in vars(module) or any(getattr(hook, "__module__", "") != RECORDER for hook in hooks):
            return True
    return any(GLOBAL_HOOKS)


def attention_map(
    query: Tensor, key: Tensor, attention_mask: Tensor | None, scaling: float, is_causal: bool = False
) -> Tensor:
    """Returns softmax(scaling · Q Kᵀ + mask), (..., T, S), for query (..., T, K) and key (..., S, K)."""
    scores = query @ key.transpose(-1, -2) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(query.dtype)


def eager_attention_forward(
    module: nn.Module,
    query: Tensor,  # (B, H, T, K)
    key: Tensor,  # (B, G, S, K), where each of G heads serves H / G query heads
    value: Tensor,  # (B, G, S, V)
    attention_mask: Tensor | None,  # added to the scores; if None, `module.is_causal` decides
    scaling: float,
    **kwargs,
) -> tuple[Tensor, Tensor]:
    """Returns outputs (B, T, H, V) and weights (B, H, T, S), as an attention function of transformers."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    attention = attention_map(query, key, attention_mask, scaling, attention_mask is None and module.is_causal)
    return (attention @ value).transpose(1, 2), attention
