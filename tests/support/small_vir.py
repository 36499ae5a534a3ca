# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Small random ViRs, and images for them."""

import torch
from random_vision import random_images, shake_vision
from torch import Tensor

from retnet_hf import ViRConfig, ViRForImageClassification


RECIPES = {
    # the authors', with what the presets leave at its default
    "authors": {"use_layer_scale": True, "layer_scale_init_value": 0.5},
    # BrianPulfer/vision-retention-networks'
    "pulfer": {
        "pooling": "last_patch",
        "decay_schedule": [0.5, 0.9],
        "use_per_head_projections": True,
        "use_retention_norm": True,
        "retention_act": "gelu",
        "layer_norm_eps": 1e-5,
    },
    "mean": {"pooling": "mean", "decay_schedule": "power_of_two", "qkv_bias": False},
    "bidirectional": {"bidirectional": True},
    "mirrored": {"mirror_sequence": True, "pooling": "mean_but_first"},
}


def small_vir_config(recipe: str = "authors", **overrides) -> ViRConfig:
    """Images of 3 x 4 patches, in chunks of which the last is not full."""
    fields = {
        "image_size": [24, 24],
        "patch_size": [8, 6],
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 24,
        "chunk_size": 5,
        "num_labels": 5,
    }
    return ViRConfig(**(fields | RECIPES[recipe] | overrides))


def small_vir(recipe: str = "authors", model_class: type = ViRForImageClassification, seed: int = 0, **overrides):
    return shake_vision(model_class(small_vir_config(recipe, **overrides)), seed).eval()


def images(batch: int = 2, height: int = 24, width: int = 24, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return random_images(batch, height, width, seed, dtype=dtype)
