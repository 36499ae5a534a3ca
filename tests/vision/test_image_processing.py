# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The image processors, against a plain computation with PIL and NumPy, in every backend that is installed."""

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.utils import is_torchvision_available

import retnet_hf


MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
FAMILIES = {  # both classes, and what of an image is left of a crop
    name: (getattr(retnet_hf, f"{name}ImageProcessor"), getattr(retnet_hf, f"{name}ImageProcessorPil"), crop_pct)
    for name, crop_pct in {"ViR": 0.9, "RMT": 0.875, "MetaFormer": 0.9}.items()
}
# one level of 256, or two where both backends round, in units of the smallest standard deviation
LEVEL = 1 / 255 / 0.224
ROUNDING = {"pil": 1e-5, "torchvision": 2.1 * LEVEL}


@pytest.fixture(params=["plain", "Pil"])
def processor_class(request):
    """Both classes of one family; the families differ in a number, which has a test of its own."""
    plain, pil, _ = FAMILIES["ViR"]
    return plain if request.param == "plain" else pil


def picture(height: int = 40, width: int = 56, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Smooth colours, whose resized versions depend little on how a filter rounds."""
    rows, columns = np.mgrid[:height, :width]
    phase = np.random.default_rng(seed).uniform(0, 6, 3)
    waves = [np.sin(rows / 7 + phase[i]) + np.cos(columns / (5 + i) - phase[i]) for i in range(3)]
    levels = (127.5 + 60 * np.stack(waves, axis=-1)).clip(0, 255).astype(np.uint8)
    return Image.fromarray(levels).convert(mode)


def expected(image: Image.Image, size: tuple[int, int] = (32, 32), crop_pct: float | None = None) -> torch.Tensor:
    """What should come out, by PIL and NumPy alone: (3, height, width)."""
    height, width = size
    image = image.convert("RGB")
    if crop_pct is None:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    else:
        scale = max(int(height / crop_pct) / image.height, int(width / crop_pct) / image.width)
        larger = (int(image.width * scale + 1e-9), int(image.height * scale + 1e-9))
        left, top = (larger[0] - width) // 2, (larger[1] - height) // 2
        image = image.resize(larger, Image.Resampling.BICUBIC).crop((left, top, left + width, top + height))
    return torch.tensor((np.asarray(image) / 255 - MEAN) / STD).float().movedim(-1, 0)


def pixels(processor, images, **kwargs) -> torch.Tensor:
    batch = processor(images, return_tensors="pt", **kwargs)
    assert (set(batch), batch["pixel_values"].dtype) == ({"pixel_values"}, torch.float32)
    return batch["pixel_values"]


def assert_pixels(processor, images, wanted: list[torch.Tensor], tolerance: float | None = None, **kwargs) -> None:
    actual = pixels(processor, images, **kwargs)
    assert actual.shape == (len(wanted), *wanted[0].shape)
    tolerance = ROUNDING[processor.backend] if tolerance is None else tolerance
    torch.testing.assert_close(actual, torch.stack(wanted), rtol=0, atol=tolerance)


@pytest.mark.parametrize("crop_pct", [None, 0.875, 1, 0.5])
def test_an_image_becomes_what_pil_and_numpy_make_of_it(processor_class, crop_pct):
    for size in ((32, 32), (24, 40)):
        processor = processor_class(size={"height": size[0], "width": size[1]}, crop_pct=crop_pct)
        for image in (picture(), picture(56, 40), picture(20, 21), picture(97, 30)):
            assert_pixels(processor, image, [expected(image, size, crop_pct)])


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_of_each_family(family):
    plain, pil, crop_pct = FAMILIES[family]
    for processor in (plain(), pil()):
        assert (processor.crop_pct, dict(processor.size)) == (crop_pct, {"height": 224, "width": 224})
        assert processor.backend == ("torchvision" if type(processor) is plain and is_torchvision_available() else "pil")
        assert_pixels(processor, picture(250, 300), [expected(picture(250, 300), (224, 224), crop_pct)])


def test_options_of_a_call_take_the_place_of_those_of_the_processor(processor_class):
    processor, image = processor_class(size=32, crop_pct=0.8), picture()
    assert_pixels(processor, image, [expected(image)], crop_pct=None)
    assert_pixels(processor, image, [expected(image, crop_pct=0.5)], crop_pct=0.5)
    raw = pixels(processor, image, crop_pct=None, do_normalize=False)
    wanted = expected(image) * torch.tensor(STD).view(3, 1, 1) + torch.tensor(MEAN).view(3, 1, 1)
    torch.testing.assert_close(raw[0], wanted.float(), rtol=0, atol=ROUNDING[processor.backend])
    assert_pixels(processor, image, [expected(image, crop_pct=0.8)])
    for size, shape in ((9, (9, 9)), ([24, 40], (24, 40)), ({"height": 8, "width": 12}, (8, 12))):
        assert pixels(processor, image, size=size).shape == pixels(processor_class(size=size), image).shape == (1, 3, *shape)
    [alone] = processor(image).pixel_values  # without return_tensors, a list of images
    assert alone.shape == (3, 32, 32)


@pytest.mark.parametrize("name", ["nearest", "bilinear", "lanczos"])
def test_other_filters(name):
    image, filter_ = picture(), Image.Resampling[name.upper()]
    actual = FAMILIES["ViR"][1](size=32, crop_pct=None, resample=filter_, do_normalize=False)(image).pixel_values[0]
    wanted = np.asarray(image.resize((32, 32), filter_)).transpose(2, 0, 1) / 255
    np.testing.assert_allclose(actual, wanted, atol=1e-6)


def inputs_of(image: Image.Image) -> dict:
    last = np.asarray(image)
    first = last.transpose(2, 0, 1)
    found = {"PIL": image, "list of PIL": [image], "list of lists": [[image]], "tuple of NumPy": (last,)}
    found |= {"NumPy, channels last": last, "NumPy, channels first": first, "NumPy, float64": last.astype(np.float64)}
    found |= {"NumPy, not contiguous": np.flip(np.flip(last, 1).copy(), 1), "torch, channels last": torch.tensor(last)}
    return found | {"torch, channels first": torch.tensor(first), "torch, a batch of one": torch.tensor(first)[None]}


@pytest.mark.parametrize("kind", inputs_of(picture()))
def test_every_kind_of_image(processor_class, kind):
    """Floats are not rounded to 256 levels when they are resized."""
    for crop_pct in (None, 0.875):
        processor = processor_class(size=32, crop_pct=crop_pct)
        assert_pixels(processor, inputs_of(picture())[kind], [expected(picture(), crop_pct=crop_pct)], 2.1 * LEVEL)


@pytest.mark.parametrize("kinds", [["PIL"] * 4, ["PIL", "NumPy", "torch", "PIL"]])
def test_images_of_different_sizes(processor_class, kinds):
    images = [picture(40, 56, seed=1), picture(33, 20, seed=2), picture(40, 56, seed=3), picture(8, 9, seed=4)]
    convert = {"PIL": lambda i: i, "NumPy": np.asarray, "torch": lambda i: torch.tensor(np.asarray(i)).movedim(-1, 0)}
    given_images = [convert[kind](image) for kind, image in zip(kinds, images)]
    processor = processor_class(size=32, crop_pct=0.9)
    assert_pixels(processor, given_images, [expected(i, crop_pct=0.9) for i in images])
    assert pixels(processor, given_images).equal(torch.cat([pixels(processor, i) for i in given_images]))


@pytest.mark.parametrize("layout", [(32, 32), (1, 32, 32), (32, 32, 1)])
def test_grey_arrays(processor_class, layout):
    array, wanted = np.asarray(picture(32, 32, "L")).reshape(layout), expected(picture(32, 32, "L"))
    processor = processor_class(size=32, crop_pct=None)
    for image in (array, torch.tensor(array)):
        assert_pixels(processor, image, [wanted], tolerance=1e-5)
        assert_pixels(processor, [image, image], [wanted, wanted], tolerance=1e-5)


@pytest.mark.parametrize("mode", ["RGB", "1", "L", "P", "CMYK", "YCbCr", "HSV"])
def test_every_mode_of_pil(processor_class, mode):
    image = picture(32, 32).convert(mode)
    assert_pixels(processor_class(size=32, crop_pct=None), image, [expected(image)], tolerance=1e-5)


def test_ambiguous_channels_are_decided_by_input_data_format(processor_class):
    array = np.random.default_rng(0).integers(0, 256, (3, 40, 3), dtype=np.uint8)
    last, first = expected(Image.fromarray(array), (3, 40)), expected(Image.fromarray(array.transpose(1, 2, 0)), (40, 3))
    processor = processor_class(crop_pct=None)
    assert_pixels(processor, array, [last], tolerance=1e-5, size=[3, 40], input_data_format="channels_last")
    assert_pixels(processor, array, [first], tolerance=1e-5, size=[40, 3], input_data_format="channels_first")


def test_without_conversion_a_grey_image_stays_grey(processor_class):
    processor = processor_class(size=32, crop_pct=None, do_convert_rgb=False, image_mean=[0.5], image_std=[0.25])
    image = picture(32, 32, "L")
    wanted = torch.tensor(np.asarray(image) / 255 - 0.5).float()[None, None] / 0.25
    for each in (image, np.asarray(image)):
        torch.testing.assert_close(pixels(processor, each), wanted, rtol=0, atol=1e-5)


NO_OPTIONS = [({"size": {"shortest_edge": 32}}, "size must be .*shortest_edge"), ({"size": 0}, "size must be")]
NO_OPTIONS += [({"size": {"height": -1, "width": 5}}, "size must be")]
NO_OPTIONS += [({"crop_pct": 0}, r"crop_pct must be in \(0, 1\], or None for no crop, got 0")]
NO_OPTIONS += [({"crop_pct": 1.5}, "crop_pct must be .* got 1.5")]
NO_IMAGES = [
    (np.zeros((40, 30, 5)), {"size": 32}, "channel"),
    (Image.new("I;16", (5, 5)), {}, "must have 8 bits, got one of PIL's mode 'I;16'"),
    (Image.new("F", (5, 5)), {}, "must have 8 bits, got one of PIL's mode 'F'"),
    (3, {}, "Invalid|invalid|type"),
]


@pytest.mark.parametrize(("image", "options", "words"), [*((picture(), *row) for row in NO_OPTIONS), *NO_IMAGES])
def test_options_and_images_that_cannot_be_are_refused(processor_class, image, options, words):
    for call in (lambda: processor_class(**options)(image), lambda: processor_class()(image, **options)):
        with pytest.raises((TypeError, ValueError), match=words):
            call()


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_copied_and_pickled_it_does_the_same(family, tmp_path):
    options = {"size": {"height": 24, "width": 20}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7]}
    options |= {"resample": Image.Resampling.BILINEAR, "rescale_factor": 1 / 100}
    for processor_class, crop_pct in zip(FAMILIES[family][:2], (0.7, None)):
        processor = processor_class(**options, crop_pct=crop_pct)
        processor.save_pretrained(tmp_path)
        loaded = processor_class.from_pretrained(tmp_path)
        for twin in (loaded, copy.deepcopy(processor), pickle.loads(pickle.dumps(processor))):
            assert type(twin) is processor_class
            assert pixels(twin, picture()).equal(pixels(processor, picture()))
        assert loaded.to_dict() == AutoImageProcessor.from_pretrained(tmp_path).to_dict() == processor.to_dict()
        saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
        assert (saved["size"], saved["crop_pct"]) == (options["size"], crop_pct)
        assert saved["image_processor_type"] == FAMILIES[family][0].__name__
        assert processor_class.from_pretrained(tmp_path, crop_pct=0.6, size=48).crop_pct == 0.6
