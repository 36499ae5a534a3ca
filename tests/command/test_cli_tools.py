# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What users bring along: tokenizers, adapters, a Llama, files named in capitals, full disks, damaged folders."""

import argparse
import copy
import errno
import io
import json
import math
import os
import pickle
import random
import resource
import shutil
import struct
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from command_answers import done, refused, tree
from foreign_folders import foreign, to_rmt, write_folder
from golden import SMALL, golden
from peft import LoraConfig, inject_adapter_in_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from small_models import VOCAB_SIZE, small_model, word_tokenizer
from small_vision_models import small_rmt
from tokenizers.processors import TemplateProcessing
from torch.nn.utils.parametrizations import weight_norm
from torchrun import free_port
from transformers import AutoTokenizer

from retnet_hf.cli.commands import serve
from retnet_hf.cli.text.corpus import END_OF_TEXT, encode, load_tokenizer, train_tokenizer
from retnet_hf.cli.text.generation import encode_prompt
from retnet_hf.conversion.torchscale import to_torchscale
from retnet_hf.export import ExportError, export_mlx


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")

TRAIN = ("train", "book.txt", "--config", "small.json", "--block-size", 8, "--steps", 1, "-o", "made")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def workplace(tmp_path, in_an_empty_folder) -> Path:
    """A working directory with a text, a model whose tokenizer has no eos token, and a foreign checkpoint."""
    Path("book.txt").write_text("w5 w6 w7 w8 " * 500, encoding="utf-8")
    Path("small.json").write_text(json.dumps(SIZES), encoding="utf-8")
    small_model("fla", num_hidden_layers=1).save_pretrained("model")
    tokenizer = word_tokenizer()
    tokenizer.eos_token = tokenizer.bos_token = None
    tokenizer.save_pretrained("model")
    _, state_dict, config = foreign("fla")
    write_folder(tmp_path / "foreign", state_dict, config)
    return tmp_path


def test_a_tokenizer_without_eos_is_enough_to_write_and_to_export_and_cannot_separate_documents(retnet_hf, workplace):
    for arguments in (("generate", "model", "-n", 2), ("chat", "model", "-n", 2), ("export", "model", "mlx", "--to", "mlx")):
        done(retnet_hf(*arguments, stdin=b"w5 w6\n"))
    refused(retnet_hf(*TRAIN, "--tokenizer", "model"), "the tokenizer model has no eos token, which is needed to separate")
    assert not Path("made").exists()
    refused(retnet_hf("generate", "model", ""), "has neither a bos nor an eos token to begin an empty text with")


@pytest.mark.parametrize("single", ["$A", "$A w92", "w91 $A", "w91 $A w92", "w92 $A", "w92 $A w92", "w91 w93 $A w92"])
def test_prompts_begin_as_texts_do_in_training_and_end_without_eos(workplace, single):
    """Also of the tokenizer that the commands save, and other programs load."""
    begin = [int(name[1:]) for name in single.split("$A")[0].split()]
    tokenizer = word_tokenizer(92)
    special = [(f"w{number}", number) for number in (91, 92, 93)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    tokenizer.save_pretrained("model")
    load_tokenizer("model").save_pretrained("again")
    for ids in (encode_prompt(tokenizer, "w5 w6"), AutoTokenizer.from_pretrained("again")("w5 w6")["input_ids"]):
        assert ids == [*begin, 5, 6]
    between = [92] if begin == [92] else [92, *begin]
    assert encode(["w5 w6", "w7"], tokenizer).tolist() == [*(begin or [92]), 5, 6, *between, 7, 92]


def test_a_special_token_that_a_text_spells_out_is_text(workplace):
    text = f"a{END_OF_TEXT}b"
    tokenizer = train_tokenizer([text], 300)
    assert encode([text, text], tokenizer).tolist().count(tokenizer.eos_token_id) == 3
    assert tokenizer.eos_token_id not in (ids := encode_prompt(tokenizer, text))
    assert tokenizer.decode(ids) == text


UNUSABLE = [  # files of a model, and what is said about them
    ("generation_config.json", '{"eos_token_id": "x"}', "the model cannot continue this text: new()"),
    ("generation_config.json", '{"bad_words_ids": [[1, "a"]]}', "the model cannot continue this text: Each list in"),
    ("generation_config.json", '{"num_beams": 3}', "2 tokens"),
    ("tokenizer_config.json", '{"a":' + "[" * 100_000, "does not hold a tokenizer that can be loaded: maximum"),
    ("tokenizer.json", "{}", "does not hold a tokenizer that can be loaded: KeyError"),
    ("config.json", {"vocab_size": VOCAB_SIZE + 1}, "do not fit its config.json: 2 are missing or of"),
    ("config.json", {"vocab_size": 10**12}, "does not hold a model that can be loaded"),
    ("config.json", "{ broken", "does not hold a model that can be loaded"),
    ("model.safetensors", "cut", "does not hold a model that can be loaded"),
    ("model.safetensors", math.nan, "its logits are not finite numbers: the weights are damaged"),
    ("model.safetensors", math.inf, "its logits are not finite numbers: the weights are damaged"),
]
GOES_ON = ("cannot continue", "not finite")  # a conversation does


@pytest.mark.parametrize(("name", "content", "said"), UNUSABLE)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_what_cannot_be_used_in_a_folder_is_one_line(retnet_hf, workplace, command, name, content, said):
    file = Path("model", name)
    if isinstance(content, float):
        save_file(load_file(file) | {"lm_head.weight": torch.full((VOCAB_SIZE, 32), content)}, file, {"format": "pt"})
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(json.loads(file.read_text()) | content))
    for temperature in (0, 0.8):
        answer = retnet_hf(command, "model", "-n", 2, "--temperature", temperature, stdin=b"w5\n")
        goes_on = said == "2 tokens" or (command == "chat" and any(words in said for words in GOES_ON))
        assert answer.code == (0 if goes_on else 2)
        assert len([line for line in answer.err.splitlines() if "/help" not in line]) == 1
        assert said in answer.err


