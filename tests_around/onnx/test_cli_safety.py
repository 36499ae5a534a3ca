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
from transformers import PreTrainedModel

from retnet_hf import RetNetConfig
from retnet_hf.cli.commands import serve


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")

CODE = "from pathlib import Path\nPath('executed').touch()\nclass Own:\n    pass\n"


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A working directory with a text, a RetNet, a Llama and an image classifier."""
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


def with_code(folder: str, file: str, **fields) -> None:
    """Lets a JSON file of a folder name a class in a file of code beside it."""
    path = Path(folder) / file
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(held | fields), encoding="utf-8")
    (Path(folder) / "own.py").write_text(CODE, encoding="utf-8")


def in_config(folder: str) -> None:
    auto_classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForImageClassification", "AutoTokenizer")
    with_code(folder, "config.json", model_type="own", auto_map=dict.fromkeys(auto_classes, "own.Own"))


def in_tokenizer(folder: str) -> None:
    with_code(folder, "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})


def in_processor(folder: str) -> None:
    """Which an image classifier is exported with, and `transformers serve` looks for."""
    code = {"auto_map": {"AutoImageProcessor": "own.Own", "AutoProcessor": "own.Own"}}
    with_code(folder, "preprocessor_config.json", image_processor_type="Own", processor_class="Own", **code)


def in_generation(folder: str) -> None:
    with_code(folder, "generation_config.json", custom_generate="own.py")
    (Path(folder) / "custom_generate").mkdir()
    (Path(folder) / "custom_generate" / "generate.py").write_text(CODE + "def generate(model, **kwargs):\n    pass\n")


TRAIN = ("train", "book.txt", "--preset", "tiny", "--steps", 1, "--block-size", 8, "--output", "made", "--tokenizer")
LINEARIZE = ("book.txt", "--block-size", 8, "--align-steps", 0, "--distill-steps", 1, "--batch-size", 1, "--output", "made")
COMMANDS = {
    "generate": lambda folder: ("generate", folder, "w5", "-n", 2),
    "generate from stdin": lambda folder: ("generate", folder, "-n", 2),
    "chat": lambda folder: ("chat", folder, "-n", 2),
    "export": lambda folder: ("export", folder, "made"),
    "linearize": lambda folder: ("linearize", folder, *LINEARIZE),
    "train": lambda folder: (*TRAIN, folder),
    "serve": lambda folder: ("serve", folder, "--engine", "transformers", "--port", free_port()),
    "inspect": lambda folder: ("inspect", folder),
    "convert": lambda folder: ("convert", folder, "made"),
}
WITHOUT_A_USE = {  # commands that do not need the code, and work without it, or say that they do not take such a folder
    in_config: ("train", "inspect", "convert"),
    in_tokenizer: ("inspect", "convert"),
    in_processor: ("generate", "chat", "linearize", "train", "serve", "inspect", "convert"),
}


@pytest.mark.parametrize("place", [in_config, in_tokenizer, in_processor, in_generation])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_of_a_folder_whatever_stdin_answers(retnet_hf, workplace, monkeypatch, command, place):
    commands = []
    monkeypatch.setattr(serve, "ENGINES", {"transformers": ()})
    monkeypatch.setattr(serve, "become", commands.append)
    monkeypatch.setattr("retnet_hf.export.export_onnx", lambda *arguments: [])  # what takes long begins when all is loaded
    folder = "llama" if command == "linearize" else "vir" if place is in_processor and command == "export" else "model"
    place(folder)
    answer = retnet_hf(*COMMANDS[command](folder), stdin=b"y\ny\ny\n")
    assert not Path("executed").exists()
    assert not (workplace / "modules").exists() or not list((workplace / "modules").rglob("own.py"))
    assert "Traceback" not in answer.err
    if place in WITHOUT_A_USE and not command.startswith(WITHOUT_A_USE[place]):
        assert answer.code == 2
        assert len(answer.err.splitlines()) == 1
        assert "with code of its own, and retnet-hf runs no code of a folder" in answer.err
        assert not commands
        assert not Path("made").exists()


OVERWRITING = {
    "train": (*TRAIN[:-1], "--vocab-size", 258),
    "linearize": ("linearize", "llama", *LINEARIZE),
    "demo": ("demo", "--text", "book.txt", "--minutes", 0.01, "-o", "made"),
    "export": ("export", "model", "made"),
    "convert": ("convert", "foreign", "made"),
}


@pytest.fixture
def sources(workplace) -> Path:
    """What the commands above read, and a model in `made` that they may replace."""
    _, state_dict, config = foreign("fla")
    write_folder(workplace / "foreign", state_dict, config)
    shutil.copytree("model", "made")
    return workplace


@pytest.mark.parametrize("command", OVERWRITING)
def test_a_folder_with_what_no_command_wrote_is_not_deleted_and_the_thing_is_named(retnet_hf, sources, command):
    Path("made/checkpoint-5").mkdir()
    Path("made/checkpoint-5/notes.txt").write_text("mine", encoding="utf-8")
    before, named = tree(sources), Path("made/checkpoint-5/notes.txt").resolve()
    refused(retnet_hf(*OVERWRITING[command], "--overwrite"), f"{named} is not part of a model")
    assert tree(sources) == before


@pytest.mark.parametrize("command", ["train", "convert"])
def test_files_that_came_during_the_work_are_not_deleted_at_its_end(retnet_hf, sources, monkeypatch, command):
    save = PreTrainedModel.save_pretrained

    def saves(self, *arguments, **options):
        Path("made/notes.txt").write_text("mine", encoding="utf-8")
        return save(self, *arguments, **options)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", saves)
    refused(retnet_hf(*OVERWRITING[command], "--overwrite"), "made/notes.txt is not part of a model")
    assert Path("made/notes.txt").read_text(encoding="utf-8") == "mine"


def test_an_unfinished_run_with_a_file_of_the_user_is_not_deleted(retnet_hf, sources):
    Path("made.partial").mkdir()
    Path("made.partial/training_run.json").write_text('{"command": "train"}', encoding="utf-8")
    Path("made.partial/notes.txt").write_text("mine", encoding="utf-8")
    refused(retnet_hf(*OVERWRITING["train"], "--overwrite"), "made.partial/notes.txt is not part of a model")
    assert Path("made.partial/notes.txt").exists()


def test_a_model_that_was_saved_with_its_code_is_replaced(retnet_hf, sources):
    for name in ("modeling_retnet.py", "configuration_retnet.py"):
        shutil.copy(Path(inspect.getfile(RetNetConfig)).with_name(name), "made")
    done(retnet_hf("convert", "foreign", "made", "--overwrite"))


def link_weights() -> tuple:
    Path("foreign/model.safetensors").rename("made/model.safetensors")
    Path("foreign/model.safetensors").symlink_to("../made/model.safetensors")
    return ("convert", "foreign", "made")


def link_source() -> tuple:
    shutil.rmtree("made")
    shutil.copytree("foreign", "made")
    Path("here").symlink_to("made")
    return ("convert", "here", "made")


def shard_in_a_folder() -> tuple:
    Path("foreign/model").mkdir()
    Path("foreign/model.safetensors").rename("foreign/model/model.safetensors")
    shutil.copy("foreign/config.json", "foreign/model")
    names = load_file("foreign/model/model.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model/model.safetensors")}
    Path("foreign/model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return ("convert", "foreign", "foreign/model")


def exported() -> tuple:
    Path("model/model.safetensors").unlink()
    Path("model/model.safetensors").symlink_to("../made/model.safetensors")
    return ("export", "model", "made", "--to", "mlx")


def teacher() -> tuple:
    Path("llama/model.safetensors").unlink()
    Path("llama/model.safetensors").symlink_to("../made/model.safetensors")
    return ("linearize", "llama", *LINEARIZE)


READ = {  # what is arranged, and the command that reads it
    "link weights": link_weights,
    "link source": link_source,
    "shard in a folder": shard_in_a_folder,
    "exported": exported,
    "teacher": teacher,
    "link output": lambda: Path("there").symlink_to("foreign") or ("convert", "foreign", "there"),
    "one file": lambda: Path("a.safetensors").symlink_to("made/model.safetensors") or ("convert", "a.safetensors", "made"),
    "state": lambda: ("export", "model", "made", "--to", "web", "--state", "made/config.json"),
    "configuration": lambda: ("train", "book.txt", "--config", "made/config.json", "-o", "made"),
    "tokenizer": lambda: ("train", "book.txt", "--tokenizer", "made", "-o", "made"),
    "text": lambda: ("train", "made/README.md", "-o", "made"),
}


@pytest.mark.parametrize("arrange", READ.values(), ids=READ)
def test_what_is_read_is_not_deleted_behind_whatever_link_it_is(retnet_hf, sources, arrange):
    Path("made/README.md").write_text("text", encoding="utf-8")
    arguments = arrange()
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
    done(retnet_hf("convert", "foreign", "made", "--overwrite"))
    assert not Path("made/model.safetensors").is_symlink()
    assert tree(Path("blobs")) == blobs
