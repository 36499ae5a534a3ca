# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The dialects of published RetNet weights, and how `from_pretrained` reads a folder of each.

A dialect is a table of names, and of the changes of values beside them. `from_pretrained`, `conversion/` and
the plugin for vLLM share these tables. A model that was read in any dialect is saved under our own names.

What transformers does not promise to keep is used in `names_in`, `RowConversion`, `loading_transforms`, `with_transforms`,
`forget_transforms` and `tensor_parallel_share`, and nowhere else.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter, WeightRenaming, WeightTransform
from transformers.modeling_utils import PreTrainedModel, load_state_dict

from .configuration_retnet import RetNetConfig


class Change:
    """How the values of foreign tensors become those of ours, and back. This class changes nothing."""

    label = "as it is"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Theirs to ours."""
        return tensors

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        """Ours to theirs."""
        return tensors


class PairsApart(Change):
    """Rows (H K, D) of a query or key projection: from rotated pairs (2i, 2i+1) of each head to pairs (i, i + K/2)."""

    label = "rotated pairs set apart"

    def __init__(self, head_dim: int) -> None:
        self.head_dim = head_dim

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unflatten(0, (-1, self.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unflatten(0, (-1, 2, self.head_dim // 2)).transpose(1, 2).flatten(0, 2)]


class Split(Change):
    """One tensor whose rows are those of several of ours, one after the other."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.label = f"split in {parts}"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return list(tensors[0].tensor_split(self.parts))

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [torch.cat(tensors)]


class Squeezed(Change):
    """A tensor (H, 1, K) as (H, K)."""

    label = "as one row for each head"

    def forward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].squeeze(1)]

    def backward(self, tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].unsqueeze(1)]


@dataclass(frozen=True)
class Dialect:
    """One way of naming a RetNet's weights.

    Args:
        sign: the end of a name that no other dialect has.
        modules: (their name, our name), replaced in this order. When a model is written, the first match is used.
        interleaved: whether queries and keys are rotated in pairs (2i, 2i+1), where ours are (i, i + K/2).
        unused: pattern of tensors that follow from the configuration.
        mixer: their name for what is `retention` or `attention` here, by the kind of the layer.
        changed: tensors whose values change, as `changes` returns them.
    """

    name: str
    sign: str
    modules: tuple[tuple[str, str], ...]
    interleaved: bool
    unused: str | None = None
    mixer: str | None = None
    changed: tuple[tuple[str, tuple[str, ...], Change], ...] = ()

    def ours(self, name: str) -> str:
        """Our name for one of theirs."""
        for theirs, ours in self.modules:
            name = re.sub(rf"\b{re.escape(theirs)}\.", f"{ours}.", name)
        return name

    def theirs(self, name: str) -> str:
        """Their name for one of ours."""
        for theirs, ours in self.modules:
            name = re.sub(rf"\b{re.escape(ours)}\.", f"{theirs}.", name)
        return name

    def changes(self, config: RetNetConfig, fused: bool) -> dict[str, tuple[tuple[str, ...], Change]]:
        """The tensors whose values change: suffix of our name -> (suffixes of the tensors of ours that it fills, change).

        Args:
            fused: whether gate and up projection are one tensor, as `is_fused` says.
        """
        found = {end: (ends, change) for end, ends, change in self.changed}
        if self.interleaved and config.use_rotary:
            for end in (".retention.q_proj.weight", ".retention.k_proj.weight"):
                found[end] = (end,), PairsApart(config.head_dim)
        if fused and config.use_gated_mlp:
            found[".mlp.gate_proj.weight"] = (".mlp.gate_proj.weight", ".mlp.up_proj.weight"), Split(2)
        return found

    def change(self, name: str, config: RetNetConfig, fused: bool = False) -> tuple[tuple[str, ...], Change]:
        """The tensors of ours that a foreign tensor fills, and how, by our name for it."""
        for end, (ends, change) in self.changes(config, fused).items():
            if name.endswith(end):
                return tuple(name.removesuffix(end) + other for other in ends), change
        return (name,), Change()


FLA = Dialect(
    name="fla",
    sign=".attn.q_proj.weight",
    modules=(
        ("embeddings", "embed_tokens"),
        ("attn.g_norm_swish_gate", "retention.head_norm"),
        ("attn.g_norm", "retention.head_norm"),
        ("attn_norm", "retention_norm"),
        ("attn", "retention"),
    ),
    interleaved=False,
)

