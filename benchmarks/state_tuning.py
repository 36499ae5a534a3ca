# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""`python -m benchmarks.state_tuning`: a learned initial state beside LoRA of as many parameters, and all weights.

A model of 1.3 M parameters learns the King James Bible, and then, from a tenth as many tokens, what another text is like. Each
way of tuning has the best of its learning rates. The results are written to benchmarks/results/state_tuning.json, and the table
of docs/guides/fine-tune.md is made from them (`--table` for the table alone).
"""

import argparse
import copy
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from retnet_hf import RetNetForCausalLM, StateTuning

from .machine import describe
from .quality import texts
from .quality.report import filled
from .quality.rivals import of_equal_size
from .quality.settings import SETTINGS
from .quality.tables import table
from .quality.training import train
from .whole_files import write_whole


ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "state_tuning.json", ROOT / "docs" / "guides" / "fine-tune.md"
SETTING = SETTINGS["laptop"]
BASE, BASE_RATE, TUNED_TEXTS, TUNING_TOKENS = "king-james", 6e-3, ("dictionary", "manuals"), 70_000
SEEDS = (0, 1)
RANK = 5  # of q, k, v, gate and output: 33,280 parameters, where the states have 32,768
POSITIONS = ((0, 64), (64, 256), (256, 1024))


def with_lora(model: RetNetForCausalLM) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    modules = ["q_proj", "k_proj", "v_proj", "g_proj", "o_proj"]
    return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=modules))


# title, the module that is trained, and its learning rates
WAYS: tuple[tuple[str, Callable[[RetNetForCausalLM], nn.Module], tuple[float, ...]], ...] = (
    ("initial state", StateTuning, (3e-2, 1e-1, 3e-1)),
    ("LoRA", with_lora, (3e-3, 1e-2, 3e-2)),
    ("all weights", lambda model: model, (1e-3, 3e-3, 1e-2)),
)


def stream(text: str, part: str) -> Tensor:
    return texts.tokens(text, part, SETTING.vocabulary, SETTING.tokenizer_texts)


@torch.no_grad()
def losses(model: nn.Module, ids: Tensor) -> dict[str, float]:
    """By position, in blocks of the longest of `POSITIONS`."""
    length = POSITIONS[-1][1]
    blocks = ids[: min(len(ids), SETTING.scored_tokens) // length * length].view(-1, length)
    rows = []
    for block in blocks.split(SETTING.batch):
        logits = model(block).logits[:, :-1].float()
        rows.append(nn.functional.cross_entropy(logits.transpose(1, 2), block[:, 1:], reduction="none"))
    found = torch.cat(rows)
    return {f"{start}-{end}": found[:, start : end - 1].mean().item() for start, end in POSITIONS}


def trained(parameters: nn.Module) -> int:
    return sum(weight.numel() for weight in parameters.parameters() if weight.requires_grad)


def measure() -> dict:
    torch.manual_seed(0)
    base = of_equal_size("retnet-from-scratch", {}, SETTING)
    train(base, stream(BASE, "training"), SETTING.short, BASE_RATE, seed=0)
    found: dict = {"machine": describe("cpu", torch.get_num_threads()), "base": {}, "ways": {}}
    for text in TUNED_TEXTS:
        found["base"][text] = losses(base, stream(text, "reporting"))
        for title, way, rates in WAYS:
            for rate in rates:
                for seed in SEEDS:
                    torch.manual_seed(seed)
                    tuned = way(copy.deepcopy(base))
                    count = trained(tuned)
                    train(tuned, stream(text, "training"), TUNING_TOKENS, rate, seed)
                    cell = {
                        "parameters": count,
                        "choosing": losses(tuned, stream(text, "choosing")),
                        "reporting": losses(tuned, stream(text, "reporting")),
                    }
                    found["ways"].setdefault(title, {}).setdefault(text, {}).setdefault(str(rate), []).append(cell)
                    print(text, title, rate, seed, count, perplexities(cell["reporting"]), flush=True)
    return found


def perplexities(found: dict[str, float]) -> list[float]:
    return [round(math.exp(loss), 1) for loss in found.values()]


def mean(cells: list[dict], part: str) -> dict[str, float]:
    return {name: sum(cell[part][name] for cell in cells) / len(cells) for name in cells[0][part]}


def tables(found: dict) -> dict[str, str]:
    """Perplexities, of the rate that is best on the part for choosing, at the positions of training."""
    header = ("", "parameters", *(f"{text}, {start} to {end}" for text in TUNED_TEXTS for start, end in POSITIONS))
    plain = [value for text in TUNED_TEXTS for value in perplexities(found["base"][text])]
    rows = [["not tuned", "0", *map(str, plain)]]
    for title, by_text in found["ways"].items():
        cells: list[str] = []
        for text in TUNED_TEXTS:
            best = min(by_text[text].values(), key=lambda runs: sum(list(mean(runs, "choosing").values())[:2]))
            cells += map(str, perplexities(mean(best, "reporting")))
        rows.append([title, f"{best[0]['parameters']:,}", *cells])
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
