# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Faster decoding on a CPU.

    fast = retnet_hf.cpu.compile(model)
    fast.generate(**inputs)

The package wraps models of `retnet_hf`. `retnet_hf` itself does not import it.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from huggingface_hub import constants
from torch import Tensor, nn
from transformers.utils import logging

from retnet_hf.hybrid.modeling_hybrid import RetNetHybridDecoderLayer, RetNetHybridRetention
from retnet_hf.modules.layers import has_hooks
from retnet_hf.ops.plan import Plan
from retnet_hf.ops.retention_forms import is_traced
from retnet_hf.retnet.modeling_retnet import RetNetDecoderLayer, RetNetMLP, RetNetPreTrainedModel, RetNetRetention
from retnet_hf.state.retention_state import RetNetState

from .programs import (
    LayerProgram,
    ModuleSnapshot,
    ProductProgram,
    PromptPrograms,
    layer_programs,
    product_programs,
    projections,
    prompt_programs,
    shallow_copy,
)


logger = logging.get_logger(__name__)
Model = TypeVar("Model", bound=RetNetPreTrainedModel)


class CompiledLayer(RetNetDecoderLayer):
    """A layer of a fast copy. It is a class, since a `forward` in the layer's `__dict__` would look like a hook."""

    programs: dict[int, LayerProgram]  # of steps, by number of sequences; empty after the weights have changed
    prompts: PromptPrograms | None  # None if there are none, or after the weights have changed
    original_class = RetNetDecoderLayer
    added = ("programs", "prompts")

    def forward(self, hidden_states, plan, state=None, **kwargs):
        if not self.training and not is_traced():
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
            said = f"retnet_hf.cpu.compile made no program for steps of {batch} sequences"
            logger.warning_once(f"{said}: add this number to batch_sizes.")
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
            return False
        return True


class CompiledLinear(nn.Linear):
    """A linear layer of a fast copy, with the parameters of the original layer."""

    program: ProductProgram | None  # None after the weight has changed
    original_class = nn.Linear
    added = ("program",)

    def forward(self, hidden_states: Tensor) -> Tensor:
        program = self.program
        if program is not None and program.computes(hidden_states):
            if program.snapshot.is_unchanged():
                return program(hidden_states)
            self.program = None
        return super().forward(hidden_states)


def compile(
    model: Model,
    folder: str | os.PathLike | None = None,
    programs: bool = True,
    measure: bool = True,
    batch_sizes: Sequence[int] = (1,),
    prompts: bool = False,
) -> Model:
    """Returns a fast copy of a model for decoding on a CPU. The model itself is not changed.

    The copy has the model's class and shares its parameters under the same names, so that `generate`, pipelines, states and
    `save_pretrained` work as usual. It computes the same values up to rounding.

    A program is a decode step of a layer of retention, or the product of one token with the weight of the head, of softmax
    attention, or of a layer with experts or learned angles. It is compiled once, in ten to thirty seconds, and stored in a
    file. Equal layers share it. It multiplies weights by the kernel that is fastest in a trial, and weights of torchao
    (`Int8WeightOnlyConfig`, `IntxWeightOnlyConfig` with `torch.int4` in groups) as integers. Warnings count the layers
    that have no program, and say why. Without programs, no compiler is needed: products of one token use a faster
    kernel of PyTorch, if there is one.

    With autocast, hooks, training mode, recorded gradients or `torch.export`, or with weights that were replaced or moved
    since, the layers compute as in the model. If values change in place, programs read the new values, unless they are
    quantised. Since parameters are shared, training the copy trains the model. `original` returns a plain model.

    Args:
        model: a causal RetNet, usually a `RetNetForCausalLM` or `RetNetModel`, on a CPU in float32 or half precision.
        folder: folder of programs, by default in the cache of huggingface_hub. Programs are code that is executed, so a
            folder that other users may write to is refused.
        programs: whether to compile programs.
        measure: has no effect. It was an option of fused projections, which earlier versions had.
        batch_sizes: numbers of sequences for which decode steps are compiled. Programs of products serve one sequence.
        prompts: whether to compile two programs for calls with two or more tokens per sequence in layers of retention, in
            about fifteen more seconds. Quantised layers have none. Tested with torch 2.13 and 2.15.

    Raises:
        ValueError: for an unsupported model, batch_sizes that are empty or contain a number below 1, `prompts` without
            `programs`, or a folder that other users may write to.
        OSError: if the folder cannot be written to.
        RuntimeError: if a program cannot be compiled, for example without a C++ compiler.
    """
    if not isinstance(model, RetNetPreTrainedModel):
        raise ValueError(f"retnet_hf.cpu.compile needs a model of retnet_hf, got {type(model).__name__}.")
    if model.device.type != "cpu" or model.dtype == torch.float64 or model.config.bidirectional:
        needed = "retnet_hf.cpu.compile needs a model that decodes on a CPU, in float32 or half precision"
        given = f"device {model.device}, {model.dtype} and bidirectional={model.config.bidirectional}"
        raise ValueError(f"{needed}, got {given}.")
    sizes = () if isinstance(batch_sizes, int) else tuple(dict.fromkeys(batch_sizes))
    if not sizes or min(sizes) < 1:
        raise ValueError(f"batch_sizes must be a list of one or more positive numbers of sequences, got {batch_sizes}.")
    if prompts and not programs:
        raise ValueError("prompts=True needs programs=True: prompts are read by programs.")
    fast = original(model)
    path = Path(folder or Path(constants.HF_HOME) / "retnet_hf" / "decoding") if programs else None
    served = set() if path is None else install_steps(fast, path, sizes, prompts)
    layers = [layer for _, layer in projections(fast) if layer not in served]
    for layer, program in zip(layers, product_programs(layers, path)):
        if program is not None:
            layer.__class__, layer.program = CompiledLinear, program
    return fast


