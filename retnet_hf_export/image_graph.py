# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""An image classifier as a function of pixels alone, and what its file computes beside it."""

from pathlib import Path

import onnxruntime
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from retnet_hf import ViRForImageClassification

from .onnx_file import write


STRIDE = 32  # pixels, of which the sides of pictures of any size are multiples in RMT and MetaFormer
CHECKED_BATCH = 3


class ImageGraph(nn.Module):
    """`model` as a function: pixel_values (B, C, H, W) -> logits (B, labels).

    Args:
        any_size: whether pictures may have other sizes than those that the model was made for.
    """

    def __init__(self, model: PreTrainedModel, any_size: bool) -> None:
        super().__init__()
        self.model = model
        self.options = (
            {"interpolate_pos_encoding": True} if any_size and isinstance(model, ViRForImageClassification) else {}
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.model(pixel_values, **self.options).logits


def picture_size(model: PreTrainedModel) -> tuple[int, int, int]:
    """Channels, height and width of the pictures that a model was made for."""
    size = getattr(model.config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    return model.config.num_channels, height, width


def write_classifier(model: PreTrainedModel, file: Path, any_size: bool = False) -> None:
    """Writes an image classifier. The input is `pixel_values`, of any batch, and the output is `logits`.

    Args:
        any_size: whether height and width are open too, multiples of the size of a patch, or of `STRIDE`.
    """
    shape, traced = {0: torch.export.Dim("batch_size", min=1)}, picture_size(model)
    if any_size:
        step = getattr(model.config, "patch_size", STRIDE)
        sides = (step, step) if isinstance(step, int) else step
        shape |= {axis + 2: side * torch.export.Dim(f"rows_{axis}", min=1) for axis, side in enumerate(sides)}
        traced = traced[0], 3 * sides[0], 2 * sides[1]  # neither 1, which would be taken for a fixed size, nor equal
    pixels = torch.zeros(2, *traced)
    write(ImageGraph(model, any_size), (pixels,), file, ["pixel_values"], ["logits"], (shape,))


@torch.no_grad()
def check_classifier(model: PreTrainedModel, file: Path) -> float:
    """The largest difference of a logit from the model's, over the largest logit, on random pictures."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    pixels = torch.randn(CHECKED_BATCH, *picture_size(model), generator=torch.Generator().manual_seed(0))
    [logits] = session.run(None, {"pixel_values": pixels.numpy()})
    expected = model(pixels).logits
    return ((torch.from_numpy(logits) - expected).abs().max() / expected.abs().max()).item()
