# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""From whatever pictures a user points at to images with labels: reading, and holding out."""

import gzip
import hashlib
import io
import re
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
from ..sources import require_images


if TYPE_CHECKING:
    from datasets import Dataset, DatasetDict


IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
TRAINING, EVALUATION = ("train", "training"), ("test", "validation", "valid", "val", "eval")  # names of splits
# The format of MNIST and its kin: what the file is about, its number of dimensions, and whether it is packed.
IDX_NAME = re.compile(r"(?P<set>.*?)[-_.]?(?P<kind>images|labels)[-_.]idx[13][-_.]ubyte(\.gz)?")
IDX_OF_UINT8 = b"\x00\x00\x08"


@dataclass(frozen=True)
class LabelledImages:
    """Pictures, each read when it is asked for, and the number of the class that each belongs to."""

    pictures: Sequence[Any]  # (height, width) arrays of uint8, or rows of one column that has a path or bytes
    labels: np.ndarray  # (N,) int64
    order: np.ndarray  # (N,) places of the images among `pictures`

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, places: np.ndarray) -> "LabelledImages":
        """Those of the images that are at `places`."""
        return LabelledImages(self.pictures, self.labels[places], self.order[places])

    def read(self, index: int) -> PIL.Image.Image:
        """The picture in RGB, upright, exactly as the pipelines of transformers read it.

        Raises:
            InputError: if it is no picture, a damaged one, or one of 16 bits.
        """
        place = int(self.order[index])
        picture = self.pictures[place]
        name = f"image {place}, counted from 0,"
        try:
            if isinstance(picture, np.ndarray):
                opened = PIL.Image.fromarray(picture)
            else:
                [encoded] = picture.values()
                name = encoded["path"] or name
                opened = PIL.Image.open(io.BytesIO(content(picture)))
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


def content(picture: Any) -> bytes:
    """The bytes of a picture, as `LabelledImages.pictures` holds it."""
    if isinstance(picture, np.ndarray):
        return picture.tobytes()
    [encoded] = picture.values()
    if encoded is None:  # a row without a picture
        return b""
    return Path(encoded["path"]).read_bytes() if encoded["bytes"] is None else encoded["bytes"]


@dataclass(frozen=True)
class ImageCorpus:
    """What a classifier is trained on."""

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
    require_images(source)
    path = Path(source).expanduser()
    if path.is_dir() and (files := _idx_files(path)):
        training, evaluation, names = _read_idx(path, files)
    else:
        training, evaluation, names = _read_dataset(source, subset, image_column, label_column)
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


def _idx_files(path: Path) -> dict[tuple[str, str], Path]:
    """IDX files of a folder by the name of their set, such as "train" or "t10k", and by "images" or "labels"."""
    matches = {file: IDX_NAME.fullmatch(file.name) for file in sorted(path.iterdir(), reverse=True)}
    return {(match["set"], match["kind"]): file for file, match in matches.items() if match}


def _read_idx(path: Path, files: dict[tuple[str, str], Path]) -> tuple[LabelledImages, LabelledImages | None, list[str]]:
    sets = sorted({name for name, _ in files})
    training = [name for name in sets if "train" in name]
    evaluation = [name for name in sets if name not in training and ("10k" in name or "test" in name)]
    if len(training) != 1 or len(evaluation) > 1:
        raise InputError(
            f"{path} must have IDX files of one set to train on, such as train-images-idx3-ubyte, and of one at most to "
            f"evaluate on, such as t10k-images-idx3-ubyte; it has those of {', '.join(sets)}"
        )

    def images(name: str) -> LabelledImages:
        for kind, dimensions in (("images", 3), ("labels", 1)):
            if (name, kind) not in files:
                raise InputError(f"{path} has no {name}-{kind}-idx{dimensions}-ubyte, packed or not")
        pictures, labels = read_idx(files[name, "images"]), read_idx(files[name, "labels"])
        if pictures.ndim != 3 or labels.ndim != 1 or len(pictures) != len(labels):
            raise InputError(
                f"the IDX files of {name} in {path} do not belong together: images of shape {pictures.shape}, "
                f"labels of shape {labels.shape}"
            )
        return _labelled(pictures, labels)

    parts = images(training[0]), images(evaluation[0]) if evaluation else None
    count = 1 + max(int(part.labels.max(initial=0)) for part in parts if part is not None)
    return *parts, [str(number) for number in range(count)]


