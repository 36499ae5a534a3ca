# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The layers of a fast copy. Each call uses a program, or the layer itself if no program supports the call."""

from torch import Tensor, nn
from transformers.utils import logging

from retnet_hf.modules.layers import has_hooks
from retnet_hf.ops.plan import Plan
from retnet_hf.ops.retention_forms import needs_autograd
from retnet_hf.retnet.modeling_retnet import RetNetDecoderLayer
from retnet_hf.state.retention_state import RetNetState

from .changed_modules import ModuleSnapshot, warn_of_change
from .programs import LayerProgram, ProductProgram
from .prompts import PromptPrograms


logger = logging.get_logger(__name__)


class CompiledLayer(RetNetDecoderLayer):
    """A layer of a fast copy, with the modules and parameters of the original layer.

    It is a class, since a `forward` in the layer's `__dict__` would look like a hook.

    Attributes:
        programs: programs of steps by number of sequences; empty after the weights have changed.
        prompts: programs of prompts; None if there are none, or after the weights have changed.
    """

    programs: dict[int, LayerProgram]
    prompts: PromptPrograms | None
    original_class = RetNetDecoderLayer
    added = ("programs", "prompts")

    def forward(self, hidden_states, plan, state=None, **kwargs):
        if not self.training and not needs_autograd():
            compute = self.step if hidden_states.shape[1] == 1 else self.prompt
            output = compute(hidden_states, plan, state)
            if output is not None:
                return output
        return super().forward(hidden_states, plan, state, **kwargs)

    def step(self, hidden_states: Tensor, plan: Plan, state: RetNetState | None) -> Tensor | None:
        """Returns a program's output for one token of each sequence, or None if the layer has to compute it."""
        batch = hidden_states.shape[0]
        if state is None:
            return None
        if batch not in self.programs and any(self.programs.values()):
            logger.warning_once(
                f"retnet_hf.cpu.compile made no program for steps of {batch} sequences: add this number to batch_sizes."
            )
        program, past = self.programs.get(batch), state.layers[self.retention.layer_idx]
        decay = None if program is None else program.decay(hidden_states, plan, past)
        if decay is None or not self.may_use(program.snapshot):
            return None
        return program(hidden_states, plan, past, decay)

    def prompt(self, hidden_states: Tensor, plan: Plan, state: RetNetState | None) -> Tensor | None:
        """Returns the programs' output for several tokens of each sequence, or None if the layer has to compute it."""
        programs = self.prompts
        if programs is None or not programs.computes(hidden_states, plan) or not self.may_use(programs.snapshot):
            return None
        return programs(hidden_states, plan, state, self.retention.layer_idx)

    def may_use(self, snapshot: ModuleSnapshot) -> bool:
        """Returns whether the layer is unchanged and without hooks. A changed layer drops its programs, with a warning."""
        if has_hooks(snapshot.within):
            return False
        if not snapshot.is_unchanged():
            self.programs, self.prompts = {}, None
            warn_of_change()
            return False
        return True


class CompiledLinear(nn.Linear):
    """A linear layer of a fast copy, with the parameters of the original layer.

    Attributes:
        program: the program of its product; None after the weight has changed.
    """

    program: ProductProgram | None
    original_class = nn.Linear
    added = ("program",)

    def forward(self, hidden_states: Tensor) -> Tensor:
        program = self.program
        if program is not None and program.computes(hidden_states):
            if program.snapshot.is_unchanged():
                return program(hidden_states)
            self.program = None
            warn_of_change()
        return super().forward(hidden_states)
