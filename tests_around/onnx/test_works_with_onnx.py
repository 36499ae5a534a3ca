# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Prompt and decode step as programs of torch.export, with the state among their inputs and outputs."""

import pytest
import torch
from small_models import close, random_ids, same_state, small_model
from torch import Tensor, nn

from retnet_hf import RetNetForCausalLM, RetNetState


class Prompt(nn.Module):
    """ids (B, T) -> logits (B, T, vocabulary), state (layers, B, G, K, V), position of the next token (B,)."""

    def __init__(self, model: RetNetForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.read(input_ids, RetNetState(self.model.config))

    def read(self, input_ids: Tensor, state: RetNetState) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.model(input_ids, past_key_values=state, use_cache=True).logits
        return logits, torch.stack([layer.recurrent_states for layer in state.layers]), state.layers[0].next_position.clone()


class Step(Prompt):
    """The same for one token, (B, 1), after those that the state has read."""

    def forward(self, input_ids: Tensor, recurrent_states: Tensor, next_position: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        state = RetNetState(self.model.config)
        for layer, matrices in zip(state.layers, recurrent_states):  # copied, as a step writes to its state in place
            layer.fill_(matrices.clone(), next_position.clone(), torch.zeros((), dtype=torch.int64))
        return self.read(input_ids, state)


@pytest.fixture(scope="module")
def model():
    """One layer with something of every dialect, since each export costs seconds; its heads share states."""
    fields = {"num_attention_heads": 4, "num_key_value_heads": 2, "decay_schedule": [0.6, 0.6, 0.97, 0.97]}
    return small_model("torchscale", num_hidden_layers=1, chunk_size=8, **fields)


@pytest.fixture(scope="module")
def programs(model):
    """Both, exported with the batch and the length of the prompt left open."""
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=4096)
    ids = random_ids(2, 21)
    with torch.no_grad():
        _, state, position = Prompt(model)(ids)
        shapes = ({0: batch, 1: length},)
        prompt = torch.export.export(Prompt(model), (ids,), dynamic_shapes=shapes, strict=False)
        shapes = ({0: batch}, {1: batch}, {0: batch})
        step = torch.export.export(Step(model), (ids[:, :1], state, position), dynamic_shapes=shapes, strict=False)
    return prompt, step


def reads_as(model: RetNetForCausalLM, prompt, step, batch: int, length: int, tolerance: float) -> None:
    """Prompt and eight steps, against one forward of the model over all of it."""
    ids = random_ids(batch, length + 8)
    with torch.no_grad():
        expected = model(ids, use_cache=True)
    logits, state, position = prompt(ids[:, :length])
    close(logits, expected.logits[:, :length], tolerance)
    for n in range(length, length + 8):
        logits, state, position = step(ids[:, n : n + 1], state, position)
        close(logits[:, 0], expected.logits[:, n], tolerance)
    assert position.tolist() == [length + 8] * batch
    ours = RetNetState(model.config)
    for layer, matrices in zip(ours.layers, state):
        layer.fill_(matrices, position, torch.tensor(length + 8))
    same_state(ours, expected.past_key_values, tolerance)


OTHER_SHAPES = [(2, 21), (1, 2), (3, 8), (5, 34), (1, 100)]


def test_exported_prompt_and_step_carry_the_state(model, programs, tmp_path):
    """Saved and loaded, at other batches and lengths than those that were traced."""
    loaded = []
    for index, program in enumerate(programs):
        torch.export.save(program, tmp_path / f"{index}.pt2")
        loaded.append(torch.export.load(tmp_path / f"{index}.pt2").module())
    for batch, length in OTHER_SHAPES:
        reads_as(model, *loaded, batch, length, 1e-4)
