# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""An image classifier as a function of pixels alone, and the comparison of its file with the model."""

from pathlib import Path

import onnxruntime
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from retnet_hf import ViRForImageClassification

from .causal_graph import in_float32
from .onnx_file import write


STRIDE = 32  # pixels; the product of all strides of RMT or MetaFormer
CHECKED_BATCH = 3


class ImageGraph(nn.Module):
    """`model` as a function: pixel_values (B, C, H, W) -> logits (B, labels).

    Args:
        any_size: whether pictures may have another size than the model's.
    """

    def __init__(self, model: PreTrainedModel, any_size: bool) -> None:
        super().__init__()
        self.model = in_float32(model)
        self.options = size_options(model, any_size)
        if hasattr(model.config, "retention_form"):  # a graph has no loop over a variable number of tokens
            self.model.config.retention_form = "parallel" if any_size else "auto"

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values, **self.options).logits


def size_options(model: PreTrainedModel, any_size: bool) -> dict[str, bool]:
    """Returns the arguments with which `forward` reads pictures of any size."""
    return {"interpolate_pos_encoding": True} if any_size and isinstance(model, ViRForImageClassification) else {}


def picture_size(model: PreTrainedModel) -> tuple[int, int, int]:
    """Returns channels, height and width of a model's pictures."""
    size = getattr(model.config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    return model.config.num_channels, height, width


def size_steps(model: PreTrainedModel) -> tuple[int, int]:
    """Returns the sides of a patch, or `STRIDE`. Sides of pictures of any size are multiples of these."""
    step = getattr(model.config, "patch_size", STRIDE)
    return (step, step) if isinstance(step, int) else tuple(step)


def write_classifier(model: PreTrainedModel, file: Path, any_size: bool = False) -> None:
    """Writes an image classifier with the input `pixel_values`, of any batch size, and the output `logits`.

    Args:
        any_size: whether height and width are dynamic too, as multiples of `size_steps`.
    """
    shape, traced = {0: torch.export.Dim("batch_size", min=1)}, picture_size(model)
    if any_size:
        sides = size_steps(model)
        shape |= {axis + 2: side * torch.export.Dim(f"rows_{axis}", min=1) for axis, side in enumerate(sides)}
        traced = traced[0], 3 * sides[0], 2 * sides[1]  # different, and not 1, which would be exported as a fixed size
    pixels = torch.zeros(2, *traced)
    write(ImageGraph(model, any_size), (pixels,), file, ["pixel_values"], ["logits"], (shape,))


@torch.no_grad()
def check_classifier(model: PreTrainedModel, file: Path, any_size: bool = False) -> float:
    """Returns the largest difference of a logit from the model's, divided by the largest logit, for `checked_sizes`."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    generator, errors = torch.Generator().manual_seed(0), []
    for size in checked_sizes(model, any_size):
        pixels = torch.randn(CHECKED_BATCH, model.config.num_channels, *size, generator=generator)
        [logits] = session.run(None, {"pixel_values": pixels.numpy()})
        expected = model(pixels, **size_options(model, any_size)).logits
        errors.append(((torch.from_numpy(logits) - expected).abs().max() / expected.abs().max()).item())
    return torch.tensor(errors).max().item()  # NaN if any is NaN


def checked_sizes(model: PreTrainedModel, any_size: bool) -> list[tuple[int, int]]:
    """Returns height and width of the model's pictures and, with any_size, of a column, a row and larger pictures."""
    height, width = picture_size(model)[1:]
    if not any_size:
        return [(height, width)]
    down, across = size_steps(model)
    own = max(1, height // down), max(1, width // across)
    return [(rows * down, columns * across) for rows, columns in (own, (2, 1), (1, 3), (5, 4))]
