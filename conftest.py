# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How the tests are run. The fixtures, and with them torch, are imported by the processes that run tests alone."""

import gc


gc.disable()  # while everything is imported, of which nothing is garbage: that halves the time

# Files that take longest, the slowest first.
LONG = (
    "test_notebooks",
    "test_compile_and_export",
    "test_cli",
    "test_vision_promises",
    "test_documentation",
    "test_cli_conversion",
    "test_generation",
    "test_cli_process",
    "test_tensor_parallel",
    "test_transformers_mixins",
    "test_works_with_onnx",
    "test_export_onnx",
    "test_export_page",
    "test_works_with_accelerate",
    "test_works_with_transformers_serve",
    "test_hub",
    "test_training",
    "test_decoding_programs",
    "test_fused_projections",
    "test_remote_code",
    "test_readme",
)


def pytest_configure(config):
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if runs_tests:
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_collection_modifyitems(items):
    """Long files begin first, so that at the end no worker is left alone with one."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


def pytest_collection_finish(session):
    """What the imports of all test files have left is not garbage, and is not searched for it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    gc.enable()
