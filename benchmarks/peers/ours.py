# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNetForCausalLM of this package."""

import functools
from typing import Any

import torch

import retnet_hf.cpu
from retnet_hf import RetNetConfig, RetNetForCausalLM

from .peer import Size, TransformersPeer


class Ours(TransformersPeer):
    """A RetNet with the options of the paper or of the presets for training from scratch.

    It may be compiled by `torch.compile` or `retnet_hf.cpu`, or quantised.
    """

    def __init__(
        self,
        size: Size,
        compiled: bool = False,
        programs: bool = False,
        bits: int | None = None,
        from_scratch: bool = False,
    ) -> None:
        make = functools.partial(RetNetConfig.from_preset, "small") if from_scratch else RetNetConfig
        config = make(**size.fields, intermediate_size=size.feed_forward(matrices=3, others=8))
        super().__init__(RetNetForCausalLM(config), compiled)
        self.programs, self.bits = programs, bits

    def ready(self) -> None:
        if self.bits is not None:
            from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, PerGroup, quantize_

            of_4_bits = IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))
            quantize_(self.module.model, Int8WeightOnlyConfig() if self.bits == 8 else of_4_bits)
        if self.programs:
            super().__init__(retnet_hf.cpu.compile(self.module, prompts=True))

    def state_after(self, context: int, batch: int, room: int) -> Any:
        state = super().state_after(context, batch, room)
        for layer in state.layers:
            layer.next_position.fill_(context)
            layer.cumulative_length.fill_(context)
        return state
