# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""States of the beginnings of texts, so that a server reads only what is new in a conversation."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import PreTrainedModel

from .retention_state import RetNetState


class PrefixStates:
    """Generates from prompts, and keeps states of their beginnings. A state has the same size for every length.

    `generate` continues from the longest beginning of the prompt whose state is kept: the last turn of a conversation, the
    same prompt, or a multiple of `every` tokens, such as a common system prompt. The results are those of `model.generate`,
    up to rounding. The states that were not used for the longest time are dropped.

    Args:
        model: a causal language model with a `RetNetState`, used from one thread.
        memory: largest number of bytes of all states. every: tokens between states inside of a prompt.
        generate: function to generate with; `model.generate` by default.

    Attributes:
        states: by the int64 ids that were read, as bytes, in the order of their use.
        reused, read: tokens of all prompts so far that were found in a state, and that were read.
        nbytes: the bytes of all states.
    """

    def __init__(
        self, model: PreTrainedModel, memory: int = 2**30, every: int = 1024, generate: Callable[..., Any] | None = None
    ) -> None:
        self.model, self.memory, self.every = model, memory, every
        self._generate = model.generate if generate is None else generate
        self.states: OrderedDict[bytes, RetNetState] = OrderedDict()
        self.reused = self.read = self.nbytes = 0

    def generate(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        """Generates as `model.generate`. Calls with several rows, padding, or a state are passed on unchanged.

        Args:
            input_ids: (1, T), the whole text so far.
        """
        options = ("cache", "past_key_values", "assistant_model", "prompt_lookup_num_tokens", "inputs_embeds")
        config = kwargs.get("generation_config") or self.model.generation_config
        rows = [kwargs.get(name, getattr(config, name, None)) or 1 for name in ("num_beams", "num_return_sequences")]
        masked = attention_mask is not None and not bool(attention_mask.all())
        if {len(input_ids), *rows} != {1} or masked or any(kwargs.get(name) is not None for name in options):
            return self._generate(input_ids, attention_mask=attention_mask, **kwargs)
        prompt, last = input_ids[0].cpu(), input_ids.shape[1] - 1  # generate() reads at least one token
        text = prompt.numpy().tobytes()
        known = max((key for key in self.states if len(key) <= 8 * last and text.startswith(key)), key=len, default=b"")
        state, done = RetNetState(self.model.config), len(known) // 8
        if known:
            self.states.move_to_end(known)
            state = self.states[known].clone()
        self.reused, self.read = self.reused + done, self.read + len(prompt) - done
        with torch.no_grad():
            for end in [*range(done // self.every * self.every + self.every, last, self.every), last]:
                if end > done:
                    piece = input_ids[:, done:end].to(self.model.device)
                    self.model(piece, cache=state, use_cache=True, logits_to_keep=1)
                    self._keep(prompt[:end], state.clone())
                    done = end
        output = self._generate(input_ids, cache=state, **kwargs)
        written = getattr(output, "sequences", output)
        self._keep(written[0, : int(state.get_seq_length())].cpu(), state.clone())
        return output

    def _keep(self, ids: Tensor, state: RetNetState) -> None:
        key = ids.long().contiguous().numpy().tobytes()
        if key not in self.states and 0 < state.nbytes <= self.memory:
            self.states[key] = state
            self.nbytes += state.nbytes
        while self.nbytes > self.memory:
            self.nbytes -= self.states.popitem(last=False)[1].nbytes
