# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Image processors for ViR."""

from .image_processing_retention import (
    RetentionImageProcessor,
    RetentionImageProcessorKwargs,
    RetentionImageProcessorPil,
)


ViRImageProcessorKwargs = RetentionImageProcessorKwargs


class ViRImageProcessor(RetentionImageProcessor):
    """Prepares images for ViR, whose authors evaluate on a centre crop of 0.9, resized bicubically.

    The arguments are those of `RetentionImageProcessing`.

    Example:

    ```python
    >>> import numpy as np
    >>> from retnet_hf import ViRImageProcessor

    >>> processor = ViRImageProcessor(size=32)
    >>> processor(np.zeros((48, 40, 3), dtype=np.uint8), return_tensors="pt").pixel_values.shape
    torch.Size([1, 3, 32, 32])
    ```
    """

    crop_pct = 0.9


class ViRImageProcessorPil(RetentionImageProcessorPil):
    """`ViRImageProcessor` with Pillow and NumPy, whether or not torchvision is installed."""

    crop_pct = 0.9


__all__ = ["ViRImageProcessor", "ViRImageProcessorKwargs", "ViRImageProcessorPil"]
