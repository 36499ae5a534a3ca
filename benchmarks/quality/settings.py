# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Sizes of models and trainings."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Sizes that all models of a table share.

    Attributes:
        hidden_size, layers, heads: sizes of every model, unless a cell has other options.
        parameters: number of parameters of every model; the width of the feed-forward is chosen for it.
        vocabulary, tokenizer_texts: size of the tokenizer, and its training texts.
        block, batch: tokens of a sequence and sequences of a step in training.
        lengths: lengths of the blocks for measuring the loss, the trained length first.
        scored_tokens: maximum of measured tokens of a text.
        short, middle, long: numbers of training tokens.
        seeds: seeds of every row.
        texts: training texts, the main one first.
        bfloat16: whether matrix products of training use bfloat16 (torch.autocast).
        studies: names of the studies, in the order of their measurement.
        rates: first learning rates; if there are several, more follow until the best has a worse one on both sides.
        pictures, image_rates: training pictures and learning rates for images.
        recall_steps, recall_sizes: training steps and hidden sizes for associative recall.
    """

    hidden_size: int = 128
    layers: int = 4
    heads: int = 4
    parameters: int = 1_312_000
    vocabulary: int = 2048
    block: int = 256
    batch: int = 8
    lengths: tuple[int, ...] = (256, 1024, 4096)
    scored_tokens: int = 49_152
    short: int = 700_000
    middle: int = 2_000_000
    long: int = 4_000_000
    seeds: tuple[int, ...] = (0, 1, 2)
    texts: tuple[str, ...] = ("king-james", "dictionary")
    tokenizer_texts: tuple[str, ...] = ("king-james", "dictionary", "fortunes")
    device: str = "cpu"
    bfloat16: bool = False
    studies: tuple[str, ...] = (
        "decays",
        "longer",
        "comparison",
        "images",
        "recall",
        "longest",
        "best",
        "frontier",
        "seconds",
        "muon",
    )
    rates: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3)
    pictures: int = 110_000
    image_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    recall_steps: int = 1500
    recall_sizes: tuple[int, ...] = (32, 64, 128)


SETTINGS = {
    "laptop": Setting(),
    "quick": Setting(
        short=60_000,
        scored_tokens=16_384,
        lengths=(256, 1024),
        seeds=(0,),
        texts=("king-james",),
        studies=("comparison", "images", "recall"),
        rates=(3e-3,),
        pictures=5_000,
        image_rates=(4e-3,),
        recall_steps=100,
        recall_sizes=(64,),
    ),
    "larger": Setting(
        hidden_size=256,
        layers=8,
        parameters=10_000_000,
        vocabulary=4096,
        short=1_000_000,
        middle=1_000_000,
        long=10_000_000,
        seeds=(0,),
        texts=("four-texts",),
        tokenizer_texts=("four-texts",),
        bfloat16=True,
        studies=("seconds", "larger"),
    ),
}
