# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Image processors for RMT."""

from .image_processing_retention import (
    RetentionImageProcessor,
    RetentionImageProcessorKwargs,
    RetentionImageProcessorPil,
)


RMTImageProcessorKwargs = RetentionImageProcessorKwargs


class RMTImageProcessor(RetentionImageProcessor):
    """Prepares images for RMT, whose authors evaluate 224 pixels on a centre crop of 0.875, and larger sizes on one of 1.

    The arguments are those of `RetentionImageProcessing`.

    Example:

    ```python
    >>> import numpy as np
    >>> from retnet_hf import RMTImageProcessor

    >>> processor = RMTImageProcessor(size=32)
    >>> processor(np.zeros((48, 40, 3), dtype=np.uint8), return_tensors="pt").pixel_values.shape
    torch.Size([1, 3, 32, 32])
    ```
    """

    crop_pct = 0.875


class RMTImageProcessorPil(RetentionImageProcessorPil):
    """`RMTImageProcessor` with Pillow and NumPy, whether or not torchvision is installed."""

    crop_pct = 0.875


__all__ = ["RMTImageProcessor", "RMTImageProcessorKwargs", "RMTImageProcessorPil"]
