# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The end of linearizing: both models are measured, and the folder of the new one is completed.

`run` is the `Linearization` of `pipeline`, which imports this file.
"""

import dataclasses
import json
import shutil
import textwrap
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from retnet_hf.conversion.converted_folder import licence_of
from retnet_hf.conversion.replaced_folder import replace
from retnet_hf.hub.cards import model_card
from retnet_hf.linearization.alignment import measure_layers
from retnet_hf.linearization.linearized_card import markdown
from retnet_hf.linearization.what_was_kept import (
    Extent,
    Report,
    Training,
    measure_decoding,
    measure_parts,
    measure_text,
    measure_texts,
    measured_divergence,
    measured_part,
    recalled_vocabulary,
)
from retnet_hf.retnet.modeling_retnet import RetNetForCausalLM

from ..text.conversation import Conversation
from ..text.generation import sampling
from ..training.figures import axes_of
from .stages import FIGURES, TRAINING


REPORT, POSITIONS = "linearization.json", "positions.png"
PROMPT_TOKENS, PROMPT_CHARACTERS = 24, 48  # maximal length of the example in the model card
PROMPTS = ("Why is the sky blue?", "Write two sentences about a fox and a river.")  # answered by both models
ANSWER_TOKENS = 48


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """Returns a model's greedy answer to a prompt."""
    return Conversation(model, tokenizer, sampling(ANSWER_TOKENS, temperature=0)).say(prompt).text


def opening_of(run: Any) -> str:
    """Returns the first words of the held-out text."""
    opening = run.tokenizer.decode(run.texts.evaluation[:PROMPT_TOKENS], skip_special_tokens=True)
    return textwrap.shorten(opening, PROMPT_CHARACTERS, placeholder="")


def report_of(run: Any, student: RetNetForCausalLM) -> Report:
    """Measures both models on held-out text, and returns the report."""
    recipe, teacher, stream = run.recipe, run.teacher, run.texts.evaluation.long()
    vocabulary = recalled_vocabulary(stream, run.tokenizer.all_special_ids)
    extent = Extent().shortened(recipe.report)
    sizes = {"block_size": recipe.block_size, "extent": extent}
    theirs, own = (measure_text(model, stream, vocabulary=vocabulary, **sizes) for model in (teacher, student))
    measure_texts({teacher: theirs, student: own}, run.texts.by_text, **sizes)
    measure_decoding({teacher: theirs, student: own}, stream, **sizes)
    errors = measure_layers(student, teacher, run.measured_blocks)
    files = [run.folder.partial / stage / TRAINING for stage in recipe.steps]
    trainings = [Training(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
    source, *texts = (
        Path(name).resolve().name if Path(name).exists() else name for name in (recipe.source, *run.texts.names)
    )
    prompts = [opening_of(run)] if run.tokenizer.chat_template is None else PROMPTS
    answers = [(prompt, *(answer(model, run.tokenizer, prompt) for model in (teacher, student))) for prompt in prompts]
    return Report(
        source=source,
        positions=getattr(teacher.config, "max_position_embeddings", None),
        options=recipe.options,
        texts=texts,
        read=len(run.texts.training) + len(run.texts.evaluation),
        block_size=recipe.block_size,
        held_out=len(measured_part(stream, recipe.block_size, extent)),
        teacher=theirs,
        student=own,
        layer_errors=errors,
        layer_costs=run.layer_costs,
        divergence=measured_divergence(student, teacher, stream, **sizes),
        without=measure_parts(student, stream, **sizes),
        unseen=run.texts.unseen,
        answers=answers,
        extent=extent,
        trainings=trainings,
    )


def finish(run: Any, student: RetNetForCausalLM) -> None:
    """Completes the folder, moves it to OUTPUT, and then deletes the stages."""
    partial, finished = run.folder.partial, run.folder.partial / "finished"
    shutil.rmtree(finished, ignore_errors=True)
    finished.mkdir()
    with run.console.status("measuring both models"):
        report = report_of(run, student)
    student.save_pretrained(finished)
    run.tokenizer.save_pretrained(finished)
    (finished / REPORT).write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", encoding="utf-8")
    curves = []
    for stage in run.recipe.steps:
        shutil.copyfile(partial / stage / f"{stage}.png", finished / f"{stage}.png")
        curves.append(f"![{FIGURES[stage]} in the stage {stage}]({stage}.png)\n")
    draw_positions(report, finished / POSITIONS)
    curves.append(f"![Perplexity of both by the place of a token in its block]({POSITIONS})\n")
    name, prompt = run.folder.output.name, opening_of(run)
    card = model_card(student, name, None, prompt, markdown(report) + "\n" + "\n".join(curves))
    for field, value in source_metadata(run.recipe.source).items():
        card.data[field] = value
    card.save(finished / "README.md")
    replace(run.folder.output, finished)
    shutil.rmtree(partial)
    for length, theirs in report.teacher.perplexity.items():
        figures = f"source {theirs:,.2f}, RetNet [bold green]{report.student.perplexity[length]:,.2f}[/bold green]"
        run.console.print(f"perplexity in blocks of {length:,}: {figures}")


def source_metadata(name: str) -> dict[str, Any]:
    """Returns metadata for the model card: the repository of the source, and its licence if known."""
    if Path(name).is_dir():
        return licence_of(Path(name)) or {}
    try:
        licence = licence_of(Path(hf_hub_download(name, "README.md")).parent)
    except (OSError, HfHubHTTPError):  # no card or no network
        licence = None
    return {"base_model": name, **(licence or {})}


def draw_positions(report: Report, file: Path) -> None:
    """Draws the perplexity of both models against the position of a token in its block, as a PNG."""
    figure, axes = axes_of(xlabel="tokens before", ylabel="perplexity", xscale="log")
    for name, measures in (("source", report.teacher), ("this model", report.student)):
        last = [int(place.rsplit(" ", 1)[1]) for place in measures.by_position]
        axes.plot(last, list(measures.by_position.values()), "o-", label=name, linewidth=1.5, markersize=4)
    axes.legend()
    figure.savefig(file, dpi=120)
