# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The `retnet-hf` command: train, generate, demo, train-image, convert, inspect.

What a command alone needs is imported inside it, and every mistake of a user ends in one line and an exit code:
2 for input that cannot be used, 130 for Ctrl-C, 1 where the machine fails.
"""

import functools
import io
import itertools
import logging
import os
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .errors import InputError, Interrupted, first_line
from .text_corpus import SAMPLE_TEXT, read_documents
from .version import __version__


if TYPE_CHECKING:
    from .text_training import TextRun
    from .training_run import TrainingRun

# typer has carried its own copy of click since 0.2x: this is the one whose errors it raises.
UsageError = typer.BadParameter.__base__

app = typer.Typer(
    name="retnet-hf",
    help="Retentive networks: train them like a transformer, let them write like an RNN.\n\n"
    "Start with [bold]retnet-hf demo[/bold], which does both within minutes.",
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_enable=False,
)


class ImageModel(str, Enum):
    """Families of models that classify images."""

    vir = "vir"
    rmt = "rmt"
    metaformer = "metaformer"
    vit = "vit"


class Form(str, Enum):
    """Forms of retention that make sense for training."""

    auto = "auto"
    parallel = "parallel"
    chunkwise = "chunkwise"


run_option, model_option, data_option, image_option, training_option, sampling_option = (
    functools.partial(typer.Option, rich_help_panel=panel)
    for panel in ("Run", "Model", "Text", "Images", "Training", "Sampling")
)
Threads = Annotated[
    int | None, run_option(min=1, help="CPU threads. Absent: one for a small model, or all where that is faster.")
]
Overwrite = Annotated[bool, run_option("--overwrite", help="Replace the model in OUTPUT once the new one is finished.")]
Resume = Annotated[
    bool,
    run_option(
        "--resume", help="Continue an interrupted run, to the same weights bit for bit, or a finished one for longer."
    ),
]


@app.callback(invoke_without_command=True)
def options(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def train(
    texts: Annotated[
        list[str],
        typer.Argument(
            metavar="TEXT...",
            help="Text files, folders (searched for .txt, .md and .jsonl), .jsonl files with one document a line, "
            "or the name of a data set on the Hugging Face Hub.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, run_option("--output", "-o", help="Folder of the finished model; it is made in OUTPUT.partial.")
    ] = Path("retnet-model"),
    resume: Resume = False,
    overwrite: Overwrite = False,
    seed: Annotated[int, run_option(min=0, help="Of weights, order of the text, and samples.")] = 0,
    threads: Threads = None,
    preset: Annotated[
        str | None,
        model_option(help="Size: tiny, mini, small, base, 1.3B, 2.7B, 6.7B, torchscale-base…", show_default="tiny"),
    ] = None,
    config: Annotated[
        Path | None, model_option(help="JSON file with fields of RetNetConfig, in the place of a preset.")
    ] = None,
    tokenizer: Annotated[
        str | None, model_option(help="Folder or Hub name of a tokenizer. Absent: a byte-level BPE is trained on the text.")
    ] = None,
    vocab_size: Annotated[int, model_option(min=258, help="Most tokens of a tokenizer that is trained.")] = 8192,
    field: Annotated[str, data_option(help="Where the text is in a .jsonl line or a row of a data set.")] = "text",
    split: Annotated[str, data_option(help="Part of a data set.")] = "train",
    subset: Annotated[str | None, data_option(help="Configuration of a data set.")] = None,
    eval_fraction: Annotated[
        float, data_option(min=0.001, max=0.5, help="Share of the text held out for evaluation.")
    ] = 0.05,
    block_size: Annotated[int, data_option(min=2, help="Tokens in a training sequence.")] = 256,
    steps: Annotated[int | None, training_option(min=1, help="Optimizer steps, in the place of epochs.")] = None,
    epochs: Annotated[float | None, training_option(min=0.001, help="Times through the text.", show_default="3")] = None,
    minutes: Annotated[
        float | None, training_option(min=0.001, help="Train no longer than this; the learning rate decays by then.")
    ] = None,
    batch_size: Annotated[int, training_option(min=1, help="Sequences in a step.")] = 8,
    lr: Annotated[float, training_option(min=0.0, help="Highest learning rate.")] = 1e-3,
    weight_decay: Annotated[float, training_option(min=0.0, help="Of AdamW.")] = 0.1,
    form: Annotated[
        Form, training_option(help="Form of retention. They compute the same; chunkwise is linear in the block size.")
    ] = Form.auto,
    eval_every: Annotated[
        int | None,
        training_option(
            min=1, help="Steps between evaluations, each with a sample and a checkpoint. Absent: a tenth of all."
        ),
    ] = None,
) -> None:
    """Train a RetNet on text, into a folder that transformers loads.

    [bold]Examples[/bold]

    retnet-hf train book.txt --minutes 5

    retnet-hf train notes/ letters.jsonl --field body --preset mini --output my-model

    retnet-hf train Salesforce/wikitext --subset wikitext-2-raw-v1 --tokenizer gpt2 --preset small --epochs 1

    retnet-hf train book.txt --resume      (after Ctrl-C, a crash or a power cut)

    Ctrl-C saves a checkpoint and stops; a second one stops at once.
    The folder holds model, tokenizer, loss curve and model card.
    """
    from .training_folder import TrainingFolder

    folder = TrainingFolder(output)
    folder.claim(resume, overwrite)
    if preset is not None and config is not None:
        raise InputError("--preset and --config exclude each other")
    quiet()
    from .configuration_retnet import RetNetConfig
    from .text_training import Recipe, prepare
    from .training_run import read_config

    recipe = Recipe(
        preset=preset or (None if config else "tiny"),
        config=None if config is None else read_config(config, RetNetConfig),
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        eval_fraction=eval_fraction,
        block_size=block_size,
        batch_size=batch_size,
        lr=lr,
        weight_decay=weight_decay,
        form=form.value,
        seed=seed,
    )
    console = Console(highlight=False)
    with console.status("reading the text, preparing tokenizer and model"):
        documents = read_documents(texts, field, split, subset)
        run = prepare(
            texts, documents, folder, recipe,
            steps=steps, epochs=epochs, minutes=minutes, eval_every=eval_every, threads=threads, resume=resume,
        )  # fmt: skip
    if complete(run, console):
        invite(output, run.prompt, console)


def complete(run: "TrainingRun", console: Console) -> bool:
    """Trains what is not finished yet. Returns whether there was anything to do."""
    if run.finished:
        done = f"{run.folder.output} is trained to step {run.steps_done:,} already; more --steps or --epochs would go on"
        console.print(done, markup=False, soft_wrap=True)
        return False
    try:
        run_training(run, console)
    except Interrupted as error:
        message = f"{error}, which is saved: the same command with --resume continues from there"
        raise Interrupted(message, error.signal_number) from None
    return True


def run_training(run: "TrainingRun", console: Console) -> None:
    """Trains, and shows how it goes."""
    from .training_progress import RichProgress

    threads = f"{run.threads} CPU thread{'s' * (run.threads > 1)}"
    console.print(f"{run.model.num_parameters():,} parameters, {run.overview()}; {threads}", soft_wrap=True)
    if run.checkpoint is not None:
        console.print(f"continuing after step {run.steps_done:,}")
    start, progress = time.monotonic(), RichProgress(console, run)
    try:
        run.train([progress])
    finally:
        progress.progress.stop()
    console.print(f"{run.outcome()}, in {time.monotonic() - start:.0f} s", soft_wrap=True)
    console.print(f"saved: {run.folder.output}", markup=False, soft_wrap=True)


@app.command()
def train_image(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DATA",
            help="Folder with a sub-folder of pictures for each class, in itself or in its sub-folders train and test; "
            "folder with the IDX files of MNIST or Fashion-MNIST; or the name of a data set on the Hugging Face Hub.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, run_option("--output", "-o", help="Folder of the finished model; it is made in OUTPUT.partial.")
    ] = Path("retnet-image-model"),
    resume: Resume = False,
    overwrite: Overwrite = False,
    seed: Annotated[int, run_option(min=0, help="Of weights, order of the images, augmentation, what is held out.")] = 0,
    threads: Threads = None,
    model: Annotated[ImageModel, model_option(help="Family: three of retention, and ViT to compare them with.")] = (
        ImageModel.vir
    ),
    preset: Annotated[
        str | None,
        model_option(help="Size: micro or mini, for small pictures, or a published one.", show_default="mini"),
    ] = None,
    config: Annotated[
        Path | None, model_option(help="JSON file with fields of the family's configuration, in the place of a preset.")
    ] = None,
    image_size: Annotated[
        int | None, model_option(min=4, help="Pixels a side. Absent: that of the first image, or 64 if it is larger.")
    ] = None,
    patch_size: Annotated[
        int | None,
        model_option(min=1, help="Pixels a side of the patches of vir and vit. Absent: four or more patches a side."),
    ] = None,
    classes: Annotated[
        str | None, image_option(help="Names of the classes in the order of their numbers, separated by commas.")
    ] = None,
    subset: Annotated[str | None, image_option(help="Configuration of a data set.")] = None,
    image_column: Annotated[str | None, image_option(help="Where the pictures of a data set are.")] = None,
    label_column: Annotated[str | None, image_option(help="Where the labels of a data set are.")] = None,
    eval_fraction: Annotated[
        float, image_option(min=0.001, max=0.5, help="Share held out where DATA has no part for evaluation.")
    ] = 0.1,
    crop_padding: Annotated[
        int | None, image_option(min=0, help="Pixels that images are shifted by at most. Absent: an eighth of the size.")
    ] = None,
    flip: Annotated[bool, image_option(help="Reflect half of the images, which digits and letters do not take.")] = True,
    steps: Annotated[int | None, training_option(min=1, help="Optimizer steps, in the place of epochs.")] = None,
    epochs: Annotated[float | None, training_option(min=0.001, help="Times through the images.", show_default="10")] = None,
    minutes: Annotated[
        float | None, training_option(min=0.001, help="Train no longer than this; the learning rate decays by then.")
    ] = None,
    batch_size: Annotated[int, training_option(min=1, help="Images in a step.")] = 128,
    lr: Annotated[float, training_option(min=0.0, help="Highest learning rate.")] = 1e-3,
    weight_decay: Annotated[float, training_option(min=0.0, help="Of AdamW.")] = 0.05,
    label_smoothing: Annotated[
        float, training_option(min=0.0, max=0.9, help="Share of a label given to all classes.")
    ] = 0.0,
    eval_every: Annotated[
        int | None,
        training_option(min=1, help="Steps between evaluations, each with a checkpoint. Absent: a tenth of all."),
    ] = None,
) -> None:
    """Train a classifier of images, into a folder that transformers loads.

    [bold]Examples[/bold]

    retnet-hf train-image photos/ --minutes 10

    retnet-hf train-image /usr/share/datasets/fashion-mnist --model rmt --preset mini --epochs 5 --output my-model

    retnet-hf train-image uoft-cs/cifar10 --model vir --epochs 20

    retnet-hf train-image photos/ --resume      (after Ctrl-C, a crash or a power cut)

    Ctrl-C saves a checkpoint and stops; a second one stops at once.
    The folder holds model, image processor, loss curve, confusion matrix, sample predictions and model card.
    """
    from .training_folder import TrainingFolder

    folder = TrainingFolder(output)
    folder.claim(resume, overwrite)
    if preset is not None and config is not None:
        raise InputError("--preset and --config exclude each other")
    quiet()
    from .image_corpus import read_corpus
    from .image_models import FAMILIES
    from .image_training import ImageRecipe, prepare
    from .training_run import read_config

    recipe = ImageRecipe(
        model=model.value,
        preset=preset or (None if config else "mini"),
        config=None if config is None else read_config(config, FAMILIES[model.value].config_class),
        image_size=image_size,
        patch_size=patch_size,
        crop_padding=crop_padding,
        flip=flip,
        eval_fraction=eval_fraction,
        batch_size=batch_size,
        lr=lr,
        weight_decay=weight_decay,
        label_smoothing=label_smoothing,
        seed=seed,
    )
    console = Console(highlight=False)
    with console.status("reading the images, preparing the model"):
        corpus = read_corpus(
            source,
            classes=None if classes is None else [name.strip() for name in classes.split(",")],
            subset=subset,
            image_column=image_column,
            label_column=label_column,
            eval_fraction=eval_fraction,
            seed=seed,
        )
        run = prepare(
            source, corpus, folder, recipe,
            steps=steps, epochs=epochs, minutes=minutes, eval_every=eval_every, threads=threads, resume=resume,
        )  # fmt: skip
    complete(run, console)


@app.command()
def generate(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Folder of a model, or its name on the Hugging Face Hub.", show_default=False),
    ],
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Text to continue. Absent, or -: read from stdin.", show_default=False),
    ] = None,
    max_new_tokens: Annotated[int, sampling_option("--max-new-tokens", "-n", min=1, help="Tokens to write at most.")] = 200,
    temperature: Annotated[
        float, sampling_option(min=0.0, help="Below 1 tamer, above 1 wilder; 0 always takes the most probable token.")
    ] = 0.8,
    top_p: Annotated[
        float, sampling_option(min=0.001, max=1.0, help="Draw from the most probable tokens that make up this much.")
    ] = 0.95,
    top_k: Annotated[int, sampling_option(min=0, help="Draw from so many most probable tokens; 0: from all.")] = 0,
    repetition_penalty: Annotated[
        float, sampling_option(min=0.01, help="Above 1, tokens that were there become less probable.")
    ] = 1.0,
    seed: Annotated[int | None, sampling_option(min=0, help="The same seed draws the same text.")] = None,
    echo: Annotated[bool, run_option(help="Print the prompt before its continuation.")] = True,
    threads: Threads = None,
) -> None:
    """Continue a text, token by token, in constant memory.

    The text goes to stdout as it is written, and nothing else does;
    speed and size of the state go to stderr.

    [bold]Examples[/bold]

    retnet-hf generate my-model "In the beginning"

    retnet-hf generate my-model "And he said" -n 1000 --temperature 1 --seed 7

    cat chapter.txt | retnet-hf generate my-model --no-echo > next-chapter.txt
    """
    text = read_prompt(prompt)
    quiet()
    import torch

    from .cpu_threads import cpu_threads, decoding_threads
    from .text_generation import Sampling, continue_text, load_model

    with Console(stderr=True).status("loading the model"):
        network, tokenizer = load_model(model)
    if seed is not None:
        torch.manual_seed(seed)
    if echo:
        emit(text)
    sampling = Sampling(max_new_tokens, temperature, top_k, top_p, repetition_penalty)
    with cpu_threads(threads or decoding_threads(network)):
        written = continue_text(network, tokenizer, text, sampling, emit)
    emit("\n")
    state = getattr(written.state, "nbytes", None)
    size = "" if state is None else f"; the state takes {state:,} bytes, whatever the length"
    print(f"{written.new_tokens} tokens, {written.tokens_per_second:,.1f} tokens/s{size}", file=sys.stderr)


@app.command()
def demo(
    output: Annotated[
        Path | None,
        run_option("--output", "-o", help="Folder of the model. Absent: retnet-demo, or the next free retnet-demo-2, …"),
    ] = None,
    text: Annotated[
        str | None, data_option(help="Train on this text file in the place of the one that comes with the package.")
    ] = None,
    minutes: Annotated[float, training_option(min=0.01, max=600, help="Time for everything.")] = 2.5,
    overwrite: Overwrite = False,
    threads: Threads = None,
) -> None:
    """Train a small RetNet and let it write, in one go.

    It trains on a part of the King James Bible, reloads the finished folder
    with transformers, writes a text recurrently, and shows that what it
    remembers keeps its size while the text grows.

    [bold]Examples[/bold]

    retnet-hf demo

    retnet-hf demo --text moby-dick.txt --minutes 10 --output my-model
    """
    started = time.monotonic()
    from .training_folder import TrainingFolder

    output = output or free_name("retnet-demo")
    folder = TrainingFolder(output)
    folder.claim(resume=False, overwrite=overwrite, resumable=False)
    quiet()
    from .text_training import Recipe, prepare

    console = Console(highlight=False)
    source = text or str(SAMPLE_TEXT)
    recipe = Recipe(preset="tiny", vocab_size=2048, batch_size=4, lr=5e-3)
    reserve = min(0.4, 0.2 * minutes)  # for loading the libraries before training, and for writing after it
    with console.status("reading the text, preparing tokenizer and model"):
        run = prepare(
            [source], read_documents([source]), folder, recipe,
            epochs=4, minutes=minutes - reserve, started=started, threads=threads,
        )  # fmt: skip
    try:
        run_training(run, console)
    except Interrupted as error:
        raise Interrupted(f"{error}; a demo keeps nothing of an unfinished run", error.signal_number) from None
    finally:
        shutil.rmtree(folder.partial, ignore_errors=True)
    show_generation(run, console)
    console.print(f"\n{time.monotonic() - started:.0f} s in all")
    invite(output, run.prompt, console)


@app.command()
def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="INPUT",
            help="Folder or file of a foreign checkpoint, or its name on the Hugging Face Hub.",
            show_default=False,
        ),
    ],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder of the converted model.", show_default=False)],
    format_name: Annotated[
        str | None, typer.Option("--from", metavar="FORMAT", help="Its format. Absent: told from names and config.json.")
    ] = None,
    licence: Annotated[str | None, typer.Option("--license", help="Of the weights, where the source does not say.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Turn a checkpoint of another implementation into a folder that transformers loads.

    Formats: fla, torchscale, syncdoth; vir_official, vir_pulfer, rmt, poolformer; yet_another_retnet is recognised only.
    Folders of fla and syncdoth need no conversion: from_pretrained reads them as they are.

    [bold]Examples[/bold]

    retnet-hf convert checkpoint_last.pt my-retnet --from torchscale

    retnet-hf convert fla-hub/retnet-1.3B-100B retnet-1.3B
    """
    quiet()
    from rich.progress import track

    from conversion.card import how_to_load
    from conversion.checkpoint import Checkpoint, locate
    from conversion.folder import claim, write_folder
    from conversion.formats import FORMATS, plan_of
    from conversion.report import moves_table

    if format_name is not None and format_name not in FORMATS:
        raise InputError(f"--from must be one of {', '.join(FORMATS)}, got {format_name!r}")
    console = Console(highlight=False, markup=False)
    claim(output, overwrite)
    checkpoint = Checkpoint(path := locate(source))
    plan = plan_of(checkpoint, format_name)
    bar = Console(stderr=True)
    progress = iter(track(plan.moves, "converting", console=bar, transient=True, disable=not bar.is_terminal))
    next(progress)
    repository = None if path == Path(source).expanduser() else source
    model = write_folder(checkpoint, plan, output, licence, overwrite, lambda move: next(progress, None), repository)
    console.print(moves_table(plan, checkpoint.shapes))
    used = sum(len(move.sources) for move in plan.moves)
    console.print(
        f"{used:,} tensors of format {plan.format}, each used once, became {model.num_parameters():,} parameters in {output}"
    )
    console.print(f"load it: {how_to_load(model, str(output))}", soft_wrap=True)


