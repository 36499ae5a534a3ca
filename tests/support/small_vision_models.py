# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Small random image models: one of each family for images of 32 x 32 pixels, others for all options, and images."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import BaseImageProcessor, PreTrainedConfig, PreTrainedModel

import retnet_hf


@torch.no_grad()
def shake_vision(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights, large enough that every pixel sways the logits, and batch norms that have seen something."""
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


def random_images(batch=2, height=32, width=32, seed=0, channels=3, dtype=torch.float32) -> Tensor:
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def vir_images(batch: int = 2, height: int = 24, width: int = 24, **options) -> Tensor:
    return random_images(batch, height, width, **options)


def stage_images(batch: int = 2, height: int = 64, width: int = 48, **options) -> Tensor:
    return random_images(batch, height, width, **options)


def random_picture(height: int = 40, width: int = 48, mode: str = "RGB", seed: int = 0) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels).convert(mode)


class VisionFamily:
    """The classes of a family, the fields of a small configuration, and those of one that is quick to compile."""

    def __init__(self, name: str, fields: dict[str, Any], smallest: dict[str, Any]) -> None:
        self.config_class = getattr(retnet_hf, f"{name}Config")
        self.model_class = getattr(retnet_hf, f"{name}Model")
        self.classifier_class = getattr(retnet_hf, f"{name}ForImageClassification")
        self.backbone_class = getattr(retnet_hf, f"{name}Backbone")
        self.processor_class = getattr(retnet_hf, f"{name}ImageProcessor")
        self.fields, self.smallest = fields, smallest

    def config(self, **overrides: Any) -> PreTrainedConfig:
        return self.config_class(**({"image_size": 32, "num_labels": 5} | self.fields | overrides))

    def model(self, model_class: type | None = None, seed: int = 0, **overrides: Any) -> PreTrainedModel:
        return shake_vision((model_class or self.classifier_class)(self.config(**overrides)), seed).eval()

    def fresh(self, seed: int = 0, **overrides: Any) -> PreTrainedModel:
        """A classifier as it is initialised."""
        torch.manual_seed(seed)
        return self.classifier_class(self.config(**overrides))

    def processor(self, **options: Any) -> BaseImageProcessor:
        return self.processor_class(**({"size": {"height": 32, "width": 32}} | options))


VISION_FAMILIES = {
    "vir": VisionFamily(
        "ViR",
        {"patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        | {"intermediate_size": 48, "use_layer_scale": True, "layer_scale_init_value": 0.5},
        {"num_hidden_layers": 1},
    ),
    "rmt": VisionFamily(
        "RMT",
        {"hidden_sizes": [8, 12, 16], "depths": [1, 1, 2], "num_attention_heads": [2, 2, 4]}
        | {"mlp_ratios": [2, 2, 2], "attention_types": ["decomposed", "whole", "whole"], "drop_path_rate": 0.0}
        | {"decay_exponents": [2, 2, 2], "decay_exponent_ranges": [4, 4, 6], "projection_size": 20}
        | {"use_layer_scale": [False, False, True], "layer_scale_init_value": 0.5},
        {"hidden_sizes": [8, 8], "depths": [1, 1], "num_attention_heads": [2, 2], "mlp_ratios": [2, 2]}
        | {"attention_types": ["decomposed", "whole"], "decay_exponents": [2, 2], "decay_exponent_ranges": [4, 4]}
        | {"use_layer_scale": [True, False], "token_classifier_input": "hidden_states"},
    ),
    "metaformer": VisionFamily(
        "MetaFormer",
        {"token_mixers": ["pooling", "manhattan", "retention", "attention"], "depths": [1, 1, 1, 1]}
        | {
            "hidden_sizes": [8, 16, 16, 24],
            "num_attention_heads": [1, 2, 2, 2],
            "mlp_ratio": 2,
            "layer_scale_init_value": 0.5,
        },
        {"token_mixers": ["manhattan"], "depths": [1], "hidden_sizes": [16], "num_attention_heads": [2]}
        | {"patch_sizes": [7], "strides": [4], "padding": [2]},
    ),
}

RECIPES = {
    # the authors', with what the presets leave at its default
    "authors": {"use_layer_scale": True, "layer_scale_init_value": 0.5},
    # BrianPulfer/vision-retention-networks'
    "pulfer": {"pooling": "last_patch", "decay_schedule": [0.5, 0.9], "use_per_head_projections": True}
    | {"use_retention_norm": True, "retention_act": "gelu", "layer_norm_eps": 1e-5},
    "mean": {"pooling": "mean", "decay_schedule": "power_of_two", "qkv_bias": False},
    "bidirectional": {"bidirectional": True},
    "mirrored": {"mirror_sequence": True, "pooling": "mean_but_first"},
}


def small_vir_config(recipe: str = "authors", **overrides) -> retnet_hf.ViRConfig:
    """Images of 3 x 4 patches, in chunks of which the last is not full."""
    fields = {"image_size": [24, 24], "patch_size": [8, 6], "hidden_size": 16, "num_hidden_layers": 3}
    fields |= {"num_attention_heads": 2, "intermediate_size": 24, "chunk_size": 5, "num_labels": 5}
    return retnet_hf.ViRConfig(**(fields | RECIPES[recipe] | overrides))


def small_vir(recipe: str = "authors", model_class: type = retnet_hf.ViRForImageClassification, seed: int = 0, **overrides):
    return shake_vision(model_class(small_vir_config(recipe, **overrides)), seed).eval()


def small_rmt_config(**overrides) -> retnet_hf.RMTConfig:
    """Four stages: two decomposed, two whole; heads of 4, 6 and 8; layer scale in the last."""
    fields = {"hidden_sizes": [8, 12, 16, 16], "depths": [1, 1, 2, 1], "num_attention_heads": [2, 2, 2, 4], "num_labels": 5}
    fields |= {"mlp_ratios": [2, 2, 1.5, 2], "use_layer_scale": [False, False, False, True], "projection_size": 20}
    return retnet_hf.RMTConfig(**(fields | overrides))


def small_rmt(model_class: type = retnet_hf.RMTForImageClassification, seed: int = 0, **overrides):
    return shake_vision(model_class(small_rmt_config(**overrides)), seed).eval()


MIXERS = {name: [name] * 4 for name in ("pooling", "retention", "manhattan", "attention", "identity")}
MIXERS["all"] = ["pooling", "retention", "manhattan", "attention"]


def small_metaformer_config(mixers: str = "all", **overrides) -> retnet_hf.MetaFormerConfig:
    fields = {"token_mixers": MIXERS[mixers], "hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 2, 1], "num_labels": 5}
    fields |= {"num_attention_heads": [2, 2, 4, 3], "value_expansion": 2.0, "mlp_ratio": 1.5, "layer_scale_init_value": 0.5}
    return retnet_hf.MetaFormerConfig(**(fields | overrides))


def small_metaformer(mixers="all", model_class=retnet_hf.MetaFormerForImageClassification, seed=0, **overrides):
    return shake_vision(model_class(small_metaformer_config(mixers, **overrides)), seed).eval()


COLOURS = ("blue", "green", "red")


def colour_picture(colour: str, seed: int, size: tuple[int, int] = (16, 20)) -> Image.Image:
    levels = np.random.default_rng([COLOURS.index(colour), seed]).integers(0, 100, (*size, 3))
    levels[..., 2 - COLOURS.index(colour)] += 120
    return Image.fromarray(levels.astype(np.uint8))


def write_pictures(folder: Path, count: int, suffix: str = ".png") -> None:
    for colour in COLOURS:
        (folder / colour).mkdir(parents=True)
        for number in range(count):
            colour_picture(colour, number).save(folder / colour / f"{number:02}{suffix}")
