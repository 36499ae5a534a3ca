# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How large models and trainings are."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """Sizes that all models of a table share.

    Attributes:
        hidden_size, layers, heads: of every model, unless an option of a cell says otherwise.
        parameters: that the width of its feed-forward brings every model to.
        vocabulary, tokenizer_texts: size of the tokenizer, and what it is trained on.
        block, batch: tokens of a sequence and sequences of a step, in training.
        lengths: of the blocks that the loss is measured in, the trained length first.
        scored_tokens: of a text, at the most.
        short, middle, long: tokens trained on.
        seeds: of every row.
        texts: trained on, the main one first. other_texts: what models of one text are tried on too.
        bfloat16: whether the matrix products of training have its inputs (torch.autocast).
        studies: by name, in the order in which they are measured.
        rates: of learning, tried first; if there are several, others follow until the best has a worse one on both sides.
        pictures, image_rates: as for tokens and rates, of images.
        recall_steps, recall_sizes: steps of training on associative recall, and hidden sizes.
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
    other_texts: tuple[str, ...] = ("king-james", "dictionary", "fortunes", "manuals")
    tokenizer_texts: tuple[str, ...] = ("king-james", "dictionary", "fortunes")
    device: str = "cpu"
    bfloat16: bool = False
    studies: tuple[str, ...] = (
        "decays",
        "longer",
        "comparison",
        "images",
        "ablations",
        "heads",
        "expansion",
        "window",
        "recall",
        "other_text",
        "longest",
        "search",
        "best",
    )
    rates: tuple[float, ...] = (1.5e-3, 3e-3, 6e-3)
    pictures: int = 110_000
    image_rates: tuple[float, ...] = (1e-3, 2e-3, 4e-3)
    recall_steps: int = 1500
    recall_sizes: tuple[int, ...] = (32, 64, 128)


_HUB_TEXTS = ("hub:Salesforce/wikitext:wikitext-103-raw-v1", "hub:roneneldan/TinyStories")
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
        other_texts=(),
        tokenizer_texts=("four-texts",),
        bfloat16=True,
        studies=("larger",),
    ),
    "gpu": Setting(
        hidden_size=512,
        layers=12,
        heads=8,
        parameters=60_000_000,
        vocabulary=16_384,
        block=1024,
        batch=32,
        lengths=(1024, 4096, 16_384),
        scored_tokens=2**20,
        short=100_000_000,
        middle=300_000_000,
        long=1_000_000_000,
        texts=_HUB_TEXTS,
        other_texts=_HUB_TEXTS,
        tokenizer_texts=_HUB_TEXTS,
        device="cuda",
        studies=("decays", "longer", "heads", "expansion", "window", "other_text", "comparison", "ablations", "longest"),
        rates=(5e-4, 1e-3, 2e-3),
    ),
}
