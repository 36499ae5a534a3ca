# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Comparison of files with their model: logits of a prompt in pieces, and greedy tokens."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from retnet_hf import RetNetForCausalLM, RetNetState
from retnet_hf.hybrid.attention_columns import AttentionSpan


PROMPT, FIRST_PIECES, GREEDY = 300, (21, 1), 64  # tokens; from position 256 on, `DigitRotation` uses a second digit


class Found(NamedTuple):
    """Result of a check.

    Attributes:
        error: largest difference of a logit from the model's, divided by the largest logit.
        equal_tokens: how many of `GREEDY` tokens come before the first difference from the model's tokens.
    """

    error: float
    equal_tokens: int


class Runner:
    """A language model in ONNX Runtime that reads tokens and stores the state."""

    def __init__(self, file: Path, threads: int = 0) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        self.state_names = [each.name for each in self.session.get_inputs() if each.name.startswith("past_key_values.")]
        self.shapes = {each.name: each.shape for each in self.session.get_inputs()}
        self.reset()

    def reset(self, batch: int = 1) -> None:
        """Empties the state."""
        self.position = 0
        self.state = {}
        for name in self.state_names:
            first, *rest = self.shapes[name]
            shape = [batch, *(0 if isinstance(size, str) else size for size in rest)]
            self.state[name] = np.zeros(shape, dtype=np.float32)

    def read(self, ids: Tensor) -> Tensor:
        """Reads ids (B, T), and returns logits (B, T, vocabulary)."""
        position = np.broadcast_to(np.arange(self.position, self.position + ids.shape[1]), ids.shape)
        inputs: dict[str, Any] = {"input_ids": ids.numpy(), "position_ids": position.astype(np.int64)} | self.state
        logits, *state = self.session.run(None, {name: inputs[name] for name in self.shapes})
        outputs = [each.name.replace("present.", "past_key_values.") for each in self.session.get_outputs()[1:]]
        self.state, self.position = dict(zip(outputs, state)), self.position + ids.shape[1]
        return torch.from_numpy(logits)

    def greedy(self, prompt: Tensor, tokens: int) -> Iterator[int]:
        """Yields the likeliest tokens after a prompt (1, T)."""
        self.reset()
        logits = self.read(prompt)
        for _ in range(tokens):
            token = int(logits[0, -1].argmax())
            yield token
            logits = self.read(torch.tensor([[token]]))


@torch.no_grad()
def check(model: RetNetForCausalLM, file: Path) -> Found:
    """Compares a file with the model in float32, on random tokens from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    config = model.config
    length = PROMPT
    if config.is_hybrid:
        window = max(AttentionSpan.of(config, kind).window or 0 for kind in config.layer_types)
        far = (config.attention_sink_distance or 0) + window  # so that tokens are far from the sinks
        length = max(PROMPT, 2 * window + config.attention_sinks, far)  # so that tokens leave every window
    ids = torch.randint(config.vocab_size, (1, length), generator=generator)
    runner, expected = Runner(file), model(ids, use_cache=False).logits
    found = torch.cat([runner.read(part) for part in ids.split((*FIRST_PIECES, length - sum(FIRST_PIECES)), dim=1)], dim=1)
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    state, token, equal = RetNetState(config), ids, 0
    for own in runner.greedy(ids, GREEDY):
        token = model(token, cache=state, use_cache=True).logits[:, -1:].argmax(-1)
        if own != token.item():
            break
        equal += 1
    return Found(error, equal)
