# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Small random RMTs, and images for them."""

import torch
from torch import Tensor, nn

from retnet_hf import RMTConfig, RMTForImageClassification


def small_rmt_config(**overrides) -> RMTConfig:
    """Four stages: two decomposed, two whole; heads of 4, 6 and 8; layer scale in the last."""
    fields = {
        "hidden_sizes": [8, 12, 16, 16],
        "depths": [1, 1, 2, 1],
        "num_attention_heads": [2, 2, 2, 4],
        "mlp_ratios": [2, 2, 1.5, 2],
        "use_layer_scale": [False, False, False, True],
        "projection_size": 20,
        "num_labels": 5,
    }
    return RMTConfig(**(fields | overrides))


@torch.no_grad()
def shake_vision(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights, large enough that every pixel sways the logits, and batch norms that have seen something."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.dim() > 1:
            tensor.normal_(0, 1.5 * tensor[0].numel() ** -0.5, generator=generator)
        elif name.endswith(("running_mean", "bias")):
            tensor.normal_(0, 0.2, generator=generator)
        elif tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5, generator=generator)
    return model


def small_rmt(model_class: type = RMTForImageClassification, seed: int = 0, **overrides):
    return shake_vision(model_class(small_rmt_config(**overrides)), seed).eval()


def images(batch: int = 2, height: int = 64, width: int = 48, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(seed))
