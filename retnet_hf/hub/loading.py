# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How `from_pretrained` reads a folder of published weights in any dialect of `dialects.py`.

What transformers does not promise to keep is used in `names_in`, `RowConversion`, `RowConverter`, `loading_transforms`,
`with_transforms`, `forget_transforms` and `tensor_parallel_share`, and nowhere else.
"""

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import (
    Concatenate,
    ConversionOps,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)
from transformers.modeling_utils import PreTrainedModel, load_state_dict

from ..retnet.configuration_retnet import RetNetConfig
from .dialects import DIALECTS, dialect_of, is_fused
from .weight_changes import Change


class RowConversion(ConversionOps):
    """A `Change` of one tensor's rows as a step of transformers' loader. The weight may be spread over devices.

    Under tensor parallelism and FSDP, each process reads its rows of the tensor as it was before the conversion.
    So all rows are gathered, converted, and divided again.
    """

    def __init__(self, change: Change) -> None:
        self.change = change

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Tensor | list[Tensor]],
        target_patterns: list[str],
        model: PreTrainedModel,
        full_layer_name: str,
        **kwargs,
    ) -> dict[str, Tensor]:
        tensors = next(iter(input_dict.values()))
        weight = tensors[0] if isinstance(tensors, list) else tensors
        parameters = [model.get_parameter_or_buffer(name) for name in names_of(full_layer_name, target_patterns)]
        parameter = parameters[0]
        if not hasattr(parameter, "placements"):  # it is no DTensor
            return dict(zip(target_patterns, self.change.forward([weight])))

        from torch.distributed.tensor import DTensor, Replicate  # not in every build of torch

        mesh, placements = parameter.device_mesh, parameter.placements
        shape = (sum(parameter.shape[0] for parameter in parameters), *parameter.shape[1:])
        strides = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(weight, mesh, placements, shape=shape, stride=strides).full_tensor()
        parts = (DTensor.from_local(part, mesh, [Replicate()] * mesh.ndim) for part in self.change.forward([whole]))
        return {  # cloned, or each would keep the memory of the whole
            name: part.redistribute(mesh, placements).to_local().clone() for name, part in zip(target_patterns, parts)
        }


class RowConverter(WeightConverter):
    """One foreign tensor that fills one or more of ours.

    Transformers quantises the first of them alone. Here each is quantised that the quantizer is for.
    """

    __slots__ = ()

    def convert(self, layer_name: str, model=None, config=None, hf_quantizer=None, loading_info=None) -> dict[str, Tensor]:
        quantize, self.quantization_operation = self.quantization_operation, None
        tensors = super().convert(layer_name, model, config, hf_quantizer, loading_info)
        made = {}
        for name, tensor in tensors.items():
            if quantize is None or not hf_quantizer.param_needs_quantization(model, name):
                made[name] = tensor
            else:
                made |= quantize.convert(
                    {name: tensor},
                    source_patterns=self.source_patterns,
                    target_patterns=self.target_patterns,
                    full_layer_name=name,
                    model=model,
                    config=config,
                    missing_keys=loading_info.missing_keys if loading_info else None,
                )
        return made


def names_of(first: str, ends: list[str]) -> list[str]:
    """Names of the tensors that one tensor fills: the first one, and the ends of all."""
    return [first.removesuffix(ends[0]) + end for end in ends]


def names_in(checkpoint_files: list[str]) -> set[str]:
    """Names of all tensors in the files. No values are read."""
    return {name for file in checkpoint_files for name in load_state_dict(file, map_location="meta")}


def loading_transforms(names: Collection[str], config: RetNetConfig) -> list[WeightTransform]:
    """The dialect of weights with these names, as transformers' loader takes it; empty if the names are ours."""
    dialect = dialect_of(names)
    if dialect is None:
        return []
    transforms: list[WeightTransform] = [
        WeightRenaming(rf"\b{re.escape(theirs)}\.", f"{ours}.") for theirs, ours in dialect.modules_of(config)
    ]
    for end, (ends, change) in dialect.changes(config, is_fused(names)).items():
        transforms.append(RowConverter(end, list(ends), [RowConversion(change)]))
    if dialect.experts is not None:
        gate, up, down = (f".mlp.experts.*.{name}.weight" for name in dialect.experts)
        joined = [MergeModulelist(dim=0), Concatenate(dim=1)]
        transforms.append(WeightConverter([gate, up], ".mlp.experts.gate_up_proj", joined))
        transforms.append(WeightConverter([down], ".mlp.experts.down_proj", [MergeModulelist(dim=0)]))
    return transforms


