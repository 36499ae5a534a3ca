# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Writes the tables and the figure about images in docs/speed.md: `python -m benchmarks.vision_resolution_report`."""

from pathlib import Path
from typing import Any

from . import vision_resolution as study
from .quality.tables import table
from .quality.write_tables import filled
from .whole_files import write_whole


ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "vision_resolution.json", ROOT / "docs" / "speed.md"
FIGURE = ROOT / "docs" / "images" / "vision_resolution.png"


def speed(entry: dict[str, Any]) -> str:
    """Returns the speed relative to the reference, with the spread of the repetitions."""
    if "speed_ratio" not in entry:
        return f"{entry['images_per_second']:.2g} images/s"
    return f"{entry['speed_ratio']:.2f} ({entry['least_speed_ratio']:.2f}..{entry['greatest_speed_ratio']:.2f})"


def tables(entries: dict[study.Cell, dict[str, Any]]) -> dict[str, str]:
    """Returns the tables of speed by mode, with a row for each resolution and a column for each model."""
    built = {}
    resolutions = study.without_repeats(pixels for _, pixels, _ in entries)
    for mode in study.MODES:
        models = study.without_repeats(name for name, _, of in entries if of == mode)
        others = [name for name in models if name != study.REFERENCE]
        head = ("pixels", "patches", "ViT", *(study.MODELS[name][0] for name in others))
        rows = []
        for pixels in resolutions:
            row = [f"{pixels:,}", f"{(pixels // study.PATCH) ** 2:,}"]
            for name in (study.REFERENCE, *others):
                entry = entries[name, pixels, mode]
                if "failure" in entry:
                    row.append(entry["failure"])
                elif name == study.REFERENCE:
                    row.append(f"{entry['images_per_second']:.3g} images/s")
                else:
                    row.append(speed(entry))
            rows.append(row)
        built[f"{mode}_speed"] = table(head, rows)
    return built


def main() -> None:
    _, results = study.read(RESULTS)
    entries = study.summaries(results)
    write_whole(PAGE, filled(PAGE.read_text(encoding="utf-8"), tables(entries)))
    study.draw(entries, FIGURE)


if __name__ == "__main__":
    main()
