# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Gradient checkpointing of a layer in segments of its sequence: the backward pass holds one segment at a time."""

from functools import partial

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


class SegmentCheckpointingLayer(GradientCheckpointingLayer):
    """A layer in which transformers switches gradient checkpointing on, and which does it itself, around `segment_forward`.

    Transformers would do it around the whole layer: its `forward`, or in older versions its `__call__`.
    """

    __call__ = nn.Module.__call__

    def __init_subclass__(cls, **kwargs) -> None:
        super(GradientCheckpointingLayer, cls).__init_subclass__(**kwargs)

    def run_segment(self, *operands, **kwargs):
        """`segment_forward`, and again in the backward pass where checkpointing asks for that."""
        if self.gradient_checkpointing and self.training:
            return self._gradient_checkpointing_func(partial(self.segment_forward, **kwargs), *operands)
        return self.segment_forward(*operands, **kwargs)

    def segment_forward(self, *operands, **kwargs):
        """What the layer computes of a segment. Operands that need a gradient come by position."""
        raise NotImplementedError
