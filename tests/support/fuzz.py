# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile files for `RetNetState.load`, `convert`, `inspect` and the `/load` of `chat`.

    python tests/support/fuzz.py --inputs 10000 --seed 0

Each input is a small valid folder in which a file was changed. It must end in the errors that are documented, run no code
and write nothing outside of the output. Inputs that break this are copied to `--keep`.
"""

import argparse
import contextlib
import copy
import io
import json
import os
import pickle
import random
import shutil
import struct
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from foreign_folders import foreign, write_folder
from foreign_images import to_rmt, to_vir_official
from golden import SMALL, golden
from small_models import small_model, word_tokenizer
from small_vision_models import small_rmt, small_vir

from retnet_hf import RetNetState
from retnet_hf.cli.errors import InputError
from retnet_hf.cli.main import main as command
from retnet_hf.cli.text.generation import Conversation, sampling
from retnet_hf.conversion.torchscale import to_torchscale


MARKER = "executed"
VALUES = [None, True, 0, -1, 7, 2**31, 10**12, 10**30, 0.5, -1e308, float("nan"), float("inf")]
VALUES += ["", "x", "\x1b[31m", "../up", "/etc/passwd", "\ud800", "a" * 5000, [], [1, "a", None], {}, {"a": [1]}]
MARKS = ("[" * 50_000, "{", "null", "5", "[]", '"text"', "\x00", "---\nlicense: [\n---\n", "---\nlicense: {a: b}\n---\n")
FORBIDDEN = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect", "ctypes.dlopen")


class Found(Exception):
    """Something that no input may lead to."""


class Code:
    """Runs a function when it is unpickled by a reader that runs code."""

    def __init__(self, function: Callable, *arguments: object) -> None:
        self.called = (function, arguments)

    def __reduce__(self) -> tuple:
        return self.called


def watch(folder: Path) -> Callable[[bool], list[str]]:
    """Starts to watch what this process does. The function that is returned turns it on or off, and tells what was done."""
    done, state = [], {"on": False}

    def hook(event: str, arguments: tuple) -> None:
        if not state["on"]:
            return
        if event in FORBIDDEN:
            done.append(f"{event} {arguments[:1]}")
        elif event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
            writes = isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            place = Path(os.path.abspath(os.fsdecode(arguments[0])))
            if writes and not place.is_relative_to(folder) and place != Path(os.devnull):
                done.append(f"writes {place}")

    sys.addaudithook(hook)

    def turn(on: bool) -> list[str]:
        state["on"], told = on, list(done)
        done.clear()
        return told

    return turn


def nodes(value: object) -> list[tuple[object, object]]:
    """Every container in a JSON value with each of its keys."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [(value, key) for key in keys] + [node for key in keys for node in nodes(value[key])]


def changed_json(text: bytes, draw: random.Random) -> bytes:
    """JSON with fields of other types, without some, or with others."""
    try:
        value = json.loads(text)
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            if not (places := nodes(value)):
                break
            holder, key = draw.choice(places)
            kind = draw.random()
            if kind < 0.15:
                del holder[key]
            elif kind < 0.25 and isinstance(holder, dict):
                holder[draw.choice(("model_type", "../a", "\x1b[2J", "", "architectures", "auto_map"))] = draw.choice(VALUES)
            elif kind < 0.35:
                holder[key] = copy.deepcopy(draw.choice(places)[0])
            else:
                holder[key] = copy.deepcopy(draw.choice(VALUES))
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return damaged(text, draw)


def changed_header(content: bytes, draw: random.Random) -> bytes:
    """A safetensors file with another header."""
    if len(content) < 8:
        return content
    length = struct.unpack("<Q", content[:8])[0]
    header = changed_json(content[8 : 8 + length], draw)
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


def damaged(content: bytes, draw: random.Random) -> bytes:
    """Bytes that were flipped, cut off, cut out, doubled or filled."""
    held = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        if not held:
            break
        # headers and the ends of zip files say the most
        place = draw.choice(
            (draw.randrange(len(held)), draw.randrange(min(64, len(held))), max(0, len(held) - draw.randrange(1, 99)))
        )
        end, kind = place + draw.choice((1, 4, 100)), draw.randrange(6)
        if kind < 2:
            held[place] ^= 1 << draw.randrange(8)
        elif kind == 2:
            del held[place:]
        elif kind == 3:
            del held[place:end]
        elif kind == 4:
            held[place:place] = held[place:end]
        else:
            held[place:end] = bytes([draw.choice((0, 1, 0x7F, 0x80, 0xFF))]) * (end - place)
    return bytes(held)


