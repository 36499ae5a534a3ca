# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf train`: trains a language model on text and saves it."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from .. import options, ranks
from ..errors import InputError
from ..named_inputs import model_source, require_data
from ..options import argument, data_option, loading, model_option, run_option, training_option
from ..training.run_folder import TrainingFolder
from .generate import invite


def train(
    context: typer.Context,
    texts: Annotated[
        list[str],
        argument(
            metavar="TEXT...",
            help="Files (.txt, .md, .jsonl, .csv, .tsv, .parquet, .json), folders of them, or a data set on the Hub.",
        ),
    ],
    output: options.Output = Path("retnet-model"),
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    seed: Annotated[int, run_option(min=0, help="Seed of weights, order of the text, and samples.")] = 0,
    threads: options.Threads = None,
    base: Annotated[
        str | None, model_option("--from", metavar="MODEL", help="Train this RetNet further: a folder or a Hub name.")
    ] = None,
    preset: Annotated[str | None, model_option(help="Size: tiny, mini, small, base, 1.3B…", show_default="tiny")] = None,
    config: options.Config = None,
    tokenizer: Annotated[str | None, model_option(help="Folder or Hub name. Absent: one is trained on the text.")] = None,
    vocab_size: Annotated[int, model_option(min=258, help="Largest vocabulary of a trained tokenizer.")] = 8192,
    field: options.Field = "text",
    split: options.Split = "train",
    subset: options.Subset = None,
    eval_fraction: options.EvalFraction = 0.05,
    block_size: Annotated[int, data_option(min=2, help="Tokens in a training sequence.")] = 256,
    steps: Annotated[int | None, training_option(min=1, help="Optimizer steps, instead of epochs.")] = None,
    epochs: Annotated[float | None, training_option(min=0.001, help="Passes over the text.", show_default="3")] = None,
    minutes: Annotated[
        float | None,
        training_option(
            min=0.001,
            help="Time limit from now on: --steps or --epochs may end the run before. The learning rate decays until then.",
        ),
    ] = None,
    batch_size: options.BatchSize = 8,
    lr: Annotated[
        float | None, training_option(min=0.0, help="Highest learning rate.", show_default="1e-3; 1e-4 with --from")
    ] = None,
    optimizer: Annotated[
        Literal["muon", "adamw"] | None,
        training_option(
            help="Muon updates values, outputs, feed-forward; AdamW the rest.", show_default="muon; adamw with --from"
        ),
    ] = None,
    weight_decay: Annotated[float, training_option(min=0.0, help="Weight decay.")] = 0.1,
    form: Annotated[Literal["auto", "parallel", "chunkwise"], training_option(help="Form of retention.")] = "auto",
    eval_every: options.EvalEvery = None,
) -> None:
    """Train a RetNet on text, and save it in a folder that transformers loads.

    [bold]Examples[/bold]

    retnet-hf train book.txt --minutes 5

    retnet-hf train notes/ letters.csv --field body --preset mini --output my-model

    retnet-hf train chats.jsonl --from my-model --output my-chat-model      (rows with messages, or prompt and completion)

    retnet-hf train Salesforce/wikitext --subset wikitext-2-raw-v1 --tokenizer gpt2 --preset small --epochs 1

    retnet-hf train book.txt --resume      (after Ctrl-C, a crash or a power cut)

    torchrun --nproc-per-node 2 -m retnet_hf.cli train book.txt      (processes share each step)

    Ctrl-C saves a checkpoint and stops; a second one stops at once (under torchrun, after 30 seconds).
    The folder contains model, tokenizer, loss curve and model card.
    """
    for source in texts:
        require_data(source)
    folder = TrainingFolder(output, "train")
    context.with_resource(folder.claim(resume, overwrite, [*texts, config, tokenizer, base]))
    made = [name for name in ("base", "preset", "config") if context.params[name] is not None]
    if len(made) > 1 or (base is not None and options.given(context, "tokenizer", "vocab_size")):
        raise InputError("--from, --preset and --config exclude each other, and --from has its own tokenizer")
    base = None if base is None else model_source(base)
    console = Console(highlight=False, quiet=not ranks.FIRST)
    ranks.share_of(batch_size)
    with loading(console, threads):
        from retnet_hf.conversion.checkpoint import read_json

        from ..text.corpus import CHAT_TEMPLATE, read_documents, text_files
        from ..training.run import OF_NEW_MODELS, Course, Recipe, prepare

    ranks.join()
    if optimizer == "muon" and OF_NEW_MODELS != "muon":
        raise InputError("--optimizer muon needs PyTorch 2.9 or later")
    optimizer = optimizer or (OF_NEW_MODELS if base is None else "adamw")
    fields = None if config is None else read_json(config, "must hold a JSON object with fields of RetNetConfig")
    if fields is not None and fields.get("model_type", "retnet") != "retnet":
        raise InputError(f'{config} describes a model of type "{fields["model_type"]}", not "retnet"')
    lr = lr if lr is not None else 1e-3 if base is None else 1e-4
    preset = preset or ("tiny" if config is None and base is None else None)
    recipe = options.chosen(Recipe, context, base=base, preset=preset, config=fields, lr=lr, optimizer=optimizer)
    with console.status("reading the text, preparing tokenizer and model"):
        documents = read_documents(texts, field, split, subset, folder.own)
        run = prepare(texts, documents, folder, recipe, options.chosen(Course, context))
    console.print(text_files(texts, folder.own)[1], markup=False, soft_wrap=True)
    if run.tokenizer.chat_template == CHAT_TEMPLATE:
        console.print("the tokenizer has no chat template: turns are written as User: … and Assistant: …", soft_wrap=True)
    run.train(console)
    console.print(f"saved: {folder.output}", markup=False, soft_wrap=True)
    invite(output, None if isinstance(run.training, list) else run.prompt, console)
