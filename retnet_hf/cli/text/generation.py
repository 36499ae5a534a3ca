# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Loading of saved language models, and timed generation of text, token by token."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, LogitsProcessor, PreTrainedModel, TextStreamer

import retnet_hf
import retnet_hf.cpu
from retnet_hf.conversion.errors import first_line
from retnet_hf.retnet.generation_retnet import CACHE

from ..errors import InputError
from ..named_inputs import load
from .corpus import ids_of, load_tokenizer, prefix


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REPORTED = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # arguments of `from_pretrained` for `whole`


def sampling(
    max_new_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    repetition_penalty: float = 1.0,
) -> dict[str, Any]:
    """Returns arguments of `generate()` that select the next token. A temperature of 0 takes the most probable one."""
    lengths = {"max_new_tokens": max_new_tokens, "repetition_penalty": repetition_penalty}
    if temperature == 0:
        return lengths | {"do_sample": False}
    return lengths | {"do_sample": True, "temperature": temperature, "top_k": top_k, "top_p": top_p}


class Generation(NamedTuple):
    """The result of one call, with its speed and state."""

    tokens: list[int]  # without the prompt
    tokens_per_second: float  # from the first new token to the last; with one new token, from the prompt
    state: Cache


class Writer(TextStreamer):
    """Passes each piece of text to `write` as soon as it is final, and records the time of every token."""

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


class Finite(LogitsProcessor):
    """Ends generation where no token can be chosen, because the largest logit (B, vocabulary) is no finite number."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if not scores.amax(-1).isfinite().all():
            raise ValueError("its logits are not finite numbers: the weights are damaged, or too large for their type")
        return scores


def use_few_threads(model: PreTrainedModel) -> None:
    """Sets one thread for a small model on a CPU: more are not faster, and wait for each other if the CPU is busy."""
    if model.device.type == "cpu" and model.num_parameters() < 1e8:
        torch.set_num_threads(1)


def compile_steps(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of a model with compiled decode steps. Raises InputError if that is not possible."""
    if not isinstance(model, retnet_hf.RetNetForCausalLM):
        raise InputError(f"--compile is for a RetNet, and this is a model of type {model.config.model_type}")
    try:
        fast = retnet_hf.cpu.compile(model)
    except (ValueError, RuntimeError, OSError) as error:
        raise InputError(first_line(error)) from error
    if all(type(mine) is type(theirs) for mine, theirs in zip(fast.modules(), model.modules(), strict=True)):
        raise InputError("--compile: no layer of this model can be compiled: all are quantised, adapted or hooked")
    return fast


def device() -> torch.device:
    """Returns the device of the models: the accelerator, if there is one."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")


def whole(model: PreTrainedModel, report: dict[str, Any], name: str) -> PreTrainedModel:
    """Returns a model after a check of its loading report. Raises InputError if weights are missing."""
    if absent := sorted(report["missing_keys"]) + sorted(str(key) for key in report["mismatched_keys"]):
        raise InputError(f"the weights in {name} do not fit its config.json: {len(absent)} are missing or of another shape")
    return model


def load_model(name: str) -> tuple[PreTrainedModel, "PreTrainedTokenizerBase"]:
    """Returns model and tokenizer of a folder or a repository of the Hub, on the accelerator if there is one.

    Raises InputError if they cannot be loaded, or weights are missing.
    """
    model = whole(*load(AutoModelForCausalLM, name, dtype="auto", **REPORTED), name)
    tokenizer = load_tokenizer(name)
    return model.to(device()).eval(), tokenizer


def load_state(file: Path, model: PreTrainedModel) -> retnet_hf.RetNetState:
    """Returns a saved state of a model, on the device of the model. Raises InputError for other files."""
    try:
        return retnet_hf.RetNetState.load(file, model, device=model.device)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} holds no state of this model: {first_line(error)}") from error


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> list[int]:
    """Returns the ids of a prompt as in training; an empty one begins a document. Raises InputError if it has no token."""
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ids = [*prefix(tokenizer), *ids_of(prompt, tokenizer)] or [begin]
    if None in ids:
        raise InputError("the tokenizer has neither a bos nor an eos token to begin an empty text with: give a prompt")
    return ids


def continue_text(
    model: PreTrainedModel,
    tokenizer: "PreTrainedTokenizerBase",
    prompt: str | list[int],
    arguments: dict[str, Any],
    write: Callable[[str], object],
    past: int = 0,
) -> Generation:
    """Continues a prompt with `generate(**arguments)`, and passes each piece of text to `write` as soon as it is final.

    Args:
        prompt: a text, or ids. past: number of tokens before the prompt that the cache in `arguments` contains.

    Raises:
        InputError: for a tokenizer of another model, and for options in the model's folder that `generate` refuses.
    """
    ids = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise InputError("there is no text to continue: the chat template wrote nothing")
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
            logits_processor=[Finite()],
            use_cache=True,
            num_beams=1,  # beams would delay the text
            return_dict_in_generate=True,
            **arguments,
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:  # options in its folder can cause these
        raise InputError(f"the model cannot continue this text: {first_line(error)}") from error
    read, *times = writer.times  # the prompt, then every new token
    speed = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else 1 / (times[0] - read)
    return Generation(output.sequences[0, len(ids) :].tolist(), speed, output[CACHE])
