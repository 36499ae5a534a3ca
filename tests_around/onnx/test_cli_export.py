# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf export`, as a user meets it: what it writes and says, and what it refuses."""

import _thread
import json
import resource
import shutil
import threading
import urllib.request
from pathlib import Path

import pytest
import torch
from command_answers import done, refused, tree
from rich.console import Console
from safetensors.torch import load_file
from small_models import random_ids, small_model, word_tokenizer
from small_vision_models import VISION_FAMILIES

from retnet_hf import RetNetForMaskedLM, StateTuning
from retnet_hf.cli.commands.demo import serve_page
from retnet_hf.cli.text.corpus import SAMPLE_TEXT
from retnet_hf.export import web_folder


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")


def one_layer(seed: int = 0):
    """Exporters take seconds for each layer."""
    return small_model("fla", seed=seed, num_hidden_layers=1)


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A working directory with a model, and one without a tokenizer."""
    monkeypatch.chdir(tmp_path)
    one_layer().save_pretrained("model")
    shutil.copytree("model", "bare")
    tokenizer = word_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(2)
    tokenizer.save_pretrained("model")
    return tmp_path


def test_a_folder_for_onnx_runtime(retnet_hf, workplace):
    answer = done(retnet_hf("export", "model", "out", "--quantize", "int8", "--quantize", "float32"))
    assert "onnx/model.onnx: " in answer.out
    assert "and 64 greedy tokens as in PyTorch" in " ".join(answer.out.split())
    assert {path.name for path in Path("out").iterdir()} >= {"onnx", "config.json", "tokenizer.json", "genai_config.json"}
    assert {path.name for path in Path("out/onnx").iterdir()} == {"model.onnx", "model_quantized.onnx"}
    assert not any(b"retnet_hf/" in path.read_bytes() for path in Path("out/onnx").iterdir())  # paths of this machine
    refused(retnet_hf("export", "model", "out"), "is not empty", "--overwrite")


@pytest.mark.parametrize("options", [[], ["--any-size"]])
def test_a_folder_for_pictures(retnet_hf, workplace, options):
    vision = VISION_FAMILIES["vir"]
    vision.model(**vision.smallest).save_pretrained("vir")
    vision.processor().save_pretrained("vir")
    assert "onnx/model.onnx: " in done(retnet_hf("export", "vir", "out", *options)).out
    assert Path("out/preprocessor_config.json").is_file()


with_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm, which fetches what a page needs")


@with_npm
def test_a_page_that_begins_with_a_learned_state(retnet_hf, workplace):
    tuned = StateTuning(one_layer())
    with torch.no_grad():
        tuned.states[0].normal_()
    tuned.save("task.safetensors")
    answer = done(retnet_hf("export", "model", "page", "--to", "web", "--state", "task.safetensors"))
    assert "python3 -m http.server --directory page" in " ".join(answer.out.split())
    info = json.loads(Path("page/model/info.json").read_text(encoding="utf-8"))
    assert info["initial"] == "initial_state.safetensors"
    assert (info["name"], info["file"]) == ("model", "model_quantized.onnx")
    found, expected = (load_file(name) for name in ("page/model/initial_state.safetensors", "task.safetensors"))
    assert found.keys() == expected.keys()
    assert all(tensor.equal(expected[name]) for name, tensor in found.items())
    done(retnet_hf("export", "model", "page", "--to", "web", "--overwrite"))
    assert not Path("page/model/initial_state.safetensors").exists()


@pytest.mark.parametrize("options", [["mlx"], pytest.param(["web"], marks=with_npm), ["onnx", "--quantize", "int8"]])
def test_a_full_disk_is_one_line_and_leaves_the_older_folder(retnet_hf, workplace, options):
    """As a limit to the size of files makes it, which every library meets in its own way."""
    done(retnet_hf("export", "model", "out", "--to", "mlx"))
    before, limits = tree(workplace), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        refused(retnet_hf("export", "model", "out", "--to", *options, "--overwrite"), code=1, silent=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert tree(workplace) == before


REFUSED = {  # arguments of `export`, and what is said
    "nothing out": "nothing",
    "bare out": "there is no tokenizer in bare",
    "model out --to paper": "'paper' is not one of 'onnx', 'web', 'mlx'",
    "model out --quantize int2": "weights can be float32, int8 or int4, not 'int2'",
    "model out --to web --quantize int4": "browsers have no fast 4-bit matrix products",
    "model out --to web --quantize int8 --quantize float32": "--to web takes one --quantize",
    "model out --state model/config.json": "--state is for --to web",
    "model out --to web --state state": "'state' does not exist",
    "model out --to web --state other": "other weights",
    "model out --to mlx --quantize int8": "mlx-lm quantises the models that it loads",
    "model out --any-size": "--any-size is for image classifiers",
    "headless out": "2 are missing or of another shape",
    "encoder out": "an encoder cannot be exported",
    "model model": "model holds the files to be read",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_exported_is_refused(retnet_hf, workplace, arguments):
    small_model("fla", RetNetForMaskedLM, bidirectional=True).save_pretrained("encoder")
    vision = VISION_FAMILIES["vir"]
    vision.model(vision.model_class).save_pretrained("headless")
    vision.processor().save_pretrained("headless")
    other = one_layer(seed=1)
    with torch.no_grad():
        other(random_ids(1, 5), use_cache=True).past_key_values.save("other")
    before = tree(workplace)
    refused(retnet_hf("export", *arguments.split()), REFUSED[arguments], silent=False)
    assert tree(workplace) == before


@with_npm
def test_a_demo_ends_in_a_page(retnet_hf, workplace, monkeypatch):
    Path("book.txt").write_text(SAMPLE_TEXT.read_text(encoding="utf-8")[:60_000], encoding="utf-8")
    with monkeypatch.context() as patch:  # without it, nothing is trained
        patch.setattr(web_folder, "CACHE", workplace / "cache")
        patch.setattr(web_folder.shutil, "which", lambda name: None)
        before = tree(workplace)
        refused(retnet_hf("demo", "--browser"), "for a page: install Node.js")
        assert tree(workplace) == before
    served = []
    monkeypatch.setattr("retnet_hf.cli.commands.demo.serve_page", lambda page, console: served.append(page))
    done(retnet_hf("demo", "--text", "book.txt", "--minutes", 0.08, "--threads", 1, "--browser"))
    [page] = served
    assert page.name == "retnet-demo-page"
    assert (page / "index.html").is_file()
    assert json.loads((page / "model" / "info.json").read_text(encoding="utf-8"))["name"] == "retnet-demo"


def test_a_page_is_served_and_opened_until_ctrl_c(tmp_path, monkeypatch):
    (tmp_path / "index.html").write_text("a page", encoding="utf-8")
    read = []

    def visit(address: str) -> None:
        read.append(urllib.request.urlopen(address).read())
        _thread.interrupt_main()

    monkeypatch.setattr("webbrowser.open", lambda address: threading.Thread(target=visit, args=[address]).start())
    serve_page(tmp_path, Console(quiet=True))
    assert read == [b"a page"]
