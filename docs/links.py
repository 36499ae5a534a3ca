# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Links that work on GitHub and in the site. Pages name files of the repository; the site has some of these elsewhere."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page


ROOT = Path(__file__).parent.parent
WHOLE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}  # pages that show a file of the repository


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri in WHOLE:
        return (ROOT / WHOLE[page.file.src_uri]).read_text(encoding="utf-8").replace("](docs/", "](")
    return re.sub(r"\]\((?:\.\./)+(notebooks/[^)]+)\)", rf"]({'../' * page.file.src_uri.count('/')}\1)", markdown)
