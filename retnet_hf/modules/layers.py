# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Linear layers and norms of a model, and their first weights as `initialization` of `RetNetConfig` says."""

from torch import Tensor, nn
from transformers import initialization as init
from transformers.configuration_utils import PreTrainedConfig

from ..ops.gradients import rms_norm


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
