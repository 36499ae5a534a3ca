# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Damaged and hostile files end in the errors that are documented. `tests/support/fuzz.py` gives more of them."""

import pytest
from fuzz import TARGETS, Fuzz, fuzz


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")


def test_no_damaged_or_hostile_file_leads_to_a_traceback_to_code_or_to_a_file_elsewhere():
    outcomes, wrong = fuzz(400)
    assert not wrong, wrong[0]
    for target in TARGETS:
        assert outcomes[target, "refused"] > 20
        assert outcomes[target, "read"] > 0


def test_what_is_damaged_is_valid_before(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fuzzer = Fuzz(tmp_path)
    for name, folder in fuzzer.templates.items():
        assert fuzzer.run("inspect", str(folder)) == "read", name
        assert fuzzer.run("convert", str(folder), f"made-{name}") == ("refused" if name == "own" else "read"), name
    assert fuzzer.talk.load(tmp_path / "templates/talk/state.safetensors")
