# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures of the heads of a transformer on a text: how far each head looks back, and how large its output is."""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


class HeadMeasures(NamedTuple):
    """Measures of each layer and head, (layers, H) float64."""

    distance: Tensor  # mean distance, in tokens, to the tokens that a token attends to, weighted by attention
    rms: Tensor  # root mean square of the head's output


@torch.no_grad()
def measure_heads(source: PreTrainedModel, blocks: Iterable[Tensor]) -> HeadMeasures:
    """Measures the heads on blocks of token ids, (B, T) each, with one layer's attention weights in memory at a time.

    Raises:
        ValueError: if there is no block.
    """
    config, layers = source.config, source.model.layers
    shape, tokens = (len(layers), config.num_attention_heads), 0
    distance, squares = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)

    def attended(index: int, _: nn.Module, __: tuple, output: tuple[Tensor, Tensor]) -> None:
        weights = output[1].float()  # (B, H, T, T)
        place = torch.arange(weights.shape[-1], dtype=torch.float32, device=weights.device)
        # In half precision, the weights of a token hardly ever sum to 1, so their sum is used.
        distance[index] += (place * weights.sum(-1) - weights @ place).cpu().double().sum(dim=(0, 2))

    def entered(index: int, _: nn.Module, inputs: tuple[Tensor]) -> None:
        heads = inputs[0].unflatten(-1, (shape[1], -1)).float()  # (B, T, H, V)
        squares[index] += heads.square().mean(-1).cpu().double().sum(dim=(0, 1))

    handles = []
    for index, layer in enumerate(layers):
        handles.append(layer.self_attn.register_forward_hook(partial(attended, index)))
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(partial(entered, index)))
    implementation, training = source.config._attn_implementation, source.training
    source.set_attn_implementation("eager")  # only "eager" returns attention weights
    source.eval()
    try:
        for ids in blocks:
            tokens += ids.numel()
            source.model(ids.to(source.device), use_cache=False)
    finally:
        source.set_attn_implementation(implementation)
        source.train(training)
        for handle in handles:
            handle.remove()
    if not tokens:
        raise ValueError("blocks must hold at least one block of tokens.")
    return HeadMeasures(distance / tokens, (squares / tokens).sqrt())
