# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What transformers' loader does to each weight of a published RetNet folder, shard by shard, on its way into the model."""

from abc import abstractmethod
from collections.abc import Collection

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform
from transformers.distributed.utils import is_dtensor
from transformers.modeling_utils import PreTrainedModel, load_state_dict

from .checkpoint_dialects import dialect_of, is_fused, pairs_apart
from .configuration_retnet import RetNetConfig


class RowConversion(ConversionOps):
    """A change of the rows of a weight, which may be spread over devices.

    Under tensor parallelism and FSDP, transformers reads of a tensor only the rows that this process will have of the
    parameter, chosen as if there were no conversion: so all are gathered, converted, and divided again.
    """

    @abstractmethod
    def parts(self, weight: Tensor, config: RetNetConfig) -> tuple[Tensor, ...]:
        """The weights of ours that one of theirs becomes, each as large as the others."""

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Tensor | list[Tensor]],
        target_patterns: list[str],
        config: RetNetConfig,
        model: PreTrainedModel,
        full_layer_name: str,
        **kwargs,
    ) -> dict[str, Tensor]:
        tensors = next(iter(input_dict.values()))
        weight = tensors[0] if isinstance(tensors, list) else tensors
        module, _, name = full_layer_name.rpartition(".")  # the first of ours
        parameter = getattr(model.get_submodule(module), name)
        if not is_dtensor(parameter):
            return dict(zip(target_patterns, self.parts(weight, config)))

        from torch.distributed.tensor import DTensor, Replicate  # which not every build of torch has

        mesh, placements = parameter.device_mesh, parameter.placements
        shape = (len(target_patterns) * parameter.shape[0], *parameter.shape[1:])
        strides = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(weight, mesh, placements, shape=shape, stride=strides).full_tensor()
        parts = (DTensor.from_local(part, mesh, [Replicate()] * mesh.ndim) for part in self.parts(whole, config))
        return {  # cloned, or each would keep the memory of the whole
            name: part.redistribute(mesh, placements).to_local().clone() for name, part in zip(target_patterns, parts)
        }


class PairsApart(RowConversion):
    """Reorders the rows of a query or key projection from interleaved to half-split rotation."""

    def parts(self, weight: Tensor, config: RetNetConfig) -> tuple[Tensor, ...]:
        return (pairs_apart(weight, config.head_dim),)


class Halves(RowConversion):
    """Gate and up projection out of one tensor, the gate's rows above the others."""

    def parts(self, weight: Tensor, config: RetNetConfig) -> tuple[Tensor, ...]:
        return weight.tensor_split(2)


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
        transforms.append(WeightConverter(halves[0], halves, [Halves()]))
    return transforms
