# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Programs of `retnet_hf.cpu` that run as modules, without a compiler, which takes ten seconds for each."""

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from small_models import close, random_ids
from torch import Tensor, nn

from retnet_hf import RetNetState
from retnet_hf.cpu import programs as cpu_programs
from retnet_hf.cpu.products import product_of
from retnet_hf.cpu.programs import AfterOperator, BeforeOperator, ProductStep
from retnet_hf.ops import gradients
from retnet_hf.state.retention_state import RetNetStateLayer


class Runs(list):
    """Files of the programs of layers that ran, and of those of products and of prompts."""

    def __init__(self) -> None:
        super().__init__()
        self.of_products: list[Path] = []
        self.of_prompts: list[Path] = []

    def clear(self) -> None:
        super().clear()
        self.of_products.clear()
        self.of_prompts.clear()


@pytest.fixture
def made(request, monkeypatch) -> Runs:
    """Programs that would have been compiled run as they are: the first of both modules to choose from, or the last."""
    chosen, kept, runs = getattr(request, "param", 0), {}, Runs()

    def make(path, steps, inputs):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        kept[path] = steps[chosen]

    def load(path):
        def run(flat: list[Tensor]) -> list[Tensor]:
            step = kept[path]
            first = len(flat) - len(step.names)
            with torch.no_grad(), patch.object(gradients, "is_traced", lambda *arguments: True):  # as in a compiler
                if isinstance(step, ProductStep):
                    runs.of_products.append(path)
                    return [step(flat[0], flat[1:])]
                if isinstance(step, BeforeOperator):
                    runs.of_prompts.append(path)
                    return list(step(flat[0], flat[1:first], flat[first:]))
                if isinstance(step, AfterOperator):
                    runs.of_prompts.append(path)
                    return [step(flat[0], flat[1], flat[first:])]
                runs.append(path)
                return [step(*flat[:3], flat[3:first], flat[first:])]

        return run

    monkeypatch.setattr(cpu_programs, "make", make)
    monkeypatch.setattr(cpu_programs, "load", load)
    return runs


def same(found: tuple[Tensor, RetNetState], expected: tuple[Tensor, RetNetState], tolerance: float = 1e-4) -> None:
    close(found[0].float(), expected[0].float(), tolerance)
    for layer, other in zip(found[1].layers, expected[1].layers, strict=True):
        assert layer.next_position.equal(other.next_position)
        assert layer.cumulative_length.equal(other.cumulative_length)
        if isinstance(layer, RetNetStateLayer):
            close(layer.recurrent_states, other.recurrent_states, tolerance)


PROMPT = random_ids(1, 7)
KINDS = {  # dialects and options
    "plain": ("fla", {}),
    "bare": ("fla", dict.fromkeys(("use_output_gate", "use_gated_mlp", "use_head_norm", "use_rotary"), False)),
    "grouped": ("grouped", {}),
    "torchscale": ("torchscale", {}),
    "hybrid": ("hybrid", {}),
    "minimax": ("minimax", {"num_experts": None}),
    "scaled": ("fla", {"value_act": "silu", "use_rotary": False, "residual_multiplier": 0.7}),
    "post": ("fla", {"feature_map": "relu", "use_head_norm": False, "norm_position": "post"}),
}


@torch.no_grad()
def read(model, ids: Tensor, **inputs) -> tuple[Tensor, RetNetState]:
    state = RetNetState(model.config)
    return model(ids, past_key_values=state, use_cache=True, **inputs).logits, state


def state_after(model, ids: Tensor = PROMPT) -> RetNetState:
    return read(model, ids)[1]


@torch.no_grad()
def decoded(model, ids: Tensor = PROMPT) -> tuple[Tensor, RetNetState]:
    state = state_after(model, ids)
    steps = [random_ids(ids.shape[0], 1, seed=number) for number in range(5)]
    return torch.cat([model(step, past_key_values=state, use_cache=True).logits for step in steps], dim=1), state


def linear_layers(dtype: torch.dtype = torch.bfloat16, bias: bool = False, inputs: int = 128) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(inputs, size, bias=bias).to(dtype) for size in (48, 16)]


def check(layers: list[nn.Linear], rounding: float) -> None:
    for layer in layers:
        token = torch.randn(1, 1, layer.in_features, generator=torch.Generator().manual_seed(1)).to(layer.weight.dtype)
        weight = layer.weight if type(layer.weight) is nn.Parameter else layer.weight.dequantize()
        bias = None if layer.bias is None else layer.bias.double()
        with torch.no_grad():
            output, expected = product_of(layer)(token), nn.functional.linear(token.double(), weight.double(), bias)
        assert (output.shape, output.dtype) == (expected.shape, token.dtype)
        assert (output - expected).norm() < rounding * expected.norm()


BFLOAT16 = 2**-8  # a rounding of the result, and one of a bias
