# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A conversation with a causal language model, which reads each turn once and keeps its state between turns.

The state of a RetNet can be saved, and everything that was said with it. Taking a turn back, or going on in two ways, takes
a copy of the state: for a RetNet a copy of constant size, however long the conversation is.
"""

import copy
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import Cache

from retnet_hf import RetNetForCausalLM, RetNetState
from retnet_hf.retnet.generation_retnet import CACHE
from retnet_hf_conversion.errors import first_line

from ..errors import InputError
from ..training.run_folder import write_whole
from .generation import continue_text, encode_prompt, load_state


REWINDS = 8  # turns that can be taken back: each keeps a state, which grows with the text in a hybrid


def _require_replaceable(file: Path, beside: Path) -> None:
    """Raises InputError for files that hold something else than a saved conversation."""
    path = file
    try:
        if file.exists():
            with safe_open(file, framework="pt") as opened:
                (opened.metadata() or {})["fingerprint"]
        path = beside
        if beside.exists():
            json.loads(beside.read_text(encoding="utf-8"))["unread"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError, SafetensorError) as error:
        raise InputError(f"{path} is no saved conversation, and is not replaced: give the name of another file") from error


@dataclass
class Turn:
    """What an answer took. Bytes of the state are None for a cache that does not tell."""

    text: str
    new_tokens: int
    tokens_per_second: float
    state_bytes: int | None
    stopped: bool


@dataclass
class Memory:
    """What a conversation has come to.

    Attributes:
        messages: as chat templates take them; None where only the state is known.
        read: ids in the cache; None where only the state is known. unread: ids that were written and are not in the cache.
    """

    messages: list[dict[str, str]] | None = field(default_factory=list)
    read: list[int] | None = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    cache: Cache | None = None


def memory_of(said: Any, vocabulary: int) -> Memory:
    """Returns what `Conversation.save` wrote beside a state. Raises ValueError for anything else."""

    def is_message(each: Any) -> bool:
        return type(each) is dict and each.keys() == {"role", "content"} and all(type(text) is str for text in each.values())

    def is_token(each: Any) -> bool:
        return type(each) is int and 0 <= each < vocabulary

    if said is None:
        return Memory(None, None)
    for name, fits in (("messages", is_message), ("read", is_token), ("unread", is_token)):
        value = said.get(name, False) if isinstance(said, dict) else False
        unknown = value is None and name != "unread"
        if not unknown and not (isinstance(value, list) and all(map(fits, value))):
            raise ValueError(f'the file beside it has no conversation in its field "{name}"')
    return Memory(said["messages"], said["read"], said["unread"])


class _Stop(StoppingCriteria):
    def __init__(self, asked: Callable[[], bool]) -> None:
        self.asked = asked

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.asked(), device=input_ids.device)


class Conversation:
    """Turns of a user and of a model, and what was there before each of them.

    Args:
        arguments: of `generate`. system: the first message, if there is one.

    Attributes:
        memory: what the model has read. before: of each of the last turns, which can be taken back, the memory before it.
        forgets: whether there were turns that cannot be taken back any more.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        arguments: dict[str, Any],
        system: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.arguments = model, tokenizer, arguments
        self.memory = Memory([] if system is None else [{"role": "system", "content": system}])
        self.before: deque[Memory] = deque(maxlen=REWINDS)
        self.forgets = False
        ends = model.generation_config.eos_token_id
        self.ends = {ends} if isinstance(ends, int) else set(ends or ())

    @property
    def uses_template(self) -> bool:
        """Whether the model was made for conversations. Another one continues what the user writes."""
        return self.tokenizer.chat_template is not None

    def say(
        self, text: str, write: Callable[[str], object] = lambda piece: None, stop: Callable[[], bool] = lambda: False
    ) -> Turn:
        """The model's answer, handed to `write` piece by piece as soon as it is certain.

        Args:
            stop: asked after every token whether the answer is to end there.
        """
        memory = copy.deepcopy(self.memory)
        new = memory.unread + self._ids_of(text, memory)
        arguments, past = self.arguments | {"stopping_criteria": StoppingCriteriaList([_Stop(stop)])}, 0
        if memory.cache is not None:
            arguments[CACHE] = memory.cache
            past = int(memory.cache.get_seq_length()) if memory.read is None else 0  # ids that are not at hand
        written, speed, cache = continue_text(
            self.model, self.tokenizer, [*(memory.read or ()), *new], arguments, write, past
        )
        answer = self.tokenizer.decode([token for token in written if token not in self.ends], skip_special_tokens=True)
        messages = memory.messages
        if messages is not None:
            messages = [*messages, {"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        # the last token was written and not read; the end of a turn comes again with the next one, from the template
        unread = written[-1:] if not (self.uses_template and written[-1] in self.ends) else []
        read = None if memory.read is None else [*memory.read, *new, *written[:-1]]
        self._go_on(Memory(messages, read, unread, cache))
        return Turn(answer, len(written), speed, getattr(cache, "nbytes", None), stop())

    def _ids_of(self, text: str, memory: Memory) -> list[int]:
        """What the model reads of a turn, without what it has read before."""
        if not self.uses_template:
            return self._tokens(text) if memory.read != [] else encode_prompt(self.tokenizer, text)
        user = {"role": "user", "content": text}
        if memory.cache is None:
            return self._tokens(self._templated([*memory.messages, user], True))
        # the template may say more about a whole conversation than about its end: the last turn is told by difference
        answer = "\N{BLACK SQUARE}answer\N{BLACK SQUARE}"
        past = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
        _, found, turn = self._templated([*past, user], True).rpartition(answer)
        if not found:
            raise InputError("the chat template of this model does not repeat the answers, so that it cannot be continued")
        return self._tokens(turn)

    def _templated(self, messages: list[dict[str, str]], ask: bool) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        except Exception as error:  # whatever a template raises
            raise InputError(f"the chat template refuses this conversation: {first_line(error)}") from error

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _go_on(self, memory: Memory) -> None:
        self.forgets |= len(self.before) == REWINDS
        self.before.append(self.memory)
        self.memory = memory

    def rewind(self) -> bool:
        """Takes the last turn back, if there is one: as if it had never been read."""
        if self.before:
            self.memory = self.before.pop()
            return True
        return False

    def branch(self) -> "Conversation":
        """A second conversation with the same past."""
        twin = copy.copy(self)
        twin.memory, twin.before = copy.deepcopy(self.memory), self.before.copy()
        return twin

    def save(self, file: Path) -> None:
        """Writes the state, and beside it, in `FILE.json`, what was said. Raises InputError where that is not possible."""
        if not isinstance(self.memory.cache, RetNetState):
            raise InputError(
                "nothing was read yet" if self.memory.cache is None else "only the state of a RetNet can be saved"
            )
        said = {"messages": self.memory.messages, "read": self.memory.read, "unread": self.memory.unread}
        beside = file.with_name(f"{file.name}.json")
        _require_replaceable(file, beside)
        try:
            self.memory.cache.save(file)
            write_whole(beside, json.dumps(said, ensure_ascii=False) + "\n")
        except (OSError, ValueError, SafetensorError) as error:
            raise InputError(f"{file} cannot be written: {first_line(error)}") from error

    def load(self, file: Path) -> bool:
        """Goes on from a saved state. Returns whether what was said is known, too. Raises InputError for any other file."""
        if not isinstance(self.model, RetNetForCausalLM):
            raise InputError("only a RetNet goes on from a saved state")
        beside = file.with_name(f"{file.name}.json")
        try:
            cache = load_state(file, self.model)
            if cache.layers[0].batch_size != 1:
                raise ValueError(f"it holds the state of {cache.layers[0].batch_size} sequences")
            said = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else None
            memory = memory_of(said, self.model.config.vocab_size)
            if memory.read is not None and len(memory.read) != int(cache.get_seq_length()):
                memory = Memory(None, None)  # of another state
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise InputError(f"{file} holds no conversation with this model: {first_line(error)}") from error
        memory.cache = cache
        self._go_on(memory)
        return memory.messages is not None
