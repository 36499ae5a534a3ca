# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Conversations that outlive requests and the server: the state of each as a file, whatever has been said so far.

A request names its conversation in a header and says only what is new. Its answer goes on from the state, which then has
read both. What a request that fails or is cut off has read is forgotten, as if it had not been made.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from retnet_hf import RetNetForCausalLM, RetNetState

from ..errors import InputError


HEADER = "X-Conversation-ID"
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")


class ConversationError(ValueError):
    """What was asked of a conversation cannot be done. The message is a sentence."""


class Unavailable(ConversationError):
    """It could be done at another time, or with another file."""


class Conversations:
    """The conversations of a folder, which is made if it is not there.

    Raises:
        InputError: if they are those of a model with other weights.
    """

    def __init__(self, folder: Path, model: RetNetForCausalLM) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.model, self.busy = folder, model, set[str]()
        marker, mark = folder / "model.json", json.dumps({"weights": mark_of(model)}) + "\n"
        if not marker.exists():
            partial = marker.with_name(f"model.json.{os.getpid()}.partial")
            partial.write_text(mark, encoding="utf-8")
            os.replace(partial, marker)
        elif marker.read_text(encoding="utf-8") != mark:
            raise InputError(f"the conversations in {folder} were held with other weights, or in another --dtype")

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
            raise Unavailable(f"the conversation {name} is being answered; its next turn comes after that.")
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
            raise Unavailable(str(error)) from error

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
    def answer(
        self,
        name: str,
        state: RetNetState,
        new: Tensor,
        streamer: BaseStreamer | None = None,
        has_left: Callable[[], bool] = lambda: False,
        **arguments: Any,
    ) -> Tensor:
        """The answer (1, T) of `generate` to new tokens (1, T). The state is on disk then; a streamer is not told the end.

        Args:
            has_left: whether nobody waits for the answer any more.

        Raises:
            ConversationError: for several answers, and where somebody has left. Nothing is written then.
        """
        require_one_answer(arguments.get("generation_config") or self.model.generation_config)
        past = RetNetState.length_of(state)
        leaving = StoppingCriteriaList([_Leaving(has_left)])
        whole = self.model.generate(
            new,
            attention_mask=new.new_ones(1, past + new.shape[1]),
            past_key_values=state,
            use_cache=True,
            streamer=None if streamer is None else _HeldBack(streamer),
            stopping_criteria=leaving,
            **arguments,
        )
        self.model(whole[:, -1:], past_key_values=state, use_cache=True)  # which generate has written, and not read
        if has_left():
            raise ConversationError("nobody waits for this answer.")
        if RetNetState.length_of(state) != past + whole.shape[1]:
            raise RuntimeError("the state has not read what was said.")
        state.save(self.path(name))
        return whole[:, new.shape[1] :]


def require_one_answer(config: GenerationConfig) -> None:
    """Raises ConversationError where several are asked for."""
    if (config.num_beams or 1) > 1 or (config.num_return_sequences or 1) > 1:
        raise ConversationError("a conversation has one answer: num_beams and num_return_sequences must be 1.")


class _HeldBack(BaseStreamer):
    """A streamer that is not told of the end."""

    def __init__(self, streamer: BaseStreamer) -> None:
        self.streamer = streamer

    def put(self, value: Tensor) -> None:
        self.streamer.put(value)

    def end(self) -> None:
        pass


class _Leaving(StoppingCriteria):
    """Stops where nobody waits for the answer."""

    def __init__(self, has_left: Callable[[], bool]) -> None:
        self.has_left = has_left

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        return torch.full((input_ids.shape[0],), self.has_left(), device=input_ids.device)


def mark_of(model: RetNetForCausalLM) -> str:
    """Tells models with other weights apart, by 64 numbers of each."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        numbers = parameter.detach().flatten()
        some = numbers[:: max(1, numbers.numel() // 64)][:64].double().cpu()
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)} ".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()
