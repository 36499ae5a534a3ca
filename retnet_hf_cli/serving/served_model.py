# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a server is told about the model that it serves."""

import math
import os
from collections.abc import Sequence

import torch
from transformers import AutoConfig

from retnet_hf import RetNetConfig

from ..errors import InputError
from ..named_inputs import load


def retnet_config(name: str) -> RetNetConfig:
    """Raises InputError for a model that is no RetNet, or does not write."""
    config = load(AutoConfig, name)
    if not isinstance(config, RetNetConfig) or config.bidirectional:
        hint = ": `retnet-hf convert` makes a RetNet of it" if config.model_type == "minimax" else ""
        raise InputError(f"{name} holds no RetNet that writes, but a model of type {config.model_type}{hint}")
    return config


def dtype_of(config: RetNetConfig, asked: str) -> str:
    """The name of the weights' dtype. Half precision is slow on most CPUs, and vLLM's own default is half precision."""
    saved = str(config.dtype).removeprefix("torch.")
    half = saved in ("bfloat16", "float16") and torch.accelerator.is_available()
    return asked if asked != "auto" else saved if half else "float32"


def state_bytes(config: RetNetConfig) -> int:
    """Memory that vLLM needs for the states of one request: in each layer a slot with the largest sizes of all."""
    shapes = map(config.state_shape, range(config.num_hidden_layers))
    return 4 * config.num_hidden_layers * math.prod(map(max, zip(*shapes, strict=True)))


def vllm_arguments(config: RetNetConfig, requests: int, length: int | None, further: Sequence[str] = ()) -> list[str]:
    """Arguments of vLLM's server, of which `further` come last and win.

    On a CPU vLLM would take nearly all memory. Here it takes as much as the states of all requests, or a quarter of the
    machine's memory where it also keeps keys and values, or the states of prefixes.
    """
    told = ["--max-num-seqs", str(requests)]
    told += [] if length is None else ["--max-model-len", str(length)]
    if torch.accelerator.is_available():
        return [*told, *further]
    if config.has_softmax_attention or "--enable-prefix-caching" in further:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    else:
        memory = (requests + 2) * state_bytes(config)  # vLLM keeps slots of its own
    return [*told, "--enforce-eager", "--kv-cache-memory-bytes", str(memory), *further]
