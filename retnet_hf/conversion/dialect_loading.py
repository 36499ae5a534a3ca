# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Loading by `from_pretrained` of published weights in any dialect, by transforms of transformers' loader."""

import re
from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter, WeightRenaming
from transformers.modeling_utils import PreTrainedModel

from .changes import Change
from .dialect import is_fused
from .families import dialect_of


class RowConversion(ConversionOps):
    """A step of transformers' loader that applies a `Change` to one tensor. The weight may be sharded over devices.

    Under tensor parallelism and FSDP, each process reads its rows of the unconverted tensor. Therefore all rows are
    gathered, converted, and sharded again.
    """

    def __init__(self, change: Change) -> None:
        self.change = change

    @torch.no_grad()
    def convert(self, input_dict, target_patterns, model, full_layer_name, **kwargs) -> dict[str, Tensor]:
        tensors = next(iter(input_dict.values()))
        weight = tensors[0] if isinstance(tensors, list) else tensors
        stem = full_layer_name.removesuffix(target_patterns[0])
        parameter, *others = (model.get_parameter_or_buffer(stem + end) for end in target_patterns)
        if not hasattr(parameter, "placements"):  # the parameter is no DTensor
            return dict(zip(target_patterns, self.change.forward([weight])))

        from torch.distributed.tensor import DTensor, Replicate  # some builds of torch lack them

        mesh, placements = parameter.device_mesh, parameter.placements
        shape = (sum(each.shape[0] for each in (parameter, *others)), *parameter.shape[1:])
        strides = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(weight, mesh, placements, shape=shape, stride=strides).full_tensor()
        parts = (DTensor.from_local(part, mesh, [Replicate()] * mesh.ndim) for part in self.change.forward([whole]))
        return {  # cloned, since a view would keep the memory of the whole tensor
            name: part.redistribute(mesh, placements).to_local().clone() for name, part in zip(target_patterns, parts)
        }


class RowConverter(WeightConverter):
    """Converter of one foreign tensor into one or more of ours. transformers' own quantises only the first of them."""

    __slots__ = ()

    def convert(self, layer_name: str, model=None, config=None, hf_quantizer=None, loading_info=None) -> dict[str, Tensor]:
        quantize, self.quantization_operation = self.quantization_operation, None
        tensors = super().convert(layer_name, model, config, hf_quantizer, loading_info)
        made = {}
        options = {"source_patterns": self.source_patterns, "target_patterns": self.target_patterns, "model": model}
        options |= {"config": config, "missing_keys": loading_info.missing_keys if loading_info else None}
        for name, tensor in tensors.items():
            if quantize is None or not hf_quantizer.param_needs_quantization(model, name):
                made[name] = tensor
            else:
                made |= quantize.convert({name: tensor}, full_layer_name=name, **options)
        return made


def load(names: Collection[str], model: PreTrainedModel, state_dict, checkpoint_files, load_config, *args, **kwargs):
    """Does the work of `PreTrainedModel._load_pretrained_model` for weights with names of another dialect."""
    dialect, config, transforms = dialect_of(names), model.config, []
    if dialect is not None:
        model._keys_to_ignore_on_load_unexpected |= {dialect.unused} if dialect.unused else set()
        transforms += [WeightRenaming(rf"\b{re.escape(old)}\.", f"{new}.") for old, new in dialect.modules_of(config)]
        for end, (ends, change) in dialect.changes(config, is_fused(names)).items():
            transforms.append(RowConverter(end, list(ends), [RowConversion(change)]))
        if dialect.experts is not None:
            gate, up, down = (f".mlp.experts.*.{name}.weight" for name in dialect.experts)
            joined = [MergeModulelist(dim=0), Concatenate(dim=1)]
            transforms.append(WeightConverter([gate, up], ".mlp.experts.gate_up_proj", joined))
            transforms.append(WeightConverter([down], ".mlp.experts.down_proj", [MergeModulelist(dim=0)]))
        load_config = replace(load_config, weight_mapping=[*(load_config.weight_mapping or []), *transforms])
    loaded = PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config, *args, **kwargs)
    if transforms:  # transformers would reverse them when it saves the model, but we save our own names
        model._weight_conversions = [each for each in model._weight_conversions or [] if each not in transforms]
    return loaded
