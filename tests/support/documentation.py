# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The Python of a Markdown page, as a reader would run it: README and the guides can not lie."""

import re
from pathlib import Path
from typing import NamedTuple


class Block(NamedTuple):
    """A fenced block: the line of the page it begins on, and what it says."""

    line: int
    source: str


class Session(NamedTuple):
    """Blocks that are run one after the other in one namespace: those of a page, or of one of its sections."""

    page: Path
    title: str
    blocks: list[Block]

    def run(self) -> dict:
        """Runs the blocks in order, with the page's own lines in tracebacks. Returns what they have defined."""
        namespace = {"__name__": "__main__"}
        for block in self.blocks:
            exec(compile("\n" * block.line + block.source, str(self.page), "exec"), namespace)
        return namespace


def blocks(markdown: str, language: str = "python") -> list[Block]:
    found = re.finditer(rf"^```{language}\n(.*?)^```$", markdown, flags=re.DOTALL | re.MULTILINE)
    return [Block(markdown[: match.start(1)].count("\n"), match[1]) for match in found]


def anchors(markdown: str) -> set[str]:
    found: dict[str, int] = {}
    prose = re.sub(r"^```.*?^```$", "", markdown, flags=re.DOTALL | re.MULTILINE)
    for heading in re.findall(r"^#+ (.+)$", prose, flags=re.MULTILINE):
        name = re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")
        found[name] = found.get(name, -1) + 1
    return {name if number == 0 else f"{name}-{number}" for name, most in found.items() for number in range(most + 1)}


def dead_links(page: Path) -> list[str]:
    """Links of a page that lead nowhere in its Markdown: no file, no heading, or a name that only the site knows."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    dead = re.findall(r"\]\[[^\]]*\]", prose)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            dead.append(link)
    return dead


def session(page: Path) -> Session:
    return Session(page, page.stem, blocks(page.read_text(encoding="utf-8")))


def sessions(page: Path) -> list[Session]:
    """The Python of each section of a page whose sections stand by themselves; those without any are left out."""
    markdown = page.read_text(encoding="utf-8")
    starts = [(match.start(), match[1]) for match in re.finditer(r"^## (.+)$", markdown, flags=re.MULTILINE)]
    ends, found = [start for start, _ in starts[1:]] + [len(markdown)], []
    for (start, title), end in zip(starts, ends):
        first_line = markdown[:start].count("\n")
        inside = [Block(line + first_line, source) for line, source in blocks(markdown[start:end])]
        if inside:
            found.append(Session(page, title, inside))
    return found
