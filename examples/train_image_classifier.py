# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Trains an image classifier of retention, or a ViT to compare it with, by `datasets` and `Trainer`.

    python examples/train_image_classifier.py --data photos/ --model vir --num_train_epochs 20 --output_dir my-vir

The data is a folder with one folder of pictures per class (directly, or in `train` and `test`), a folder with the IDX files
of MNIST or Fashion-MNIST, or the name of a data set on the Hub. Every field of `TrainingArguments` is an option, too:
`--resume_from_checkpoint True` continues an interrupted run, and `torchrun` starts it on several devices.
"""

import gzip
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers
from datasets import ClassLabel, Dataset, DatasetDict, Image, Value, load_dataset
from matplotlib.figure import Figure
from PIL import Image as Picture
from transformers import AutoModelForImageClassification, EvalPrediction, HfArgumentParser, Trainer, TrainingArguments

import retnet_hf
from retnet_hf.hub.cards import model_card


@dataclass
class Options:
    data: str = field(metadata={"help": "Folder of pictures, folder of IDX files, or data set of the Hub."})
    model: str = field(default="vir", metadata={"choices": ["vir", "rmt", "metaformer", "vit"]})
    size: str = field(default="mini", metadata={"help": "micro, mini, or a name in `presets()` of the configuration."})
    image_size: int = field(default=32, metadata={"help": "Pixels of a side, to which pictures are resized."})
    patch_size: int = field(default=4, metadata={"help": "Pixels of a side of a patch of vir and vit."})
    image_column: str = field(default="image", metadata={"help": "Column of the pictures in a data set."})
    label_column: str = field(default="label", metadata={"help": "Column of the labels in a data set."})
    held_out: float = field(default=0.1, metadata={"help": "Share of each class held out where there is no test split."})
    shift: int = field(default=4, metadata={"help": "Pixels by which training pictures are shifted at most."})
    flip: bool = field(default=True, metadata={"help": "Reflect half of the training pictures."})


DEFAULTS = {  # of fields of TrainingArguments
    "output_dir": "retnet-image-model",
    "num_train_epochs": 10,
    "per_device_train_batch_size": 128,
    "per_device_eval_batch_size": 256,
    "learning_rate": 1e-3,
    "weight_decay": 0.05,
    "warmup_steps": 0.05,
    "lr_scheduler_type": "cosine",
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "logging_strategy": "epoch",
    "remove_unused_columns": False,
    "report_to": [],
    "dataloader_pin_memory": torch.cuda.is_available(),
}


def single(width: int) -> dict:
    """Returns the fields of a model whose layers all have one width."""
    return {"hidden_size": width, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 4 * width}


def pyramid(*widths: int) -> dict:
    """Returns the fields of a model of two stages, with tokens of 4 and of 8 pixels."""
    return {"hidden_sizes": list(widths), "depths": [2, 3], "num_attention_heads": [width // 16 for width in widths]}


# Models of one size have about the same number of parameters. Decays are short, since small pictures have few tokens.
COMMON = {
    "vir": {
        "decay_schedule": [0.5, 0.75, 0.9, 0.97],
        "use_retention_norm": True,
        "retention_act": "gelu",
        "pooling": "mean",
    },
    "rmt": {
        "mlp_ratios": [3, 3],
        "attention_types": ["whole", "whole"],
        "decay_exponents": [2, 2],
        "decay_exponent_ranges": [4, 4],
        "use_layer_scale": [False, False],
        "drop_path_rate": 0.0,
    },
    "metaformer": {
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "padding": [2, 1],
        "token_mixers": "retention",
        "use_layer_scale": False,
    },
    "vit": {},
}
SIZES = {
    "vir": {"micro": single(64), "mini": single(128)},
    "rmt": {"micro": pyramid(32, 64) | {"projection_size": 128}, "mini": pyramid(64, 128) | {"projection_size": 256}},
    "metaformer": {"micro": pyramid(32, 64), "mini": pyramid(64, 128)},
    "vit": {"micro": single(64), "mini": single(128)},
}
NAMES = {"vir": "ViR", "rmt": "RMT", "metaformer": "MetaFormer", "vit": "ViT"}


def read_idx(folder: Path, part: str, what: str) -> np.ndarray:
    """Returns the array of unsigned bytes in an IDX file such as train-images-idx3-ubyte.gz."""
    file = next(file for end in ("", ".gz") for file in folder.glob(f"[!.]*{what}-idx?-ubyte{end}") if part in file.name)
    data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    start = 4 + 4 * data[3]  # of the elements, after the sizes of the dimensions
    return np.frombuffer(data, np.uint8, offset=start).reshape(np.frombuffer(data[4:start], ">u4").astype(int))


def load(options: Options) -> DatasetDict:
    """Returns the pictures to train on and to test on, in columns `image` and `label`."""
    folder = Path(options.data)
    if any(folder.glob("[!.]*idx3-ubyte*")):
        parts = {
            name: Dataset.from_dict(
                {
                    "image": [Picture.fromarray(pixels) for pixels in read_idx(folder, part, "images")],
                    "label": read_idx(folder, part, "labels"),
                }
            )
            for name, part in (("train", "train"), ("test", "t10k"))
        }
        data = DatasetDict(parts)
    else:
        data = load_dataset(options.data)
    data = data.rename_columns(
        {old: new for old, new in ((options.image_column, "image"), (options.label_column, "label")) if old != new}
    ).cast_column("image", Image(mode="RGB"))
    if not isinstance(data["train"].features["label"], ClassLabel):
        data = data.cast_column("label", Value("string"))
        data["train"] = data["train"].class_encode_column("label")
        data = data.cast_column("label", data["train"].features["label"])  # one number for a name in all splits
    test = next((data[split] for split in ("test", "validation", "valid") if split in data), None)
    if test is None:
        return data["train"].train_test_split(options.held_out, stratify_by_column="label", seed=0)
    return DatasetDict(train=data["train"], test=test)


def make_model(options: Options, classes: list[str]):
    """Returns an untrained classifier and its image processor."""
    package = transformers if options.model == "vit" else retnet_hf
    config_class = getattr(package, f"{NAMES[options.model]}Config")
    processor_class = getattr(package, f"{NAMES[options.model]}ImageProcessor")
    side = options.image_size
    fields = {"image_size": side, "id2label": dict(enumerate(classes))}
    fields["label2id"] = {label: number for number, label in enumerate(classes)}
    if options.model in ("vir", "vit"):
        fields["patch_size"] = options.patch_size
    if options.size in SIZES[options.model]:
        config = config_class(**COMMON[options.model], **SIZES[options.model][options.size], **fields)
    else:
        config = config_class.from_preset(options.size, **fields)
    cut = {"size": side, "crop_pct": 1.0}
    if options.model == "vit":
        cut = {"size": {"shortest_edge": side}, "do_center_crop": True, "crop_size": side}
    return AutoModelForImageClassification.from_config(config), processor_class(**cut)


def augment(pixels: torch.Tensor, shift: int, flip: bool) -> torch.Tensor:
    """Shifts pictures (B, 3, height, width) by up to `shift` pixels, with zeros moving in, and reflects half of them."""
    padded = torch.nn.functional.pad(pixels, (shift,) * 4)
    shifted = []
    for picture in padded:
        top, left = torch.randint(2 * shift + 1, (2,)).tolist()
        picture = picture[:, top : top + pixels.shape[2], left : left + pixels.shape[3]]
        shifted.append(picture.flip(-1) if flip and torch.rand(()) < 0.5 else picture)
    return torch.stack(shifted)


def accuracy(evaluated: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((evaluated.predictions.argmax(-1) == evaluated.label_ids).mean())}


def draw(folder: Path, log: list[dict[str, float]], counts: np.ndarray, classes: list[str]) -> str:
    """Draws accuracy.png and confusion.png from the log and counts (class, answer). Returns a table with a row per class."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*((entry["epoch"], entry["eval_accuracy"]) for entry in log if "eval_accuracy" in entry)), "o-")
    axes.set(title=folder.name, xlabel="epoch", ylabel="accuracy on test pictures")
    figure.savefig(folder / "accuracy.png", dpi=120)
    figure = Figure(figsize=(1.5 + 0.4 * len(classes),) * 2, layout="constrained")
    axes = figure.subplots()
    axes.imshow(counts / counts.sum(1, keepdims=True).clip(1), cmap="Blues", vmin=0, vmax=1)
    axes.set(title=folder.name, xlabel="answer", ylabel="class")
    axes.set_xticks(range(len(classes)), classes, rotation=90)
    axes.set_yticks(range(len(classes)), classes)
    figure.savefig(folder / "confusion.png", dpi=120)
    found, right, asked = counts.sum(0).clip(1), counts.diagonal(), counts.sum(1)
    rows = [
        f"| {name} | {asked[index]:,} | {right[index] / max(asked[index], 1):.1%} | {right[index] / found[index]:.1%} |"
        for index, name in enumerate(classes)
    ]
    table = ["| class | pictures | found | answers that are right |", "|---|---:|---:|---:|", *rows]
    return "\n".join(["", "## Classes", "", *table, "", "![accuracy](accuracy.png)", "![confusion](confusion.png)", ""])


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Trains, saves model and processor in the output folder, and returns the metrics on the test pictures."""
    parser = HfArgumentParser((Options, TrainingArguments))
    parser.set_defaults(**DEFAULTS)
    options, training = parser.parse_args_into_dataclasses(arguments)
    transformers.set_seed(training.seed)
    pictures = load(options)
    model, processor = make_model(options, pictures["train"].features["label"].names)

    def prepare(rows: dict[str, list]) -> dict[str, torch.Tensor]:
        return {"pixel_values": processor(rows["image"], return_tensors="pt")["pixel_values"], "labels": rows["label"]}

    def prepare_for_training(rows: dict[str, list]) -> dict[str, torch.Tensor]:
        prepared = prepare(rows)
        return prepared | {"pixel_values": augment(prepared["pixel_values"], options.shift, options.flip)}

    trainer = Trainer(
        model,
        training,
        train_dataset=pictures["train"].with_transform(prepare_for_training),
        eval_dataset=pictures["test"].with_transform(prepare),
        processing_class=processor,
        compute_metrics=accuracy,
    )
    checkpoint = training.resume_from_checkpoint  # the option is a text: a folder, or "True" for the last checkpoint
    trainer.train(resume_from_checkpoint=checkpoint == "True" or checkpoint)
    trainer.save_model()
    evaluated = trainer.predict(pictures["test"].with_transform(prepare), metric_key_prefix="eval")
    metrics, classes = evaluated.metrics, list(model.config.id2label.values())
    trainer.save_metrics("eval", metrics)
    counts = np.zeros((len(classes),) * 2, dtype=int)
    np.add.at(counts, (evaluated.label_ids, evaluated.predictions.argmax(-1)), 1)
    if metrics["eval_accuracy"] < 1.5 * counts.sum(1).max() / counts.sum():
        print("The answers are hardly better than chance: try --model rmt, which needs fewer pictures, or more epochs.")
    facts = {"images": f"{len(pictures['train']):,} to train on", "accuracy": f"{metrics['eval_accuracy']:.2%}"}
    folder = Path(training.output_dir)
    shown = draw(folder, trainer.state.log_history, counts, classes)
    model_card(model, folder.name, facts, training=shown).save(folder / "README.md")
    return metrics


if __name__ == "__main__":
    main()
