# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The server of transformers, in this process, with a model that is loaded once, and conversations that may be kept.

`transformers serve` makes its parts by itself, and looks for a model among its own. `serve` therefore puts parts derived
from them in their place, in this process alone.
"""

import asyncio
import functools
import inspect
import socket
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from retnet_hf import RetNetForCausalLM

from ..errors import InputError
from .conversations import HEADER, ConversationError, Conversations, Unavailable, require_one_answer
from .settings import Settings


TESTED = "5.23"  # of transformers
PATIENCE = 1  # seconds that answers have for ending, once the server is to end


class Request(NamedTuple):
    """What the parts of the server do not hand on to each other."""

    conversation: str | None  # that it names
    is_disconnected: Callable[[], Awaitable[bool]]


request: ContextVar[Request] = ContextVar("request")


def is_installed() -> bool:
    return find_spec("fastapi") is not None and find_spec("uvicorn") is not None and find_spec("openai") is not None


def serve(settings: Settings, model: RetNetForCausalLM, tokenizer: Any, conversations: Conversations | None) -> None:
    """Runs until Ctrl-C.

    Raises:
        InputError: where transformers is built otherwise.
    """
    try:
        import uvicorn
        from transformers.cli.serve import Serve
        from transformers.cli.serving import model_manager, server, utils

        _require(utils.GenerateManager.generate_streaming, "model", "processor", "inputs", "gen_config")
        _require(utils.GenerateManager.generate_non_streaming, "model", "processor", "inputs", "gen_config")
        _require(model_manager.ModelManager._load_model, "model_id_and_revision")
        _require(server.build_server, "model_manager")
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"retnet-hf serve is made for the server of transformers {TESTED}, and {transformers.__version__} is built "
            f"otherwise: {error}"
        ) from error
    model_manager.ModelManager = _with_model(model_manager.ModelManager, settings.model, model, tokenizer)
    utils.GenerateManager = _keeping(utils.GenerateManager, conversations)
    server.build_server = _watched(server.build_server)
    uvicorn.Config = functools.partial(uvicorn.Config, timeout_graceful_shutdown=PATIENCE)
    Serve(settings.model, host=settings.host, port=settings.port, log_level="error")


def _require(function: Any, *arguments: str) -> None:
    """Raises AttributeError for a function whose first arguments are others."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    if tuple(known[: len(arguments)]) != arguments:
        raise AttributeError(f"{function.__qualname__} takes {', '.join(known)}")


def require_free(host: str, port: int) -> None:
    """Raises InputError where nothing can listen at this address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        raise InputError(f"nothing can listen at {host}, port {port}: {error.strerror or error}") from error


def _with_model(manager: type, name: str, model: RetNetForCausalLM, tokenizer: Any) -> type:
    """A manager of models that has this one, and no other."""

    class OneModel(manager):
        def _load_processor(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
            return tokenizer

        def _load_model(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> RetNetForCausalLM:
            if model_id_and_revision != self.process_model_name(name):
                raise ValueError(f"this server has {name} alone.")
            return model

        def get_model_modality(self, *args: Any, **kwargs: Any) -> Any:
            from transformers.cli.serving.utils import Modality

            return Modality.LLM

        @staticmethod
        def get_gen_models(*args: Any, **kwargs: Any) -> list[dict]:
            return [{"id": name, "object": "model", "created": 0, "owned_by": "retnet-hf"}]

    return OneModel


def _keeping(manager: type, conversations: Conversations | None) -> type:
    """A manager of generation that goes on with the conversation that a request names, if it names one."""
    from fastapi import HTTPException

    def turn_of(model: Any, inputs: Any, config: Any) -> "RetNetForCausalLM | _Turn":
        name = request.get().conversation
        if name is None:
            if not torch.as_tensor(inputs["input_ids"]).numel():
                raise HTTPException(400, "a request has to say something.")
            return model
        if conversations is None:
            raise HTTPException(400, f"{HEADER} cannot be used: this server was started without --keep-states.")
        try:
            return _Turn(conversations, name, inputs["input_ids"], config)
        except ConversationError as error:
            raise HTTPException(409 if isinstance(error, Unavailable) else 400, str(error)) from error

    class Keeping(manager):
        def generate_streaming(self, model: Any, processor: Any, inputs: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
            return super().generate_streaming(turn_of(model, inputs, config), processor, inputs, config, *args, **kwargs)

        async def generate_non_streaming(
            self, model: Any, processor: Any, inputs: Any, config: Any, *args: Any, **kwargs: Any
        ) -> Any:
            turn = turn_of(model, inputs, config)
            answer = super().generate_non_streaming(turn, processor, inputs, config, *args, **kwargs)
            if turn is model:
                return await answer
            waiting = asyncio.ensure_future(answer)
            while not waiting.done():
                await asyncio.wait({waiting}, timeout=0.1)
                turn.has_left = turn.has_left or await request.get().is_disconnected()
            if turn.has_left and waiting.exception() is not None:
                raise HTTPException(499, "nobody waits for this answer.")
            return await waiting

    return Keeping


class _Turn:
    """One answer in a conversation, as a server asks a model for it.

    Raises:
        ConversationError: if there can be none.

    Attributes:
        has_left: whether nobody waits for the answer any more.
    """

    def __init__(self, conversations: Conversations, name: str, input_ids: Tensor, config: Any) -> None:
        self.conversations, self.name, self.has_left = conversations, name, False
        self.at_work = conversations.at_work(name)
        self.state = self.at_work.__enter__()
        try:
            self.new = conversations.new_tokens(self.state, input_ids)
            require_one_answer(config)
        except ConversationError:
            self.at_work.__exit__(None, None, None)
            raise

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, streamer: Any = None, **arguments: Any
    ) -> Tensor:
        """Prompt and answer, (1, T). The next turn may begin before a streamer is told of the end."""
        try:
            answer = self.conversations.answer(self.name, self.state, self.new, streamer, lambda: self.has_left, **arguments)
        finally:
            self.at_work.__exit__(None, None, None)
        if streamer is not None:
            streamer.end()
        return torch.cat([input_ids, answer], dim=1)


def _watched(build_server: Any) -> Any:
    """`build_server`, of a server that remembers what a request's header says, and how to ask if its client is there."""

    from fastapi.responses import JSONResponse

    def build(*args: Any, **kwargs: Any) -> Any:
        app = build_server(*args, **kwargs)

        @app.middleware("http")
        async def remember(asked: Any, call_next: Any) -> Any:
            request.set(Request(asked.headers.get(HEADER), asked.is_disconnected))
            return await call_next(asked)

        @app.exception_handler(ValueError)  # of the tokenizer, its template, or generate()
        async def refuse(_: Any, error: ValueError) -> Any:
            return JSONResponse({"detail": str(error)}, 400)

        return app

    return build
