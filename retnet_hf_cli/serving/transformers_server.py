# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The server of transformers, in this process, with a model that is loaded once, and conversations that may be kept.

`transformers serve` makes its parts by itself, and looks for a model among its own. `serve` therefore puts parts derived
from them in their place, in this process alone.
"""

import socket
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from torch import Tensor

from retnet_hf import RetNetForCausalLM

from ..errors import InputError
from .conversations import HEADER, ConversationError, Conversations
from .settings import Settings


TESTED = "5.23"  # of transformers
conversation: ContextVar[str | None] = ContextVar("conversation", default=None)  # that a request names


def is_installed() -> bool:
    return find_spec("fastapi") is not None and find_spec("uvicorn") is not None and find_spec("openai") is not None


def serve(
    settings: Settings,
    model: RetNetForCausalLM,
    tokenizer: Any,
    conversations: Conversations | None,
    continuous_batching: bool,
) -> None:
    """Runs until Ctrl-C.

    Raises:
        InputError: where transformers is built otherwise, or somebody else listens at this port.
    """
    try:
        from transformers.cli.serve import Serve
        from transformers.cli.serving import model_manager, server, utils

        parts = [(model_manager, "ModelManager"), (utils, "GenerateManager"), (server, "build_server")]
        known = [getattr(module, name) for module, name in parts]
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"retnet-hf serve is made for the server of transformers {TESTED}, and {transformers.__version__} is built "
            f"otherwise: {error}"
        ) from error
    require_free(settings.host, settings.port)
    replaced = [
        _with_model(known[0], model, tokenizer),
        *([] if conversations is None else [_keeping(known[1], conversations)]),
    ]
    for (module, name), part in zip(parts, [*replaced, *known[len(replaced) :]]):
        setattr(module, name, part)
    if conversations is not None:
        server.build_server = _naming(known[2])
    batching = {"continuous_batching": True, "cb_num_blocks": settings.requests} if continuous_batching else {}
    Serve(settings.model, host=settings.host, port=settings.port, log_level="error", **batching)


def require_free(host: str, port: int) -> None:
    """Raises InputError where nothing can listen at this address."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
    except OSError as error:
        raise InputError(f"nothing can listen at {host}, port {port}: {error.strerror or error}") from error


def _with_model(manager: type, model: RetNetForCausalLM, tokenizer: Any) -> type:
    """A manager of models that has this one."""

    class OneModel(manager):
        def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
            return tokenizer

        def _load_model(self, *args: Any, **kwargs: Any) -> RetNetForCausalLM:
            return model

        def get_model_modality(self, *args: Any, **kwargs: Any) -> Any:
            from transformers.cli.serving.utils import Modality

            return Modality.LLM

    return OneModel


def _keeping(manager: type, conversations: Conversations) -> type:
    """A manager of generation that goes on with the conversation that a request names, if it names one."""

    class Keeping(manager):
        def generate_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return super().generate_streaming(_of_request(model, inputs), processor, inputs, *args, **kwargs)

        async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return await super().generate_non_streaming(_of_request(model, inputs), processor, inputs, *args, **kwargs)

    def _of_request(model: Any, inputs: Any) -> Any:
        from fastapi import HTTPException

        name = conversation.get()
        try:
            return model if name is None else _Turn(conversations, name, inputs["input_ids"])
        except ConversationError as error:
            raise HTTPException(status_code=409, detail=str(error)) from error

    return Keeping


class _Turn:
    """One answer in a conversation, as a server asks a model for it.

    Raises:
        ConversationError: if there can be none.
    """

    def __init__(self, conversations: Conversations, name: str, input_ids: Tensor) -> None:
        self.conversations, self.name = conversations, name
        self.at_work = conversations.at_work(name)
        self.state = self.at_work.__enter__()
        try:
            self.new = conversations.new_tokens(self.state, input_ids)
        except ConversationError:
            self.at_work.__exit__(None, None, None)
            raise

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **arguments: Any) -> Tensor:
        """Prompt and answer, (1, T)."""
        try:
            answer = self.conversations.answer(self.name, self.state, self.new, **arguments)
            return torch.cat([input_ids, answer], dim=1)
        finally:
            self.at_work.__exit__(None, None, None)


def _naming(build_server: Any) -> Any:
    """`build_server`, of a server that reads the header."""

    def build(*args: Any, **kwargs: Any) -> Any:
        app = build_server(*args, **kwargs)

        @app.middleware("http")
        async def name_conversation(request: Any, call_next: Any) -> Any:
            conversation.set(request.headers.get(HEADER))
            return await call_next(request)

        return app

    return build
