# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Image processors for MetaFormer."""

from .image_processing_retention import (
    RetentionImageProcessor,
    RetentionImageProcessorKwargs,
    RetentionImageProcessorPil,
)


MetaFormerImageProcessorKwargs = RetentionImageProcessorKwargs


class MetaFormerImageProcessor(RetentionImageProcessor):
    """Prepares images for MetaFormer; 0.9 is the centre crop of PoolFormer up to S36, its M36 and M48 have 0.95.

    The arguments are those of `RetentionImageProcessing`.

    Example:

    ```python
    >>> import numpy as np
    >>> from retnet_hf import MetaFormerImageProcessor

    >>> processor = MetaFormerImageProcessor(size=32)
    >>> processor(np.zeros((48, 40, 3), dtype=np.uint8), return_tensors="pt").pixel_values.shape
    torch.Size([1, 3, 32, 32])
    ```
    """

    crop_pct = 0.9


class MetaFormerImageProcessorPil(RetentionImageProcessorPil):
    """`MetaFormerImageProcessor` with Pillow and NumPy, whether or not torchvision is installed."""

    crop_pct = 0.9


__all__ = ["MetaFormerImageProcessor", "MetaFormerImageProcessorKwargs", "MetaFormerImageProcessorPil"]
