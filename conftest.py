# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""How the tests are run. The fixtures, and with them torch, are imported by the processes that run tests alone."""

import gc
import json
from pathlib import Path


gc.disable()  # while everything is imported, of which nothing is garbage: that halves the time

ROOT = Path(__file__).parent


def pytest_configure(config):
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests:
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_collection_modifyitems(items):
    """Long files begin first, so that at the end no worker is left alone with one."""
    seconds = json.loads((ROOT / "tests" / "durations.json").read_text(encoding="utf-8"))["files"]
    items.sort(key=lambda item: -seconds.get(item.path.relative_to(ROOT).as_posix(), 0))


def pytest_collection_finish(session):
    """What the imports of all test files have left is not garbage, and is not searched for it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()
