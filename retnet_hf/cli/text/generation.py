# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Loading of saved language models, timed generation of text, and conversations."""

import copy
import itertools
import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

import retnet_hf
import retnet_hf.cpu
from retnet_hf import RetNetForCausalLM, RetNetState
from retnet_hf.conversion.errors import first_line
from retnet_hf.conversion.replaced_folder import write_whole
from retnet_hf.retnet.generation_retnet import CACHE

from ..errors import InputError
from ..named_inputs import load
from .corpus import ids_of, load_tokenizer, prefix


CUT = "\ufdd0"  # no character; cuts a special token that a message spells out into parts, which are text and end no turn
REWINDS = 8  # turns that can be taken back; each needs a copy of the state, which grows with the text in a hybrid
REPORTED = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # arguments of `from_pretrained` for `whole`


def sampling(
    max_new_tokens: int = 200, temperature: float = 0.8, top_k: int = 0, top_p: float = 0.95, repetition_penalty: float = 1.0
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

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self.write(text)


def require_finite(input_ids: Tensor, scores: Tensor) -> Tensor:
    """Returns logits (B, vocabulary). Raises ValueError if no token can be chosen: the largest is no finite number."""
    if not scores.amax(-1).isfinite().all():
        raise ValueError("its logits are not finite numbers: the weights are damaged, or too large for their type")
    return scores


def compile_steps(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of a model with compiled decode steps. Raises InputError if that is not possible."""
    if not isinstance(model, RetNetForCausalLM):
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


def load_model(name: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns model and tokenizer of a folder or a repository, on the accelerator if any. Raises InputError."""
    model = whole(*load(AutoModelForCausalLM, name, dtype="auto", **REPORTED), name)
    tokenizer = load_tokenizer(name)
    return model.to(device()).eval(), tokenizer


def load_writer(
    name: str, console: Console, threads: int | None, seed: int | None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Returns the result of `load_model`, with one thread for a small model on a CPU, unless `threads` says otherwise."""
    with console.status("loading the model"):
        model, tokenizer = load_model(name)
    if threads is None and model.device.type == "cpu" and model.num_parameters() < 1e8:
        torch.set_num_threads(1)  # more would not be faster, and wait for each other if the CPU is busy
    if seed is not None:
        torch.manual_seed(seed)
    return model, tokenizer


def load_state(file: Path, model: PreTrainedModel) -> RetNetState:
    """Returns a saved state of a model, on the device of the model. Raises InputError for other files."""
    try:
        return RetNetState.load(file, model, device=model.device)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} holds no state of this model: {first_line(error)}") from error


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Returns the ids of a prompt as in training; an empty one begins a document. Raises InputError if it has no token."""
    begin = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    ids = [*prefix(tokenizer), *ids_of(prompt, tokenizer)] or [begin]
    if None in ids:
        raise InputError("the tokenizer has neither a bos nor an eos token to begin an empty text with: give a prompt")
    return ids


def require_known(token: int, model: PreTrainedModel) -> None:
    """Raises InputError if a token of the tokenizer is not in the vocabulary of the model."""
    if token >= (known := model.config.get_text_config().vocab_size):
        advice = "copy the tokenizer that the model was trained with into its folder"
        raise InputError(f"the tokenizer has a token {token}, and the model knows {known} tokens: {advice}")


def continue_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | list[int],
    arguments: dict[str, Any],
    write: Callable[[str], object],
    past: int = 0,
) -> Generation:
    """Continues a text or ids with `generate(**arguments)`, and passes each piece of text to `write` once it is final.

    `past` is the number of tokens before the prompt that the cache in `arguments` contains.
    Raises InputError for a tokenizer of another model, and for options in the model's folder that `generate` refuses.
    """
    ids = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt
    if not ids:
        raise InputError("there is no text to continue: the chat template wrote nothing")
    require_known(max(ids), model)
    writer = Writer(tokenizer, write)
    try:
        output = model.generate(
            torch.tensor([ids], device=model.device),
            attention_mask=torch.ones(1, past + len(ids), dtype=torch.long, device=model.device),
            streamer=writer,
            logits_processor=[require_finite],
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


def templated(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], ask: bool) -> str:
    """Returns a conversation as its template writes it, with the beginning of an answer if `ask`. For `template_ids`."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    messages = copy.deepcopy(messages)
    for message, name in itertools.product(messages, special):
        message["content"] = message["content"].replace(name, name[:1] + CUT + name[1:])
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
    except Exception as error:  # a template may raise anything
        raise InputError(f"the chat template refuses this conversation: {first_line(error)}") from error


def template_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Returns the ids of a part of a templated conversation, where only the template's special tokens are special."""
    parts = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split(CUT)]
    return list(itertools.chain.from_iterable(parts))


@dataclass
class Turn:
    """An answer and its costs. `state_bytes` is None if the cache does not report its size."""

    text: str
    new_tokens: int
    tokens_per_second: float
    state_bytes: int | None
    stopped: bool


@dataclass
class Memory:
    """The current content of a conversation."""

    messages: list[dict[str, str]] | None = field(default_factory=list)  # for templates; None if only the state is known
    read: list[int] | None = field(default_factory=list)  # ids in the cache; None if only the state is known
    unread: list[int] = field(default_factory=list)  # generated ids that are not in the cache yet
    cache: Cache | None = None


def memory_of(said: Any, vocabulary: int) -> Memory:
    """Returns the content of a file that `Conversation.save` wrote next to a state. Raises ValueError for other files."""
    if said is None:
        return Memory(None, None)
    for name in ("messages", "read", "unread"):
        value = said.get(name, False) if isinstance(said, dict) else False
        valid = isinstance(value, list)
        for each in value if valid else ():
            if name == "messages":
                valid &= type(each) is dict and each.keys() == {"role", "content"} and set(map(type, each.values())) == {str}
            else:
                valid &= type(each) is int and 0 <= each < vocabulary
        if not valid and (value is not None or name == "unread"):
            raise ValueError(f'the .json file next to it has no valid field "{name}"')
    return Memory(said["messages"], said["read"], said["unread"])


class Conversation:
    """A conversation of a user and a model, which reads each turn once. It can be rewound, branched and saved.

    `arguments`: of `generate`.
    """

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, arguments: dict, system: str | None = None
    ) -> None:
        self.model, self.tokenizer, self.arguments = model, tokenizer, arguments
        self.memory = Memory([] if system is None else [{"role": "system", "content": system}])
        self.before: deque[Memory] = deque(maxlen=REWINDS)  # the memory before each of the last turns
        self.forgets = False  # whether some turns can no longer be taken back
        ends = model.generation_config.eos_token_id
        self.ends = {ends} if isinstance(ends, int) else set(ends or ())

    @property
    def uses_template(self) -> bool:
        """Returns whether the tokenizer has a chat template. Without one, the model continues the user's text."""
        return self.tokenizer.chat_template is not None

    def say(
        self, text: str, write: Callable[[str], object] = lambda piece: None, stop: Callable[[], bool] = lambda: False
    ) -> Turn:
        """Returns the model's answer, whose pieces are passed to `write`. It ends when `stop()`, after a token, is True."""

        def stopped(input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
            return torch.full((len(input_ids),), stop(), device=input_ids.device)

        memory = copy.deepcopy(self.memory)
        new = memory.unread + self._ids_of(text, memory)
        arguments, past = self.arguments | {"stopping_criteria": [stopped]}, 0
        if memory.cache is not None:
            arguments[CACHE] = memory.cache
            past = int(memory.cache.get_seq_length()) if memory.read is None else 0  # tokens of unknown ids
        ids = [*(memory.read or ()), *new]
        written, speed, cache = continue_text(self.model, self.tokenizer, ids, arguments, write, past)
        answer = self.tokenizer.decode([token for token in written if token not in self.ends], skip_special_tokens=True)
        messages = memory.messages
        if messages is not None:
            messages = [*messages, {"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        # The model has not read the last token yet. If this token ends the turn, the template writes it again.
        unread = written[-1:] if not (self.uses_template and written[-1] in self.ends) else []
        read = None if memory.read is None else [*memory.read, *new, *written[:-1]]
        self._go_on(Memory(messages, read, unread, cache))
        return Turn(answer, len(written), speed, getattr(cache, "nbytes", None), stop())

    def _ids_of(self, text: str, memory: Memory) -> list[int]:
        """Returns the ids of a turn that the model has not read yet."""
        if not self.uses_template:
            return ids_of(text, self.tokenizer) if memory.read != [] else encode_prompt(self.tokenizer, text)
        user = {"role": "user", "content": text}
        if memory.cache is None:
            return template_ids(self.tokenizer, templated(self.tokenizer, [*memory.messages, user], True))
        # A template may add text to a whole conversation, so the last turn is found as the text after a marked answer.
        answer = "\N{BLACK SQUARE}answer\N{BLACK SQUARE}"
        past = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
        _, found, turn = templated(self.tokenizer, [*past, user], True).rpartition(answer)
        if not found:
            raise InputError("the chat template of this model does not repeat answers, so conversations cannot be continued")
        return template_ids(self.tokenizer, turn)

    def _go_on(self, memory: Memory) -> None:
        self.forgets |= len(self.before) == REWINDS
        self.before.append(self.memory)
        self.memory = memory

    def rewind(self) -> bool:
        """Takes back the last turn, as if the model had never read it. Returns whether there was one."""
        if self.before:
            self.memory = self.before.pop()
            return True
        return False

    def branch(self) -> "Conversation":
        """Returns a second conversation with the same past."""
        twin = copy.copy(self)
        twin.memory, twin.before = copy.deepcopy(self.memory), self.before.copy()
        return twin

    def save(self, file: Path) -> None:
        """Writes the state to `file` and the messages to `FILE.json`. Raises InputError on failure."""
        if self.memory.cache is None:
            raise InputError("nothing was read yet")
        if not isinstance(self.memory.cache, RetNetState):
            raise InputError("only the state of a RetNet can be saved")
        said = {"messages": self.memory.messages, "read": self.memory.read, "unread": self.memory.unread}
        beside = path = file.with_name(f"{file.name}.json")
        try:  # nothing but a saved conversation is replaced
            if beside.exists():
                json.loads(beside.read_text(encoding="utf-8"))["unread"]
            path = file
            if file.exists():
                with safe_open(file, framework="pt") as opened:
                    (opened.metadata() or {})["fingerprint"]
        except (OSError, ValueError, TypeError, LookupError, RecursionError, SafetensorError) as error:
            raise InputError(f"{path} is no saved conversation, and is not replaced: use another file name") from error
        try:
            self.memory.cache.save(file)
            write_whole(beside, json.dumps(said, ensure_ascii=False) + "\n")
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"{file} cannot be written: {first_line(error)}") from error

    def load(self, file: Path) -> bool:
        """Continues from a saved state. Returns whether the messages are known. Raises InputError for other files."""
        if not isinstance(self.model, RetNetForCausalLM):
            raise InputError("only a RetNet can continue from a saved state")
        beside = file.with_name(f"{file.name}.json")
        try:
            cache = load_state(file, self.model)
            if cache.layers[0].batch_size != 1:
                raise ValueError(f"it holds the state of {cache.layers[0].batch_size} sequences")
            said = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else None
            memory = memory_of(said, self.model.config.vocab_size)
            if memory.read is not None and len(memory.read) != int(cache.get_seq_length()):
                memory = Memory(None, None)  # the file belongs to another state
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{file} holds no conversation with this model: {first_line(error)}") from error
        memory.cache = cache
        self._go_on(memory)
        return memory.messages is not None
