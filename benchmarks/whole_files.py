# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Files that are written completely or not at all, in folders that are made first."""

from pathlib import Path

from retnet_hf.conversion import replaced_folder


def write_whole(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replaced_folder.write_whole(path, text)
