# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""For the API reference: packages whose folders have another name, under the names by which they are imported.

mkdocstrings looks for a package in a folder of its name, and does not know the editable installs of setuptools.
"""

from pathlib import Path


FOLDERS = {"retnet_hf_conversion": "conversion", "retnet_hf_linearization": "linearization"}  # as pyproject.toml has them


def on_startup(**kwargs) -> None:
    """Links the packages in `build/packages`, which is one of the paths of mkdocstrings."""
    root = Path(__file__).resolve().parent.parent
    links = root / "build" / "packages"
    links.mkdir(parents=True, exist_ok=True)
    for package, folder in FOLDERS.items():
        if not (links / package).exists():
            (links / package).unlink(missing_ok=True)  # a link to a folder that has gone
            (links / package).symlink_to(root / folder, target_is_directory=True)
