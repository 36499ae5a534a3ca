# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Cells: a method that makes a RetNet from a source. The command `retnet-hf linearize` runs where possible."""

import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from retnet_hf_cli.main import main as retnet_hf
from retnet_hf_linearization.what_was_kept import measure_text

from ..quality.cells import Cell
from ..quality.rivals import of_equal_size
from ..quality.training import train
from ..whole_files import write_whole
from . import teacher


ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SOURCES = ROOT / "build" / "linearization"  # has a folder for each seed

STEPS = {"align": 100, "distill": 300}
SCRATCH_RATE = 6e-3  # the best rate in `benchmarks.quality`, for published and geometric decays
TRIAL_TOKENS = 40_960  # first trial of the speed of training from scratch
TRIALS, SAME_TIME = 4, 0.05  # maximum of trials; relative tolerance of times

# Options of the command by name, for a source that knows text, a source that recalls lists, and a source that was not used
# to choose defaults; and the decays of RetNets that are trained from scratch.
OF_TEXT: dict[str, list[str]] = {
    "pure retention": [],
    "geometric decays": ["--decays", "geometric"],
    "sigmoid gate": ["--gate", "sigmoid"],
    "no alignment": ["--align-steps", "0", "--distill-steps", "400"],
}
OF_LISTS: dict[str, list[str]] = {
    "pure retention": [],
    "a quarter kept, the hardest": ["--keep-attention", "auto"],
    "a quarter kept, spread": ["--keep-attention", "25%"],
    "window of 64": ["--window", "64"],
}
OF_PYTHON: dict[str, list[str]] = {
    "a quarter kept, window of 64": ["--keep-attention", "auto", "--window", "64"],
}
WAYS = {"text": OF_TEXT, "lists": OF_LISTS, "python": OF_PYTHON}
FROM_SCRATCH = {"published decays": "power_of_two", "best decays": "geometric 2 512"}


class Processor:
    """The share of the CPU that this process has received: 1 if nothing else ran on its cores.

    It corrects times, because runs are hours apart on machines with other work.
    """

    def __init__(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    @property
    def share(self) -> float:
        wall, own = self._began
        return (time.process_time() - own) / (time.perf_counter() - wall) / torch.get_num_threads()


def measured(model: PreTrainedModel, learned: str) -> dict[str, Any]:
    """Returns perplexity at the trained length and beyond, and recall of words, on held-out text."""
    stream = teacher.stream(learned, "reporting")
    return vars(measure_text(model.eval(), stream, teacher.SETTING.block, teacher.words(learned)))


@dataclass(frozen=True)
class LinearizationCell(Cell):
    """`model` is "source", one of `WAYS`, or one of `FROM_SCRATCH` after "from scratch, ".

    Attributes:
        learned: training text of the source, one of `teacher.TEXTS`; linearization reads the same.
    """

    kind: ClassVar[str] = "linearization"
    noise: ClassVar[float] = 0.0
    learned: str = "text"
    seed: int = 0

    @property
    def facts(self) -> dict[str, Any]:
        return {"source": self.learned, "seed": self.seed}

    @property
    def source(self) -> Path:
        """Returns the folder of the source."""
        return SOURCES / f"{self.learned}-{self.seed}"

    def measure(self) -> dict[str, Any]:
        torch.manual_seed(self.seed)
        if self.model == "source":
            return self.made_source()
        return self.from_scratch() if self.model.startswith("from scratch") else self.linearized()

    def made_source(self) -> dict[str, Any]:
        record = self.source / "training.json"
        if not record.is_file():
            began = time.perf_counter()
            self.source.mkdir(parents=True, exist_ok=True)
            teacher.write_source(self.source, self.seed, self.learned)
            write_whole(record, json.dumps({"seconds": time.perf_counter() - began}))
        trained = json.loads(record.read_text(encoding="utf-8"))
        return trained | measured(AutoModelForCausalLM.from_pretrained(self.source), self.learned)

    def linearized(self) -> dict[str, Any]:
        text = self.source / teacher.FILE
        if not text.is_file():
            teacher.write_text(text, self.learned)
        with tempfile.TemporaryDirectory() as output:
            arguments = [
                "linearize",
                self.source,
                text,
                "--output",
                f"{output}/model",
                "--block-size",
                teacher.SETTING.block,
            ]
            arguments += ["--batch-size", teacher.SETTING.batch, "--seed", self.seed, "--threads", torch.get_num_threads()]
            for stage, steps in STEPS.items():
                arguments += [f"--{stage}-steps", steps]
            options = WAYS[self.learned][self.model]
            processor = Processor()
            if retnet_hf([str(argument) for argument in [*arguments, *options]]):
                raise RuntimeError(f"retnet-hf linearize failed for {self.name}")
            share = processor.share
            report = json.loads(Path(output, "model", "linearization.json").read_text(encoding="utf-8"))
            student = AutoModelForCausalLM.from_pretrained(f"{output}/model")
            return {
                "seconds": share * sum(stage["seconds"] for stage in report["trainings"]),
                "layer_errors": report["layer_errors"],
                "trainings": report["trainings"],
                "kept": [layer for layer, kind in enumerate(student.config.layer_types) if kind != "linear_attention"],
                **measured(student, self.learned),
            }

    def from_scratch(self) -> dict[str, Any]:
        """Trains a RetNet for the time of linearization; the number of tokens is corrected until the times agree.

        All seeds have the same work, so the shortest measured time is the least disturbed.
        """
        measured_ones = [LinearizationCell("pure retention", seed=seed).result(RESULTS) for seed in range(self.seed + 1)]
        wanted = min(one["seconds"] for one in measured_ones if one is not None)
        schedule = FROM_SCRATCH[self.model.removeprefix("from scratch, ")]
        tokens, ids = TRIAL_TOKENS, teacher.stream(self.learned)
        for _ in range(TRIALS):
            torch.manual_seed(self.seed)
            model = of_equal_size("retnet", {"schedule": schedule}, teacher.SETTING)
            processor = Processor()
            run = train(model, ids, tokens, SCRATCH_RATE, self.seed, teacher.SETTING.block, teacher.SETTING.batch)
            seconds = run.seconds * processor.share
            if abs(seconds - wanted) <= SAME_TIME * wanted:
                break
            tokens = int(run.curve[-1][0] * wanted / seconds)
        return {"seconds": seconds, "tokens": run.curve[-1][0], **measured(model, self.learned)}

    def cost(self, result: dict[str, Any]) -> float:
        return result["perplexity"][str(teacher.SETTING.block)]

    def headline(self, result: dict[str, Any]) -> str:
        figures = ", ".join(f"{length}: {perplexity:.2f}" for length, perplexity in result["perplexity"].items())
        shares = ", ".join(f"{pairs}: {share:.0%}" for pairs, share in result["associative_recall"].items())
        return f"perplexity at {figures}; recalled of pairs {shares}"
