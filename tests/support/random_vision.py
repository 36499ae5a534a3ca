# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Random weights and images for models of any vision family."""

import torch
from torch import Tensor, nn


@torch.no_grad()
def shake_vision(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights, large enough that every pixel and every position sways the logits, and batch norms that have seen
    something. What a configuration fixes, such as decays, is not saved and stays as it is.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        if name.endswith(("bias", "running_mean")):
            tensor.normal_(0, 0.2, generator=generator)
        elif tensor.dim() == 1:
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif tensor.dim() == 3 and tensor.shape[0] == 1:  # positions and tokens
            tensor.normal_(generator=generator)
        else:
            inputs = tensor[0].numel() if tensor.dim() == 4 else tensor.shape[-1]
            tensor.normal_(0, 1.5 * inputs**-0.5, generator=generator)
    return model


def random_images(
    batch: int = 2,
    height: int = 32,
    width: int = 32,
    seed: int = 0,
    channels: int = 3,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
