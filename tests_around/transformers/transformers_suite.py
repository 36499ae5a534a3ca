# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The test mixins of transformers, imported as `transformers_tests` from the source distribution of the installed version.

pip downloads it once into the user's cache. What its top-level test modules import from folders that it leaves out is an
empty class here, which adds no test: `GenerationTesterMixin`, `ExportTesterMixin` and the tests of each pipeline task.
"""

import importlib
import subprocess
import sys
import tarfile
import tempfile
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from unittest import mock

import pytest
import transformers
from filelock import FileLock
from huggingface_hub.constants import HF_HOME


PACKAGE = "transformers_tests"
DOWNLOAD_SECONDS = 300


class SuiteUnavailable(Exception):
    """The source distribution cannot be had; the message says why."""


def load(*names: str) -> list[ModuleType]:
    """The modules `tests/<name>.py`. Raises SuiteUnavailable where they can neither be found nor downloaded."""
    if PACKAGE not in sys.modules:
        package = ModuleType(PACKAGE)
        package.__path__ = [str(_suite_folder())]
        sys.modules[PACKAGE] = package
        sys.meta_path.append(_StandIns())
    with (
        # The pipeline tests would load a second transformers, from the sources beside them.
        mock.patch("transformers.utils.direct_transformers_import", return_value=transformers),
        # Their marks are not declared in our pyproject.toml, which pytest --strict-markers would object to.
        mock.patch.object(pytest.mark, "_config", None),
    ):
        return [importlib.import_module(f"{PACKAGE}.{name}") for name in names]


def enter_classes(common: ModuleType, model_type: str, classes: dict[str, type]) -> None:
    """Name classes by kind, such as "MODEL_FOR_MASKED_LM", in the tables of `test_modeling_common`, not in transformers'."""
    for kind, model_class in classes.items():
        table = f"{kind}_MAPPING_NAMES"
        setattr(common, table, {**getattr(common, table, {}), model_type: model_class.__name__})


class _StandIns(MetaPathFinder, Loader):
    """Modules of the suite that the distribution leaves out. It comes last, after the search on disk."""

    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(PACKAGE + ".") else None

    def exec_module(self, module: ModuleType) -> None:
        def empty_class(name: str) -> type:
            if not name[0].isupper():
                raise AttributeError(f"transformers' source distribution has no {module.__name__}.{name}.")
            return type(name, (), {})

        module.__getattr__ = empty_class


def _suite_folder() -> Path:
    """The unpacked test modules of the installed version. Processes that ask at the same time wait for the first."""
    folder = Path(HF_HOME) / "retnet_hf" / f"transformers-{transformers.__version__}" / "tests"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / "lock"):
            if not folder.exists():
                with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
                    _unpack(_download(Path(scratch)), Path(scratch) / "tests")
                    (Path(scratch) / "tests").rename(folder)
    except OSError as error:
        raise SuiteUnavailable(f"the source distribution of transformers cannot be stored: {error}") from error
    return folder


def _download(folder: Path) -> Path:
    requirement = f"transformers=={transformers.__version__}"
    options = ["--quiet", "--no-deps", "--no-binary", "transformers", "--retries", "1", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.SubprocessError as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise SuiteUnavailable(f"pip cannot download the source distribution of {requirement}: {lines[-1]}") from error
    return next(folder.glob("*.tar.gz"))


def _unpack(archive: Path, folder: Path) -> None:
    (folder / "utils").mkdir(parents=True)
    (folder / "utils" / "tiny_model_summary.json").write_text("{}")  # read on import; the distribution leaves it out
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = Path(member.name).parts
            if len(parts) == 3 and parts[1] == "tests" and member.isfile():
                (folder / parts[2]).write_bytes(tar.extractfile(member).read())
