# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What commands share: arguments, options, the panels of their help, and the slow imports of libraries."""

import functools
import gc
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from rich.console import Console
from typer.core import TyperCommand


T = TypeVar("T")
run_option, model_option, data_option, training_option, sampling_option = (
    functools.partial(typer.Option, rich_help_panel=panel) for panel in ("Run", "Model", "Text", "Training", "Sampling")
)
argument = functools.partial(typer.Argument, show_default=False)
WORDS = {"bool": " ", "int": "N", "float": "X", "Path": "PATH", "str": "NAME"}  # what help shows for a value of a type
Model = Annotated[str, argument(metavar="MODEL", help="Folder of a model, or its name on the Hub: NAME or NAME@REVISION.")]
Threads = Annotated[int | None, run_option(min=1, help="CPU threads. Absent: OMP_NUM_THREADS, or all cores.")]
WriterThreads = Annotated[
    int | None, run_option(min=1, help="CPU threads. Absent: one for a small model, else OMP_NUM_THREADS, or all cores.")
]
Output = Annotated[Path, run_option("--output", "-o", help="Folder of the finished model; it is made in OUTPUT.partial.")]
Overwrite = Annotated[bool, run_option("--overwrite", help="Replace the model in OUTPUT once the new one is finished.")]
Resume = Annotated[bool, run_option("--resume", help="Continue a run. The same number of processes gives the same weights.")]
Config = Annotated[
    Path | None,
    model_option(exists=True, dir_okay=False, help="JSON file with fields of the configuration, instead of a preset."),
]
Field = Annotated[str, data_option(help="Field of the text in a row.")]
Split = Annotated[str, data_option(help="Part of a data set.")]
Subset = Annotated[str | None, data_option(help="Configuration of a data set.")]
EvalFraction = Annotated[float, data_option(min=0.001, max=0.5, help="Share of the text held out for evaluation.")]
BatchSize = Annotated[int, training_option(min=1, help="Sequences in a step, over all processes.")]
EvalEvery = Annotated[
    int | None,
    training_option(min=1, help="Steps between evaluations, each with a checkpoint. Absent: about a tenth of the steps."),
]
TopP = Annotated[float, sampling_option(min=0.001, max=1.0, help="Draw from the top tokens with this total probability.")]
TopK = Annotated[int, sampling_option(min=0, help="Draw from this number of most probable tokens; 0: from all.")]
Temperature = Annotated[float, sampling_option(min=0.0, help="Higher is more random; 0 takes the most probable token.")]
RepetitionPenalty = Annotated[float, sampling_option(min=0.01, help="Values above 1 reduce repetitions.")]


class Command(TyperCommand):
    """A command whose help shows words for values, nothing for flags, and examples without blank lines between them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        hints = getattr(self.callback, "__annotations__", {})
        for option in self.params:
            kinds = str(get_args(hints.get(option.name))[:1])  # such as "(int | None,)"
            words = (word for kind, word in WORDS.items() if kind in kinds)
            if "Literal" not in kinds:
                option.metavar = option.metavar or next(words, None)
        before, title, examples = (self.help or "").partition("[bold]Examples[/bold]\n\n")
        lines, rest = [], examples.split("\n\n")
        while rest and rest[0].lstrip().startswith(("retnet-hf", "torchrun", "cat ")):
            lines.append(rest.pop(0).strip())
        self.help = "\n\n".join([before + title.strip(), "\n".join(["\b", *lines]), *rest]) if title else before


def chosen(kind: Callable[..., T], context: typer.Context, **further: Any) -> T:
    """Calls a dataclass or function with the options that have its arguments' names, and with `further` arguments."""
    return kind(**{name: value for name, value in context.params.items() if name in kind.__annotations__} | further)


def given(context: typer.Context, *names: str) -> bool:
    """Returns whether the user has passed any of these options, named by their arguments."""
    return any(context.get_parameter_source(name).name != "DEFAULT" for name in names)


@contextmanager
def loading(console: Console, threads: int | None = None) -> Iterator[None]:
    """Shows a spinner during the imports of a command, sets CPU threads, and disables warnings that users cannot act on."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    gc.disable()  # collection during imports and at exit would take 1.6 s of the 3.9 s of a short command
    with console.status("loading torch and transformers"):
        import torch
        import transformers

        from .. import library  # noqa: F401

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if threads is not None:
            torch.set_num_threads(threads)
        yield
    gc.freeze()
    gc.enable()
