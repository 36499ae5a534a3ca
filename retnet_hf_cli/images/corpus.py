# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""From whatever pictures a user points at to images with labels: reading, and holding out."""

import glob
import gzip
import hashlib
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import PIL.Image
from transformers.image_utils import load_image

from retnet_hf_conversion.errors import first_line

from ..errors import InputError
from ..named_inputs import load_data, require_data


if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
TRAINING, EVALUATION = ("train", "training"), ("test", "validation", "valid", "val", "eval")  # names of splits


@dataclass(frozen=True)
class LabelledImages:
    """Pictures, each read when it is asked for, and the number of the class that each belongs to."""

    pictures: Sequence[dict[str, Any]]  # rows of one column that has a path or bytes
    labels: np.ndarray  # (N,) int64
    order: np.ndarray  # (N,) places of the images among `pictures`

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, places: np.ndarray) -> "LabelledImages":
        return LabelledImages(self.pictures, self.labels[places], self.order[places])

    def read(self, index: int) -> PIL.Image.Image:
        """The picture in RGB, upright, exactly as the pipelines of transformers read it.

        Raises InputError if it is no picture, a damaged one, or one of 16 bits.
        """
        place = int(self.order[index])
        [encoded] = self.pictures[place].values()
        name = encoded["path"] or f"image {place}, counted from 0,"
        try:
            opened = PIL.Image.open(io.BytesIO(content(self.pictures[place])))
            highest = opened.getextrema()[1] if opened.mode.startswith(("I", "F")) else 0
            read = load_image(opened)
        except Exception as error:  # whatever the decoders of some thirty formats raise at a damaged file
            raise InputError(f"{name} cannot be read as an image: {first_line(error)}") from error
        if highest > 255:
            raise InputError(
                f"{name} has levels up to {highest:g}, and the pipelines of transformers show all above 255 white: "
                "convert the pictures to 8 bits"
            )
        return read


def content(picture: dict[str, Any]) -> bytes:
    """The bytes of a picture; none for a row without a picture."""
    [encoded] = picture.values()
    if encoded is None:
        return b""
    return Path(encoded["path"]).read_bytes() if encoded["bytes"] is None else encoded["bytes"]


@dataclass(frozen=True)
class ImageCorpus:
    training: LabelledImages
    evaluation: LabelledImages
    classes: list[str]
    digest: str  # of the pictures' contents, labels and names, to detect other ones when a run is resumed


def read_corpus(
    source: str,
    *,
    classes: list[str] | None = None,
    subset: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    eval_fraction: float = 0.1,
    seed: int = 0,
) -> ImageCorpus:
    """Labelled images of a folder or of a data set, with some held out where there is no part of them for evaluation.

    Args:
        source: a folder that has a sub-folder of pictures for each class, in itself or in its sub-folders train and test (or
            validation, val, …); a folder with the IDX files of MNIST, Fashion-MNIST or such, packed by gzip or not; or a
            name, or local folder, that `datasets` knows.
        classes: names of the classes, in the order of their numbers, in the place of those that the source gives.
        subset: configuration of a data set. image_column, label_column: where its pictures and labels are; the first of
            the right type if absent.
        eval_fraction: share of each class that is held out, drawn by `seed`.

    Raises:
        InputError: for a source that is missing, empty, damaged or not what it should be.
    """
    require_data(source, file_allowed=False)
    path = Path(source).expanduser()
    if path.is_dir() and any(path.glob("*[-_.]idx[13][-_.]ubyte*")):
        training, evaluation, names = _read_idx(path)
    else:
        name = str(path) if path.is_dir() else source
        training, evaluation, names = _read_dataset(name, subset, image_column, label_column)
    if classes is not None:
        if len(classes) < len(names):
            raise InputError(f"--classes names {len(classes)} classes, and {source} has {len(names)}")
        names = classes
    if len(names) < 2:
        raise InputError(f"there is only one class in {source}, and nothing to tell apart")
    digest = hashlib.sha256("\0".join(names).encode())
    for part in (training, evaluation):
        if part is not None:
            digest.update(part.labels.tobytes())
            for picture in part.pictures:
                digest.update(content(picture))
    if evaluation is None:
        training, evaluation = hold_out(training, eval_fraction, seed)
    elif unknown := set(evaluation.labels.tolist()) - set(training.labels.tolist()):
        strangers = ", ".join(names[label] for label in sorted(unknown))
        raise InputError(f"{source} has images of {strangers} to evaluate on, and none to train on")
    if not len(training) or not len(evaluation):
        raise InputError(f"there are too few images in {source} to train on some and to hold out others")
    return ImageCorpus(training, evaluation, names, digest.hexdigest())


def hold_out(images: LabelledImages, fraction: float, seed: int = 0) -> tuple[LabelledImages, LabelledImages]:
    """Splits images into those to train on and those to evaluate on, the latter a fair share of every class.

    Unlike `train_test_split` of `datasets`, it takes classes of one image, and fewer images than classes.
    """
    generator, held_out = np.random.default_rng(seed), []
    for label in np.unique(images.labels):
        places = generator.permutation(np.flatnonzero(images.labels == label))
        held_out.append(places[: max(1, round(len(places) * fraction)) if len(places) > 1 else 0])
    held_out = np.sort(np.concatenate(held_out))
    return images.select(np.setdiff1d(np.arange(len(images)), held_out)), images.select(held_out)


def _labelled(pictures: Sequence[Any], labels: Sequence[int] | np.ndarray) -> LabelledImages:
    return LabelledImages(pictures, np.asarray(labels, dtype=np.int64), np.arange(len(pictures)))