@app.command()
def inspect(
    source: Annotated[
        str,
        typer.Argument(metavar="INPUT", help="Folder or file of a checkpoint, or its name on the Hub.", show_default=False),
    ],
) -> None:
    """Say what a checkpoint is: format, size, parameters, the state it keeps, and how long each head remembers.

    [bold]Examples[/bold]

    retnet-hf inspect retnet-model

    retnet-hf inspect pytorch_model.bin
    """
    quiet()
    from conversion.checkpoint import Checkpoint, locate
    from conversion.report import describe

    console = Console(highlight=False, markup=False)
    facts, decays = describe(Checkpoint(locate(source)))
    console.print(facts, soft_wrap=True)
    if decays is not None:
        console.print(decays)


def show_generation(run: "TextRun", console: Console) -> None:
    """Reloads a finished run, lets it write, and tabulates the size of its state while it reads on."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from .cpu_threads import cpu_threads
    from .text_generation import Sampling, continue_text

    model = AutoModelForCausalLM.from_pretrained(run.folder.output).to(run.model.device).eval()
    tokenizer = AutoTokenizer.from_pretrained(run.folder.output)
    console.print("\nreloaded with AutoModelForCausalLM, it writes, one recurrent step per token:\n")
    emit(run.prompt)
    torch.manual_seed(run.recipe.seed)
    with cpu_threads(run.decode_threads):
        written = continue_text(model, tokenizer, run.prompt, Sampling(max_new_tokens=160), emit)
    emit("\n")
    console.print(f"\n{written.tokens_per_second:,.0f} tokens/s. The same state reads on:\n")

    config = model.config
    table = Table("tokens read", "bytes of the state", "bytes of a transformer's KV cache", box=None)
    for column in table.columns:
        column.justify = "right"
    stream = run.training.blocks.flatten()
    state, read = written.state, written.tokens.shape[1] - 1  # the last token was written, not read
    with torch.no_grad(), cpu_threads(run.threads):
        for target in (read, 1024, 4096, 16384):
            ids = stream[torch.arange(read, target) % len(stream)].long()[None].to(model.device)
            if target > read:
                model(ids, past_key_values=state, use_cache=True, logits_to_keep=1)
            read = target
            keys_and_values = 2 * config.num_hidden_layers * config.hidden_size * model.dtype.itemsize * read
            table.add_row(f"{int(state.get_seq_length()):,}", f"{state.nbytes:,}", f"{keys_and_values:,}")
    console.print(table)


def read_prompt(argument: str | None) -> str:
    """The prompt from the command line or, without the line break at its end, from stdin."""
    given = argument not in (None, "-")
    if not given and (sys.stdin is None or (argument is None and sys.stdin.isatty())):
        raise InputError("give a prompt as an argument or on stdin")
    data = os.fsencode(argument) if given else sys.stdin.buffer.read().removesuffix(b"\n")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        place = "the prompt" if given else "stdin"
        raise InputError(f"{place} is not UTF-8 text (byte 0x{data[error.start]:02x} at {error.start})") from error


def free_name(name: str) -> Path:
    """The first of name, name-2, name-3, … where no result and no unfinished run is."""
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(Path(name) for name in names if not Path(name).exists() and not Path(f"{name}.partial").exists())


def invite(model: Path, prompt: str, console: Console) -> None:
    """Shows the command that comes next."""
    console.print("try it:", shlex.join(["retnet-hf", "generate", str(model), prompt]), markup=False, soft_wrap=True)


def emit(text: str) -> None:
    """Writes text to stdout at once."""
    print(text, end="", flush=True)


def quiet() -> None:
    """Keeps the libraries from reporting what a user can do nothing about. Their errors are raised as ever."""
    warnings.filterwarnings("ignore")
    for name in ("huggingface_hub", "datasets", "torch", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def complain(message: str, code: int) -> int:
    """One line on stderr. Returns the exit code."""
    print(f"retnet-hf: {' '.join(message.split())}", file=sys.stderr)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    try:
        code: Any = app(arguments or ["--help"], prog_name="retnet-hf", standalone_mode=False) or 0
        return complain("interrupted", code) if code == 130 else code
    except (KeyboardInterrupt, typer.Abort):
        return complain("interrupted", 130)
    except UsageError as error:
        context = getattr(error, "ctx", None)
        return complain(f"{error.format_message()} (see: {context.command_path if context else 'retnet-hf'} --help)", 2)
    except InputError as error:
        return complain(str(error), 2)
    except Interrupted as error:
        return complain(str(error), 128 + error.signal_number)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it flushes at exit
        return 141
    except OSError as error:
        return complain(f"{error.filename}: {error.strerror}" if error.filename else first_line(error), 1)


if __name__ == "__main__":
    sys.exit(main())
