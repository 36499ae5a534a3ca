# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Conversations that outlive requests and the server: the state of each as a file, whatever has been said so far.

A request names its conversation in a header and says only what is new. Its answer goes on from the state, which then has
read both. What a request that fails or is cut off has read is forgotten, as if it had not been made.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from retnet_hf import RetNetForCausalLM, RetNetState


HEADER = "X-Conversation-ID"
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class ConversationError(ValueError):
    """A conversation that cannot be gone on with. The message is a sentence."""


class Conversations:
    """The conversations of a folder, which is made if it is not there."""

    def __init__(self, folder: Path, model: RetNetForCausalLM) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.model, self.busy = folder, model, set[str]()

    def path(self, name: str) -> Path:
        """The file of a conversation.

        Raises:
            ConversationError: for what is no name.
        """
        if not NAME.fullmatch(name):
            raise ConversationError(
                f"{HEADER} must be 1 to 128 letters, digits, dots, hyphens and underscores, the first no dot, got {name!r}."
            )
        return self.folder / f"{name}.safetensors"

    @contextmanager
    def at_work(self, name: str) -> Iterator[RetNetState]:
        """The state of a conversation, which is empty if it is new, and of no other request meanwhile.

        Raises:
            ConversationError: if another request is being answered in it, or its file cannot be used.
        """
        path = self.path(name)
        if name in self.busy:
            raise ConversationError(f"the conversation {name} is being answered; its next turn comes after that.")
        self.busy.add(name)
        try:
            yield self.load(path)
        finally:
            self.busy.discard(name)

    def load(self, path: Path) -> RetNetState:
        config = self.model.config
        try:
            return RetNetState.load(path, config, self.model.device) if path.exists() else RetNetState(config)
        except ValueError as error:
            raise ConversationError(str(error)) from error

    def new_tokens(self, state: RetNetState, input_ids: Tensor) -> Tensor:
        """What a conversation has not read of a prompt (1, T): all of it, but the token that begins a text only once.

        Raises:
            ConversationError: if that is nothing.
        """
        begin = self.model.generation_config.bos_token_id
        if RetNetState.length_of(state) and input_ids.shape[1] and input_ids[0, 0].item() == begin:
            input_ids = input_ids[:, 1:]
        if not input_ids.shape[1]:
            raise ConversationError("a request has to say something new.")
        return input_ids

    @torch.inference_mode()
    def answer(self, name: str, state: RetNetState, new: Tensor, streamer: Any = None, **arguments: Any) -> Tensor:
        """The answer (1, T) of `generate` to new tokens. The state is on disk before a streamer is told of the end."""
        mask = new.new_ones(1, RetNetState.length_of(state) + new.shape[1])
        held_back = None if streamer is None else _HeldBack(streamer)
        whole = self.model.generate(new, attention_mask=mask, past_key_values=state, streamer=held_back, **arguments)
        self.model(whole[:, -1:], past_key_values=state, use_cache=True)  # which generate has written, and not read
        state.save(self.path(name))
        if streamer is not None:
            streamer.end()
        return whole[:, new.shape[1] :]


class _HeldBack:
    """A streamer that is not told of the end."""

    def __init__(self, streamer: Any) -> None:
        self.put = streamer.put

    def end(self) -> None:
        pass
