# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Compares a learned initial state with LoRA of as many parameters, and all weights: `python -m benchmarks.state_tuning`.

A model of 1.3 M parameters learns the King James Bible. Then it is tuned to answer whether a verse is from the Old or the
New Testament, and to read another text, on a tenth as many tokens. Each method uses the best of its learning rates. Writes
benchmarks/results/state_tuning.json and the table of docs/guides/fine-tune.md from it (`--table`: only the table).
"""

import argparse
import copy
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retnet_hf import RetNetForCausalLM, StateTuning

from .machine import describe
from .quality import texts
from .quality.rivals import of_equal_size
from .quality.settings import SETTINGS
from .quality.tables import table
from .quality.training import BETAS, batches, fit, train
from .quality.write_tables import filled
from .whole_files import write_whole


ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "state_tuning.json", ROOT / "docs" / "guides" / "fine-tune.md"
SETTING = SETTINGS["laptop"]
BASE, BASE_RATE, OTHER_TEXT, STEPS = "king-james", 6e-3, "dictionary", 250
SEEDS = (0, 1)
RANK = 5  # of q, k, v, gate and output: 33,280 parameters; the states have 32,768
POSITIONS = ((0, 64), (64, 256))
VERSES, LONGEST, VERSES_OF_A_STEP = 500, 48, 8  # per testament for choosing and for reporting; most tokens; batch


def with_lora(model: RetNetForCausalLM) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    modules = ["q_proj", "k_proj", "v_proj", "g_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=modules))


# title, trained module, and learning rates
WAYS: tuple[tuple[str, Callable[[RetNetForCausalLM], nn.Module], tuple[float, ...]], ...] = (
    ("initial state", StateTuning, (1e-1, 3e-1, 1.0)),
    ("LoRA", with_lora, (3e-3, 1e-2, 3e-2)),
    ("all weights", lambda model: model, (1e-3, 3e-3, 1e-2)),
)


def stream(text: str, part: str) -> Tensor:
    return texts.tokens(text, part, SETTING.vocabulary, SETTING.tokenizer_texts)


@torch.no_grad()
def perplexities(model: nn.Module, part: str) -> list[float]:
    """Returns perplexities of the other text in blocks of the trained length, for the ranges in `POSITIONS`."""
    ids = stream(OTHER_TEXT, part)
    blocks = ids[: min(len(ids), SETTING.scored_tokens) // SETTING.block * SETTING.block].view(-1, SETTING.block)
    losses = [
        F.cross_entropy(model(each).logits[:, :-1].transpose(1, 2), each[:, 1:], reduction="none")
        for each in blocks.split(32)
    ]
    return [torch.cat(losses)[:, start : end - 1].mean().exp().item() for start, end in POSITIONS]


class Verses(NamedTuple):
    """ids (N, T), padded on the left, which end with the token between documents; answers (N,): 0 or 1."""

    ids: Tensor
    mask: Tensor
    answers: Tensor


@cache
def verses() -> dict[str, Verses]:
    """Returns as many verses of each testament, by part: "training", "choosing" and "reporting"."""
    found = texts.verses()
    first_of_new = [chapter for chapter, _ in found].index("Mat1")
    tokenizer = texts.tokenizer(SETTING.vocabulary, SETTING.tokenizer_texts)
    end = tokenizer.convert_tokens_to_ids(tokenizer.eos_token)
    both = [[text for _, text in part] for part in (found[:first_of_new], found[first_of_new:])]
    for part in both:
        random.Random(0).shuffle(part)
    parts = {}
    for name, place in (
        ("choosing", slice(VERSES)),
        ("reporting", slice(VERSES, 2 * VERSES)),
        ("training", slice(2 * VERSES, 7000)),
    ):
        rows = [(text, answer) for answer, part in enumerate(both) for text in part[place]]
        random.Random(1).shuffle(rows)
        ids = torch.full((len(rows), LONGEST + 1), end)
        mask = torch.zeros_like(ids)
        for row, (text, _) in enumerate(rows):
            tokens = torch.tensor(tokenizer(text)["input_ids"])[:LONGEST]
            ids[row, LONGEST - len(tokens) : LONGEST], mask[row, LONGEST - len(tokens) :] = tokens, 1
        parts[name] = Verses(ids, mask, torch.tensor([answer for _, answer in rows]))
    return parts


def answered(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Returns the logits (N, 2) of the words "old" and "new" after each verse."""
    return model(ids, attention_mask=mask, logits_to_keep=1).logits[:, -1, words()]