def test_a_chat_template_that_writes_nothing_is_named(retnet_hf, workplace):
    Path("model/chat_template.jinja").write_text("{# nothing #}")
    answer = done(retnet_hf("chat", "model", "-n", 2, stdin=b"w5\n"))
    assert "there is no text to continue: the chat template wrote nothing" in answer.err


CHANGED = {  # models with other tensors than mlx-lm expects
    "injected": lambda model: inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model),
    "normed": lambda model: weight_norm(model.lm_head) and model,
    "biased": lambda model: setattr(model, "lm_head", torch.nn.Linear(32, VOCAB_SIZE)) or model,
    "shorter": lambda model: model.model.layers.pop(-1) and model,
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_what_mlx_lm_cannot_load_is_not_exported(tmp_path, change):
    said = r"mlx-lm loads only the tensors of a plain RetNet, and (model|lm_head)\..*: merge adap"
    with pytest.raises(ExportError, match=said):
        export_mlx(change(small_model("fla")), tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_tokenizer_that_is_larger_than_the_vocabulary_is_named(retnet_hf, workplace):
    tokenizer = word_tokenizer()
    tokenizer.add_tokens("surplus")
    tokenizer.save_pretrained("model")
    said = f"the tokenizer has a token {VOCAB_SIZE}, and the model knows {VOCAB_SIZE} tokens: copy the tokenizer that"
    refused(retnet_hf("generate", "model", "surplus", "--no-echo"), said)
    Path("text.txt").write_text("w5 surplus")
    refused(retnet_hf("evaluate", "model", "text.txt"), said)
    answer = done(retnet_hf("chat", "model", "-n", 2, stdin=b"surplus\nw5\n"))
    assert said in answer.err
    assert "2 tokens" in answer.err
    assert retnet_hf("generate", "model", "w5", "-n", 2).code == 0  # what it knows, it reads


@pytest.mark.parametrize("command", ["generate", "chat", "export", "convert", "inspect", "serve", "linearize"])
def test_an_adapter_is_told_from_a_model_and_how_to_merge_it(retnet_hf, workplace, monkeypatch, command):
    Path("lora").mkdir()
    Path("lora/adapter_config.json").write_text('{"peft_type": "LORA"}')
    torch.save({}, "lora/training_args.bin")
    monkeypatch.setattr(serve, "ENGINES", {"transformers": ()})
    output = {"export": ["made"], "convert": ["made"], "serve": ["--port", free_port()]}.get(command, [])
    answer = retnet_hf(command, "lora", *output, stdin=b"w5")
    refused(answer, "lora holds an adapter of PEFT, not a model", "merge_and_unload()")


def test_a_server_of_a_model_without_a_template_says_what_it_answers(retnet_hf, workplace, monkeypatch):
    monkeypatch.setattr(serve, "ENGINES", {"transformers": ()})
    monkeypatch.setattr(serve, "become", lambda command: None)
    answer = done(retnet_hf("serve", "model", "--engine", "transformers", "--port", free_port()))
    assert "no chat template: /v1/completions answers, /v1/chat/completions does not" in answer.err


def test_endings_mean_the_same_in_capitals(retnet_hf, workplace):
    Path("foreign/model.safetensors").rename("foreign/WEIGHTS.SAFETENSORS")
    done(retnet_hf("convert", "foreign", "made"))
    torch.save(dict(small_model("fla").state_dict()), "WEIGHTS.PT")
    done(retnet_hf("inspect", "WEIGHTS.PT"))
    refused(retnet_hf("inspect", "/dev/null"), "/dev/null is neither a file nor a folder")


EXPORT, FEW = ("export", "model", "made", "--to", "mlx"), (*TRAIN, "--vocab-size", 258)


@pytest.mark.parametrize("command", [("convert", "foreign", "made"), EXPORT, FEW], ids=["convert", "export", "train"])
def test_a_full_disk_is_one_line_and_leaves_everything_as_it_was(retnet_hf, workplace, command):
    shutil.copytree("model", "made")
    before, limit = tree(workplace), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))  # no file of more bytes can be written
        refused(retnet_hf(*command, "--overwrite"), code=1, silent=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert tree(workplace) == before


ERRORS = (
    OSError(errno.EDQUOT, "Disk quota exceeded", "made/model.safetensors"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing file data/0"),
    MemoryError(),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_full_disk_is_one_line_however_libraries_say_it(retnet_hf, workplace, monkeypatch, error):
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", mock.Mock(side_effect=error))
    before = tree(workplace)
    words = "out of memory" if isinstance(error, MemoryError) else ""
    refused(retnet_hf("convert", "foreign", "made"), words, code=1)
    assert tree(workplace) == before


MARKER = "executed"
VALUES = [None, True, 0, -1, 7, 10**12, 10**30, -1e308, float("nan"), float("inf"), "", "\x1b[31m", "../up", "\ud800"]
VALUES += ["a" * 5000, [], [1, "a", None], {}, {"a": [1]}]
MARKS = ("[" * 50_000, "{", "null", "[]", '"text"', "\x00", "---\nlicense: [\n---\n", "---\nlicense: {a: b}\n---\n")
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "ctypes.dlopen")


class Code:
    """Runs a function when it is unpickled by a reader that runs code."""

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {MARKER}",)


def changed_json(text: bytes, draw: random.Random) -> bytes:
    """JSON with a field of another type, without one, or with one more."""

    def nodes(value: object) -> list[tuple]:
        keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        return [(value, key) for key in keys] + [node for key in keys for node in nodes(value[key])]

    value = json.loads(text)
    for _ in range(draw.choice((1, 1, 2))):
        holder, key = draw.choice(nodes(value) or [({}, "a")])
        holder[key] = copy.deepcopy(draw.choice([*VALUES, holder]))
        if draw.random() < 0.2:
            del holder[key]
    if isinstance(value, dict) and draw.random() < 0.1:
        value[draw.choice(("model_type", "../a", "\x1b[2J", "architectures", "auto_map"))] = draw.choice(VALUES)
    return json.dumps(value).encode()


def changed_header(content: bytes, draw: random.Random) -> bytes:
    length = struct.unpack("<Q", content[:8])[0]
    header = changed_json(content[8 : 8 + length], draw)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Bytes that were flipped, cut off, cut out, doubled or filled; headers and ends of zip files say the most."""
    held = bytearray(content or b"0")
    place = draw.choice((draw.randrange(len(held)), draw.randrange(min(64, len(held))), max(0, len(held) - 40)))
    end = place + draw.choice((1, 4, 100))
    filled = bytes([draw.choice((0, 1, 0x7F, 0x80, 0xFF))]) * (end - place)
    return bytes(held[:place] + draw.choice((b"", held[end:], held[place:end] + held[place:], filled + held[end:])))


def hostile_pickle(draw: random.Random) -> bytes:
    """A pickle, or an archive of torch, that would run code, holds what is no tensor, or is none."""
    ones, file = torch.ones(2, 2), io.BytesIO()
    held = [{"model": Code()}, {"model": ones, "state_dict": {"a": Code()}}, {"a": ones.to_sparse(), "b": ones}, Code()]
    held += [{"a": ones.to("meta")}, {"a": torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)}, [ones] * 3]
    held += [{("a", 1): ones, None: ones, 5: [ones]}, {"args": argparse.Namespace(model="x"), "model": {"a": ones}}]
    held += [{"config": {"model_type": ["retnet"], "hidden_size": {}}, "model": {"embed_tokens.weight": ones}}]
    torch.save(draw.choice(held), file, _use_new_zipfile_serialization=draw.random() < 0.5)
    opcodes = bytes(draw.choice(b"(]}cCRbstuqhKMNXU.0e\x85\x86\x87") for _ in range(draw.randrange(1, 60)))
    kinds = file.getvalue(), damaged(file.getvalue(), draw), b"\x80\x02" + opcodes + b".", pickle.dumps(Code(), protocol=2)
    return draw.choice(kinds)


def mutate(file: Path, draw: random.Random) -> None:
    content, kind, change = file.read_bytes(), draw.random(), damaged
    if kind < 0.03:
        content = draw.choice(MARKS).encode()
    elif file.suffix == ".bin" and kind < 0.5:
        content = hostile_pickle(draw)
    else:
        if kind < 0.8:
            change = {".safetensors": changed_header, ".json": changed_json}.get(file.suffix, damaged)
        content = change(content, draw)
    file.write_bytes(content)


@pytest.fixture(scope="module")
def templates(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("templates")
    foreigners = {"fla": ("fla", "safetensors"), "shards": ("fla", "sharded"), "syncdoth": ("syncdoth", "bin")}
    for name, (dialect, layout) in foreigners.items():
        _, state_dict, config = foreign(dialect)
        write_folder(folder / name, state_dict, config, layout)
        (folder / name / "generation_config.json").write_text('{"max_new_tokens": 7, "do_sample": false}')
        (folder / name / "README.md").write_text("---\nlicense: mit\n---\n\n# A model\n")
    write_folder(folder / "rmt", *to_rmt(small_rmt()))
    for name in ("hypenet", "transnormer", "ring"):
        case = golden(f"{name}/published_like", SMALL)
        write_folder(folder / name, case.state_dict, case.config)
    state_dict, config = to_torchscale(small_model("torchscale", decay_schedule="power_of_two", residual_multiplier=4**0.25))
    held = {"args": argparse.Namespace(**config), "model": {f"decoder.{name}": state_dict[name] for name in state_dict}}
    (folder / "torchscale").mkdir()
    torch.save(held, folder / "torchscale" / "pytorch_model.bin")
    small_model("hybrid").save_pretrained(folder / "own")
    return folder


def test_no_damaged_or_hostile_folder_leads_to_a_traceback_or_runs_code_or_writes_elsewhere(
    retnet_hf, templates, tmp_path, in_an_empty_folder
):
    """What is done by this process is watched: commands, and files that are written outside of a folder."""
    watched = {"in": None, "done": []}

    def hook(event: str, arguments: tuple) -> None:
        if watched["in"] is not None and event in FORBIDDEN:
            watched["done"].append(event)
        elif watched["in"] is not None and event == "open" and isinstance(arguments[0], (str, bytes)):
            place = Path(os.path.abspath(os.fsdecode(arguments[0])))
            if arguments[2] & (os.O_WRONLY | os.O_RDWR) and not place.is_relative_to(tmp_path) and place != Path(os.devnull):
                watched["done"].append(place)

    sys.addaudithook(hook)
    outcomes, names = Counter(), sorted(path.name for path in templates.iterdir())
    for number in range(-len(names), 200):  # at first undamaged
        draw, work = random.Random(number), tmp_path / "work"
        name = names[number] if number < 0 else draw.choice(names)
        source = Path(shutil.copytree(templates / name, work / name))
        if number >= 0:
            mutate(draw.choice(sorted(source.iterdir())), draw)
        before, watched["in"] = set(work.rglob("*")), tmp_path
        for command in ("inspect", "convert"):
            answer = retnet_hf(command, source, *([work / "made"] if command == "convert" else []))
            assert answer.code in (0, 2), number
            assert answer.err.count("\n") == bool(answer.code), number
            assert "\x1b" not in answer.out + answer.err, number
            written = {path.relative_to(work).parts[0] for path in set(work.rglob("*")) - before}
            assert written == ({"made"} if command == "convert" and not answer.code else set()), number
            assert number >= 0 or answer.code == 2 * ((command, name) == ("convert", "own")), name
            outcomes[command, answer.code] += 1
        watched["in"] = None
        assert not watched["done"]
        assert not list(tmp_path.rglob(MARKER)), number
        shutil.rmtree(work)
    assert min(outcomes.values()) > 50
