# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Loading a saved language model and letting it write, token by token, with the time it takes."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel, TextStreamer

import retnet_hf
import retnet_hf_cpu
from retnet_hf.retnet.generation_retnet import CACHE
from retnet_hf_conversion.errors import first_line

from ..errors import InputError
from ..named_inputs import load
from .corpus import load_tokenizer


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REPORTED = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # of `from_pretrained`, for `whole`


def sampling(
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    repetition_penalty: float = 1.0,
) -> dict[str, Any]:
    """Arguments of `generate()` that say how the next token is drawn. A temperature of 0 takes the most probable one."""
    lengths = {"max_new_tokens": max_new_tokens, "repetition_penalty": repetition_penalty}
    if temperature == 0:
        return lengths | {"do_sample": False}
    return lengths | {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}


class Generation(NamedTuple):
    """What one call wrote, and what it took."""

    tokens: list[int]  # without the prompt
    tokens_per_second: float  # from the first new token to the last; of a single one, with the prompt
    state: Cache


class Writer(TextStreamer):
    """Hands on every piece of text as soon as it is certain, and looks at the clock at every token."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", write: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.write(text)


def use_few_threads(model: PreTrainedModel) -> None:
    """One thread for a small model on a CPU: more gain it nothing, and where the CPU is busy they wait for each other."""
    if model.device.type == "cpu" and model.num_parameters() < 1e8:
        torch.set_num_threads(1)


def compile_steps(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of a model with compiled decode steps. Raises InputError for a model that has none, or without a compiler."""
    if not isinstance(model, retnet_hf.RetNetForCausalLM):
        raise InputError(f"--compile is for a RetNet, and this is a model of type {model.config.model_type}")
    try:
        fast = retnet_hf_cpu.compile(model)
    except (ValueError, RuntimeError, OSError) as error:
        raise InputError(first_line(error)) from error
    if all(type(mine) is type(theirs) for mine, theirs in zip(fast.modules(), model.modules(), strict=True)):
        raise InputError("--compile: no layer of this model can be compiled: all are quantised, adapted or hooked")
    return fast


def device() -> torch.device:
    """Where models run: on the accelerator, if there is one."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def whole(model: PreTrainedModel, report: dict[str, Any], name: str) -> PreTrainedModel:
    """A model with what transformers reports of its loading. Raises InputError if weights are missing."""
    if absent := sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"]):
        raise InputError(f"the weights in {name} do not fit its config.json: {len(absent)} are missing or of another shape")
    return model


def load_model(name: str) -> tuple[PreTrainedModel, "PreTrainedTokenizerBase"]:
    """Model and tokenizer of a folder or of a repository of the Hub, on the accelerator if there is one.

    Raises InputError if they cannot be loaded, or weights are missing.
    """
    model = whole(*load(AutoModelForCausalLM, name, dtype="auto", **REPORTED), name)
    tokenizer = load_tokenizer(name)
    return model.to(device()).eval(), tokenizer


def load_state(file: Path, model: PreTrainedModel) -> retnet_hf.RetNetState:
    """Returns a saved state of a model, on its device. Raises InputError for any other file."""
    try:
        return retnet_hf.RetNetState.load(file, model, device=model.device)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} holds no state of this model: {first_line(error)}") from error


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> list[int]:
    """Ids of a prompt; those of the beginning of a document for an empty one. Raises InputError where there is none."""
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ids = tokenizer(prompt)["input_ids"] or [begin]
    if None in ids:
        raise InputError("the tokenizer has neither a bos nor an eos token, with which an empty text begins: give a prompt")
    return ids


def continue_text(
    model: PreTrainedModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | list[int],
    arguments: dict[str, Any],
    write: Callable[[str], object],
    past: int = 0,
) -> Generation:
    """Continues a prompt by `generate(**arguments)`, and hands every piece of text to `write` as soon as it is certain.

    Args:
        prompt: a text, or ids. past: tokens before it that are in the cache among the arguments.

    Raises:
        InputError: for a tokenizer of another model, and for options in its folder that `generate` refuses.
    """
    ids = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise InputError("there is nothing to go on from: the chat template has written nothing")
    if max(ids) >= (known := model.config.get_text_config().vocab_size):
        raise InputError(
            f"the tokenizer has a token {max(ids)}, and the model knows {known} tokens: copy the tokenizer that the model "
            "was trained with into its folder"
        )
    writer = Writer(tokenizer, write)
    try:
        output = model.generate(
            torch.tensor([ids], device=model.device),
            attention_mask=torch.ones(1, past + len(ids), dtype=torch.long, device=model.device),
            streamer=writer,
            use_cache=True,
            num_beams=1,  # text is written as soon as it is certain
            return_dict_in_generate=True,
            **arguments,
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:  # whatever options in its folder lead to
        raise InputError(f"the model cannot continue this text: {first_line(error)}") from error
    read, *times = writer.times  # of the prompt, then of every new token
    speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 1 / (times[0] - read)
    return Generation(output.sequences[0, len(ids) :].tolist(), speed, output[CACHE])
