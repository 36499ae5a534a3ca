# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`examples/train_image_classifier.py`: every family learns colours, resumes exactly, and reads each kind of data."""

import gzip
import runpy
from pathlib import Path

import numpy as np
import pytest
from command_answers import same_weights
from datasets import Dataset, Image
from pictures import COLOURS, colour_picture, write_pictures
from places import ROOT
from transformers import pipeline


SCRIPT = ROOT / "examples" / "train_image_classifier.py"
if not SCRIPT.exists():
    pytest.skip("a source distribution has no examples", allow_module_level=True)
FEW = ["--size", "micro", "--image_size", "16", "--per_device_train_batch_size", "8", "--learning_rate", "0.003"]
FEW += ["--shift", "1", "--use_cpu", "True", "--disable_tqdm", "True", "--num_train_epochs", "2"]


@pytest.fixture(scope="module")
def example():
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def pictures(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "pictures" / "train", 16)
    write_pictures(tmp_path / "pictures" / "test", 4)
    return tmp_path / "pictures"


@pytest.mark.parametrize("family", ["vir", "rmt", "metaformer", "vit"])
def test_every_family_learns_colours_into_a_folder_that_a_pipeline_loads(example, pictures, family):
    metrics = example["main"](
        ["--data", "pictures", "--model", family, *FEW, "--output_dir", "made", "--save_strategy", "no"]
    )
    assert metrics["eval_accuracy"] > 0.9
    card = Path("made/README.md").read_text(encoding="utf-8")
    assert all(f"| {colour} | 4 | " in card for colour in COLOURS)
    assert all(Path("made", f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("accuracy", "confusion"))
    classify = pipeline("image-classification", model="made", device="cpu")
    assert classify.model.config.model_type == family
    assert classify(colour_picture("green", 99))[0]["label"] == "green"


def test_an_interrupted_run_that_is_resumed_ends_with_the_same_weights(example, pictures, monkeypatch):
    run = ["--data", "pictures", *FEW, "--output_dir"]
    example["main"]([*run, "whole"])
    example["main"]([*run, "resumed", "--save_total_limit", "3"])
    for file in Path("resumed").glob("*.safetensors"):
        file.unlink()
    _, second = sorted(Path("resumed").glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    for file in sorted(second.rglob("*"), reverse=True):
        file.unlink()
    second.rmdir()
    example["main"]([*run, "resumed", "--resume_from_checkpoint", "True"])
    same_weights(Path("whole"), Path("resumed"))


def test_names_of_labels_have_one_number_in_all_splits(example, tmp_path):
    for split, labels in (("train", [3, 1, 2]), ("test", [3, 2])):
        rows = {"image": [colour_picture("green", 0)] * len(labels), "label": labels}
        Dataset.from_dict(rows).cast_column("image", Image()).to_parquet(tmp_path / f"{split}.parquet")
    data = example["load"](example["Options"](data=str(tmp_path)))
    assert data["train"].features["label"].names == ["1", "2", "3"]
    assert [data[split]["label"][:] for split in ("train", "test")] == [[2, 0, 1], [2, 1]]


def write_idx(file: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    file.write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))


def test_folders_idx_files_and_data_sets_are_read_with_a_fair_share_held_out(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load, options = example["load"], example["Options"]
    write_pictures(tmp_path / "photos", 10)
    data = load(options(data="photos", held_out=0.2))
    assert data["train"].features["label"].names == list(COLOURS)
    assert [data[split]["label"].count(label) for split in ("train", "test") for label in range(3)] == [8] * 3 + [2] * 3

    pixels = np.random.default_rng(0).integers(0, 256, (12, 6, 6))
    for part, count in (("train", 12), ("t10k", 4)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", pixels[:count])
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(count) % 3)
    data = load(options(data=str(tmp_path)))
    assert [len(data[split]) for split in ("train", "test")] == [12, 4]
    assert data["train"]["label"][:4] == [0, 1, 2, 0]
    assert np.array_equal(np.asarray(data["test"][3]["image"]), np.repeat(pixels[3][..., None], 3, axis=2))

    rows = {"picture": [colour_picture(colour, 0) for colour in COLOURS] * 4, "colour": list(COLOURS) * 4}
    Dataset.from_dict(rows).cast_column("picture", Image()).to_parquet(tmp_path / "saved" / "train.parquet")
    data = load(options(data="saved", image_column="picture", label_column="colour", held_out=0.25))
    assert data["train"].features["label"].names == list(COLOURS)
    assert data["train"][0]["image"].mode == "RGB"