def install_steps(fast: nn.Module, folder: Path, batch_sizes: Sequence[int], prompts: bool) -> set[nn.Module]:
    """Adds programs of steps, and optionally of prompts, to layers of retention. Returns all modules in these layers."""
    kinds, mixers = (RetNetDecoderLayer, RetNetHybridDecoderLayer), (RetNetRetention, RetNetHybridRetention)
    candidates = [layer for layer in fast.modules() if type(layer) in kinds and type(layer.mixer) in mixers]
    layers = [layer for layer in candidates if type(layer.mlp) is RetNetMLP]
    layers = [layer for layer in layers if getattr(layer.retention, "learned_rotation", None) is None]
    if left := len(candidates) - len(layers):
        some = f"{left} of {len(candidates)} layers of retention, since they have experts or learned angles"
        logger.warning(f"retnet_hf.cpu.compile compiles only the products of {some}. PyTorch computes the rest.")
    of_steps = layer_programs(layers, fast.config, folder, batch_sizes)
    if left := len(layers) - len(of_steps):
        some = f"{left} of {len(layers)} layers of retention, since they have hooks or linear layers without a program"
        logger.warning(f"retnet_hf.cpu.compile makes no programs of steps for {some}.")
    of_prompts = prompt_programs(list(of_steps), fast.config, folder) if prompts else {}
    if prompts and (left := len(of_steps) - len(of_prompts)):
        logger.warning(f"prompts=True makes no programs for {left} of {len(of_steps)} layers: they are quantised.")
    served: set[nn.Module] = set()
    for layer, steps in of_steps.items():
        layer.__class__, layer.programs, layer.prompts = CompiledLayer, steps, of_prompts.get(layer)
        served |= set(layer.modules())
    return served


def original(fast: Model) -> Model:
    """Returns a model without programs that shares a fast copy's parameters, to train, adapt or save.

    For a plain model, it returns a copy that shares the parameters.
    """
    plain = shallow_copy(fast)
    for module in plain.modules():
        if isinstance(module, (CompiledLayer, CompiledLinear)):
            for name in module.added:
                delattr(module, name)
            module.__class__ = module.original_class
    return plain


def number_of_programs(fast: nn.Module) -> int:
    """Returns how many layers of a fast copy compute decode steps with programs."""
    return sum(isinstance(module, CompiledLayer) and any(module.programs.values()) for module in fast.modules())
