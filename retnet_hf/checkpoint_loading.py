# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What transformers' loader does to each weight of a published RetNet folder, shard by shard, on its way into the model."""

from collections.abc import Collection

import torch
from torch import Tensor
from transformers.core_model_loading import Chunk, ConversionOps, WeightConverter, WeightRenaming, WeightTransform
from transformers.modeling_utils import load_state_dict

from .checkpoint_dialects import dialect_of, is_fused, pairs_apart, pairs_together
from .configuration_retnet import RetNetConfig


class PairsApart(ConversionOps):
    """Reorders the rows of a query or key projection from interleaved to half-split rotation."""

    rows = staticmethod(pairs_apart)

    @torch.no_grad()
    def convert(
        self, input_dict: dict[str, Tensor | list[Tensor]], target_patterns: list[str], config: RetNetConfig, **kwargs
    ) -> dict[str, Tensor]:
        tensors = next(iter(input_dict.values()))
        weight = tensors[0] if isinstance(tensors, list) else tensors
        return {target_patterns[0]: self.rows(weight, config.head_dim)}

    @property
    def reverse_op(self) -> ConversionOps:
        return PairsTogether()


class PairsTogether(PairsApart):
    """The way back."""

    rows = staticmethod(pairs_together)

    @property
    def reverse_op(self) -> ConversionOps:
        return PairsApart()


def names_in(checkpoint_files: list[str]) -> set[str]:
    """Names of all tensors in the files, without reading one of them."""
    return {name for file in checkpoint_files for name in load_state_dict(file, map_location="meta")}


def loading_transforms(names: Collection[str], config: RetNetConfig) -> list[WeightTransform]:
    """Renamings and conversions for weights of these names; none where the names are ours."""
    dialect = dialect_of(names)
    if dialect is None:
        return []
    transforms: list[WeightTransform] = [WeightRenaming(theirs, ours) for theirs, ours in dialect.renamings]
    if dialect.interleaved and config.use_rotary:
        for name in (".retention.q_proj.weight", ".retention.k_proj.weight"):
            transforms.append(WeightConverter(name, name, [PairsApart()]))
    if config.use_gated_mlp and is_fused({dialect.canonical(name) for name in names}):
        halves = [".mlp.gate_proj.weight", ".mlp.up_proj.weight"]
        transforms.append(WeightConverter(halves[0], halves, [Chunk(dim=0)]))
    return transforms