def _read_idx(path: Path) -> tuple[LabelledImages, LabelledImages | None, list[str]]:
    """What MNIST and its kin have: files such as train-images-idx3-ubyte and t10k-labels-idx1-ubyte, packed or not."""

    def part(*names: str) -> LabelledImages | None:
        arrays = []
        for kind in ("images", "labels"):
            files = [file for name in names for file in path.glob(f"*{name}*{kind}[-_.]idx*")]
            unpacked = {file.name.removesuffix(".gz"): file for file in files}  # some folders have both
            if len(unpacked) > 1:
                found = ", ".join(sorted(unpacked))
                raise InputError(f"{path} must have one IDX file of {kind} named {' or '.join(names)}, and has {found}")
            arrays += map(read_idx, unpacked.values())
        if not arrays:
            return None
        if [array.ndim for array in arrays] != [3, 1] or len(arrays[0]) != len(arrays[1]):
            shapes = " and ".join(str(array.shape) for array in arrays)
            raise InputError(f"the IDX files of {names[0]} in {path} do not belong together: they have {shapes}")
        header = b"P5 %d %d 255 " % arrays[0].shape[:0:-1]  # of a PGM, whose content is plain bytes
        return _labelled([{"image": {"bytes": header + each.tobytes(), "path": None}} for each in arrays[0]], arrays[1])

    training, evaluation = part("train"), part("t10k", "test")
    if training is None:
        raise InputError(f"{path} has no IDX files to train on, such as train-images-idx3-ubyte")
    count = 1 + max(int(part.labels.max(initial=0)) for part in (training, evaluation) if part is not None)
    return training, evaluation, [str(number) for number in range(count)]


def read_idx(file: Path) -> np.ndarray:
    """The array of an IDX file of unsigned bytes, packed by gzip or not. Raises InputError if it is damaged."""
    data = file.read_bytes()
    try:
        data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
        if not data.startswith(b"\x00\x00\x08"):
            raise ValueError("it holds no unsigned bytes")
        start = 4 + 4 * data[3]
        return np.frombuffer(data, np.uint8, offset=start).reshape(np.frombuffer(data[4:start], ">u4").astype(int))
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise InputError(f"{file} is damaged, or no IDX file of unsigned bytes: {first_line(error)}") from error


def _load_dataset(name: str, subset: str | None) -> "DatasetDict":
    import datasets

    try:
        if any(file.suffix.lower() in IMAGE_SUFFIXES for file in Path(name).glob("*/**/*")):
            return load_data("imagefolder", data_files=_parts(Path(name)))
        dataset = load_data(name, subset)
    except Exception as error:  # load_dataset passes on whatever its readers and the network raise
        raise InputError(
            f"{name} is neither a folder with pictures, nor a data set that can be loaded: {first_line(error)}"
        ) from error
    return dataset if isinstance(dataset, dict) else datasets.DatasetDict(train=dataset)


def _parts(folder: Path) -> dict[str, str]:
    """Patterns of the pictures in each part of a folder. To find the parts, `datasets` would look at each file 66 times."""
    parts, found = {}, {each.name.lower(): each for each in sorted(folder.iterdir()) if each.is_dir()}
    for part, names in (("train", TRAINING), ("test", EVALUATION)):
        for name in names:
            if name in found:
                parts.setdefault(part, f"{glob.escape(str(found[name]))}/**")
    return parts if "train" in parts else {"train": f"{glob.escape(str(folder))}/**"}


def _read_dataset(
    name: str, subset: str | None, image_column: str | None, label_column: str | None
) -> tuple[LabelledImages, LabelledImages | None, list[str]]:
    import datasets

    splits = _load_dataset(name, subset)
    training = next((splits[split] for split in TRAINING if split in splits), None)
    if training is None:
        raise InputError(f"the data set {name} has no split train (it has: {', '.join(splits)})")
    columns = ", ".join(training.features)

    def column(given: str | None, kind: type, allowed: tuple[type, ...], what: str) -> str:
        found = given or next((key for key, feature in training.features.items() if isinstance(feature, kind)), None)
        if not isinstance(training.features.get(found), allowed):
            reason = "has no" if given is None else f'has in the column "{given}" no'
            advice = ", or give each class a sub-folder of pictures" if Path(name).is_dir() else ""
            raise InputError(
                f"{name} {reason} {what} for each image (it has: {columns}); name one by --{what}-column{advice}"
            )
        return found

    images = column(image_column, datasets.Image, (datasets.Image,), "image")
    labels = column(label_column, datasets.ClassLabel, (datasets.ClassLabel, datasets.Value), "label")
    if isinstance(training.features[labels], datasets.ClassLabel):
        names = training.features[labels].names
        numbers = {number: number for number in range(len(names))}
    else:
        values = sorted({value for value in training[labels] if value is not None})
        names, numbers = [str(value) for value in values], {value: number for number, value in enumerate(values)}

    def part(dataset: "Dataset") -> LabelledImages | None:
        """None where some labels are not given, as in the test sets of competitions."""
        pictures = dataset.select_columns(images).cast_column(images, datasets.Image(decode=False))
        found = [numbers.get(label) for label in dataset[labels]]
        return None if None in found else _labelled(pictures, found)

    parts = (part(splits[split]) for split in EVALUATION if split in splits)
    whole, evaluation = part(training), next((part for part in parts if part is not None), None)
    if whole is None:
        raise InputError(f'the column "{labels}" of the data set {name} has no label for some images to train on')
    return whole, evaluation, names
