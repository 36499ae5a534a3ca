# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""State tuning: training only the initial state of a language model, as if it had read a text that asks for a task."""

import os
from typing import Any

import torch
from torch import Tensor, nn

from ..retnet.generation_retnet import register_causal
from ..retnet.modeling_retnet import RetNetForCausalLM
from ..state.retention_state import RetNetState, require_retention_alone


class StateTuning(nn.Module):
    """A language model with frozen weights and a learned initial state. Trainer trains it like the model.

    Its `state_dict`, and so every checkpoint, contains only the state. `save` writes a file that `RetNetState.load` reads,
    for `generate`, exports and everything else that accepts a state.

    Args:
        model: a model with retention in all layers. Its parameters are set to require no gradients.

    Raises:
        ValueError: for a model with softmax attention, since its state has no fixed size.

    Attributes:
        states: (M, K, V) for each layer, float32. Initially they are zero, which equals a model without a state.

    Example:

    ```python
    >>> import torch
    >>> from retnet_hf import RetNetConfig, RetNetForCausalLM, StateTuning

    >>> model = RetNetForCausalLM(RetNetConfig.from_preset("tiny", num_hidden_layers=2, vocab_size=64)).eval()
    >>> tuned, ids = StateTuning(model), torch.tensor([[1, 5, 7, 3]])
    >>> tuned(ids, labels=ids).loss.backward()
    >>> model.generate(ids, cache=tuned.state(), max_new_tokens=4, min_new_tokens=4).shape
    torch.Size([1, 8])

    ```
    """

    def __init__(self, model: RetNetForCausalLM) -> None:
        super().__init__()
        self._keys_to_ignore_on_save = None  # Trainer reads this attribute when it resumes
        require_retention_alone(model.config)
        self.model, self.config = model.requires_grad_(False), model.config
        shapes = [model.config.state_shape(layer) for layer in range(model.config.num_hidden_layers)]
        self.states = nn.ParameterList(nn.Parameter(torch.zeros(shape, device=model.device)) for shape in shapes)
        self.register_load_state_dict_post_hook(_without_weights)

    def state(self, batch: int = 1) -> RetNetState:
        """Returns the initial state of `batch` texts. If gradients are enabled, they flow into `states`."""
        state = RetNetState.zeros(self.config, batch, self.states[0].device)
        for layer, own in zip(state.layers, self.states):
            layer.recurrent_states = own.expand(batch, *own.shape).clone()
        state.require_weights(self.model.model)
        return state

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Returns the model's outputs for texts (B, T) that begin with the learned state.

        Raises:
            ValueError: for packed documents, since only the first document of a row would begin with it.
        """
        packed = [name for name in ("seq_idx", "cu_seq_lens_q") if kwargs.get(name) is not None]
        if position_ids is not None and bool((position_ids[..., 1:] <= position_ids[..., :-1]).any()):
            packed.append("position_ids that restart")
        if packed:
            raise ValueError(f"Packed documents ({packed[0]}) must be separate rows, since a learned state begins a row.")
        options = {"labels": labels, "position_ids": position_ids, "use_cache": False, **kwargs}
        return self.model(input_ids, attention_mask, cache=self.state(len(input_ids)), **options)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        frozen = f"{kwargs.get('prefix', '')}model."
        entries = super().state_dict(*args, **kwargs)
        for name in [name for name in entries if name.startswith(frozen)]:
            del entries[name]
        return entries

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError: PyTorch's reentrant checkpointing passes no gradient to a state."""
        raise ValueError("gradient_checkpointing must be False for StateTuning, since it may pass no gradient to the state.")

    activation_checkpointing_enable = gradient_checkpointing_enable  # the name since transformers 5.24

    def save(self, path: str | os.PathLike) -> None:
        """Writes the state as a file that `RetNetState.load(path, model)` reads."""
        self.state().save(path)


register_causal(StateTuning)


def _without_weights(tuning: StateTuning, keys: Any) -> None:  # the frozen ones, which no checkpoint contains
    frozen = tuple(f".model.{name}" for name in tuning.model.state_dict())
    keys.missing_keys[:] = [name for name in keys.missing_keys if not f".{name}".endswith(frozen)]
