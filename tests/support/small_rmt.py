# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Small random RMTs, and images for them."""

from random_vision import random_images, shake_vision
from torch import Tensor

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


def small_rmt(model_class: type = RMTForImageClassification, seed: int = 0, **overrides):
    return shake_vision(model_class(small_rmt_config(**overrides)), seed).eval()


def images(batch: int = 2, height: int = 64, width: int = 48, seed: int = 0) -> Tensor:
    return random_images(batch, height, width, seed)
