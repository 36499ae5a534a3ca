# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""RetNetForCausalLM."""

import functools
from typing import Any

import torch
from torch import nn

import retnet_hf_cpu
from retnet_hf import RetNetConfig, RetNetForCausalLM

from .peer import Size, TransformersPeer


class Ours(TransformersPeer):
    """Fused, compiled by `torch.compile` or by programs of `retnet_hf_cpu`, with weights that torchao has quantised, with
    kernels of a GPU, or with steps of decoding as CUDA graphs. The options are those of the paper, or of the library's sizes
    for training from scratch."""

    def __init__(
        self,
        size: Size,
        fused: bool = False,
        compiled: bool = False,
        programs: bool = False,
        bits: int | None = None,
        kernels: str = "auto",
        graphed: bool = False,
        from_scratch: bool = False,
    ) -> None:
        config = (functools.partial(RetNetConfig.from_preset, "small") if from_scratch else RetNetConfig)(
            vocab_size=size.vocabulary,
            hidden_size=size.hidden_size,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=size.feed_forward(matrices=3, others=8),
            kernels=kernels,
        )
        super().__init__(RetNetForCausalLM(config), compiled, graphed)
        self.compiled, self.fused, self.programs, self.bits = compiled, fused, programs, bits

    def ready(self) -> None:
        if self.bits is not None:
            self._quantise()
        if self.fused or self.programs:
            # everything is fused, since the race itself is the trial
            options = {"programs": self.programs, "measure": False, "prompts": self.programs}
            fast = retnet_hf_cpu.compile(self.module, **options)
            super().__init__(fast, self.compiled, self.graphed)

    def _quantise(self) -> None:
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

        of_4_bits = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
        layers = [module for module in self.module.model.modules() if isinstance(module, nn.Linear)]
        self.quantised_weights = sum(layer.weight.numel() for layer in layers)
        quantize_(self.module.model, Int8WeightOnlyConfig() if self.bits == 8 else of_4_bits)

    @property
    def weight_bytes(self) -> int:
        if self.bits is None:
            return super().weight_bytes
        return self.head.weight.nbytes + self.quantised_weights * self.bits // 8  # scales and norms left out

    def state_after(self, context: int, batch: int, room: int) -> Any:
        state = super().state_after(context, batch, room)
        for layer in state.layers:
            layer.next_position.fill_(context)
            layer.cumulative_length.fill_(context)
        return state

    def state_bytes(self, state: Any) -> int:
        return state.nbytes

    def mixing_flops(self, context: float) -> float:
        """State update and read-out: what the recurrence takes. The inner products of chunks count for nothing."""
        config = self.module.config
        return 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * config.value_head_dim
