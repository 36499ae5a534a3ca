# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Cells of image classification: mixers of equal size on Fashion-MNIST (`apt-get install dataset-fashion-mnist`).

The pictures have 28 x 28 pixels. ViT and ViR read them as 7 x 7 patches of 4 pixels; RMT and MetaFormer have a stage of
7 x 7 tokens and a stage of 4 x 4.
"""

import gzip
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ViTConfig, ViTForImageClassification

from retnet_hf import (
    MetaFormerConfig,
    MetaFormerForImageClassification,
    RMTConfig,
    RMTForImageClassification,
    ViRConfig,
    ViRForImageClassification,
)

from .cells import Cell
from .rivals import decays, equalised
from .texts import MissingText
from .training import fit


FOLDER = Path("/usr/share/datasets/fashion-mnist")
PARAMETERS = 200_000
HIDDEN_SIZE, LAYERS, HEADS, PATCH = 64, 4, 4, 4
STAGES, DEPTHS, STAGE_HEADS = (32, 64), (2, 3), (2, 4)
HELD_OUT = 5000  # of the 60,000 training pictures, for choosing
BATCH = 128


class Pictures(NamedTuple):
    """Pictures (N, 1, 28, 28) with mean 0 and variance 1, and their classes (N,)."""

    pixels: Tensor
    labels: Tensor


@cache
def fashion_mnist() -> tuple[Pictures, Pictures, Pictures]:
    """Returns pictures for training, for choosing the learning rate, and for reporting."""
    if not FOLDER.is_dir():
        raise MissingText("Fashion-MNIST is not here: apt-get install dataset-fashion-mnist")

    def read_idx(name: str, header: int) -> Tensor:
        return torch.frombuffer(
            bytearray(gzip.decompress((FOLDER / f"{name}-ubyte.gz").read_bytes())[header:]), dtype=torch.uint8
        )

    def read(name: str) -> Pictures:
        pixels = read_idx(f"{name}-images-idx3", 16).view(-1, 1, 28, 28).float() / 255
        labels = read_idx(f"{name}-labels-idx1", 8).long()
        return Pictures((pixels - 0.286) / 0.353, labels)  # mean and standard deviation of the 60,000 pictures

    training, reporting = read("train"), read("t10k")
    order = torch.randperm(len(training.labels), generator=torch.Generator().manual_seed(0))
    choosing, rest = order[:HELD_OUT], order[HELD_OUT:]
    return (
        Pictures(training.pixels[rest], training.labels[rest]),
        Pictures(training.pixels[choosing], training.labels[choosing]),
        reporting,
    )


COMMON = {"num_channels": 1, "image_size": 28, "num_labels": 10}
TOKENS = {
    "patch_size": PATCH,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "initializer_range": 0.6 * HIDDEN_SIZE**-0.5,
}


def vit(width: int, **options: Any) -> nn.Module:
    return ViTForImageClassification(ViTConfig(**(COMMON | TOKENS | {"intermediate_size": width} | options)))


def vir(width: int, schedule: str = "log_linear", **options: Any) -> nn.Module:
    """Returns a ViR with norm and GELU after retention; the classifier uses the mean of all patches in any reading order."""
    fields = {"use_retention_norm": True, "retention_act": "gelu", "pooling": "mean", "intermediate_size": width}
    schedules = {"decay_schedule": decays(schedule, HEADS)}
    return ViRForImageClassification(ViRConfig(**(COMMON | TOKENS | fields | schedules | options)))


def rmt(width: int, **options: Any) -> nn.Module:
    fields = {
        "hidden_sizes": STAGES,
        "depths": DEPTHS,
        "num_attention_heads": STAGE_HEADS,
        "mlp_ratios": [width / HIDDEN_SIZE] * 2,
        "attention_types": ["whole", "whole"],
        "decay_exponents": [2, 2],
        "decay_exponent_ranges": [4, 4],
        "use_layer_scale": [False, False],
        "projection_size": 2 * HIDDEN_SIZE,
        "drop_path_rate": 0.0,
    }
    return RMTForImageClassification(RMTConfig(**(COMMON | fields | options)))


def metaformer(width: int, mixer: str = "pooling", schedule: str = "rmt", **options: Any) -> nn.Module:
    named = schedule in ("rmt", "log_linear", "power_of_two", "none")
    fields = {
        "hidden_sizes": STAGES,
        "depths": DEPTHS,
        "num_attention_heads": STAGE_HEADS,
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
        "token_mixers": mixer,
        "mlp_ratio": width / HIDDEN_SIZE,
        "use_layer_scale": False,
        "initializer_range": 0.1,
        "decay_schedule": schedule if named else [decays(schedule, heads) for heads in STAGE_HEADS],
    }
    return MetaFormerForImageClassification(MetaFormerConfig(**(COMMON | fields | options)))


MODELS: dict[str, Callable[..., nn.Module]] = {"vit": vit, "vir": vir, "rmt": rmt, "metaformer": metaformer}


def augmented(pixels: Tensor, generator: torch.Generator) -> Tensor:
    """Returns pictures that are randomly mirrored and shifted by up to two pixels."""
    count, _, height, width = pixels.shape
    mirrored = torch.rand(count, generator=generator) < 0.5
    pixels = torch.where(mirrored[:, None, None, None], pixels.flip(-1), pixels)
    padded = F.pad(pixels, (2, 2, 2, 2), value=pixels.min().item())
    down, right = torch.randint(5, (2, count, 1, 1), generator=generator)
    rows = (down + torch.arange(height)[:, None]).expand(count, height, width)
    columns = (right + torch.arange(width)).expand(count, height, width)
    return padded[torch.arange(count)[:, None, None], 0, rows, columns][:, None]


@torch.no_grad()
def accuracy(model: nn.Module, pictures: Pictures) -> float:
    right = 0
    for pixels, labels in zip(pictures.pixels.split(500), pictures.labels.split(500)):
        right += (model(pixel_values=pixels).logits.argmax(-1) == labels).sum().item()
    return right / len(pictures.labels)


@dataclass(frozen=True)
class ImageCell(Cell):
    """Cells with the same seed use the same pictures in the same order, with the same shifts and reflections."""

    kind: ClassVar[str] = "images"
    noise: ClassVar[float] = 0.002
    pictures: int = 110_000
    learning_rate: float = 2e-3
    seed: int = 0

    def measure(self) -> dict[str, Any]:
        torch.manual_seed(self.seed)
        model = equalised(lambda width: MODELS[self.model](width, **self.model_options), PARAMETERS)
        training, choosing, reporting = fashion_mnist()
        steps = math.ceil(self.pictures / BATCH)
        generator = torch.Generator().manual_seed(self.seed)
        count = len(training.labels)
        epochs = math.ceil(steps * BATCH / count)
        order = torch.cat([torch.randperm(count, generator=generator) for _ in range(epochs)])

        def loss_of(places: Tensor) -> Tensor:
            pixels = augmented(training.pixels[places], generator)
            return F.cross_entropy(model(pixel_values=pixels).logits, training.labels[places])

        start = time.perf_counter()
        fit(model, map(loss_of, order.split(BATCH)[:steps]), steps, self.learning_rate, muon="muon" in self.options)
        seconds = time.perf_counter() - start
        return {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "training": {"seconds": seconds, "pictures_per_second": steps * BATCH / seconds},
            "choosing": accuracy(model, choosing),
            "reporting": accuracy(model, reporting),
        }

    def cost(self, result: dict[str, Any]) -> float:
        return -result["choosing"]

    def headline(self, result: dict[str, Any]) -> str:
        return f"{result['reporting']:.2%} right"