@cache
def words() -> Tensor:
    tokenizer = texts.tokenizer(SETTING.vocabulary, SETTING.tokenizer_texts)
    return torch.tensor([tokenizer(f" {word}")["input_ids"][0] for word in ("old", "new")])


@torch.no_grad()
def wrong(model: nn.Module, part: str) -> list[float]:
    """Returns the percentage of wrong answers."""
    given = verses()[part]
    pieces = zip(given.ids.split(100), given.mask.split(100), given.answers.split(100))
    right = [(answered(model, ids, mask).argmax(-1) == answers).float() for ids, mask, answers in pieces]
    return [100 - 100 * torch.cat(right).mean().item()]


def tune_on_verses(model: nn.Module, rate: float, seed: int) -> None:
    given, generator = verses()["training"], torch.Generator().manual_seed(seed)

    def losses() -> Iterator[Tensor]:
        for _ in range(STEPS):
            rows = torch.randint(len(given.ids), (VERSES_OF_A_STEP,), generator=generator)
            yield F.cross_entropy(answered(model, given.ids[rows], given.mask[rows]), given.answers[rows])

    fit(model, losses(), STEPS, rate, BETAS)


def tune_on_text(model: nn.Module, rate: float, seed: int) -> None:
    ids = batches(stream(OTHER_TEXT, "training"), seed, SETTING.block, batch=2)
    losses = (
        F.cross_entropy(model(each).logits[:, :-1].flatten(0, 1), each[:, 1:].flatten())
        for each in itertools.islice(ids, STEPS)
    )
    fit(model, losses, STEPS, rate, BETAS)


# by title: the function that tunes, the measure (lower is better), and the columns
TASKS = {
    "verses": (tune_on_verses, wrong, ["testament of a verse, % wrong"]),
    "text": (tune_on_text, perplexities, [f"{OTHER_TEXT}, perplexity of tokens {a} to {b}" for a, b in POSITIONS]),
}


def measure() -> dict:
    torch.manual_seed(0)
    base = of_equal_size("retnet-from-scratch", {}, SETTING)
    train(base, stream(BASE, "training"), SETTING.short, BASE_RATE, seed=0)
    found: dict = {"machine": describe("cpu", torch.get_num_threads()), "base": {}, "ways": {}}
    for task, (tune, measured, _) in TASKS.items():
        found["base"][task] = measured(base, "reporting")
        print(task, "not tuned", found["base"][task], flush=True)
        for (title, way, rates), seed in itertools.product(WAYS, SEEDS):
            for rate in rates:
                torch.manual_seed(seed)
                tuned = way(copy.deepcopy(base))
                count = sum(weight.numel() for weight in tuned.parameters() if weight.requires_grad)
                tune(tuned, rate, seed)
                cell = {"seed": seed, "rate": rate, "parameters": count}
                cell |= {part: measured(tuned, part) for part in ("choosing", "reporting")}
                found["ways"].setdefault(title, {}).setdefault(task, []).append(cell)
                print(task, title, cell, flush=True)
    return found


def best_of(cells: list[dict]) -> list[dict]:
    """Returns the results of the learning rate that is best on the part for choosing."""
    rates = {cell["rate"] for cell in cells}
    return min(
        ([cell for cell in cells if cell["rate"] == rate] for rate in rates),
        key=lambda runs: sum(math.log(sum(cell["choosing"])) for cell in runs),
    )


def tables(found: dict) -> dict[str, str]:
    header = ["", "parameters", *(column for *_, columns in TASKS.values() for column in columns)]
    plain = [f"{value:.0f}" for task in TASKS for value in found["base"][task]]
    rows = [["not tuned", "0", *plain]]
    for title, by_task in found["ways"].items():
        cells: list[str] = []
        for task in TASKS:
            runs = best_of(by_task[task])
            means = [sum(values) / len(runs) for values in zip(*(cell["reporting"] for cell in runs))]
            cells += [f"{value:.1f}" if task == "verses" else f"{value:.0f}" for value in means]
        rows.append([title, f"{runs[0]['parameters']:,}", *cells])
    return {"state_tuning": table(header, rows)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="write the table alone, from the results that are there")
    if not parser.parse_args().table:
        write_whole(RESULTS, json.dumps(measure(), indent=1) + "\n")
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    write_whole(PAGE, filled(PAGE.read_text(encoding="utf-8"), tables(found)))


if __name__ == "__main__":
    main()
