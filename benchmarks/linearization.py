# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Trains small Llamas, linearizes each in several ways, and measures all: `python -m benchmarks.linearization`.

Results are saved, and the same command continues a stopped run. `--tables` writes the tables of benchmarks/README.md.

From the King James Bible alone, a model of this size learns to predict words, but not to recall them. One source therefore
also learns lists: pairs of words, then the same pairs in another order. At first, only attention in two layers learns these
lists: feed-forwards would learn the words of lists long before attention learns to find the right one.
"""

import argparse
import itertools
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from retnet_hf.cli.main import main as retnet_hf
from retnet_hf.linearization.recall import associative_examples
from retnet_hf.linearization.what_was_kept import measure_text

from .quality import texts
from .quality.cells import Cell, Result
from .quality.rivals import of_equal_size
from .quality.settings import SETTINGS
from .quality.statistics import Estimate
from .quality.tables import table
from .quality.training import BETAS, batches, fit, train
from .quality.write_tables import fill
from .whole_files import write_whole


ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "README.md"
SOURCES = ROOT / "build" / "linearization"  # has a folder for each source
SETTING = SETTINGS["laptop"]
SIZES = (SETTING.vocabulary, SETTING.tokenizer_texts)
SEEDS, TOKENS, LEARNING_RATE = (0, 1, 2), 2_000_000, 3e-3
WORDS = 64  # half keys, half values
PAIRS = (2, 4, 8, 16)  # in a list
SHARE = 0.3  # of the tokens of the linearizing text are in lists
ALONE_STEPS, ALONE_TOKENS, ALONE_LAYERS = 300, 4096, 2
BESIDE_TOKENS = 1024  # of lists in a step on text

# Options of the command by name, for a source that knows text alone, and for one that also recalls lists.
STEPS = ["--align-steps", "100", "--distill-steps", "300"]
WAYS: dict[str, dict[str, list[str]]] = {
    "text": {
        "pure retention": STEPS,
        "geometric decays": [*STEPS, "--decays", "geometric"],
        "sigmoid gate": [*STEPS, "--gate", "sigmoid"],
        "no alignment": ["--align-steps", "0", "--distill-steps", "400"],
    },
    "lists": {
        "pure retention": STEPS,
        "a quarter kept, the hardest": [*STEPS, "--keep-attention", "auto"],
        "a quarter kept, spread": [*STEPS, "--keep-attention", "25%"],
        "window of 64": [*STEPS, "--window", "64"],
    },
}


@cache
def words() -> Tensor:
    """Returns ids of tokens that are whole words after a space, so that they can be joined in any order."""
    vocabulary = sorted(texts.tokenizer(*SIZES).get_vocab().items(), key=lambda entry: entry[1])
    found = [number for token, number in vocabulary if token[0] == "Ġ" and token[1:].isalpha() and len(token) > 3]
    return torch.tensor(found[:WORDS])


def stream(part: str = "training") -> Tensor:
    return texts.tokens("king-james", part, *SIZES)


def lists_of_pairs(tokens: int, seed: int) -> list[str]:
    """Returns documents with a total number of tokens."""
    generator = torch.Generator().manual_seed(seed)
    documents, count = [], 0
    for pairs in itertools.cycle(PAIRS):
        if count >= tokens:
            return documents
        ids, _ = associative_examples(*words().chunk(2), pairs, 1, generator)
        documents.append(texts.tokenizer(*SIZES).decode(ids[0]))
        count += ids.numel()


def training_documents(learned: str) -> list[str]:
    """Returns the documents in a fixed order, with lists among them for a source of lists."""
    documents = list(texts.documents("king-james").training)
    if learned == "lists":
        documents += lists_of_pairs(int(len(stream()) * SHARE / (1 - SHARE)), seed=0)
        random.Random(0).shuffle(documents)
    return documents


def recall_loss(model: LlamaForCausalLM, pairs: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Returns the loss of the values in lists with a number of tokens."""
    ids, labels = associative_examples(*words().chunk(2), pairs, tokens // (4 * pairs), generator)
    asked = labels >= 0
    hidden = model.model(ids, use_cache=False).last_hidden_state
    return F.cross_entropy(model.lm_head(hidden[asked]), labels[asked])


def learn_to_recall(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Trains attention in the first layers on lists with a growing number of pairs; other parts have no output yet."""
    layers = model.model.layers
    silent = [layer.mlp.down_proj.weight for layer in layers]
    for weight in [*silent, *(layer.self_attn.o_proj.weight for layer in layers[ALONE_LAYERS:])]:
        nn.init.zeros_(weight).requires_grad_(False)
    model.model.layers = layers[:ALONE_LAYERS]

    def loss_of(step: int) -> Tensor:
        reached = min(len(PAIRS), 1 + int(len(PAIRS) * step / (0.6 * ALONE_STEPS)))
        return recall_loss(model, PAIRS[step % reached], ALONE_TOKENS, generator)

    fit(model, map(loss_of, range(ALONE_STEPS)), ALONE_STEPS, LEARNING_RATE, one_cycle=True)
    model.model.layers = layers
    model.requires_grad_(True)


def learn_text_beside(model: LlamaForCausalLM, seed: int, generator: torch.Generator) -> None:
    """Trains the whole model on chapters, with some lists in every step."""
    steps = TOKENS // (SETTING.block * SETTING.batch)
    blocks = batches(stream(), seed, SETTING.block, SETTING.batch)

    def loss_of(step: int) -> Tensor:
        ids = next(blocks)
        text = model(ids, labels=ids, use_cache=False).loss
        return text + recall_loss(model, PAIRS[step % len(PAIRS)], BESIDE_TOKENS, generator)

    fit(model, map(loss_of, range(steps)), steps, LEARNING_RATE, BETAS)


def write_source(folder: Path, seed: int, learned: str) -> None:
    """Trains a Llama, and saves it with its tokenizer and its text."""
    torch.manual_seed(seed)
    model, tokenizer = of_equal_size("llama", {}, SETTING), texts.tokenizer(*SIZES)
    if learned == "lists":
        generator = torch.Generator().manual_seed(seed)
        learn_to_recall(model, generator)
        learn_text_beside(model, seed, generator)
    else:
        train(model, stream(), TOKENS, LEARNING_RATE, seed, SETTING.block, SETTING.batch)
    for config in (model.config, model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer, name))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    lines = (json.dumps({"text": document}) + "\n" for document in training_documents(learned))
    write_whole(folder / "text.jsonl", "".join(lines))


def measured(model: PreTrainedModel) -> dict[str, Any]:
    """Returns perplexity at the trained length and beyond, and recall of words, on held-out text."""
    return vars(measure_text(model.eval(), stream("reporting"), SETTING.block, words()))


@dataclass(frozen=True)
class LinearizationCell(Cell):
    """`model` is "source" or one of `WAYS`; the source learned `learned`, and linearization reads the same."""

    kind: ClassVar[str] = "linearization"
    noise: ClassVar[float] = 0.0
    learned: str = "text"
    seed: int = 0

    def measure(self) -> dict[str, Any]:
        folder = SOURCES / f"{self.learned}-{self.seed}"
        began = time.perf_counter()
        if not (folder / "text.jsonl").is_file():
            write_source(folder, self.seed, self.learned)
        if self.model == "source":
            return {"seconds": time.perf_counter() - began} | measured(AutoModelForCausalLM.from_pretrained(folder))
        with tempfile.TemporaryDirectory() as output:
            arguments = ["linearize", folder, folder / "text.jsonl", "--output", f"{output}/model", "--seed", self.seed]
            arguments += ["--block-size", SETTING.block, "--batch-size", SETTING.batch, "--threads", torch.get_num_threads()]
            if retnet_hf([str(argument) for argument in [*arguments, *WAYS[self.learned][self.model]]]):
                raise RuntimeError(f"retnet-hf linearize failed for {self.model}")
            report = json.loads(Path(output, "model", "linearization.json").read_text(encoding="utf-8"))
            student = AutoModelForCausalLM.from_pretrained(f"{output}/model")
            return {
                "seconds": sum(stage["seconds"] for stage in report["trainings"]),
                "kept": [layer for layer, kind in enumerate(student.config.layer_types) if kind != "linear_attention"],
                **measured(student),
            }

    def cost(self, result: Result) -> float:
        return result["perplexity"][str(SETTING.block)]

    def headline(self, result: Result) -> str:
        return f"perplexity {result['perplexity']}; recalled of pairs {result['associative_recall']}"


def of_source(learned: str, folder: Path = RESULTS) -> str:
    """Returns a table of all methods compared with their source, over the measured seeds."""
    pairs = ["4", "16"] if learned == "lists" else []
    lines = []
    for model in ("source", *WAYS[learned]):
        found = []
        for seed in SEEDS:
            pair = (LinearizationCell(name, learned=learned, seed=seed) for name in (model, "source"))
            found.append([cell.result(folder) for cell in pair])
        found = [(own, theirs) for own, theirs in found if own and theirs]
        if found:
            trained, _, *longer = found[0][0]["perplexity"]
            ratio = Estimate.of([own["perplexity"][trained] / theirs["perplexity"][trained] for own, theirs in found])
            lengths = (Estimate.of([own["perplexity"][length] for own, _ in found]) for length in (trained, *longer))
            first, *others = (f"{estimate:.1f}" for estimate in lengths)
            shares = (Estimate.of([own["associative_recall"][count] for own, _ in found]) for count in pairs)
            minutes = f"{statistics.mean(own['seconds'] for own, _ in found) / 60:.1f}"
            line = [model, str(len(found)), first, "" if model == "source" else f"{ratio:.3f}", *others]
            lines.append([*line, *(f"{share:.0%}" for share in shares), minutes])
    header = ["", "seeds", "perplexity", "ratio", "at 4x", "at 8x", *(f"{count} pairs" for count in pairs), "minutes"]
    return table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--sources", choices=WAYS, nargs="+", default=list(WAYS), help="what they have learned")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--tables", action="store_true", help="write the tables from the results that are there")
    arguments = parser.parse_args()
    if arguments.tables:
        fill(PAGE, {learned: of_source(learned, arguments.results) for learned in WAYS})
        return
    transformers.logging.set_verbosity_error()
    for learned, seed in itertools.product(arguments.sources, arguments.seeds):
        for model in ("source", *WAYS[learned]):
            cell = LinearizationCell(model, seed=seed, learned=learned)
            if cell.result(arguments.results) is None:
                result = cell.run()
                cell.save(arguments.results, result)
                print(f"{model}, {learned}, {seed}: {cell.headline(result)}", flush=True)


if __name__ == "__main__":
    main()