def with_transforms(load_config: Any, transforms: list[WeightTransform]) -> Any:
    """Transformers' settings of a loading, with these transforms after those it has."""
    return replace(load_config, weight_mapping=[*(load_config.weight_mapping or []), *transforms])


def forget_transforms(model: PreTrainedModel, transforms: list[WeightTransform]) -> None:
    """Removes transforms from those that transformers keeps to save a model as it was found: we save our own names."""
    model._weight_conversions = [transform for transform in model._weight_conversions or [] if transform not in transforms]


def tensor_parallel_share(load_config: Any) -> tuple[int, int] | None:
    """This process's rank among those that share the weights by tensor parallelism, and their number; None without it."""
    mesh = getattr(load_config, "device_mesh", None)
    if mesh is None or "tp" not in (mesh.mesh_dim_names or ["tp"]):  # a mesh without names is of one dimension
        return None
    mesh = mesh["tp"] if mesh.mesh_dim_names else mesh
    return mesh.get_local_rank(), mesh.size()


def load_any_dialect(model: PreTrainedModel, state_dict, checkpoint_files, load_config, *args, **kwargs):
    """`PreTrainedModel._load_pretrained_model`, for weights in any dialect.

    Raises:
        ValueError: if the ranks of tensor parallelism cannot share the heads equally.
    """
    share = tensor_parallel_share(load_config)
    for name in ("num_key_value_heads", "attention_num_key_value_heads", "head_norm_groups"):
        groups = getattr(model.config, name, None)
        if share is not None and groups is not None and groups % share[1]:
            raise ValueError(
                f"{name} must be a multiple of the {share[1]} ranks of tensor parallelism, which share the heads, "
                f"got {groups}."
            )
    names = names_in(checkpoint_files) if state_dict is None and checkpoint_files else state_dict or ()
    transforms = loading_transforms(names, model.config)
    if transforms:
        load_config = with_transforms(load_config, transforms)
    loaded = PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    if transforms:
        forget_transforms(model, transforms)
    return loaded


class DialectLoading:
    """What a RetNet does while `from_pretrained` loads it, as a base class of its models."""

    _keys_to_ignore_on_load_unexpected = [dialect.unused for dialect in DIALECTS if dialect.unused]

    @staticmethod
    def _load_pretrained_model(model: PreTrainedModel, state_dict, checkpoint_files, load_config, *args, **kwargs):
        """Transformers' loading, for weights in any dialect."""
        model.share_heads(tensor_parallel_share(load_config))
        return load_any_dialect(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    def share_heads(self, share: tuple[int, int] | None) -> None:
        """Sets the attribute `rank_share`, (rank, ranks), of the modules that hold numbers of all heads."""
        for module in self.modules() if share is not None else ():
            if hasattr(module, "rank_share"):
                module.rank_share = share

    @classmethod
    def maybe_distribute_model(cls, model: PreTrainedModel, distributed_config: Any, mesh_manager: Any):
        """As in transformers. Distributed checkpoints do not pass through `_load_pretrained_model`, but here."""
        model = super().maybe_distribute_model(model, distributed_config, mesh_manager)
        if mesh_manager is not None and distributed_config.tp_size > 1:
            mesh = mesh_manager.get_mesh("tp")
            model.share_heads((mesh.get_local_rank(), mesh.size()))
        return model
