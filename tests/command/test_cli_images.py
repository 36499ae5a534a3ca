# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`retnet-hf train-image`: what it makes of folders, IDX files and data sets, how it goes on, and what it refuses."""

import gzip
import json
import os
import random
import re
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from command_answers import assert_same_weights, at_step, press_ctrl_c, press_ctrl_c_twice, refused, tree
from pictures import COLOURS, colour_picture, write_pictures
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, pipeline
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from retnet_hf import ViRForImageClassification
from retnet_hf_cli.errors import InputError
from retnet_hf_cli.images.corpus import LabelledImages, hold_out, read_corpus, read_idx
from retnet_hf_cli.images.models import FAMILIES, fitting_patch_size, fitting_size
from retnet_hf_cli.images.training import Augmentation, PreparedImages
from retnet_hf_cli.main import main


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")

TINY = {
    "patch_size": 4,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "hidden_dropout": 0.1,  # so that resuming exactly needs the random numbers too
}
# 12 steps in 2 epochs, evaluated and saved at every fourth
TRAIN = ["train-image", "pictures", "--config", "config.json", "--batch-size", 8, "--steps", 12, "--eval-every", 4]
TRAIN += ["--lr", 0.01, "--threads", 1]


def write_idx(file: Path, array: np.ndarray) -> None:
    data = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.astype(np.uint8).tobytes()
    file.write_bytes(gzip.compress(data) if file.suffix == ".gz" else data)