def read_idx(file: Path) -> np.ndarray:
    """The array of an IDX file of unsigned bytes, packed by gzip or not. Raises InputError if it is damaged."""
    data = file.read_bytes()
    try:
        data = gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
        start = 4 + 4 * data[3]
        shape = np.frombuffer(data[4:start], dtype=">u4").astype(int)
        if not data.startswith(IDX_OF_UINT8):
            raise ValueError("it holds no unsigned bytes")
        return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)
    except (OSError, EOFError, zlib.error, ValueError, IndexError) as error:
        raise InputError(f"{file} is damaged, or no IDX file of unsigned bytes: {first_line(error)}") from error


def _load_dataset(name: str, subset: str | None) -> "DatasetDict":
    import datasets

    datasets.disable_progress_bars()
    try:
        if any((Path(name) / file).exists() for file in ("state.json", "dataset_dict.json")):  # made by save_to_disk
            dataset = datasets.load_from_disk(name)
        elif any(file.suffix.lower() in IMAGE_SUFFIXES for file in Path(name).glob("*/**/*")):
            dataset = datasets.load_dataset("imagefolder", data_dir=name)
        else:
            dataset = datasets.load_dataset(name, subset)
    except Exception as error:  # load_dataset passes on whatever its readers and the network raise
        raise InputError(
            f"{name} is neither a folder with pictures, nor a data set that can be loaded: {first_line(error)}"
        ) from error
    return dataset if isinstance(dataset, dict) else datasets.DatasetDict(train=dataset)


def _read_dataset(
    name: str, subset: str | None, image_column: str | None, label_column: str | None
) -> tuple[LabelledImages, LabelledImages | None, list[str]]:
    import datasets

    splits = _load_dataset(name, subset)
    training = next((splits[split] for split in TRAINING if split in splits), None)
    if training is None:
        raise InputError(f"the data set {name} has no split train (it has: {', '.join(splits)})")
    features = training.features

    def column(given: str | None, kind: type, what: str) -> str:
        found = given or next((key for key, feature in features.items() if isinstance(feature, kind)), None)
        if found is None and what == "label" and Path(name).is_dir():
            raise InputError(
                f"{name} does not say what its pictures show: give it a sub-folder of pictures for each class, or name the "
                f"column with their labels by --label-column (it has: {', '.join(features)})"
            )
        if found not in features:
            wanted = f'no column "{found}"' if found else f"no column of {what}"
            raise InputError(
                f"the data set {name} has {wanted} (it has: {', '.join(features)}); name it with --{what}-column"
            )
        return found

    images = column(image_column, datasets.Image, "image")
    labels = column(label_column, datasets.ClassLabel, "label")
    if not isinstance(features[images], datasets.Image):
        raise InputError(f'the column "{images}" of the data set {name} holds no images')
    if isinstance(features[labels], datasets.ClassLabel):
        names, numbers = features[labels].names, None
    elif not isinstance(features[labels], datasets.Value):
        raise InputError(f'the column "{labels}" of the data set {name} holds something else than one label an image')
    else:
        values = sorted({value for value in training[labels] if value is not None})
        names, numbers = [str(value) for value in values], {value: number for number, value in enumerate(values)}

    def part(dataset: "Dataset") -> LabelledImages | None:
        """None where some labels are not given, as in the test sets of competitions."""
        found = [label if numbers is None else numbers.get(label) for label in dataset[labels]]
        pictures = dataset.select_columns(images).cast_column(images, datasets.Image(decode=False))
        return None if any(label is None or label < 0 for label in found) else _labelled(pictures, found)

    training_part = part(training)
    if training_part is None:
        raise InputError(f'the column "{labels}" of the data set {name} has no label for some images to train on')
    candidates = (part(splits[split]) for split in EVALUATION if split in splits)
    return training_part, next((candidate for candidate in candidates if candidate is not None), None), names
