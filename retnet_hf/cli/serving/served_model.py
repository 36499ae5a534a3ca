# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Checks of a served model, and arguments for its server."""

import math
import os
from collections.abc import Sequence

import torch
from transformers import AutoConfig

from retnet_hf import RetNetConfig

from ..errors import InputError
from ..named_inputs import load


def retnet_config(name: str) -> RetNetConfig:
    """Returns the configuration of a model. Raises InputError if it is not a causal RetNet."""
    config = load(AutoConfig, name)
    if not isinstance(config, RetNetConfig) or config.bidirectional:
        hint = ": `retnet-hf convert` turns it into a RetNet" if config.model_type == "minimax" else ""
        raise InputError(f"{name} holds no causal RetNet, but a model of type {config.model_type}{hint}")
    return config


def dtype_of(config: RetNetConfig, asked: str) -> str:
    """Returns the dtype of the weights. Half precision, the default of vLLM, is slow on most CPUs."""
    saved = str(config.dtype).removeprefix("torch.")
    half = saved in ("bfloat16", "float16") and torch.accelerator.is_available()
    return asked if asked != "auto" else saved if half else "float32"


def state_bytes(config: RetNetConfig) -> int:
    """Returns the bytes that vLLM needs for the states of a request: each layer has a slot of the largest size."""
    shapes = map(config.state_shape, range(config.num_hidden_layers))
    return 4 * config.num_hidden_layers * math.prod(map(max, zip(*shapes, strict=True)))


def vllm_arguments(config: RetNetConfig, requests: int, length: int | None, further: Sequence[str] = ()) -> list[str]:
    """Returns arguments of vLLM's server. `further` come last and override the others.

    On a CPU, vLLM would reserve nearly all memory. Here it reserves memory for the states of all requests, or a quarter of
    the machine's memory if it also stores keys and values, or states of prefixes.
    """
    told = ["--max-num-seqs", str(requests)]
    told += [] if length is None else ["--max-model-len", str(length)]
    if torch.accelerator.is_available():
        return [*told, *further]
    if config.has_softmax_attention or "--enable-prefix-caching" in further:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    else:
        memory = (requests + 2) * state_bytes(config)  # vLLM uses some slots itself
    return [*told, "--enforce-eager", "--kv-cache-memory-bytes", str(memory), *further]
