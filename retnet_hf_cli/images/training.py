# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Training a classifier of images with `transformers.Trainer`, from pictures on disk to a folder that loads anywhere."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from PIL import ImageOps
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForImageClassification,
    BaseImageProcessor,
    EvalPrediction,
    Trainer,
    TrainerCallback,
    TrainerState,
)

from ..errors import InputError
from ..training.run import TrainingRun
from ..training.run_folder import TrainingFolder
from ..training.schedule import Course
from ..training.start import Start
from .corpus import ImageCorpus, LabelledImages
from .models import FAMILIES, fitting_size


CACHE_BYTES = 2 * 10**9


@dataclass(frozen=True)
class ImageRecipe:
    """What decides the trained weights, besides images and course. A run is only resumed with the recipe it began with."""

    model: str = "vir"  # a name of FAMILIES
    preset: str | None = None
    config: dict[str, Any] | None = None  # fields of the family's configuration in the place of a preset
    image_size: int | None = None  # fitting the first image if absent
    patch_size: int | None = None  # fitting the image size if absent
    crop_padding: int | None = None  # an eighth of the image size if absent
    flip: bool = True
    eval_fraction: float = 0.1
    batch_size: int = 128
    lr: float = 1e-3
    weight_decay: float = 0.05
    label_smoothing: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Augmentation:
    """A shift by `padding` pixels at most in each direction, with black moving in, and a reflection in half of all cases."""

    padding: int
    flip: bool

    def __call__(self, image: np.ndarray, generator: random.Random) -> np.ndarray:
        """(3, height, width) uint8 -> the same."""
        picture = PIL.Image.fromarray(image.transpose(1, 2, 0))
        left, top = (generator.randint(-self.padding, self.padding) for _ in range(2))
        picture = picture.crop((left, top, left + picture.width, top + picture.height))
        if self.flip and generator.random() < 0.5:
            picture = ImageOps.mirror(picture)
        return np.asarray(picture).transpose(2, 0, 1)


class PreparedImages(Dataset):
    """Images as the processor resizes and crops them, (3, height, width) uint8, augmented or not, with their labels.

    What an image looks like in an epoch follows from the seed, the epoch and its place alone, so that a resumed run sees
    what an uninterrupted one would have seen. A set that fits into `CACHE_BYTES` is read from disk only once.
    """

    def __init__(
        self, images: LabelledImages, processor: BaseImageProcessor, augmentation: Augmentation | None = None, seed: int = 0
    ) -> None:
        self.images, self.processor, self.augmentation, self.seed = images, processor, augmentation, seed
        self.epoch = 0
        self.cache: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.images)

    def prepared(self, index: int) -> np.ndarray:
        """An image before augmentation."""
        if index in self.cache:
            return self.cache[index]
        picture = self.images.read(index)
        [image] = self.processor(picture, do_rescale=False, do_normalize=False)["pixel_values"]
        image = np.asarray(image)
        if image.nbytes * len(self) <= CACHE_BYTES:
            self.cache[index] = image
        return image

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        image = self.prepared(index)
        if self.augmentation is not None:
            image = self.augmentation(image, random.Random(f"{self.seed} {self.epoch} {index}"))
        return image, int(self.images.labels[index])

    def batch(self, items: list[tuple[np.ndarray, int]]) -> dict[str, Tensor]:
        """Inputs of the model for some items."""
        images, labels = zip(*items)
        batch = self.processor(list(images), do_resize=False, do_center_crop=False, return_tensors="pt")
        return {"pixel_values": batch["pixel_values"], "labels": torch.tensor(labels)}


class EpochCounter(TrainerCallback):
    """Tells a data set which epoch it is in. accelerate's `set_epoch` begins at 0 again in a resumed run."""

    def __init__(self, images: PreparedImages) -> None:
        self.images = images

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs) -> None:
        self.images.epoch = int(state.epoch or 0)


