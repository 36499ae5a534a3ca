# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the command never does: run code of a folder, delete files of a user, write outside of its output."""

import json
from pathlib import Path

import pytest
from small_models import small_llama, small_model, word_tokenizer
from small_vision_models import VISION_FAMILIES
from test_cli import refused
from torchrun import free_port

from retnet_hf_cli.commands import serve


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


def in_config_of_a_known_model(folder: str) -> None:
    with_code(folder, "config.json", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})


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


@pytest.mark.parametrize("place", [in_config, in_tokenizer, in_processor, in_config_of_a_known_model, in_generation])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_runs_code_of_a_folder_whatever_stdin_answers(retnet_hf, workplace, monkeypatch, command, place):
    commands = []
    monkeypatch.setattr(serve, "ENGINES", {"transformers": ()})
    monkeypatch.setattr(serve, "become", commands.append)
    monkeypatch.setattr("retnet_hf_export.export_onnx", lambda *arguments: [])  # what takes long begins when all is loaded
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
