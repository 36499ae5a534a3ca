# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Measures the models of `benchmarks.laptop` and their source on long texts: `python -m benchmarks.laptop.beyond`.

Perplexity is measured on the unseen text, in blocks of a quarter of the source's positions, of all of them, and of twice as
many. Memory and speed of decoding are measured after all positions, with both models in turns.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from retnet_hf_cli.linearizing.teacher import dequantised
from retnet_hf_cli.text.corpus import document_end, encode, read_enough
from retnet_hf_cli.text.generation import load_model
from retnet_hf_linearization.measures import losses_of, score
from retnet_hf_linearization.what_was_kept import Extent, Measures, measure_decoding

from ..whole_files import write_whole
from .__main__ import BEYOND, RUNS, SOURCE, WORK
from .texts import UNSEEN, write_texts


BLOCKS = 2  # blocks of the longest length


def measured(source: str, folders: list[Path], text: Path, positions: int | None = None) -> Iterator[dict[str, Any]]:
    """Yields measures of a source and of the model in each folder, in float32.

    Args:
        positions: number of positions of the source; default: from its configuration.
    """
    teacher, tokenizer = load_model(source)
    positions = positions or teacher.config.max_position_embeddings
    lengths = (positions // 4, positions, 2 * positions)
    tokens = BLOCKS * lengths[-1]
    documents, _ = read_enough([str(text)], tokenizer, 2 * tokens)  # the number of tokens is an estimate
    stream = torch.from_numpy(encode(documents, tokenizer, document_end(tokenizer))).long()[:tokens]

    def perplexities(model: torch.nn.Module) -> dict[int, float]:
        return {length: score(lambda ids: losses_of(model, ids), stream, length, tokens).perplexity for length in lengths}

    theirs = perplexities(teacher.float())
    for folder in folders:
        student = load_model(str(folder))[0].float()
        measures = {teacher: Measures(perplexity=theirs), student: Measures(perplexity=perplexities(student))}
        measure_decoding(measures, stream, positions, Extent(rounds=3, times=(1,)))
        yield {"positions": positions, "teacher": asdict(measures[teacher]), "student": asdict(measures[student])}


def main() -> None:
    text, source = write_texts(WORK)[UNSEEN], dequantised(SOURCE)
    folders = [WORK / name for name in RUNS if (WORK / name / "config.json").is_file()]
    for folder, found in zip(folders, measured(source, folders, text)):
        write_whole(BEYOND / f"{folder.name}.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