@dataclass(kw_only=True)
class ImageRun(TrainingRun):
    """A run on images. `prepare` makes one."""

    smaller_options = "--batch-size or --image-size"
    default_epochs = 10.0
    last_lr = 0.01

    source: str

    def figure(self, metrics: dict[str, float]) -> str:
        return f"accuracy {100 * metrics['eval_accuracy']:.2f} %"

    def overview(self) -> str:
        training, evaluation, config = len(self.training), len(self.evaluation), self.model.config
        images = f"{training:,} images of {config.num_labels} classes to train on, {evaluation:,} held out"
        return f"{images}, at {config.image_size} pixels"

    def outcome(self) -> str:
        counts = np.bincount(self.evaluation.images.labels)
        after = next(entry["eval_accuracy"] for entry in reversed(self.log) if "eval_accuracy" in entry)
        return (
            f"accuracy on images held out: [bold green]{100 * after:.2f} %[/bold green], "
            f"where guessing would reach {100 * counts.max() / counts.sum():.1f} %"
        )

    def trainer(self, callbacks: list[TrainerCallback], **kwargs: Any) -> Trainer:
        return Trainer(
            args=self.arguments(
                eval_on_start=False,
                per_device_eval_batch_size=2 * self.recipe.batch_size,
                label_smoothing_factor=self.recipe.label_smoothing,
                label_names=["labels"],
            ),
            data_collator=self.training.batch,
            processing_class=self.training.processor,
            compute_metrics=accuracy,
            callbacks=[EpochCounter(self.training), *callbacks],
            **kwargs,
        )

    def finish(self, trainer: Trainer) -> None:
        evaluated = trainer.predict(self.evaluation, metric_key_prefix="eval")
        count, confused = self.model.config.num_labels, np.stack([evaluated.label_ids, evaluated.predictions.argmax(-1)])
        matrix = np.bincount(np.ravel_multi_index(confused, (count, count)), minlength=count**2).reshape(count, count)
        metrics = evaluated.metrics | {"eval_confusion": matrix.tolist()}  # by true class, then by what it was taken for
        trainer.save_metrics("eval", metrics, combined=False)
        facts = {
            "images": f"`{Path(self.source).name}`, {len(self.training):,} to train on, {len(self.evaluation):,} held out",
            "steps": f"{trainer.state.global_step:,} of {self.recipe.batch_size} images",
            "accuracy on images held out": f"**{100 * evaluated.metrics['eval_accuracy']:.2f} %**",
        }
        self.save(trainer, facts, unit="nats per image")


def accuracy(evaluated: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((evaluated.predictions.argmax(-1) == evaluated.label_ids).mean())}


def prepare(source: str, corpus: ImageCorpus, folder: TrainingFolder, recipe: ImageRecipe, course: Course) -> ImageRun:
    """Everything up to the first training step: processor, model, checkpoint.

    `source` is a name for the model card. Raises InputError for whatever stands in the way.
    """
    start = Start(folder, recipe, course, corpus.digest, data="the images are")
    image_size = recipe.image_size or (recipe.config or {}).get("image_size")
    if image_size is None:
        first = corpus.training.read(0)
        image_size = fitting_size(first.height, first.width)
    elif not isinstance(image_size, int):
        raise InputError(f"image_size must be one number, for square images, got {image_size}")
    padding = image_size // 8 if recipe.crop_padding is None else recipe.crop_padding
    family = FAMILIES[recipe.model]
    config = family.config(recipe.preset, recipe.config, image_size, corpus.classes, recipe.patch_size)
    processor = family.processor(image_size)
    training = PreparedImages(corpus.training, processor, Augmentation(padding, recipe.flip), recipe.seed)
    evaluation = PreparedImages(corpus.evaluation, processor)
    torch.manual_seed(recipe.seed)
    model = AutoModelForImageClassification.from_config(config)
    return ImageRun(start=start, model=model, training=training, evaluation=evaluation, source=source)
