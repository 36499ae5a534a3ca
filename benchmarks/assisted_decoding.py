"""Compares assisted and prompt-lookup with greedy decoding: `python -m benchmarks.assisted_decoding MODEL DRAFT TEXT`.

Checks that all write the tokens of greedy decoding, and prints accepted tokens per step and the ratio of speeds.
"""

import argparse
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import retnet_hf  # noqa: F401  registers RetNet

from .measuring import Spread


def timed(model, prompt: torch.Tensor, tokens: int, **options) -> tuple[list[int], float, int]:
    """Returns the generated tokens, the seconds, and the number of calls of the model."""
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    hook = model.register_forward_hook(count)
    start = time.perf_counter()
    output = model.generate(prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, **options)
    elapsed = time.perf_counter() - start
    hook.remove()
    return output[0, prompt.shape[1] :].tolist(), elapsed, calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of the model that decides")
    parser.add_argument("draft", help="folder of the model that drafts, of the same tokenizer")
    parser.add_argument("text", type=Path, help="a text to take the prompts from")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    draft = AutoModelForCausalLM.from_pretrained(arguments.draft).eval()
    ids = AutoTokenizer.from_pretrained(arguments.model)(arguments.text.read_text(encoding="utf-8")).input_ids
    starts = torch.linspace(0, len(ids) - 65, arguments.prompts).long().tolist()
    prompts = [torch.tensor([ids[start : start + 64]]) for start in starts]

    ways = {"assistant model": {"assistant_model": draft}, "prompt lookup": {"prompt_lookup_num_tokens": 3}}
    table = Table(title=f"{arguments.prompts} prompts, {arguments.tokens} tokens each")
    for column in ("way", "same tokens", "tokens per step", "speed / greedy (median, 10 % .. 90 %)"):
        table.add_column(column, justify="right")
    for way, options in ways.items():
        same, calls, ratios = 0, 0, []
        for prompt in prompts:
            expected, plain, _ = timed(model, prompt, arguments.tokens)
            tokens, elapsed, steps = timed(model, prompt, arguments.tokens, **options)
            same, calls = same + (tokens == expected), calls + steps
            ratios.append(plain / elapsed)
        tokens_per_step = f"{len(prompts) * arguments.tokens / calls:.2f}"
        table.add_row(way, f"{same} of {len(prompts)}", tokens_per_step, str(Spread.of(ratios)))
    Console().print(table)


if __name__ == "__main__":
    main()
