# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Image processors of ViR, RMT and MetaFormer, which compute `pixel_values` from pictures.

As in transformers, every processor has two classes. The class with the plain name uses torchvision if it is installed, and
otherwise Pillow and NumPy. The class with a name that ends in "Pil" always uses Pillow and NumPy.
"""

import numpy as np
import PIL.Image
import torch
from torch import Tensor
from transformers.image_processing_backends import PilBackend, TorchvisionBackend
from transformers.image_processing_utils import BatchFeature
from transformers.image_utils import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    ChannelDimension,
    ImageInput,
    PILImageResampling,
    SizeDict,
    infer_channel_dimension_format,
)
from transformers.processing_utils import ImagesKwargs
from transformers.utils import is_torchvision_available

from ..hub.saving import SavedWithCode


def rgb_of(image: PIL.Image.Image | np.ndarray | Tensor, input_data_format: str | None = None) -> np.ndarray | Tensor:
    """Returns an image as (3, height, width), arrays of floats as float32, all else as uint8, transparent pixels as white.

    transformers' own conversion clips 16-bit values to white, makes "F" black, and ignores transparency in some modes.
    """
    if isinstance(image, PIL.Image.Image):
        if 0 in image.size:
            raise ValueError(f"An image must have pixels, got one of width and height {image.size}.")
        if image.mode[0] in "IF":
            levels = np.asarray(image, np.float32) * (255 if image.mode == "F" else 1 / 257)
            image = PIL.Image.fromarray(levels.round().clip(0, 255).astype(np.uint8))
        if image.getbands()[-1] in "Aa" or "transparency" in image.info:
            image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
            image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image)
        return np.moveaxis(np.array(image.convert("RGB")), -1, 0)
    if isinstance(image, np.ndarray):  # torch accepts neither foreign byte orders nor negative strides
        image = torch.from_numpy(np.array(image, dtype=image.dtype.newbyteorder("="), order="C"))
    if not image.numel():
        raise ValueError(f"An image must have pixels, got one of shape {tuple(image.shape)}.")
    if input_data_format is None:
        input_data_format = infer_channel_dimension_format(image, num_channels=(1, 3, 4))
    image = image.detach().movedim(-1, 0) if input_data_format == ChannelDimension.LAST else image.detach()
    channels, is_float, levels = image.shape[0], image.is_floating_point(), image.float()
    if channels not in (1, 3, 4):
        raise ValueError(f"An image must have 1, 3 or 4 channels, got one of shape {tuple(image.shape)} with {channels}.")
    if not is_float:
        levels = (levels * {torch.bool: 255, torch.uint16: 1 / 257}.get(image.dtype, 1)).round().clamp(0, 255)
    if channels == 4:
        white, low, high = 1.0 if is_float else 255, levels.amin().item(), levels.amax().item()
        if is_float and (low < 0 or high > 1):
            raise ValueError(f"An image of floats with transparency must be in [0, 1], got values from {low} to {high}.")
        levels = (levels[:3] - white) * (levels[3:] / white) + white
    levels = levels.expand(3, -1, -1)
    return levels if is_float else levels.round().to(torch.uint8)


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

    An image may be a PIL image of any mode, or a NumPy array or torch tensor of shape (height, width) or with 1, 3 or 4
    channels, first or last. Several images may be a list or a four-dimensional array. Transparent pixels become white.

    The mode or dtype, and never a value, decides which number is white; numbers beyond are clipped to white or black:

    - 65535 in PIL's modes "I;16" and "I", as which Pillow opens files of 16 bits, and in arrays of uint16,
    - 1.0 in PIL's mode "F", True in arrays of booleans, and 255 in all other modes and arrays of integers,
    - 255 in arrays of floats, which are not clipped, or 1.0 with `do_rescale=False`, and 1.0 if they have four channels.
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
            raise ValueError(
                'size must be the size of the output, {"height": …, "width": …} or one positive number for both, '
                f"got {size!r}."
            )
        if crop_pct is not None and not 0 < crop_pct <= 1:
            raise ValueError(f"crop_pct must be in (0, 1], or None for no crop, got {crop_pct!r}.")
        return kwargs | {"crop_pct": crop_pct}

    def fetch_images(self, images: ImageInput) -> ImageInput:
        """Returns images, or lists of images, each with a dimension of channels. (height, width) gets one in front."""
        images = super().fetch_images(images)
        return images[None] if getattr(images, "ndim", None) == 2 else images

    def process_image(self, image, do_convert_rgb=None, input_data_format=None, **kwargs) -> np.ndarray | Tensor:
        """Returns an image as (channels, height, width), in the type of the backend, in RGB if `do_convert_rgb`."""
        if do_convert_rgb:
            image, input_data_format = rgb_of(image, input_data_format), ChannelDimension.FIRST
        if self.backend == "pil" and isinstance(image, Tensor):
            image = image.cpu()
        return super().process_image(image, do_convert_rgb=False, input_data_format=input_data_format, **kwargs)

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

    def resize(self, image: np.ndarray, size: SizeDict, resample: int | None = None, **kwargs) -> np.ndarray:
        """Resizes (channels, height, width) to `size`: uint8 in 256 levels, any other type as float32."""
        if image.dtype == np.uint8:
            return super().resize(image, size, resample, **kwargs)
        channels = [PIL.Image.fromarray(channel.astype(np.float32)) for channel in image]
        return np.stack([np.asarray(channel.resize((size.width, size.height), resample)) for channel in channels])


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
