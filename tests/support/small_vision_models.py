# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""One small random model of each vision family, for images of 32 x 32 pixels, and what several test files measure with."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from random_vision import shake_vision
from transformers import BaseImageProcessor, PreTrainedConfig, PreTrainedModel

from retnet_hf import (
    MetaFormerBackbone,
    MetaFormerConfig,
    MetaFormerForImageClassification,
    MetaFormerImageProcessor,
    MetaFormerModel,
    RMTBackbone,
    RMTConfig,
    RMTForImageClassification,
    RMTImageProcessor,
    RMTModel,
    ViRBackbone,
    ViRConfig,
    ViRForImageClassification,
    ViRImageProcessor,
    ViRModel,
)


@dataclass(frozen=True)
class VisionFamily:
    """The classes of a family, and the fields of a small configuration."""

    config_class: type[PreTrainedConfig]
    model_class: type[PreTrainedModel]
    classifier_class: type[PreTrainedModel]
    backbone_class: type[PreTrainedModel]
    processor_class: type[BaseImageProcessor]
    fields: dict[str, Any]
    smallest: dict[str, Any]  # fields of a model that is quick to compile
    module: str  # that the code of the model is in

    def config(self, **overrides: Any) -> PreTrainedConfig:
        return self.config_class(**({"image_size": 32, "num_labels": 5} | self.fields | overrides))

    def model(self, model_class: type | None = None, seed: int = 0, **overrides: Any) -> PreTrainedModel:
        """A classifier, or a model of another class, with random weights."""
        return shake_vision((model_class or self.classifier_class)(self.config(**overrides)), seed).eval()

    def fresh(self, seed: int = 0, **overrides: Any) -> PreTrainedModel:
        """A classifier as it is initialised."""
        torch.manual_seed(seed)
        return self.classifier_class(self.config(**overrides))

    def processor(self, **options: Any) -> BaseImageProcessor:
        return self.processor_class(**({"size": {"height": 32, "width": 32}} | options))


VISION_FAMILIES = {
    "vir": VisionFamily(
        ViRConfig,
        ViRModel,
        ViRForImageClassification,
        ViRBackbone,
        ViRImageProcessor,
        {
            "patch_size": 8,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "use_layer_scale": True,
            "layer_scale_init_value": 0.5,
        },
        {"num_hidden_layers": 1},
        "modeling_vir",
    ),
    "rmt": VisionFamily(
        RMTConfig,
        RMTModel,
        RMTForImageClassification,
        RMTBackbone,
        RMTImageProcessor,
        {
            "hidden_sizes": [8, 12, 16],
            "depths": [1, 1, 2],
            "num_attention_heads": [2, 2, 4],
            "mlp_ratios": [2, 2, 2],
            "attention_types": ["decomposed", "whole", "whole"],
            "decay_exponents": [2, 2, 2],
            "decay_exponent_ranges": [4, 4, 6],
            "use_layer_scale": [False, False, True],
            "layer_scale_init_value": 0.5,
            "projection_size": 20,
            "drop_path_rate": 0.0,
        },
        {
            "hidden_sizes": [8],
            "depths": [1],
            "num_attention_heads": [2],
            "mlp_ratios": [2],
            "attention_types": ["whole"],
            "decay_exponents": [2],
            "decay_exponent_ranges": [4],
            "use_layer_scale": [True],
        },
        "modeling_rmt",
    ),
    "metaformer": VisionFamily(
        MetaFormerConfig,
        MetaFormerModel,
        MetaFormerForImageClassification,
        MetaFormerBackbone,
        MetaFormerImageProcessor,
        {
            "token_mixers": ["pooling", "manhattan", "retention", "attention"],
            "depths": [1, 1, 1, 1],
            "hidden_sizes": [8, 16, 16, 24],
            "num_attention_heads": [1, 2, 2, 2],
            "mlp_ratio": 2,
            "layer_scale_init_value": 0.5,
        },
        {
            "token_mixers": ["manhattan"],
            "depths": [1],
            "hidden_sizes": [16],
            "num_attention_heads": [2],
            "patch_sizes": [7],
            "strides": [4],
            "padding": [2],
        },
        "modeling_metaformer",
    ),
}


def random_picture(height: int = 40, width: int = 48, mode: str = "RGB", seed: int = 0) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels).convert(mode)
