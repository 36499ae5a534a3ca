# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf export`, as a user meets it: what it writes and says, and what it refuses."""

import _thread
import inspect
import json
import resource
import shutil
import threading
import urllib.request
from pathlib import Path

import pytest
import torch
from command_answers import done, refused, tree
from foreign_folders import foreign, write_folder
from rich.console import Console
from safetensors.torch import load_file
from small_models import random_ids, small_llama, small_model, word_tokenizer
from small_vision_models import VISION_FAMILIES
from torchrun import free_port

from retnet_hf import RetNetConfig, RetNetForMaskedLM, StateTuning
from retnet_hf.cli.commands import serve
from retnet_hf.cli.commands.demo import serve_page
from retnet_hf.cli.text.corpus import SAMPLE_TEXT
from retnet_hf.export import web_folder


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")


def one_layer(seed: int = 0):
    """Exporters take seconds for each layer."""
    return small_model("fla", seed=seed, num_hidden_layers=1)


@pytest.fixture
def workplace(tmp_path, in_an_empty_folder) -> Path:
    """A working directory with a model, and one without a tokenizer."""
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


CODE = "from pathlib import Path\nPath('executed').touch()\nclass Own:\n    pass\n"


@pytest.fixture
def crowded_workplace(workplace, monkeypatch) -> Path:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(workplace / "modules"))
    Path("book.txt").write_text("w5 w6 w7 w8 " * 500, encoding="utf-8")
    vision = VISION_FAMILIES["vir"]
    vision.model().save_pretrained("vir")
    vision.processor().save_pretrained("vir")
    shutil.copytree("model", "llama")
    small_llama().save_pretrained("llama")
    return workplace


AUTO = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageClassification", "AutoTokenizer")
OWN_PROCESSOR = dict.fromkeys(("AutoImageProcessor", "AutoProcessor"), "own.Own")
PLACES = {  # files of a folder that name a class in a file of code beside them
    "config.json": {"model_type": "own", "auto_map": dict.fromkeys(AUTO, "own.Own")},
    "tokenizer_config.json": {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}},
    "preprocessor_config.json": {"image_processor_type": "Own", "processor_class": "Own", "auto_map": OWN_PROCESSOR},
    "generation_config.json": {"custom_generate": "own.py"},
}
TRAIN = ("train", "book.txt", "--preset", "tiny", "--steps", 1, "--block-size", 8, "--output", "made", "--tokenizer")
LINEARIZE = ("book.txt", "--block-size", 8, "--align-steps", 0, "--distill-steps", 1, "--batch-size", 1, "--output", "made")

