# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Small random MetaFormers, one of each mixer and of all together, and images for them."""

from random_vision import random_images, shake_vision
from torch import Tensor

from retnet_hf import MetaFormerConfig, MetaFormerForImageClassification


MIXERS = {name: [name] * 4 for name in ("pooling", "retention", "manhattan", "attention", "identity")}
MIXERS["all"] = ["pooling", "retention", "manhattan", "attention"]


def small_metaformer_config(mixers: str = "all", **overrides) -> MetaFormerConfig:
    """Four stages, with heads of unlike sizes for queries and values."""
    fields = {
        "token_mixers": MIXERS[mixers],
        "hidden_sizes": [8, 12, 16, 24],
        "depths": [1, 1, 2, 1],
        "num_attention_heads": [2, 2, 4, 3],
        "value_expansion": 2.0,
        "mlp_ratio": 1.5,
        "layer_scale_init_value": 0.5,
        "num_labels": 5,
    }
    return MetaFormerConfig(**(fields | overrides))


def small_metaformer(mixers: str = "all", model_class: type = MetaFormerForImageClassification, seed: int = 0, **overrides):
    return shake_vision(model_class(small_metaformer_config(mixers, **overrides)), seed).eval()


def images(batch: int = 2, height: int = 64, width: int = 48, seed: int = 0) -> Tensor:
    return random_images(batch, height, width, seed)