def hostile_pickle(draw: random.Random) -> bytes:
    """A pickle, or an archive of torch, that would run code, holds what is no tensor, or is none."""
    attack = draw.choice(
        (Code(Path.touch, Path(MARKER)), Code(os.system, f"touch {MARKER}"), Code(exec, f"open({MARKER!r}, 'w')"))
    )
    ones = torch.ones(2, 2)
    held = draw.choice(
        (
            {"model": attack},
            {"model": ones, "state_dict": {"a": attack}},
            {"a": ones.to_sparse(), "b": ones},
            {"a": ones.to("meta")},
            {"a": torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8)},
            {("a", 1): ones, None: ones, 5: [ones]},
            {"args": argparse.Namespace(model=argparse.Namespace(vocab_size="x")), "model": {"a": ones}},
            {"config": {"model_type": ["retnet"], "hidden_size": {}}, "model": {"embed_tokens.weight": ones}},
            [ones] * 3,
            {"a": torch.nn.Parameter(ones), "b": ones.expand(2, 2, 2)},
            attack,
        )
    )
    file = io.BytesIO()
    kind = draw.randrange(4)
    if kind == 0:
        return bytes(draw.randrange(256) for _ in range(draw.randrange(1, 80)))
    if kind == 1:
        return (
            b"\x80\x02"
            + bytes(draw.choice(b"(]}cCRbstuqhKMNXU.0e\x85\x86\x87") for _ in range(draw.randrange(1, 60)))
            + b"."
        )
    if kind == 2:
        torch.save(held, file, _use_new_zipfile_serialization=draw.random() < 0.5)
        return damaged(file.getvalue(), draw) if draw.random() < 0.3 else file.getvalue()
    return pickle.dumps(attack, protocol=draw.choice((0, 2, 4)))


def mutate(file: Path, draw: random.Random) -> None:
    """Changes one file of a folder in place."""
    content, kind = file.read_bytes(), draw.random()
    if file.suffix == ".bin" and kind < 0.5:
        content = hostile_pickle(draw)
    elif kind < 0.03:
        content = draw.choice(MARKS).encode()
    elif file.suffix == ".safetensors" and kind < 0.6:
        content = changed_header(content, draw)
    elif ".json" in file.suffixes[-1:] and kind < 0.9:
        content = changed_json(content, draw)
    else:
        content = damaged(content, draw)
    file.write_bytes(content)


def templates(folder: Path) -> dict[str, Path]:
    """Small valid folders: of foreign formats, in files of each kind; of our own; and of a conversation."""
    made = {}
    folder.mkdir()
    for name, dialect, layout in (
        ("fla", "fla", "safetensors"),
        ("shards", "fla", "sharded"),
        ("pickle", "fla of 2024", "bin"),
        ("syncdoth", "syncdoth", "bin"),
    ):
        _, state_dict, config = foreign(dialect)
        made[name] = write_folder(folder / name, state_dict, config, layout)
        (made[name] / "generation_config.json").write_text('{"max_new_tokens": 7, "do_sample": false, "pad_token_id": 0}')
        (made[name] / "README.md").write_text("---\nlicense: mit\n---\n\n# A model\n")
    foreigners = {
        "vir_official": to_vir_official(small_vir()),
        "rmt": to_rmt(small_rmt()),
    }
    for name in ("hypenet", "transnormer", "ring"):
        case = golden(f"{name}/published_like", SMALL)
        foreigners[name] = (case.state_dict, case.config)
    for name, (state_dict, config) in foreigners.items():
        made[name] = write_folder(folder / name, state_dict, config)
    state_dict, config = to_torchscale(small_model("torchscale", decay_schedule="power_of_two", residual_multiplier=4**0.25))
    weights = {f"decoder.{name}": value for name, value in state_dict.items()}
    made["torchscale"] = folder / "torchscale"
    made["torchscale"].mkdir()
    torch.save({"args": argparse.Namespace(**config), "model": weights}, made["torchscale"] / "pytorch_model.bin")
    made["own"] = folder / "own"
    small_model("hybrid").save_pretrained(made["own"])
    return made


