# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The npm packages of a page, which npm fetches once, at the versions listed here."""

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

from huggingface_hub.constants import HF_HOME

from retnet_hf.conversion.errors import first_line

from .errors import ExportError


CACHE = Path(HF_HOME) / "retnet_hf" / "npm"


class Package(NamedTuple):
    """An npm package: its SHA-512, the files that a page needs, and the file that states its licence."""

    digest: str
    files: tuple[str, ...]
    licence: str


PACKAGES = {
    "onnxruntime-web@1.30.0": Package(
        "ab4cbe26baedba45d2cec05610c71c55fa97db92d19a8b171c5f8269126683ca590a5cdc57bb2f35ce2b298de32f4d956fb42644c0ecd528a0a91e025c07ca61",
        ("dist/ort.wasm.bundle.min.mjs", "dist/ort-wasm-simd-threaded.wasm"),
        "package.json",  # states MIT; the package has no licence file
    ),
    "@huggingface/tokenizers@0.2.0": Package(
        "2e274c1ded45a5c4981f8bdc4a35e8a1d6b7e290b433c9b58260cebfb4908ba22ffa26f5cd7ec9dec1c1082f7fdc53c2927da4d5be79167795a8c471aebf7da6",
        ("dist/tokenizers.min.mjs",),
        "LICENSE",
    ),
}


def fetch_packages() -> None:
    """Fetches packages that are not in the cache. Raises ExportError like `copy_packages`."""
    for name, package in PACKAGES.items():
        _fetched(name, package)


def copy_packages(folder: Path) -> None:
    """Copies the files of all packages into a folder, each with the file that states its licence.

    Raises:
        ExportError: if npm is missing, cannot fetch a package, or fetches a wrong one.
    """
    folder.mkdir(parents=True)
    for name, package in PACKAGES.items():
        plain = name.removeprefix("@").replace("/", "-").replace("@", "-")
        targets = {file: Path(file).name for file in package.files} | {package.licence: f"{plain}.{package.licence}"}
        with tarfile.open(_fetched(name, package)) as archive:
            for file, target in targets.items():
                with archive.extractfile(f"package/{file}") as packed:
                    (folder / target).write_bytes(packed.read())


def _fetched(name: str, package: Package) -> Path:
    """Returns the archive of a package in the cache, which npm fetches first if needed."""
    cached = CACHE / f"{package.digest[:16]}.tgz"
    if not cached.is_file():
        npm = shutil.which("npm")
        if npm is None:
            raise ExportError(f"npm is needed to fetch {name} for a page: install Node.js, and run the command again")
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as work:
            fetched = subprocess.run([npm, "pack", "--json", name], cwd=work, capture_output=True, text=True, check=False)
            archives = list(Path(work).glob("*.tgz"))
            if fetched.returncode or not archives:
                raise ExportError(f"npm could not fetch {name}: {first_line(_reason(fetched))}")
            os.replace(archives[0], cached)
    if hashlib.sha512(cached.read_bytes()).hexdigest() != package.digest:
        cached.unlink()
        raise ExportError(f"npm fetched a wrong package for {name}: its SHA-512 does not match")
    return cached


def _reason(packed: subprocess.CompletedProcess) -> str:
    """Returns npm's message about a failure."""
    try:
        return json.loads(packed.stdout)["error"]["summary"]
    except (ValueError, KeyError, TypeError):
        return packed.stderr.strip() or f"it ended with {packed.returncode}"
