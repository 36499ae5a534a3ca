# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""State tuning: of a language model only the state that it begins a text with is learned.

A model that begins with a learned state behaves as if it had read a text that asks for a task. All weights stay as they are,
the state is a small file (2 MB for 37 million parameters), and inference costs what it did.
"""

import os
from typing import Any

import torch
from torch import Tensor, nn

from ..retnet.generation_retnet import register_causal
from ..retnet.modeling_retnet import RetNetForCausalLM
from ..state.retention_state import RetNetState, require_retention_alone


class StateTuning(nn.Module):
    """A language model with frozen weights and a learned initial state. Trainer trains it as it trains the model.

    Its `state_dict` has the state alone, which is what checkpoints hold. `save` writes a file that `RetNetState.load` reads,
    for `generate`, exports and everything else that takes a state.

    Args:
        model: whose layers are all retention. Its parameters no longer ask for gradients.

    Raises:
        ValueError: for a model with softmax attention, whose state has no fixed size.

    Attributes:
        states: (M, K, V) of each layer, float32, which begin with zeros: as the model without a state.

    Example:

    ```python
    >>> import torch
    >>> from retnet_hf import RetNetConfig, RetNetForCausalLM, StateTuning

    >>> model = RetNetForCausalLM(RetNetConfig.from_preset("tiny", num_hidden_layers=2, vocab_size=64)).eval()
    >>> tuned, ids = StateTuning(model), torch.tensor([[1, 5, 7, 3]])
    >>> tuned(ids, labels=ids).loss.backward()
    >>> model.generate(ids, past_key_values=tuned.state(), max_new_tokens=4, min_new_tokens=4).shape
    torch.Size([1, 8])

    ```
    """

    def __init__(self, model: RetNetForCausalLM) -> None:
        super().__init__()
        self._keys_to_ignore_on_save = None  # which Trainer asks for when it resumes
        require_retention_alone(model.config)
        self.model, self.config = model.requires_grad_(False), model.config
        shapes = [model.config.state_shape(layer) for layer in range(model.config.num_hidden_layers)]
        self.states = nn.ParameterList(nn.Parameter(torch.zeros(shape, device=model.device)) for shape in shapes)
        self.register_load_state_dict_post_hook(_without_weights)

    def state(self, batch: int = 1) -> RetNetState:
        """The initial state of so many texts. Gradients flow into `states` where they are enabled."""
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
        """What the model returns for texts (B, T) that begin with the learned state.

        Raises:
            ValueError: for packed documents, of which only the first one would begin with it.
        """
        packed = [name for name in ("seq_idx", "cu_seq_lens_q") if kwargs.get(name) is not None]
        if position_ids is not None and bool((position_ids[..., 1:] <= position_ids[..., :-1]).any()):
            packed.append("position_ids that begin anew")
        if packed:
            raise ValueError(f"a learned state begins a row: packed documents ({packed[0]}) have to be rows of their own.")
        options = {"labels": labels, "position_ids": position_ids, "use_cache": False, **kwargs}
        return self.model(input_ids, attention_mask, past_key_values=self.state(len(input_ids)), **options)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The learned state alone."""
        entries = super().state_dict(*args, **kwargs)
        frozen = f"{kwargs.get('prefix', '')}model."
        for name in [name for name in entries if name.startswith(frozen)]:
            del entries[name]
        return entries

    def gradient_checkpointing_enable(self, *args: Any, **kwargs: Any) -> None:
        """Raises ValueError: PyTorch's reentrant checkpointing passes no gradient to a state."""
        raise ValueError("gradient_checkpointing must be False for StateTuning: a state may get no gradient through it.")

    activation_checkpointing_enable = gradient_checkpointing_enable  # the name from transformers 5.24 on

    def save(self, path: str | os.PathLike) -> None:
        """Writes the state as a file that `RetNetState.load(path, model)` reads."""
        self.state().save(path)


register_causal(StateTuning)


def _without_weights(tuning: StateTuning, keys: Any) -> None:
    """The frozen weights of the model are in no checkpoint, and nobody misses them."""
    frozen = tuple(f"model.{name}" for name in tuning.model.state_dict())
    inner = tuple(f".{name}" for name in frozen)
    keys.missing_keys[:] = [name for name in keys.missing_keys if name not in frozen and not name.endswith(inner)]