def set_up(folder: Path) -> None:
    write_pictures(folder / "pictures" / "train", 16)
    write_pictures(folder / "pictures" / "test", 4)
    (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A working directory with pictures of three colours and a configuration in it."""
    monkeypatch.chdir(tmp_path)
    set_up(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(tmp_path_factory, heard_again) -> Path:
    """The folder of an uninterrupted run of TRAIN, which tests copy before they change it."""
    folder, before = tmp_path_factory.mktemp("trained"), Path.cwd()
    set_up(folder)
    os.chdir(folder)
    try:
        assert main([str(argument) for argument in [*TRAIN, "--output", "model"]]) == 0
    finally:
        os.chdir(before)
    return folder / "model"


# What it makes


def test_it_ends_in_a_folder_with_everything(trained):
    files = {path.name for path in trained.iterdir()}
    assert files == {
        "README.md",
        "checkpoint-12",
        "config.json",
        "loss_curve.png",
        "model.safetensors",
        "eval_results.json",
        "preprocessor_config.json",
        "training_run.json",
    }
    assert (trained / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not trained.with_name("model.partial").exists()
    results = json.loads((trained / "eval_results.json").read_text())
    assert results["eval_accuracy"] > 0.9
    confusion = np.array(results["eval_confusion"])
    assert confusion.sum(1).tolist() == [4, 4, 4]
    assert confusion.trace() == pytest.approx(12 * results["eval_accuracy"])
    card = (trained / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: image-classification\n")
    assert "`pictures`, 48 to train on, 12 held out" in card
    assert "loss_curve.png" in card


def test_the_trained_folder_loads_and_classifies(trained):
    model, processor = AutoModelForImageClassification.from_pretrained(trained), AutoImageProcessor.from_pretrained(trained)
    assert type(model) is ViRForImageClassification
    assert model.config.id2label == dict(enumerate(COLOURS))
    assert model.config.label2id == {colour: number for number, colour in enumerate(COLOURS)}
    assert model.config.image_size == 20
    pictures = [colour_picture(colour, 99) for colour in COLOURS]
    with torch.no_grad():
        assert model(**processor(pictures, return_tensors="pt")).logits.argmax(-1).tolist() == [0, 1, 2]
    classifier = pipeline("image-classification", model=str(trained))
    assert [answer[0]["label"] for answer in classifier(pictures)] == list(COLOURS)


def test_the_code_in_the_model_card_runs(trained, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", (trained / "README.md").read_text(encoding="utf-8"), re.DOTALL)[1]
    monkeypatch.chdir(trained.parent)
    colour_picture("green", 7).save("picture.png")
    exec(code, {})
    assert "green" in capsys.readouterr().out


def test_it_shows_accuracy_at_every_evaluation(retnet_hf, workplace):
    answer = retnet_hf(*TRAIN, "--output", "model")
    assert answer.code == 0
    assert answer.err == ""
    rows = re.findall(r"step +(\d+) of 12   accuracy ([\d.]+) %\n", answer.out)
    assert [int(step) for step, *_ in rows] == [4, 8, 12]
    assert "48 images of 3 classes to train on, 12 held out, at 20 pixels; 1 CPU thread" in answer.out
    final = re.search(r"accuracy on images held out: ([\d.]+) %, where guessing would reach 33.3 %", answer.out)[1]
    assert float(final) == float(rows[-1][1]) > 60


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_trains(retnet_hf, workplace, family):
    arguments = ["--model", family, "--preset", "micro", "--steps", 1, "--batch-size", 4, "--label-smoothing", 0.1]
    assert retnet_hf("train-image", "pictures", *arguments, "--output", "model").code == 0
    assert AutoModelForImageClassification.from_pretrained("model").config_class is FAMILIES[family].config_class
    processor = AutoImageProcessor.from_pretrained("model")
    assert processor(colour_picture("red", 0), return_tensors="pt").pixel_values.shape == (1, 3, 20, 20)
    assert type(processor).__name__.removesuffix("Pil").lower() == f"{family}imageprocessor"


@pytest.mark.parametrize(("preset", "parameters"), [("micro", 208_000), ("mini", 808_000)])
def test_small_sizes_are_the_same_in_every_family(preset, parameters):
    for family in FAMILIES.values():
        with torch.device("meta"):
            model = AutoModelForImageClassification.from_config(family.config(preset, None, 28, list("0123456789")))
        assert model.num_parameters() == pytest.approx(parameters, rel=0.05)


def test_published_sizes_are_known_by_their_names():
    assert FAMILIES["vir"].config("ViR-S/16", None, 224, ["a", "b"]).hidden_size == 384
    assert FAMILIES["vir"].config("ViR-S/16", None, 224, ["a", "b"], patch_size=8).patch_size == 8
    assert FAMILIES["rmt"].config("small", None, 224, ["a", "b"]).depths == [3, 4, 18, 4]
    assert FAMILIES["metaformer"].config("s12", None, 224, ["a", "b"]).num_labels == 2


def test_sizes_that_follow_from_the_images():
    assert [fitting_size(*size) for size in ((28, 28), (20, 30), (32, 32), (33, 10), (50, 40), (480, 640))] == [
        28, 32, 32, 36, 64, 64,
    ]  # fmt: skip
    sizes = {4: 1, 20: 5, 28: 7, 30: 6, 32: 8, 48: 8, 64: 8, 96: 8, 100: 10, 224: 16, 384: 16}
    assert {size: fitting_patch_size(size) for size in sizes} == sizes


# Interrupting and resuming


@pytest.mark.parametrize(("ctrl_c", "checkpoint"), [(press_ctrl_c, 7), (press_ctrl_c_twice, 4)])
def test_interrupted_and_resumed_equals_uninterrupted(retnet_hf, workplace, trained, ctrl_c, checkpoint):
    """In the middle of an epoch, augmentation, dropout and order of the images included."""
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 6, ctrl_c)
        answer = retnet_hf(*TRAIN, "--output", "model")
    assert answer.code == 130
    assert answer.err.startswith("retnet-hf: interrupted")
    assert answer.err.count("\n") == 1
    assert not Path("model").exists()
    assert [path.name for path in Path("model.partial").glob("checkpoint-*")] == [f"checkpoint-{checkpoint}"]

    without_steps = [argument for argument in TRAIN if argument not in ("--steps", 12)]
    answer = retnet_hf(*without_steps, "--output", "model", "--resume")
    assert answer.code == 0
    assert f"continuing after step {checkpoint}\n" in answer.out
    assert_same_weights(Path("model"), trained)
    assert not Path("model.partial").exists()


def test_a_crash_before_the_end_of_publishing_is_made_good_by_resuming(retnet_hf, workplace, trained):
    shutil.copytree(trained, "model.partial")
    for name in ("model.safetensors", "eval_results.json"):
        Path("model.partial", name).write_bytes(b"half of it")
    assert retnet_hf(*TRAIN, "--output", "model", "--resume").code == 0
    assert_same_weights(Path("model"), trained)
    found, expected = (json.loads((folder / "eval_results.json").read_text()) for folder in (Path("model"), trained))
    assert all(found[name] == expected[name] for name in ("eval_loss", "eval_accuracy", "eval_confusion"))


def test_a_finished_run_can_be_trained_further(retnet_hf, workplace, trained):
    shutil.copytree(trained, "model")
    assert "already" in retnet_hf(*TRAIN, "--output", "model", "--resume").out
    assert tree(Path("model")) == tree(trained)
    assert retnet_hf(*TRAIN, "--output", "model", "--resume", "--steps", 14).code == 0
    assert Path("model/checkpoint-14").exists()
    assert not torch.equal(
        *(load_file(path / "model.safetensors")["classifier.weight"] for path in (Path("model"), trained))
    )


@pytest.mark.parametrize("changed", [["--lr", 0.5], ["--crop-padding", 1], ["--model", "vit"], ["--no-flip", ""]])
def test_resuming_with_other_options_is_refused(retnet_hf, workplace, trained, changed):
    shutil.copytree(trained, "model.partial")
    option, value = changed
    arguments = [option, value] if value != "" else [option]
    refused(retnet_hf(*TRAIN, "--output", "model", "--resume", *arguments), option.replace("--no-", "--"), str(value))


def test_resuming_on_other_images_is_refused(retnet_hf, workplace, trained):
    shutil.copytree(trained, "model.partial")
    files = [Path(f"pictures/train/red/{number:02}.png") for number in range(2)]
    for file in files:
        colour_picture("red", 77).resize((20, 16)).save(file, "BMP")  # of one size, whatever they show
    before = files[0].read_bytes()
    assert retnet_hf("train-image", *TRAIN[1:], "--steps", 1, "--output", "other").code == 0
    Image.open(files[0]).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(files[0], "BMP")
    assert len(files[0].read_bytes()) == len(before)
    refused(retnet_hf(*TRAIN, "--steps", 2, "--output", "other", "--resume"), "the images are not what this run began with")
    refused(retnet_hf(*TRAIN, "--output", "model", "--resume"), "the images are not what this run began with")


def test_an_earlier_result_is_replaced_only_when_asked_and_only_when_finished(retnet_hf, workplace, trained):
    shutil.copytree(trained, "model")
    refused(retnet_hf(*TRAIN, "--output", "model"), "not empty", "--resume", "--overwrite")
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 6, press_ctrl_c)
        assert retnet_hf(*TRAIN, "--output", "model", "--overwrite").code == 130
    assert tree(Path("model")) == tree(trained)


def test_failing_before_the_first_checkpoint_leaves_nothing(retnet_hf, workplace):
    before = tree(workplace)
    answer = retnet_hf(*TRAIN, "--output", "model", "--lr", 1e30)
    assert answer.code == 2
    assert "no longer a finite number" in answer.err
    assert tree(workplace) == before


# Input that cannot be used


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["DATA"]),
        (["./missing"], ["no such folder", "missing"]),
        (["config.json"], ["is a file"]),
        (["hollow"], ["empty"]),
        (["words"], ["words", "neither a folder with pictures"]),
        (["single"], ["single has no label for each image", "sub-folder"]),
        (["few"], ["too few images"]),
        (["strange"], ["images of violet to evaluate on, and none to train on"]),
        (["flat"], ["flat has no label for each image", "sub-folder", "--label-column"]),
        (["broken"], ["broken/blue/0.png", "cannot be read as an image"]),
        (["torn"], ["train-images-idx3-ubyte.gz", "damaged"]),
        (["short"], ["train-images-idx3-ubyte", "damaged"]),
        (["unpaired"], ["do not belong together", "train"]),
        (["uneven"], ["do not belong together"]),
        (["pictures", "--classes", "a,b"], ["--classes names 2 classes", "has 3"]),
        (["pictures", "--preset", "huge"], ["--preset must be one of", "micro", "ViR-S/16", "huge"]),
        (["pictures", "--config", "missing.json"], ["--config", "'missing.json' does not exist"]),
        (["pictures", "--config", "wrong.json"], ["num_attention_heads"]),
        (["pictures", "--config", "rmt.json"], ['"rmt"', '"vir"']),
        (["pictures", "--config", "config.json", "--preset", "mini"], ["--preset", "--config"]),
        (["pictures", "--config", "config.json", "--image-size", "21"], ["patch_size"]),
        (["pictures", "--patch-size", "3"], ["patch_size", "3", "20"]),
        (["pictures", "--patch-size", "4", "--model", "rmt"], ["--patch-size is for", "rmt"]),
        (["pictures", "--config", "oblong.json"], ["image_size must be one number", "[16, 20]"]),
        (["pictures", "--model", "resnet"], ["--model", "resnet"]),
        (["pictures", "--output", "config.json"], ["is a file"]),
        (["pictures", "--batch-size", "0"], ["--batch-size"]),
        (["pictures", "--resume", "--output", "model"], ["nothing to resume"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_gets_one_line(retnet_hf, workplace, arguments, words):
    for name in ("hollow", "words", "torn", "short", "unpaired", "uneven"):
        Path(name).mkdir()
    Path("words/poem.doc").write_text("no picture")
    for name, colours in {"single/red": 1, "few/red": 1, "few/blue": 1, "strange/train/red": 2, "strange/train/blue": 2,
                          "strange/test/violet": 1, "broken/red": 3, "broken/blue": 3, "flat": 3}.items():  # fmt: skip
        Path(name).mkdir(parents=True)
        for number in range(colours):
            colour_picture("red", number).save(Path(name, f"{number}.png"))
    Path("broken/blue/0.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    ten = np.zeros((10, 4, 4))
    write_idx(Path("torn/train-images-idx3-ubyte.gz"), ten)
    Path("torn/train-images-idx3-ubyte.gz").write_bytes(Path("torn/train-images-idx3-ubyte.gz").read_bytes()[:20])
    write_idx(Path("torn/train-labels-idx1-ubyte.gz"), np.zeros(10))
    Path("short/train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03\0\0\0\x0a\0\0\0\x04\0\0\0\x04 and too little")
    write_idx(Path("short/train-labels-idx1-ubyte"), np.zeros(10))
    write_idx(Path("unpaired/train-images-idx3-ubyte"), ten)
    write_idx(Path("uneven/train-images-idx3-ubyte"), ten)
    write_idx(Path("uneven/train-labels-idx1-ubyte"), np.zeros(9))
    Path("wrong.json").write_text('{"hidden_size": 32, "num_attention_heads": 5, "patch_size": 4}')
    Path("oblong.json").write_text('{"image_size": [16, 20]}')
    Path("rmt.json").write_text('{"model_type": "rmt"}')
    before = tree(workplace)
    refused(retnet_hf("train-image", *arguments), *words)
    assert tree(workplace) == before
    assert not list(workplace.glob("*.partial"))


def test_a_picture_that_turns_out_to_be_broken(retnet_hf, workplace):
    file = Path("pictures/train/red/09.png")
    file.write_bytes(file.read_bytes()[:200])
    answer = retnet_hf(*TRAIN, "--output", "model")
    assert answer.code == 2
    assert "09.png cannot be read as an image" in answer.err
    assert answer.err.count("\n") == 1
    assert not Path("model").exists()


def test_what_is_no_picture_in_a_data_set_is_named(workplace):
    encoded = [Path(f"pictures/train/red/{number:02}.png").read_bytes() for number in range(6)]
    encoded[4] = b"no picture at all"
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    rows = {"image": [{"bytes": data, "path": None} for data in encoded], "label": [0, 1] * 3}
    datasets.Dataset.from_dict(rows, features).save_to_disk("saved")
    corpus = read_corpus("saved", eval_fraction=0.3)
    refusals = []
    for part in (corpus.training, corpus.evaluation):
        for index in range(len(part)):
            try:
                part.read(index)
            except InputError as error:
                refusals.append(str(error))
    assert len(refusals) == 1
    assert refusals[0].startswith("image 4, counted from 0, cannot be read as an image")


@pytest.mark.parametrize("suffix", [".png", ".tif"])
def test_pictures_of_16_bits_are_refused(retnet_hf, workplace, suffix):
    """The pipelines of transformers would show them white."""
    levels = np.linspace(0, 65535, 400).reshape(20, 20).astype(np.uint16)
    Image.fromarray(levels).save(f"pictures/train/blue/00{suffix}")
    answer = retnet_hf(*TRAIN, "--output", "model")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert f"00{suffix} has levels up to 65535" in answer.err
    assert "convert the pictures to 8 bits" in answer.err
    Image.fromarray((levels // 257).astype(np.uint16)).save("pictures/train/blue/00.tif")
    row = {"image": {"path": "pictures/train/blue/00.tif", "bytes": None}}
    picture = LabelledImages([row], np.array([0]), np.array([0])).read(0)
    assert (np.asarray(picture)[..., 0] == levels // 257).all()


def test_help_has_examples(retnet_hf):
    answer = retnet_hf("train-image", "--help")
    assert answer.code == 0
    assert answer.out.count("retnet-hf train-image") >= 3


# Where images come from


def test_folders_without_parts_are_split_fairly(workplace):
    corpus = read_corpus("pictures/train", eval_fraction=0.25, seed=3)
    assert corpus.classes == list(COLOURS)
    assert (len(corpus.training), len(corpus.evaluation)) == (36, 12)
    assert np.bincount(corpus.evaluation.labels).tolist() == [4, 4, 4]
    places = [set(part.order.tolist()) for part in (corpus.training, corpus.evaluation)]
    assert places[0] | places[1] == set(range(48))
    for part in (corpus.training, corpus.evaluation):
        for index, label in enumerate(part.labels):
            assert Path(part.pictures[int(part.order[index])]["image"]["path"]).parent.name == COLOURS[label]
    again, other = (read_corpus("pictures/train", eval_fraction=0.25, seed=seed) for seed in (3, 4))
    assert again.digest == corpus.digest
    assert again.evaluation.order.tolist() == corpus.evaluation.order.tolist() != other.evaluation.order.tolist()


def test_pictures_of_any_kind_are_read(workplace):
    shutil.rmtree("pictures")
    write_pictures(Path("pictures/training"), 2, ".jpeg")
    write_pictures(Path("pictures/val/"), 1, ".GIF")
    write_pictures(Path("[0]*/blue"), 2)
    assert len(read_corpus("[0]*", eval_fraction=0.5).training) == 3
    colour_picture("red", 5).convert("P").save("pictures/training/red/x.BMP")
    for number in range(20):
        Path(f"pictures/training/red/{number}.json").write_text('{"no": "picture"}')
    Path("pictures/training/.cache").mkdir()
    corpus = read_corpus("pictures")
    assert (len(corpus.training), len(corpus.evaluation)) == (7, 3)
    for part in (corpus.training, corpus.evaluation):
        for index in range(len(part)):
            picture = part.read(index)
            assert picture.mode == "RGB"
            assert np.asarray(picture).mean((0, 1)).argmax() == 2 - part.labels[index]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read(workplace, suffix):
    arrays = [np.random.default_rng(seed).integers(0, 256, (size, 5, 6)) for seed, size in ((0, 9), (1, 4))]
    labels = [np.arange(9) % 3, np.array([2, 1, 0, 2])]
    Path("idx").mkdir()
    for name, images, numbers in zip(("train", "t10k"), arrays, labels):
        write_idx(Path(f"idx/{name}-images-idx3-ubyte{suffix}"), images)
        write_idx(Path(f"idx/{name}-labels-idx1-ubyte{suffix}"), numbers)
    write_idx(Path(f"idx/train-images-idx3-ubyte{'' if suffix else '.gz'}"), arrays[0])  # both, as torchvision leaves them
    corpus = read_corpus("idx", classes=["top", "shoe", "bag"])
    assert corpus.classes == ["top", "shoe", "bag"]
    assert read_corpus("idx").classes == ["0", "1", "2"]
    for part, images, numbers in zip((corpus.training, corpus.evaluation), arrays, labels):
        assert part.labels.tolist() == numbers.tolist()
        for index, image in enumerate(images):
            assert (np.asarray(part.read(index)) == image[..., None]).all()
    assert read_idx(Path(f"idx/t10k-labels-idx1-ubyte{suffix}")).tolist() == [2, 1, 0, 2]

    write_idx(Path(f"idx/letters-train-images-idx3-ubyte{suffix}"), arrays[0])
    with pytest.raises(InputError, match="one IDX file of images named train.*letters-train"):
        read_corpus("idx")


def test_data_sets_are_read(workplace, monkeypatch):
    features = datasets.Features({"picture": datasets.Image(), "kind": datasets.ClassLabel(names=list(COLOURS))})

    def rows(count: int, label: int | None = None) -> datasets.Dataset:
        kinds = [number % 3 for number in range(count)]
        pictures = [colour_picture(COLOURS[kind], number) for number, kind in enumerate(kinds)]
        return datasets.Dataset.from_dict(
            {"picture": pictures, "kind": kinds if label is None else [label] * count}, features
        )

    asked, loaded = [], datasets.DatasetDict(train=rows(9), validation=rows(6), test=rows(3, label=-1))
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: asked.append(args) or loaded)
    corpus = read_corpus("user/colours", subset="small")
    assert asked == [("user/colours", "small")]
    assert (len(corpus.training), len(corpus.evaluation)) == (9, 6)  # the test set has no labels
    assert corpus.classes == list(COLOURS)
    assert (np.asarray(corpus.training.read(4)) == np.asarray(colour_picture("green", 4))).all()

    rows(9).save_to_disk("saved")
    saved = read_corpus("saved", eval_fraction=0.3)
    assert (len(saved.training), len(saved.evaluation)) == (6, 3)
    texts = datasets.Dataset.from_dict({"picture": rows(6)["picture"], "name": [COLOURS[number % 3] for number in range(6)]})
    loaded["train"] = texts.cast_column("picture", datasets.Image())
    del loaded["validation"], loaded["test"]
    named = read_corpus("user/colours", label_column="name", eval_fraction=0.5)
    assert named.classes == sorted(COLOURS)
    names = [None if number == 4 else COLOURS[number % 3] for number in range(6)]
    loaded["train"] = loaded["train"].remove_columns("name").add_column("name", names)
    with pytest.raises(InputError, match='column "name" .* has no label for some images'):
        read_corpus("user/colours", label_column="name")
    loaded["train"] = loaded["train"].add_column("several", [[0, 1]] * 6)
    with pytest.raises(InputError, match='in the column "several" no label for each image'):
        read_corpus("user/colours", label_column="several")
    with pytest.raises(InputError, match="has no label for each image .*picture, name.*--label-column"):
        read_corpus("user/colours")
    with pytest.raises(InputError, match='in the column "image" no image .*--image-column'):
        read_corpus("user/colours", image_column="image", label_column="name")
    with pytest.raises(InputError, match='in the column "name" no image'):
        read_corpus("user/colours", image_column="name", label_column="name")


def test_a_data_set_that_is_not_there(retnet_hf, workplace, monkeypatch):
    def load_dataset(name, *args, **kwargs):
        raise ConnectionError(f"Couldn't reach '{name}' on the Hub\nand much more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    refused(retnet_hf("train-image", "no_such_data"), "no_such_data", "Couldn't reach")


@pytest.mark.parametrize("count", [2, 3, 10, 101])
def test_every_class_is_held_out_in_fair_share(count):
    labels = np.repeat([0, 1, 4], [count, 2 * count, 1])
    images = LabelledImages(list(range(len(labels))), labels, np.arange(len(labels)))
    training, evaluation = hold_out(images, 0.2)
    assert sorted([*training.order, *evaluation.order]) == list(range(len(labels)))
    assert np.bincount(evaluation.labels, minlength=5).tolist() == [
        max(1, round(0.2 * count)),
        round(0.4 * count) or 1,
        0,
        0,
        0,
    ]


# What the model sees


def test_training_sees_what_the_image_processor_makes(workplace):
    """An image without augmentation is, to the last bit, what the saved processor gives the model afterwards."""
    corpus = read_corpus("pictures")
    for family in FAMILIES.values():
        processor = family.processor(20)
        images = PreparedImages(corpus.evaluation, processor)
        batch = images.batch([images[index] for index in (0, 5, 11)])
        expected = processor([corpus.evaluation.read(index) for index in (0, 5, 11)], return_tensors="pt")
        assert batch["pixel_values"].equal(expected["pixel_values"])
        assert batch["labels"].tolist() == [0, 1, 2]


def test_augmentation_shifts_and_reflects():
    image = np.random.default_rng(0).integers(1, 256, (3, 9, 7), dtype=np.uint8)
    seen, generator = set(), random.Random(0)
    padded = np.pad(image, ((0, 0), (2, 2), (2, 2)))
    possible = {
        padded[:, top : top + 9, left : left + 7][:, :, :: 1 - 2 * reflected].tobytes(): (top, left, reflected)
        for top in range(5)
        for left in range(5)
        for reflected in (0, 1)
    }
    for _ in range(600):
        seen.add(possible[np.ascontiguousarray(Augmentation(2, flip=True)(image, generator)).tobytes()])
    assert len(seen) == 50
    assert (Augmentation(0, flip=False)(image, generator) == image).all()


def test_augmentation_follows_from_seed_epoch_and_place(workplace):
    corpus, processor = read_corpus("pictures"), FAMILIES["vir"].processor(20)

    def view(epoch: int, index: int, seed: int = 0) -> bytes:
        images = PreparedImages(corpus.training, processor, Augmentation(3, flip=True), seed)
        images.epoch = epoch
        return images[index][0].tobytes()

    assert view(1, 5) == view(1, 5)
    assert len({view(epoch, 5) for epoch in range(8)}) > 4
    assert len({view(0, 5, seed) for seed in range(8)}) > 4


def test_a_set_that_does_not_fit_is_read_again(workplace, monkeypatch):
    corpus, reads = read_corpus("pictures"), []
    read = LabelledImages.read
    monkeypatch.setattr(LabelledImages, "read", lambda self, index: reads.append(index) or read(self, index))
    images = PreparedImages(corpus.training, FAMILIES["vir"].processor(20))
    assert (images[3][0] == images[3][0]).all()
    assert reads == [3]
    monkeypatch.setattr("retnet_hf_cli.images.training.CACHE_BYTES", 48 * 3 * 20 * 20 - 1)
    images = PreparedImages(corpus.training, FAMILIES["vir"].processor(20))
    assert (images[3][0] == images[3][0]).all()
    assert reads == [3, 3, 3]