class Fuzz:
    """The targets, on a model and a conversation that all inputs share."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.work = folder, folder / "work"
        self.templates = templates(folder / "templates")
        self.talk = Conversation(small_model("fla"), word_tokenizer(), sampling(1, temperature=0))
        self.talk.say("w10 w11")
        (folder / "templates" / "talk").mkdir()
        self.talk.save(folder / "templates" / "talk" / "state.safetensors")
        self.turn = watch(folder)

    def prepare(self, name: str, draw: random.Random) -> Path:
        """A copy of a template in which a file was changed."""
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        source = shutil.copytree(self.folder / "templates" / name, self.work / name)
        for _ in range(draw.choice((1, 1, 2))):
            mutate(draw.choice(sorted(source.iterdir())), draw)
        return source

    def state(self, draw: random.Random) -> str:
        """`RetNetState.load` raises ValueError, or returns a state that can be read on from."""
        file = self.prepare("talk", draw) / "state.safetensors"
        try:
            RetNetState.load(file, self.talk.model)
        except ValueError:
            return "refused"
        return "read"

    def load(self, draw: random.Random) -> str:
        """`/load` raises InputError and leaves the conversation as it is, or the conversation goes on."""
        file = self.prepare("talk", draw) / "state.safetensors"
        memory, before = self.talk.memory, list(self.talk.before)
        try:
            self.talk.load(file)
        except InputError as error:
            if self.talk.memory is not memory or list(self.talk.before) != before:
                raise Found("a file that was refused has changed the conversation") from error
            return "refused"
        try:
            self.talk.say("w5")
        finally:
            self.talk.memory = memory
        return "read"

    def run(self, *arguments: str) -> str:
        """The command ends with 0, or with 1 or 2 and one line that cannot steer the terminal."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command(list(arguments))
        if code not in (0, 2) or err.getvalue().count("\n") != bool(code):
            raise Found(f"exit code {code}, and on stderr: {err.getvalue()!r}")
        if "\x1b" in out.getvalue() + err.getvalue():
            raise Found("a control character was printed")
        return "refused" if code else "read"

    def inspect(self, draw: random.Random) -> str:
        """`inspect` writes nothing."""
        source = self.prepare(draw.choice(sorted(self.templates)), draw)
        before = sorted(self.work.rglob("*"))
        result = self.run("inspect", str(source))
        if sorted(self.work.rglob("*")) != before:
            raise Found("inspect has written something")
        return result

    def convert(self, draw: random.Random) -> str:
        """`convert` writes its output, as a whole, or nothing."""
        source = self.prepare(draw.choice(sorted(self.templates)), draw)
        before = set(self.work.rglob("*"))
        result = self.run("convert", str(source), str(self.work / "made"))
        written = {path for path in set(self.work.rglob("*")) - before if path.relative_to(self.work).parts[0] != "made"}
        if written or (self.work / "made").exists() != (result == "read"):
            raise Found(f"convert has left {written or 'half an output'}")
        return result

    def one(self, target: str, seed: str) -> str:
        """The outcome of one input. Raises whatever must not be."""
        draw = random.Random(f"{target} {seed}")
        self.turn(True)
        try:
            return getattr(self, target)(draw)
        finally:
            done = self.turn(False)
            if done or list(self.folder.rglob(MARKER)) or Path(MARKER).exists():
                raise Found(f"code was run, or something written elsewhere: {done}")


TARGETS = ("state", "load", "inspect", "convert")


def fuzz(inputs: int, seed: int = 0, keep: Path | None = None) -> tuple[Counter, list[str]]:
    """So many inputs, shared out among the targets: how often each was read or refused, and the tracebacks of the others."""
    outcomes, wrong = Counter(), []
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        stack.callback(os.chdir, Path.cwd())
        os.chdir(name)
        fuzzer = Fuzz(Path(name).resolve())
        for number in range(inputs):
            target = TARGETS[number % len(TARGETS)]
            try:
                outcomes[target, fuzzer.one(target, f"{seed} {number}")] += 1
            except Exception:
                wrong.append(f"{target} {seed} {number}\n{traceback.format_exc()}")
                if keep is not None:
                    shutil.copytree(fuzzer.work, keep / f"{target}-{seed}-{number}", dirs_exist_ok=True)
    return outcomes, wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    counts, failures = fuzz(given.inputs, given.seed, given.keep)
    for (target, outcome), count in sorted(counts.items()):
        print(f"{target:8} {outcome:8} {count:6}")
    print(*failures, f"{len(failures)} of {given.inputs} inputs led to what must not be", sep="\n")
    sys.exit(bool(failures))
