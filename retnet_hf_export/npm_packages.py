# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Packages of npm that a page needs: fetched once, by npm, at versions that are written here."""

import json
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

from huggingface_hub.constants import HF_HOME

from retnet_hf_conversion.errors import first_line

from .errors import ExportError


CACHE = Path(HF_HOME) / "retnet_hf" / "npm"
# By package and version: files that are copied, and where their licence is told.
PACKAGES = {
    "onnxruntime-web@1.30.0": (("dist/ort.wasm.bundle.min.mjs", "dist/ort-wasm-simd-threaded.wasm"), "package.json"),
    "@huggingface/tokenizers@0.2.0": (("dist/tokenizers.min.mjs",), "LICENSE"),
}


def copy_packages(folder: Path) -> None:
    """Copies the files of all packages into a folder, each with its licence.

    Raises:
        ExportError: without npm, or where it cannot fetch a package.
    """
    folder.mkdir(parents=True)
    for name, (files, licence) in PACKAGES.items():
        package = _fetched(name)
        for file in files:
            shutil.copyfile(package / file, folder / Path(file).name)
        plain = name.removeprefix("@").replace("/", "-").replace("@", "-")
        shutil.copyfile(package / licence, folder / f"{plain}.{licence}")


def _fetched(name: str) -> Path:
    """The folder of a package in the cache."""
    folder = CACHE / name.replace("/", "+")
    if folder.is_dir():
        return folder
    npm = shutil.which("npm")
    if npm is None:
        raise ExportError(f"a page needs {name}, which npm fetches: install Node.js, and run the command again")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as work:
        packed = subprocess.run([npm, "pack", "--json", name], cwd=work, capture_output=True, text=True, check=False)
        archives = list(Path(work).glob("*.tgz"))
        if packed.returncode or not archives:
            raise ExportError(f"npm could not fetch {name}: {first_line(_reason(packed))}")
        with tarfile.open(archives[0]) as archive:
            archive.extractall(work, filter="data")
        (Path(work) / "package").replace(folder)
    return folder


def _reason(packed: subprocess.CompletedProcess) -> str:
    """What npm says of a failure."""
    try:
        return json.loads(packed.stdout)["error"]["summary"]
    except (ValueError, KeyError, TypeError):
        return packed.stderr.strip() or f"it ended with {packed.returncode}"
