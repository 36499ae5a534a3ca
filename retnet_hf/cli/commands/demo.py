# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf demo`: trains a model, generates text, shows that the state keeps its size, and serves a page of it."""

import functools
import http.server
import itertools
import shutil
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

import retnet_hf.export

from ..errors import Interrupted
from ..interrupts import leaving_order
from ..named_inputs import require_data
from ..options import Overwrite, data_option, loading, run_option, training_option
from ..text.corpus import SAMPLE_TEXT, read_documents, text_files
from ..training.run_folder import TrainingFolder
from .generate import emit, invite


if TYPE_CHECKING:
    from ..training.run import TextRun

MANY = 16_384  # tokens


def demo(
    context: typer.Context,
    output: Annotated[Path | None, run_option("--output", "-o", help="Absent: retnet-demo, or retnet-demo-2, …")] = None,
    text: Annotated[str | None, data_option(help="Train on this file instead of the text in the package.")] = None,
    minutes: Annotated[
        float, training_option(min=0.01, max=600, help="Time limit for the whole command; four epochs may end before.")
    ] = 2.5,
    overwrite: Overwrite = False,
    threads: Annotated[int, run_option(min=1, help="CPU threads.")] = 1,
    browser: Annotated[bool, run_option("--browser", help="Afterwards, show the model in a page until Ctrl-C.")] = False,
) -> None:
    """Train a small RetNet and generate text from it.

    The demo trains on a part of the King James Bible, reloads the finished
    folder with transformers, generates text recurrently, and shows that
    the state keeps its size while the text grows.

    [bold]Examples[/bold]

    retnet-hf demo

    retnet-hf demo --text moby-dick.txt --minutes 10 --output my-model
    """
    started = time.monotonic()
    output = output or free_name("retnet-demo")
    folder = TrainingFolder(output, "demo")
    context.with_resource(folder.claim(False, overwrite, [text], resumable=False))
    source = text or str(SAMPLE_TEXT)
    require_data(source)
    console = Console(highlight=False)
    with loading(console, threads):
        from ..training.run import Course, Recipe, prepare

        if browser:
            from retnet_hf.export.web_folder import PACKAGES, fetched

            from ..text.generation import load_model

            for package in PACKAGES.items():
                fetched(*package)  # fails before the training if something is missing

    recipe = Recipe(preset="tiny", vocab_size=2048, batch_size=4, lr=1e-2, weight_decay=0.6)
    reserve = min(0.4, 0.2 * minutes)  # for loading libraries before training, and for generation after it
    with console.status("reading the text, preparing tokenizer and model"):
        course = Course(epochs=4, minutes=minutes - reserve, started=started)
        run = prepare([source], read_documents([source]), folder, recipe, course)
    console.print(text_files([source])[1], markup=False, soft_wrap=True)
    with leaving_order():
        try:
            run.train(console)
        except Interrupted as error:
            raise Interrupted("interrupted; a demo keeps nothing of an unfinished run", error.signal_number) from None
        finally:
            shutil.rmtree(folder.partial, ignore_errors=True)
    console.print(f"saved: {folder.output}", markup=False, soft_wrap=True)
    show_generation(run, console)
    console.print(f"\n{time.monotonic() - started:.0f} s in all")
    if browser:
        with console.status("making a page"):
            page = folder.output.with_name(f"{folder.output.name}-page")
            model, tokenizer = load_model(str(folder.output))
            retnet_hf.export.export_web(model, page, tokenizer, name=folder.output.name, overwrite=True)
        serve_page(page, console)
    else:
        invite(output, run.prompt, console)
        console.print(f"next: retnet-hf chat {output}; retnet-hf inspect {output}; {output}/loss_curve.png", markup=False)


def show_generation(run: "TextRun", console: Console) -> None:
    """Reloads a finished run, generates text, and prints the size of the state then and after many more tokens."""
    import torch

    from ..text.generation import continue_text, load_model, sampling

    model, tokenizer = load_model(str(run.folder.output))
    console.print("\nreloaded with AutoModelForCausalLM, it generates with one recurrent step per token:\n")
    emit(run.prompt)
    torch.manual_seed(run.recipe.seed)
    written = continue_text(model, tokenizer, run.prompt, sampling(max_new_tokens=160), emit)
    emit("\n")
    console.print(f"\n{written.tokens_per_second:,.0f} tokens/s")

    stream, read = run.training.flatten(), int(written.state.get_seq_length())
    ids = stream[torch.arange(read, MANY) % len(stream)].long()[None].to(model.device)
    before, config = written.state.nbytes, model.config
    with torch.no_grad():
        model(ids, cache=written.state, use_cache=True, logits_to_keep=1)
    keys_and_values = 2 * config.num_hidden_layers * config.hidden_size * model.dtype.itemsize * MANY
    sizes = f"{before / 1e6:.2f} MB, and after {MANY:,} tokens {written.state.nbytes / 1e6:.2f} MB"
    cache = f"the KV cache of a transformer of the same size would take {keys_and_values / 1e6:.0f} MB"
    console.print(f"after {read:,} tokens its state takes {sizes}; {cache}")


def free_name(name: str) -> Path:
    """Returns the first of name, name-2, name-3, … without a result or an unfinished run."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(Path(name) for name in names if not Path(name).exists() and not Path(f"{name}.partial").exists())


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without logging requests."""

    def log_message(self, *args: object) -> None:
        pass


def serve_page(page: Path, console: Console) -> None:
    """Opens a page and serves it, only to this machine, until Ctrl-C."""
    handler = functools.partial(Quiet, directory=str(page))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        address = f"http://localhost:{server.server_port}"
        console.print(f"\nthe model in a page: {address}   (Ctrl-C ends it; the folder is {page})", soft_wrap=True)
        webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("ended")