TORCHSCALE = Dialect(
    name="torchscale",
    sign=".retention.out_proj.weight",
    modules=(
        ("output_projection", "lm_head"),
        ("layernorm_embedding", "embed_norm"),
        ("layer_norm", "norm"),
        ("retention_layer_norm", "retention_norm"),
        ("final_layer_norm", "mlp_norm"),
        ("retention.out_proj", "retention.o_proj"),
        ("ffn.fc1", "mlp.gate_proj"),
        ("ffn.gate", "mlp.up_proj"),
        ("ffn.fc2", "mlp.down_proj"),
    ),
    interleaved=True,
    unused=r"\bretnet_rel_pos\.(angle|decay)$",
)

HYPENET = Dialect(
    name="hypenet",
    sign=".self_attn.z_proj.weight",
    modules=(
        ("self_attn.z_proj", "retention.g_proj"),
        ("self_attn.o_norm", "retention.head_norm"),
        ("self_attn.o_gate", "attention.g_proj"),
        ("input_layernorm", "retention_norm"),
        ("post_attention_layernorm", "mlp_norm"),
    ),
    interleaved=False,
    mixer="self_attn",
)

TRANSNORMER = Dialect(
    name="transnormer",
    sign=".token_mixer.qkvu_proj.weight",
    modules=(
        ("token_mixer.out_proj", "retention.o_proj"),
        ("token_mixer.lrpe", "retention.learned_rotation"),
        ("token_mixer", "retention"),
        ("channel_mixer.l1", "mlp.gate_proj"),
        ("channel_mixer.l2", "mlp.up_proj"),
        ("channel_mixer.l3", "mlp.down_proj"),
    ),
    interleaved=False,
    changed=(
        (".retention.qkvu_proj.weight", tuple(f".retention.{name}_proj.weight" for name in "qkvg"), Split(4)),
        (".retention.learned_rotation.theta", (".retention.learned_rotation.angle",), Squeezed()),
    ),
)

DIALECTS = (FLA, TORCHSCALE, HYPENET, TRANSNORMER)


def dialect_of(names: Collection[str]) -> Dialect | None:
    """The dialect of these weights, or None if their names are ours or unknown."""
    return next((dialect for dialect in DIALECTS if any(name.endswith(dialect.sign) for name in names)), None)


def is_fused(names: Collection[str]) -> bool:
    """Whether `mlp.gate_proj` holds the rows of the up projection below its own, as in fla's uploads of 2024."""
    return any(name.endswith("mlp.gate_proj.weight") and name.replace("gate", "up") not in names for name in names)


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
        module, _, name = full_layer_name.rpartition(".")  # the first of ours
        parameter = getattr(model.get_submodule(module), name)
        if not hasattr(parameter, "placements"):  # it is no DTensor
            return dict(zip(target_patterns, self.change.forward([weight])))

        from torch.distributed.tensor import DTensor, Replicate  # not in every build of torch

        mesh, placements = parameter.device_mesh, parameter.placements
        shape = (len(target_patterns) * parameter.shape[0], *parameter.shape[1:])
        strides = torch.empty(shape, device="meta").stride()
        whole = DTensor.from_local(weight, mesh, placements, shape=shape, stride=strides).full_tensor()
        parts = (DTensor.from_local(part, mesh, [Replicate()] * mesh.ndim) for part in self.change.forward([whole]))
        return {  # cloned, or each would keep the memory of the whole
            name: part.redistribute(mesh, placements).to_local().clone() for name, part in zip(target_patterns, parts)
        }


def names_in(checkpoint_files: list[str]) -> set[str]:
    """Names of all tensors in the files. No values are read."""
    return {name for file in checkpoint_files for name in load_state_dict(file, map_location="meta")}


def loading_transforms(names: Collection[str], config: RetNetConfig) -> list[WeightTransform]:
    """The dialect of weights with these names, as transformers' loader takes it; empty if the names are ours."""
    dialect = dialect_of(names)
    if dialect is None:
        return []
    changes = dialect.changes(config, is_fused(names))
    modules = [*dialect.modules]
    for layer, kind in enumerate(config.layer_types if dialect.mixer else ()):
        own = "retention" if kind == "linear_attention" else "attention"
        modules.append((f"layers.{layer}.{dialect.mixer}", f"layers.{layer}.{own}"))
    return [
        *(WeightRenaming(rf"\b{re.escape(theirs)}\.", f"{ours}.") for theirs, ours in modules),
        *(WeightConverter(end, list(ends), [RowConversion(change)]) for end, (ends, change) in changes.items()),
    ]


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
    for field in ("num_key_value_heads", "attention_num_key_value_heads", "head_norm_groups"):
        groups = getattr(model.config, field)
        if share is not None and groups is not None and groups % share[1]:
            raise ValueError(
                f"{field} must be a multiple of the {share[1]} ranks of tensor parallelism, which share the heads, "
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

    _keys_to_ignore_on_load_unexpected = [TORCHSCALE.unused]

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
