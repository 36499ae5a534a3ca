# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Programs for prompts of any length: the computations of a layer of retention before and after its operator.

Everything in a layer except the operator treats tokens separately. Therefore two programs with a dynamic number of tokens
serve prompts of any length and any number of sequences: one computes queries, keys and values, the other computes the rest
of the layer from the operator's output. The operator runs between them as in the model, so that states, padding and
documents are handled as in the model.

As in programs.py, the layer itself is compiled: a copy of the layer, run up to the operator, or from it. The compiler drops
operations that the result does not need.

In shapes, N = B T: programs see the tokens of all sequences in one row.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from transformers.configuration_utils import PreTrainedConfig

from retnet_hf.ops.gradients import rotate
from retnet_hf.ops.plan import Plan, Rotation
from retnet_hf.state.retention_state import RetNetState

from .programs import ModuleSnapshot, Run, TracedStep, program_path, programs_of, shallow_copy, traced_rotation, turns


EXAMPLE = 512  # tokens with which a program is traced; the compiler uses the size to choose which loops are threaded
TOKENS = Dim("tokens", min=2, max=2**31 - 1)


class PlanBefore:
    """A plan that records the inputs of the operator of a layer.

    Args:
        rotate: rotates and scales queries and keys.
    """

    def __init__(self, rotate: Rotation) -> None:
        self.rotate = rotate

    def retain(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, past: None = None) -> tuple[Tensor, None]:
        self.kept = query, key, value
        return query.new_zeros(*query.shape[:3], value.shape[-1]), None


class PlanAfter:
    """A plan that returns `output` (B, H, T, V) as the result of the operator."""

    def __init__(self, output: Tensor) -> None:
        self.output = output

    def rotate(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        return query, key

    def retain(self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, past: None = None) -> tuple[Tensor, None]:
        return self.output, None


class BeforeOperator(TracedStep):
    """Computes queries, keys and values of a layer."""

    def forward(
        self,
        hidden_states: Tensor,  # (1, N, D)
        rotations: list[Tensor],  # (1, N, 1, K/2): cosines and sines for queries, then for keys; or nothing
        operands: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:  # (1, N, H, K), (1, N, G, K) and (1, N, G, V)
        tables = [table.transpose(1, 2) for table in rotations]
        plan = PlanBefore(traced_rotation(tables, rotate, self.twin.retention.head_dim**-0.5))
        functional_call(self.twin, dict(zip(self.names, operands)), (hidden_states, plan))
        return tuple(heads.transpose(1, 2) for heads in plan.kept)

    def open_dimensions(self, inputs: tuple) -> tuple:
        _, rotations, operands = inputs
        return {1: TOKENS}, [{1: TOKENS} for _ in rotations], [None for _ in operands]


class AfterOperator(TracedStep):
    """Computes the output of a layer from the output of its operator."""

    def forward(
        self,
        hidden_states: Tensor,  # (1, N, D)
        output: Tensor,  # (1, N, H, V), output of the operator, float32
        operands: list[Tensor],
    ) -> Tensor:  # (1, N, D)
        plan = PlanAfter(output.transpose(1, 2))
        return functional_call(self.twin, dict(zip(self.names, operands)), (hidden_states, plan))

    def open_dimensions(self, inputs: tuple) -> tuple:
        return {1: TOKENS}, {1: TOKENS}, [None for _ in inputs[2]]


class PromptPrograms:
    """Both programs with the operands of a layer. Pickling and copying drop them.

    Args:
        before, after: the programs of `BeforeOperator` and `AfterOperator`.
        layer: the layer that provides the weights as operands.
    """

    def __init__(self, before: Run, after: Run, layer: nn.Module) -> None:
        self.before, self.after = before, after
        self.rotates = turns(layer.retention.config)
        self.operands = [parameter.detach() for parameter in layer.parameters()]
        self.dtype, self.snapshot = layer.retention.q_proj.weight.dtype, ModuleSnapshot(layer)

    def computes(self, hidden_states: Tensor, plan: Plan) -> bool:
        """Returns whether the programs compute the same as the layer for this call."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or hidden_states.dtype != self.dtype:
            return False
        if plan.maps:  # its maps are outputs of the mixer
            return False
        return not self.rotates or (plan.rotate.rotate is rotate and self.dtype not in plan.rotate.cast_dtypes)

    def __call__(self, hidden_states: Tensor, plan: Plan, state: RetNetState | None, layer_idx: int) -> Tensor:
        """Returns the layer's output (B, T, D) for (B, T, D), and updates the state."""
        batch, past = hidden_states.shape[0], None if state is None else state.layers[layer_idx]
        tokens = hidden_states.reshape(1, -1, hidden_states.shape[-1]).contiguous()  # (1, N, D)
        tables = [*plan.rotate.query_angles, *plan.rotate.key_angles] if self.rotates else []
        tables = [in_one_row(table.float().expand(batch, -1, -1, -1)) for table in tables]
        operands = self.before([tokens, *tables, *self.operands])  # (1, N, H, K), in the operator (B, H, T, K)
        query, key, value = (heads[0].unflatten(0, (batch, -1)).transpose(1, 2) for heads in operands)
        output, _ = plan.retain(layer_idx, query, key, value, past)
        [result] = self.after([tokens, in_one_row(output.float()), *self.operands])
        return result.view(hidden_states.shape)

    def __reduce__(self) -> tuple:
        return type(None), ()


def in_one_row(tensor: Tensor) -> Tensor:
    """Returns (B, H, T, V) as (1, N, H, V), contiguous."""
    return tensor.transpose(1, 2).flatten(0, 1)[None].contiguous()


def prompt_programs(layers: list[nn.Module], config: PreTrainedConfig, folder: Path) -> list[PromptPrograms | None]:
    """Returns programs for prompts of each layer, loaded from the folder or compiled into it.

    The value is None for a layer with quantised weights.

    Args:
        layers: layers of retention on a CPU that have programs of steps from `layer_programs`.

    Raises:
        RuntimeError: if a program cannot be compiled.
    """
    asked = []
    for layer in filter(is_dense, layers):
        twin, mixer = shallow_copy(layer).eval(), layer.retention
        heads, _, key_size, value_size = config.mixer_sizes(mixer.layer_idx)
        operands = [parameter.detach() for parameter in twin.parameters()]
        hidden_states = torch.zeros(1, EXAMPLE, config.hidden_size, dtype=mixer.q_proj.weight.dtype)
        rotations = [torch.ones(1, EXAMPLE, 1, key_size // 2) for _ in range(4 if turns(config) else 0)]
        output = torch.zeros(1, EXAMPLE, heads, value_size)
        for step, inputs in (
            (BeforeOperator(twin), (hidden_states, rotations, operands)),
            (AfterOperator(twin), (hidden_states, output, operands)),
        ):
            path = program_path(folder, config, step, tree_leaves(inputs))
            asked.append((path, lambda summed, step=step: step, inputs))
    runs = iter(programs_of(asked))
    return [PromptPrograms(next(runs), next(runs), layer) if is_dense(layer) else None for layer in layers]


def is_dense(layer: nn.Module) -> bool:
    """Returns whether no weight is quantised."""
    return all(type(weight) is nn.Parameter and weight.is_floating_point() for weight in layer.parameters())