COMMANDS = {"generate": lambda folder: (folder, "w5", "-n", 2), "chat": lambda folder: (folder, "-n", 2)}
COMMANDS |= {"export": lambda folder: (folder, "made"), "linearize": lambda folder: (folder, *LINEARIZE)}
COMMANDS |= {"train": lambda folder: (*TRAIN[1:], folder)}
COMMANDS |= {"serve": lambda folder: (folder, "--engine", "transformers", "--port", free_port())}
COMMANDS |= {"inspect": lambda folder: (folder,), "convert": lambda folder: (folder, "made")}
WITHOUT_A_USE = {  # commands that do not need the code, and work without it, or say that they do not take such a folder
    "config.json": ("train", "inspect", "convert"),
    "tokenizer_config.json": ("inspect", "convert"),
    "preprocessor_config.json": ("generate", "chat", "linearize", "train", "serve", "inspect", "convert"),
    "generation_config.json": tuple(COMMANDS),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_of_a_folder_whatever_stdin_answers(retnet_hf, crowded_workplace, monkeypatch, command, place):
    commands = []
    monkeypatch.setattr(serve, "ENGINES", {"transformers": ()})
    monkeypatch.setattr(serve, "become", commands.append)
    monkeypatch.setattr("retnet_hf.export.export_onnx", lambda *arguments: [])  # what takes long begins when all is loaded
    pictures = place == "preprocessor_config.json" and command == "export"
    folder = "llama" if command == "linearize" else "vir" if pictures else "model"
    file = Path(folder, place)
    held = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    file.write_text(json.dumps(held | PLACES[place]), encoding="utf-8")
    Path(folder, "custom_generate").mkdir()
    Path(folder, "custom_generate", "generate.py").write_text(CODE + "def generate(model, **kwargs):\n    pass\n")
    Path(folder, "own.py").write_text(CODE, encoding="utf-8")
    answer = retnet_hf(command, *COMMANDS[command](folder), stdin=b"y\ny\ny\n")
    assert not Path("executed").exists()
    assert not (crowded_workplace / "modules").exists() or not list((crowded_workplace / "modules").rglob("own.py"))
    assert "Traceback" not in answer.err
    if command not in WITHOUT_A_USE[place]:
        refused(answer, "with code of its own, and retnet-hf runs no code of a folder", silent=False)
        assert not commands
        assert not Path("made").exists()


OVERWRITING = [(*TRAIN[:-1], "--vocab-size", 258), ("linearize", "llama", *LINEARIZE), ("convert", "foreign", "made")]
OVERWRITING += [("demo", "--minutes", 0.03, "-o", "made"), ("export", "model", "made")]


@pytest.fixture
def sources(crowded_workplace) -> Path:
    _, state_dict, config = foreign("fla")
    write_folder(crowded_workplace / "foreign", state_dict, config)
    shutil.copytree("model", "made")
    return crowded_workplace


@pytest.mark.parametrize("arguments", OVERWRITING, ids=lambda arguments: arguments[0])
def test_a_folder_with_what_no_command_wrote_is_kept_aside(retnet_hf, sources, arguments):
    Path("made/checkpoint-5").mkdir()
    Path("made/checkpoint-5/notes.txt").write_text("mine", encoding="utf-8")
    before = tree(Path("made"))
    done(retnet_hf(*arguments, "--overwrite"))
    assert tree(Path("made.old")) == before
    assert not Path("made/checkpoint-5").exists()


def linked(folder: str) -> None:
    """Lets the weights of a folder be a link to those of what is overwritten."""
    Path(folder, "model.safetensors").unlink()
    Path(folder, "model.safetensors").symlink_to("../made/model.safetensors")


def shard_in_a_folder() -> None:
    Path("foreign/model").mkdir()
    names = load_file(Path("foreign/model.safetensors").rename("foreign/model/model.safetensors"))
    shutil.copy("foreign/config.json", "foreign/model")
    index = {"weight_map": dict.fromkeys(names, "model/model.safetensors")}
    Path("foreign/model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


TEXT = ("train", "book.txt", "-o", "made")
READ = {  # what is arranged, and the command that reads it
    "link weights": (lambda: linked("foreign"), ("convert", "foreign", "made")),
    "link source": (lambda: Path("here").symlink_to("foreign"), ("convert", "here", "foreign")),
    "shard in a folder": (shard_in_a_folder, ("convert", "foreign", "foreign/model")),
    "exported": (lambda: linked("model"), ("export", "model", "made", "--to", "mlx")),
    "teacher": (lambda: linked("llama"), ("linearize", "llama", *LINEARIZE)),
    "link output": (lambda: Path("there").symlink_to("foreign"), ("convert", "foreign", "there")),
    "one file": (lambda: Path("a.safetensors").symlink_to("made/model.safetensors"), ("convert", "a.safetensors", "made")),
    "state": (list, ("export", "model", "made", "--to", "web", "--state", "made/config.json")),
    "configuration": (list, (*TEXT, "--config", "made/config.json")),
    "tokenizer": (list, (*TEXT, "--tokenizer", "made")),
    "text": (list, (*TEXT, "made/README.md")),
}


@pytest.mark.parametrize("case", READ)
def test_what_is_read_is_not_deleted_behind_whatever_link_it_is(retnet_hf, sources, case):
    Path("made/README.md").write_text("text", encoding="utf-8")
    arrange, arguments = READ[case]
    arrange()
    before = tree(sources)
    refused(retnet_hf(*arguments, "--overwrite"), "holds the files to be read, which would be lost: give another folder")
    assert tree(sources) == before


def test_a_snapshot_whose_files_are_links_to_blobs_is_read_and_replaced(retnet_hf, sources):
    for name in ("foreign", "made"):
        Path("blobs", name).mkdir(parents=True)
        for file in Path(name).iterdir():
            blob = Path("blobs", name, file.name)
            file.rename(blob)
            file.symlink_to(blob.resolve())
    blobs = tree(Path("blobs"))
    for name in ("modeling_retnet.py", "configuration_retnet.py"):  # of a model that was saved with its code
        shutil.copy(Path(inspect.getfile(RetNetConfig)).with_name(name), "made")
    done(retnet_hf("convert", "foreign", "made", "--overwrite"))
    assert not Path("made/model.safetensors").is_symlink()
    assert tree(Path("blobs")) == blobs
