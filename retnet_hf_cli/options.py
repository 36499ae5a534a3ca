# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Arguments and options that several commands have, and the panels of their help."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer


T = TypeVar("T")
run_option, model_option, data_option, training_option, sampling_option = (
    functools.partial(typer.Option, rich_help_panel=panel) for panel in ("Run", "Model", "Text", "Training", "Sampling")
)
argument = functools.partial(typer.Argument, show_default=False)
Model = Annotated[str, argument(metavar="MODEL", help="Folder of a model, or its name on the Hugging Face Hub.")]
Threads = Annotated[int | None, run_option(min=1, help="CPU threads. Absent: OMP_NUM_THREADS, or all cores.")]
WriterThreads = Annotated[
    int | None, run_option(min=1, help="CPU threads. Absent: one for a small model, else OMP_NUM_THREADS, or all cores.")
]
Output = Annotated[Path, run_option("--output", "-o", help="Folder of the finished model; it is made in OUTPUT.partial.")]
Overwrite = Annotated[bool, run_option("--overwrite", help="Replace the model in OUTPUT once the new one is finished.")]
Resume = Annotated[
    bool, run_option("--resume", help="Continue a run, in as many processes to the same weights bit for bit.")
]
Config = Annotated[
    Path | None,
    model_option(exists=True, dir_okay=False, help="JSON file with fields of the configuration, in the place of a preset."),
]
Field = Annotated[str, data_option(help="Where the text is in a .jsonl line or a row of a data set.")]
Split = Annotated[str, data_option(help="Part of a data set.")]
Subset = Annotated[str | None, data_option(help="Configuration of a data set.")]
EvalFraction = Annotated[float, data_option(min=0.001, max=0.5, help="Share of the text held out for evaluation.")]
Steps = Annotated[int | None, training_option(min=1, help="Optimizer steps, in the place of epochs.")]
Minutes = Annotated[
    float | None,
    training_option(
        min=0.001,
        help="The most that it may take from now on, not how long it lasts: --steps or --epochs may end it before. The "
        "learning rate decays by then.",
    ),
]
BatchSize = Annotated[int, training_option(min=1, help="Sequences in a step, of all processes together.")]
LearningRate = Annotated[float, training_option(min=0.0, help="Highest learning rate.")]
WeightDecay = Annotated[float, training_option(min=0.0, help="Of AdamW.")]
EvalEvery = Annotated[
    int | None,
    training_option(min=1, help="Steps between evaluations, each with a checkpoint. Absent: about a tenth of all."),
]
TopP = Annotated[float, sampling_option(min=0.001, max=1.0, help="Draw from the tokens that make up this much.")]
TopK = Annotated[int, sampling_option(min=0, help="Draw from so many most probable tokens; 0: from all.")]
Temperature = Annotated[float, sampling_option(min=0.0, help="Higher is wilder; 0 takes the most probable.")]
RepetitionPenalty = Annotated[float, sampling_option(min=0.01, help="Above 1, less of what was there.")]


def chosen(kind: Callable[..., T], context: typer.Context, **further: Any) -> T:
    """A dataclass, or a function, called with the values of the options of its arguments' names, and with `further` ones."""
    return kind(**{name: value for name, value in context.params.items() if name in kind.__annotations__} | further)


def given(context: typer.Context, *names: str) -> bool:
    """Whether a user has given any of these options, by the names of their arguments."""
    return any(context.get_parameter_source(name).name != "DEFAULT" for name in names)
