# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The weighted sum of RWKV v4 (arXiv 2305.13048, equation 16), which replaces transformers' function.

Without its CUDA kernel, transformers writes the output of each token into one tensor, and the backward pass copies this
tensor for every token. Here, only the recurrence runs token by token, with one multiplication and addition.
"""

import torch
from torch import Tensor
from transformers.models.rwkv import modeling_rwkv


def weighted_sum(
    time_decay: Tensor,
    time_first: Tensor,
    key: Tensor,
    value: Tensor,
    state: tuple[Tensor, Tensor, Tensor] | None = None,
    return_state: bool = False,
) -> tuple[Tensor, list[Tensor] | None]:
    """Returns the result of transformers' `rwkv_linear_attention`.

    Sums are stored divided by exp(highest); `highest` (B, T, C) bounds every exponent in them.

    Args:
        time_decay, time_first: (C,). key, value: (B, T, C).
        state: numerator, denominator and highest exponent, (B, C) each, in float32.

    Returns:
        The sums (B, T, C), and the state after the last token if a state was passed or requested.
    """
    log_decay, exponent = -time_decay.exp(), key.float()
    first = exponent.new_zeros(exponent[:, 0].shape)
    numerator, denominator, highest_before = state or (first, first, first - 1e38)
    with torch.no_grad():  # the result does not depend on `highest`
        decayed = log_decay * torch.arange(key.shape[1], device=key.device)[:, None]  # (T, C)
        highest = decayed + torch.cummax(exponent - decayed, 1).values
        highest = highest.maximum(highest_before[:, None] + decayed + log_decay)
        before = torch.cat([highest_before[:, None], highest[:, :-1]], 1)
    kept = (before + log_decay - highest).exp()
    added = (exponent - highest).exp()
    added = torch.stack([added * value, added])  # (2, B, T, C)
    sums = [torch.stack([numerator, denominator])]
    for keeps, adds in zip(kept.unbind(1), added.unbind(2)):
        sums.append(torch.addcmul(adds, keeps, sums[-1]))
    numerators, denominators = torch.stack(sums[:-1], 2)
    bonus = exponent + time_first
    highest_read = before.maximum(bonus).detach()
    past, present = (before - highest_read).exp(), (bonus - highest_read).exp()
    output = (past * numerators + present * value) / (past * denominators + present)
    last = [*sums[-1], highest[:, -1]] if return_state or state is not None else None
    return output.to(key.dtype), last


def install() -> None:
    """Makes every RWKV of transformers in this process use this function."""
    modeling_rwkv.rwkv_linear_attention = weighted_sum
