# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What the command never does: run code of a folder, delete files of a user, write outside of its output."""

import inspect
import json
import shutil
from pathlib import Path

import pytest
from command_answers import done, refused, tree
from foreign_folders import foreign, write_folder
from safetensors.torch import load_file
from small_models import small_llama, small_model, word_tokenizer
from small_vision_models import VISION_FAMILIES
from torchrun import free_port

from retnet_hf import RetNetConfig
from retnet_hf.cli.commands import serve


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")

CODE = "from pathlib import Path\nPath('executed').touch()\nclass Own:\n    pass\n"


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    Path("book.txt").write_text("w5 w6 w7 w8 " * 500, encoding="utf-8")
    vision = VISION_FAMILIES["vir"]
    vision.model().save_pretrained("vir")
    vision.processor().save_pretrained("vir")
    tokenizer = word_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(2)
    for name, model in (("model", small_model("fla", num_hidden_layers=1)), ("llama", small_llama())):
        model.save_pretrained(name)
        tokenizer.save_pretrained(name)
    return tmp_path


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


COMMANDS = {
    "generate": lambda folder: (folder, "w5", "-n", 2),
    "chat": lambda folder: (folder, "-n", 2),
    "export": lambda folder: (folder, "made"),
    "linearize": lambda folder: (folder, *LINEARIZE),
    "train": lambda folder: (*TRAIN[1:], folder),
    "serve": lambda folder: (folder, "--engine", "transformers", "--port", free_port()),
    "inspect": lambda folder: (folder,),
    "convert": lambda folder: (folder, "made"),
}
WITHOUT_A_USE = {  # commands that do not need the code, and work without it, or say that they do not take such a folder
    "config.json": ("train", "inspect", "convert"),
    "tokenizer_config.json": ("inspect", "convert"),
    "preprocessor_config.json": ("generate", "chat", "linearize", "train", "serve", "inspect", "convert"),
    "generation_config.json": tuple(COMMANDS),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_of_a_folder_whatever_stdin_answers(retnet_hf, workplace, monkeypatch, command, place):
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
    assert not (workplace / "modules").exists() or not list((workplace / "modules").rglob("own.py"))
    assert "Traceback" not in answer.err
    if command not in WITHOUT_A_USE[place]:
        refused(answer, "with code of its own, and retnet-hf runs no code of a folder", silent=False)
        assert not commands
        assert not Path("made").exists()


OVERWRITING = [(*TRAIN[:-1], "--vocab-size", 258), ("linearize", "llama", *LINEARIZE), ("convert", "foreign", "made")]
OVERWRITING += [("demo", "--minutes", 0.03, "-o", "made"), ("export", "model", "made")]


@pytest.fixture
def sources(workplace) -> Path:
    _, state_dict, config = foreign("fla")
    write_folder(workplace / "foreign", state_dict, config)
    shutil.copytree("model", "made")
    return workplace


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
