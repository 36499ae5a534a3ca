# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A conversation with a causal language model. The model reads each turn once and keeps its state between turns.

The state of a RetNet can be saved together with the messages. Rewinding and branching use a copy of the state; for a RetNet,
the size of the copy does not depend on the length of the conversation.
"""

import copy
import itertools
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
from retnet_hf.conversion.errors import first_line
from retnet_hf.conversion.replaced_folder import write_whole
from retnet_hf.retnet.generation_retnet import CACHE

from ..errors import InputError
from .corpus import ids_of
from .generation import continue_text, encode_prompt, load_state


CUT = "\ufdd0"  # no character; cuts a special token that a message spells out into parts, which are text and end no turn
REWINDS = 8  # turns that can be taken back; each needs a copy of the state, which grows with the text in a hybrid


def _require_replaceable(file: Path, beside: Path) -> None:
    """Raises InputError if one of the files exists and is not part of a saved conversation."""
    path = file
    try:
        if file.exists():
            with safe_open(file, framework="pt") as opened:
                (opened.metadata() or {})["fingerprint"]
        path = beside
        if beside.exists():
            json.loads(beside.read_text(encoding="utf-8"))["unread"]
    except (OSError, ValueError, TypeError, LookupError, RecursionError, SafetensorError) as error:
        raise InputError(f"{path} is no saved conversation, and is not replaced: use another file name") from error


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
    """The current content of a conversation.

    Attributes:
        messages: in the format of chat templates; None if only the state is known.
        read: ids in the cache; None if only the state is known. unread: generated ids that are not in the cache yet.
    """

    messages: list[dict[str, str]] | None = field(default_factory=list)
    read: list[int] | None = field(default_factory=list)
    unread: list[int] = field(default_factory=list)
    cache: Cache | None = None


def memory_of(said: Any, vocabulary: int) -> Memory:
    """Returns the content of a file that `Conversation.save` wrote next to a state. Raises ValueError for other files."""

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
            raise ValueError(f'the .json file next to it has no valid field "{name}"')
    return Memory(said["messages"], said["read"], said["unread"])


class _Stop(StoppingCriteria):
    def __init__(self, asked: Callable[[], bool]) -> None:
        self.asked = asked

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.asked(), device=input_ids.device)


class Conversation:
    """A conversation of a user and a model that can be rewound, branched and saved.

    Args:
        arguments: keyword arguments of `generate`. system: the system message, or None.

    Attributes:
        memory: what the model has read. before: the memory before each of the last turns, for `rewind`.
        forgets: whether some turns can no longer be taken back.
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
        """Returns whether the tokenizer has a chat template. Without one, the model continues the user's text."""
        return self.tokenizer.chat_template is not None

    def say(
        self, text: str, write: Callable[[str], object] = lambda piece: None, stop: Callable[[], bool] = lambda: False
    ) -> Turn:
        """Returns the model's answer, and passes each piece of it to `write` as soon as the piece is final.

        Args:
            stop: called after every token; the answer ends if it returns True.
        """
        memory = copy.deepcopy(self.memory)
        new = memory.unread + self._ids_of(text, memory)
        arguments, past = self.arguments | {"stopping_criteria": StoppingCriteriaList([_Stop(stop)])}, 0
        if memory.cache is not None:
            arguments[CACHE] = memory.cache
            past = int(memory.cache.get_seq_length()) if memory.read is None else 0  # tokens of unknown ids
        written, speed, cache = continue_text(
            self.model, self.tokenizer, [*(memory.read or ()), *new], arguments, write, past
        )
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
            return self._tokens(self._templated([*memory.messages, user], True))
        # A template may add text to a whole conversation, so the last turn is found as the text after a marked answer.
        answer = "\N{BLACK SQUARE}answer\N{BLACK SQUARE}"
        past = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
        _, found, turn = self._templated([*past, user], True).rpartition(answer)
        if not found:
            raise InputError("the chat template of this model does not repeat answers, so conversations cannot be continued")
        return self._tokens(turn)

    def _templated(self, messages: list[dict[str, str]], ask: bool) -> str:
        special = [token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special]
        messages = copy.deepcopy(messages)
        for message, name in itertools.product(messages, special):
            message["content"] = message["content"].replace(name, name[:1] + CUT + name[1:])
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=ask)
        except Exception as error:  # a template may raise anything
            raise InputError(f"the chat template refuses this conversation: {first_line(error)}") from error

    def _tokens(self, text: str) -> list[int]:
        parts = [self.tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split(CUT)]
        return list(itertools.chain.from_iterable(parts))

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
