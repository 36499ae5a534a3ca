# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The families of image classifiers that `retnet-hf train-image` trains, and small sizes of each for small pictures.

Sizes of one name have about the same number of parameters in every family, so that families can be compared. The published
sizes of ViR and RMT go by the names of their configurations.
"""

from dataclasses import dataclass
from typing import Any

import transformers
from transformers import BaseImageProcessor, PreTrainedConfig
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, PILImageResampling

import retnet_hf

from ..errors import InputError, require_one_of
from ..training.run import config_of


@dataclass(frozen=True)
class Family:
    """One kind of model, and its small sizes by name as fields of its configuration."""

    config_class: type[PreTrainedConfig]
    processor_class: type[BaseImageProcessor]
    small: dict[str, dict[str, Any]]

    def config(
        self,
        preset: str | None,
        given: dict[str, Any] | None,
        image_size: int,
        classes: list[str],
        patch_size: int | None = None,
    ) -> Any:
        """A configuration of a named size, or of given fields, for images of a size and for classes.

        Raises InputError if there is no such size, or the fields are not valid.
        """
        has_patches = hasattr(self.config_class(), "patch_size")  # of one size, which is to be chosen
        if patch_size is not None and not has_patches:
            raise InputError(f"--patch-size is for vir and vit, and {self.config_class.model_type} has no one patch size")
        fields = {
            "id2label": dict(enumerate(classes)),
            "label2id": {name: number for number, name in enumerate(classes)},
            "image_size": image_size,
        }
        if patch_size is not None:
            fields["patch_size"] = patch_size
        if given is not None:
            return config_of(self.config_class, **(given | fields))
        published = getattr(self.config_class, "presets", tuple)()
        require_one_of("--preset", preset, dict.fromkeys([*self.small, *published]))
        if preset not in self.small:
            return config_of(self.config_class.from_preset, preset, **fields)
        patches = {"patch_size": fitting_patch_size(image_size)} if has_patches else {}
        return config_of(self.config_class, **(self.small[preset] | patches | fields))

    def processor(self, image_size: int) -> BaseImageProcessor:
        """What resizes the shorter side of an image to `image_size`, keeps the square in its middle, and normalises it."""
        cut = {"size": image_size, "crop_pct": 1.0}
        if self.config_class is transformers.ViTConfig:
            cut = {"size": {"shortest_edge": image_size}, "do_center_crop": True, "crop_size": image_size}
        bicubic = PILImageResampling.BICUBIC
        return self.processor_class(
            image_mean=IMAGENET_DEFAULT_MEAN, image_std=IMAGENET_DEFAULT_STD, resample=bicubic, **cut
        )


def fitting_patch_size(image_size: int) -> int:
    """The largest that cuts an image into four patches a side or more, of 8 pixels at most, or 16 in images beyond 96."""
    limit = min(8 if image_size <= 96 else 16, image_size // 4)
    return next(size for size in range(limit, 0, -1) if image_size % size == 0)


def fitting_size(height: int, width: int) -> int:
    """The size that images are trained on unless another is asked for: their own, if patches divide it, and 64 at most."""
    side = min(64, max(height, width))
    return -(-side // 4) * 4 if side <= 48 else 64


def _tokens(hidden_size: int) -> dict[str, Any]:
    """Fields of a model that keeps its number of tokens, in heads of a quarter of its width."""
    return {
        "hidden_size": hidden_size,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 4 * hidden_size,
        "initializer_range": 0.6 * hidden_size**-0.5,
    }


def _stages(hidden_sizes: list[int], **fields: Any) -> dict[str, Any]:
    """Fields of a pyramid of two stages, whose tokens are of 4 and of 8 pixels."""
    heads = [size // 16 for size in hidden_sizes]
    return {"hidden_sizes": hidden_sizes, "depths": [2, 3], "num_attention_heads": heads} | fields


# With norm and GELU after the retention, and heads that forget within the few tokens that a small picture has.
VIR = {
    "decay_schedule": [0.5, 0.75, 0.9, 0.97],
    "use_retention_norm": True,
    "retention_act": "gelu",
    "pooling": "mean",
}
RMT = {
    "mlp_ratios": [3, 3],
    "attention_types": ["whole", "whole"],
    "decay_exponents": [2, 2],
    "decay_exponent_ranges": [4, 4],
    "use_layer_scale": [False, False],
    "drop_path_rate": 0.0,
}
METAFORMER = {
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "padding": [2, 1],
    "token_mixers": "retention",
    "use_layer_scale": False,
}
FAMILIES = {
    "vir": Family(
        retnet_hf.ViRConfig, retnet_hf.ViRImageProcessor, {"micro": _tokens(64) | VIR, "mini": _tokens(128) | VIR}
    ),
    "rmt": Family(
        retnet_hf.RMTConfig,
        retnet_hf.RMTImageProcessor,
        {"micro": _stages([32, 64], projection_size=128, **RMT), "mini": _stages([64, 128], projection_size=256, **RMT)},
    ),
    "metaformer": Family(
        retnet_hf.MetaFormerConfig,
        retnet_hf.MetaFormerImageProcessor,
        {"micro": _stages([32, 64], **METAFORMER), "mini": _stages([64, 128], **METAFORMER)},
    ),
    "vit": Family(transformers.ViTConfig, transformers.ViTImageProcessor, {"micro": _tokens(64), "mini": _tokens(128)}),
}
