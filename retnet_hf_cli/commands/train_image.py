# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`retnet-hf train-image`: a classifier, from pictures to a folder that loads."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from .. import options
from ..errors import InputError
from ..named_inputs import require_data
from ..options import argument, image_option, model_option, run_option, training_option
from ..slow_imports import loading
from ..training.run_folder import TrainingFolder


def train_image(
    context: typer.Context,
    source: Annotated[
        str,
        argument(
            metavar="DATA",
            help="Folder with a sub-folder of pictures for each class, itself or in train and test; folder with IDX files "
            "such as MNIST's; or the name of a data set on the Hub.",
        ),
    ],
    output: options.Output = Path("retnet-image-model"),
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    seed: Annotated[int, run_option(min=0, help="Of weights, order of the images, augmentation, what is held out.")] = 0,
    threads: options.Threads = None,
    model: Annotated[
        Literal["vir", "rmt", "metaformer", "vit"], model_option(help="vit is a transformer, to compare them with.")
    ] = "vir",
    preset: Annotated[str | None, model_option(help="micro, mini, or a published size.", show_default="mini")] = None,
    config: options.Config = None,
    image_size: Annotated[int | None, model_option(min=4, help="Pixels a side. Absent: from the first, up to 64.")] = None,
    patch_size: Annotated[int | None, model_option(min=1, help="Of vir and vit. Absent: at least four a side.")] = None,
    classes: Annotated[str | None, image_option(help="Names of the classes, in order, separated by commas.")] = None,
    subset: Annotated[str | None, image_option(help="Configuration of a data set.")] = None,
    image_column: Annotated[str | None, image_option(help="Where the pictures of a data set are.")] = None,
    label_column: Annotated[str | None, image_option(help="Where the labels of a data set are.")] = None,
    eval_fraction: Annotated[
        float, image_option(min=0.001, max=0.5, help="Share held out where DATA has no part for evaluation.")
    ] = 0.1,
    crop_padding: Annotated[int | None, image_option(min=0, help="Shift at most, pixels. Absent: an eighth.")] = None,
    flip: Annotated[bool, image_option(help="Reflect half of the images, which digits and letters do not take.")] = True,
    steps: options.Steps = None,
    epochs: Annotated[float | None, training_option(min=0.001, help="Times through the images.", show_default="10")] = None,
    minutes: options.Minutes = None,
    batch_size: Annotated[int, training_option(min=1, help="Images in a step.")] = 128,
    lr: options.LearningRate = 1e-3,
    weight_decay: options.WeightDecay = 0.05,
    label_smoothing: Annotated[float, training_option(min=0.0, max=0.9, help="Share of a label for all classes.")] = 0.0,
    eval_every: options.EvalEvery = None,
) -> None:
    """Train a classifier of images, into a folder that transformers loads.

    [bold]Examples[/bold]

    retnet-hf train-image photos/ --minutes 10

    retnet-hf train-image /usr/share/datasets/fashion-mnist --model rmt --preset mini --epochs 5 --output my-model

    retnet-hf train-image uoft-cs/cifar10 --model vir --epochs 20

    retnet-hf train-image photos/ --resume      (after Ctrl-C, a crash or a power cut)

    Ctrl-C saves a checkpoint and stops; a second one stops at once.
    The folder holds model, image processor, loss curve, confusion matrix in eval_results.json, and model card.
    """
    folder = TrainingFolder(output, "train-image")
    context.with_resource(folder.claim(resume, overwrite, [source, config]))
    if preset is not None and config is not None:
        raise InputError("--preset and --config exclude each other")
    require_data(source, file_allowed=False)
    console = Console(highlight=False)
    with loading(console, threads):
        from ..images.corpus import read_corpus
        from ..images.models import FAMILIES
        from ..images.training import ImageRecipe, prepare
        from ..training.progress import complete
        from ..training.run import read_config
        from ..training.schedule import Course

    fields = None if config is None else read_config(config, FAMILIES[model].config_class)
    recipe = options.chosen(ImageRecipe, context, preset=preset or (None if config else "mini"), config=fields)
    with console.status("reading the images, preparing the model"):
        names = None if classes is None else [name.strip() for name in classes.split(",")]
        corpus = options.chosen(read_corpus, context, classes=names)
        run = prepare(source, corpus, folder, recipe, options.chosen(Course, context))
    complete(run, console)
