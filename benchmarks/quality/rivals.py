# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Models of equal size, and the width of the feed-forward that gives each the same number of parameters."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridConfig, RetNetHybridForCausalLM
from retnet_hf.arguments.checks import scheduled_decays

from . import rwkv_sums
from .mixers import H3, Decoder, Hyena
from .settings import Setting


def decays(schedule: str, heads: int) -> str | list[float]:
    """Returns a value for `RetNetConfig.decay_schedule`.

    Args:
        schedule: a name of a schedule; "geometric FIRST LAST", γ = exp(-1/τ) with time constants τ from FIRST to LAST tokens
            in a geometric sequence; "alibi", the slopes of ALiBi (arXiv 2108.12409); or "constant τ".
    """
    name, *span = schedule.split()
    if name == "geometric":
        return scheduled_decays(name, heads, [float(constant) for constant in span])
    if name == "constant":
        return [math.exp(-1 / float(span[0]))] * heads
    return scheduled_decays(name, heads) if name == "alibi" else schedule


def sizes(size: Setting, width: int) -> dict[str, int]:
    """Returns the sizes of a decoder with a feed-forward of this width, by transformers' names."""
    return {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "intermediate_size": width,
    }


def retnet(size: Setting, width: int, schedule: str = "power_of_two", heads: int | None = None, **options: Any) -> nn.Module:
    """Returns a RetNet with the initialisation of the paper, unless `options`, fields of the configuration, differ."""
    heads = heads or size.heads
    fields = {"num_attention_heads": heads, "decay_schedule": decays(schedule, heads), "value_expansion": 2.0}
    return RetNetForCausalLM(RetNetConfig(**(sizes(size, width) | fields | options)))


def retnet_from_scratch(size: Setting, width: int, **options: Any) -> nn.Module:
    """Returns a RetNet with the options of the first presets for training from scratch, unless `options` differ.

    Args:
        options: fields of the configuration. A `feature_map` of "relu, last none" is ReLU in all layers but the last.
            `softmax_layer` is the index of a layer of softmax attention, such as -1.
    """
    fields = sizes(size, width) | {"feature_map": "relu", "use_qk_norm": False} | options
    layers = fields["num_hidden_layers"]
    if fields["feature_map"] == "relu, last none":
        fields["feature_map"] = ["relu"] * (layers - 1) + [None]
    if (place := fields.pop("softmax_layer", None)) is None:
        return RetNetForCausalLM(RetNetConfig.from_preset("tiny", **fields))
    fields["layer_types"] = ["linear_attention"] * layers
    fields["layer_types"][place] = "full_attention"
    return RetNetHybridForCausalLM(RetNetHybridConfig.from_preset("tiny", **fields))


def linear_transformer(size: Setting, width: int, **options: Any) -> nn.Module:
    """No decay, gate or rotation, positive features (arXiv 2006.16236); the norm of each head replaces its sum."""
    fields = {"schedule": "none", "use_output_gate": False, "use_rotary": False, "feature_map": "relu"}
    return retnet(size, width, **(fields | options))


def llama(size: Setting, width: int, **options: Any) -> nn.Module:
    fields = sizes(size, width) | {"max_position_embeddings": 2**16, "attn_implementation": "sdpa"}
    return LlamaForCausalLM(LlamaConfig(**(fields | options)))


def rwkv(size: Setting, width: int, **options: Any) -> nn.Module:
    """RWKV v4 (arXiv 2305.13048)."""
    rwkv_sums.install()
    fields = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.layers,
        "intermediate_size": width,
        "context_length": 2**16,
        "rescale_every": 0,
    }
    return RwkvForCausalLM(RwkvConfig(**(fields | options)))


def mamba2(size: Setting, width: int, **options: Any) -> nn.Module:
    """Mamba2 (arXiv 2405.21060). It has more layers instead of a feed-forward; `width` is the size of a state."""
    fields = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden_size,
        "num_hidden_layers": 7 * size.layers // 4,
        "num_heads": size.heads,
        "head_dim": 2 * size.hidden_size // size.heads,
        "state_size": width,
        "n_groups": 1,
        "chunk_size": 32,
    }
    return Mamba2ForCausalLM(Mamba2Config(**(fields | options)))


def gated_delta_net(size: Setting, width: int, **options: Any) -> nn.Module:
    """Only the linear layers of Qwen3-Next (arXiv 2412.06464), with heads of RetNet's sizes."""
    fields = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden_size,
        "num_hidden_layers": size.layers,
        "intermediate_size": width,
        "layer_types": ["linear_attention"] * size.layers,
        "mlp_only_layers": list(range(size.layers)),
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads,
        "head_dim": size.hidden_size // size.heads,
        "linear_num_key_heads": size.heads,
        "linear_num_value_heads": size.heads,
        "linear_key_head_dim": size.hidden_size // size.heads,
        "linear_value_head_dim": 2 * size.hidden_size // size.heads,
        "num_experts": 0,
    }
    return Qwen3NextForCausalLM(Qwen3NextConfig(**(fields | options)))


def h3(size: Setting, width: int, **options: Any) -> nn.Module:
    return Decoder(lambda: H3(size.hidden_size, **options), size.vocabulary, size.hidden_size, size.layers, width)


def hyena(size: Setting, width: int, **options: Any) -> nn.Module:
    mixer = lambda: Hyena(size.hidden_size, **({"length": size.block} | options))  # noqa: E731
    return Decoder(mixer, size.vocabulary, size.hidden_size, size.layers, width)


RIVALS: dict[str, Callable[..., nn.Module]] = {
    "retnet": retnet,
    "retnet-from-scratch": retnet_from_scratch,
    "llama": llama,
    "linear-transformer": linear_transformer,
    "rwkv": rwkv,
    "mamba2": mamba2,
    "gated-delta-net": gated_delta_net,
    "h3": h3,
    "hyena": hyena,
}


def equalised(make: Callable[[int], nn.Module], parameters: int) -> nn.Module:
    """Returns the model with the feed-forward width, a multiple of 8, that brings it closest to `parameters`.

    Raises:
        ValueError: if the model has more parameters without a feed-forward.
    """

    def count(width: int) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in make(width).parameters())

    at_eight, a_step = count(8), count(16) - count(8)
    width = 8 + 8 * round((parameters - at_eight) / a_step)
    if width < 8:
        raise ValueError(f"a model with the least feed-forward has {at_eight:,} parameters, and {parameters:,} are wanted.")
    return make(width)


def of_equal_size(model: str, options: dict[str, Any], size: Setting) -> nn.Module:
    """Returns a model with as many parameters as the other models of the setting.

    Args:
        options: arguments of the model; also `fan_in`, see `start_by_fan_in`.
    """
    options = dict(options)
    fan_in = options.pop("fan_in", False)

    def make(width: int) -> nn.Module:
        made = RIVALS[model](size, width, **options)
        return start_by_fan_in(made, size.hidden_size) if fan_in else made

    return equalised(make, size.parameters)


def start_by_fan_in(model: nn.Module, hidden_size: int) -> nn.Module:
    """Returns the model with a norm of its embeddings, and with PyTorch's initial matrices, U(±1/√fan_in)."""
    model.set_input_embeddings(nn.Sequential(model.get_input_embeddings(), nn.RMSNorm(hidden_size, eps=1e-6)))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    return model
