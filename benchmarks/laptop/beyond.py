# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`python -m benchmarks.laptop.beyond`: the models that `benchmarks.laptop` has made, and their source, on long texts.

Perplexity is that of the text that nothing was trained on, in blocks of as many tokens as the source was made for, and of
twice as many. Memory and speed of decoding are measured after blocks of the former length, both models in turns.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch

from retnet_hf_cli.linearizing.source import dequantised
from retnet_hf_cli.text.corpus import document_end, encode, read_enough
from retnet_hf_cli.text.generation import load_model
from retnet_hf_linearization.measures import losses_of, score
from retnet_hf_linearization.report import Extent, Measures, measure_decoding

from ..whole_files import write_whole
from .__main__ import BEYOND, RUNS, SOURCE, WORK
from .texts import UNSEEN, write_texts


BLOCKS = 4  # of the longer length


def measured(source: str, folder: Path, text: Path, positions: int | None = None) -> dict[str, Any]:
    """Measures of a source and of the model in a folder, in float32.

    Args:
        positions: tokens of the shorter blocks; by default, those that the source was made for.
    """
    (teacher, tokenizer), (student, _) = load_model(source), load_model(str(folder))
    models = {"teacher": teacher.float(), "student": student.float()}
    positions = positions or teacher.config.max_position_embeddings
    tokens = BLOCKS * 2 * positions
    documents, _ = read_enough([str(text)], tokenizer, 2 * tokens)  # their number is an estimate
    stream = torch.from_numpy(encode(documents, tokenizer, document_end(tokenizer))).long()[:tokens]
    measures = {name: Measures() for name in models}
    for name, model in models.items():
        for length in (positions, 2 * positions):
            found = score(lambda ids, model=model: losses_of(model, ids), stream, length, tokens)
            measures[name].perplexity[length] = found.perplexity
    decoding = {models[name]: measures[name] for name in models}
    measure_decoding(decoding, stream, positions, Extent(rounds=3, times=(1,)))
    return {"positions": positions, **{name: dataclasses.asdict(each) for name, each in measures.items()}}


def main() -> None:
    text, source = write_texts(WORK)[UNSEEN], dequantised(SOURCE)
    for name in RUNS:
        if (WORK / name / "config.json").is_file():
            found = measured(source, WORK / name, text)
            write_whole(BEYOND / f"{name}.json", json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
