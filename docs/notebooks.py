# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The notebooks as pages of the documentation, with the outputs that they were committed with.

mkdocs reads one folder, and the notebooks are in another; so they are added to its files here, and to its navigation.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files


ROOT = Path(__file__).parent.parent
PAGES = [f"notebooks/{file.name}" for file in sorted((ROOT / "notebooks").glob("*.ipynb"))]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    for section in config.nav:
        if "Notebooks" in section:
            section["Notebooks"] = PAGES  # their titles are their own
    return config


@event_priority(100)  # before mkdocs-jupyter, which makes pages of them
def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page in PAGES:
        files.append(File(page, str(ROOT), config.site_dir, config.use_directory_urls))
    return files
