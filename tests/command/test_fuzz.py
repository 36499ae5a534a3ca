# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile files end in the errors that are documented. `tests/support/fuzz.py` gives more of them."""

import os
import pickle
from pathlib import Path

import pytest
from fuzz import MARKER, TARGETS, Code, Found, Fuzz, fuzz

from retnet_hf import RetNetState


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")


def test_no_damaged_or_hostile_file_leads_to_a_traceback_to_code_or_to_a_file_elsewhere():
    outcomes, wrong = fuzz(400)
    assert not wrong, wrong[0]
    for target in TARGETS:
        assert outcomes[target, "refused"] > 20
        assert outcomes[target, "read"] > 0


@pytest.mark.parametrize(
    ("does", "found"),
    [
        (lambda folder: pickle.loads(pickle.dumps(Code(Path.touch, folder / MARKER))), "code was run"),
        (lambda folder: os.system("true"), "os.system"),
        (lambda folder: Path("/no such folder/file").write_text(""), "writes /no such folder/file"),
    ],
    ids=["marker", "command", "file"],
)
def test_what_must_not_be_is_found(tmp_path, monkeypatch, does, found):
    monkeypatch.chdir(tmp_path)
    fuzzer = Fuzz(tmp_path)

    def hostile(*arguments, **options):
        try:
            does(tmp_path)
        except OSError as error:
            raise ValueError from error
        raise ValueError

    monkeypatch.setattr(RetNetState, "load", hostile)
    with pytest.raises(Found, match=found):
        fuzzer.one("state", "0")


def test_an_error_that_is_not_documented_is_reported(monkeypatch):
    monkeypatch.setattr(RetNetState, "load", lambda *arguments, **options: {}["weights"])
    _, wrong = fuzz(1)
    assert len(wrong) == 1
    assert "KeyError" in wrong[0]


def test_what_is_damaged_is_valid_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzzer = Fuzz(tmp_path)
    for name, folder in fuzzer.templates.items():
        assert fuzzer.run("inspect", str(folder)) == "read", name
        assert fuzzer.run("convert", str(folder), f"made-{name}") == ("refused" if name == "own" else "read"), name
    assert fuzzer.talk.load(tmp_path / "templates/talk/state.safetensors")
