# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile files end in the errors that are documented, run no code, and write nothing elsewhere."""

import argparse
import copy
import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from foreign_folders import foreign, to_rmt, write_folder
from golden import SMALL, golden
from small_models import small_model
from small_vision_models import small_rmt

from retnet_hf.conversion.torchscale import to_torchscale


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")

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


def test_no_damaged_or_hostile_folder_leads_to_a_traceback_to_code_or_to_a_file_elsewhere(
    retnet_hf, templates, tmp_path, monkeypatch
):
    """What is done by this process is watched: commands, and files that are written outside of a folder."""
    monkeypatch.chdir(tmp_path)
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
