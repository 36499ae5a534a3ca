# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Image processors of ViR, RMT and MetaFormer, which compute `pixel_values` from pictures."""

from typing import Any

import numpy as np
import PIL.Image
from torch import Tensor
from transformers.image_processing_backends import PilBackend, TorchvisionBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, ImageInput, PILImageResampling, SizeDict
from transformers.processing_utils import ImagesKwargs
from transformers.utils import is_torchvision_available

from ..hub.saving import SavedWithCode


class RetentionImageProcessorKwargs(ImagesKwargs, total=False):
    """
    crop_pct (`float`, *optional*):
        Fraction of the resized image, along its shorter side, that the centre crop keeps. None for no crop.
    """

    crop_pct: float | int | None


# transformers looks up the options of a processor by a name derived from the class name.
ViRImageProcessorKwargs = RMTImageProcessorKwargs = MetaFormerImageProcessorKwargs = RetentionImageProcessorKwargs


class RetentionImageProcessing(SavedWithCode):
    """Image processing common to both backends. Must precede the backend in the list of base classes.

    Images are converted to RGB, resized to `size`, rescaled by 1/255 and normalised by the mean and standard deviation of
    ImageNet. `size` is always the size of the output, {"height": …, "width": …} or one number for both.

    With `crop_pct`, an image keeps its proportions, as in timm's evaluation: it is resized so that it just covers
    `size` / `crop_pct`, and the centre of size `size` is cropped. Without `crop_pct`, it is stretched to `size`.

    An image may be a PIL image of 8 bits, or a NumPy array or torch tensor of shape (height, width) or with 1, 3 or 4
    channels, first or last. There, 255 is white. Several images may be a list or a four-dimensional array.
    """

    valid_kwargs = RetentionImageProcessorKwargs

    do_convert_rgb = do_resize = do_rescale = do_normalize = True
    size, crop_pct, resample = {"height": 224, "width": 224}, None, PILImageResampling.BICUBIC
    image_mean, image_std = IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    def to_dict(self) -> dict:
        """Returns the options as transformers does, without the `_auto_class` that `save_pretrained` sets."""
        return {name: value for name, value in super().to_dict().items() if name != "_auto_class"}

    def _standardize_kwargs(self, size=None, crop_pct: float | None = None, **kwargs) -> dict:
        kwargs = super()._standardize_kwargs(size=size, **kwargs)
        if size is not None and not all(side and side > 0 for side in (kwargs["size"].height, kwargs["size"].width)):
            needed = 'the size of the output, {"height": …, "width": …} or one positive number for both'
            raise ValueError(f"size must be {needed}, got {size!r}.")
        if crop_pct is not None and not 0 < crop_pct <= 1:
            raise ValueError(f"crop_pct must be in (0, 1], or None for no crop, got {crop_pct!r}.")
        return kwargs | {"crop_pct": crop_pct}

    def fetch_images(self, images: ImageInput) -> ImageInput:
        """Returns images, or lists of images, each with a dimension of channels. (height, width) gets one in front."""
        images = super().fetch_images(images)
        return images[None] if getattr(images, "ndim", None) == 2 else images

    def process_image(self, image: PIL.Image.Image | np.ndarray | Tensor, **kwargs: Any) -> np.ndarray | Tensor:
        """Returns an image as (channels, height, width), in the type of the backend, in RGB if `do_convert_rgb`.

        Raises:
            ValueError: for a PIL image of more than 8 bits, which transformers would clip to white or black.
        """
        if isinstance(image, PIL.Image.Image) and image.mode[0] in "IF":
            raise ValueError(f"An image must have 8 bits, got one of PIL's mode {image.mode!r}: convert it first.")
        image = super().process_image(image, **kwargs)
        return image[[0, 0, 0]] if kwargs.get("do_convert_rgb") and len(image) == 1 else image  # as from 5.24 on

    def _preprocess(self, images, do_resize, size: SizeDict, resample, crop_pct=None, **kwargs) -> BatchFeature:
        if do_resize and crop_pct is not None:
            larger = []
            for image in images:  # to the smallest size of the same proportions that covers `size` / `crop_pct`
                (height, width), rows, columns = image.shape[-2:], int(size.height / crop_pct), int(size.width / crop_pct)
                if height * columns <= width * rows:
                    covering = SizeDict(height=rows, width=rows * width // height)
                else:
                    covering = SizeDict(height=columns * height // width, width=columns)
                larger.append(self.resize(image, covering, resample))
            images, do_resize, kwargs = larger, False, kwargs | {"do_center_crop": True, "crop_size": size}
        return super()._preprocess(images, do_resize=do_resize, size=size, resample=resample, **kwargs)


class RetentionImageProcessorPil(RetentionImageProcessing, PilBackend):
    """Image processor that uses Pillow and NumPy."""


_BASES = (RetentionImageProcessing, TorchvisionBackend) if is_torchvision_available() else (RetentionImageProcessorPil,)


class RetentionImageProcessor(*_BASES):
    """Image processor that uses torchvision, or Pillow and NumPy if torchvision is not installed."""


class ViRImageProcessor(RetentionImageProcessor):
    """`RetentionImageProcessing` for ViR. Its authors evaluate on a centre crop of 0.9, resized bicubically."""

    crop_pct = 0.9


class ViRImageProcessorPil(RetentionImageProcessorPil):
    crop_pct = 0.9


class RMTImageProcessor(RetentionImageProcessor):
    """`RetentionImageProcessing` for RMT. Its authors crop 0.875 of the centre at 224 pixels, and all at larger sizes."""

    crop_pct = 0.875


class RMTImageProcessorPil(RetentionImageProcessorPil):
    crop_pct = 0.875


class MetaFormerImageProcessor(RetentionImageProcessor):
    """`RetentionImageProcessing` for MetaFormer. The centre crop of 0.9 is PoolFormer's up to S36; M36 and M48 have 0.95."""

    crop_pct = 0.9


class MetaFormerImageProcessorPil(RetentionImageProcessorPil):
    crop_pct = 0.9
