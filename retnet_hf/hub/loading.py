# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Loading by `from_pretrained`: on all ranks of tensor parallelism, and also from folders of other libraries."""

from typing import Any

from transformers.modeling_utils import PreTrainedModel, load_state_dict

from .foreign import conversion


OUR_TENSORS = (".retention.o_proj.weight", ".attention.o_proj.weight")  # no other library has tensors with these names


def names_in(checkpoint_files: list[str]) -> set[str]:
    """Returns the names of all tensors in the files, without reading values."""
    return {name for file in checkpoint_files for name in load_state_dict(file, map_location="meta")}


def tensor_parallel_share(load_config: Any) -> tuple[int, int] | None:
    """Returns this process's rank in tensor parallelism and the number of ranks; None without tensor parallelism."""
    mesh = getattr(load_config, "device_mesh", None)
    if mesh is None or "tp" not in (mesh.mesh_dim_names or ["tp"]):  # a mesh without names has one dimension
        return None
    mesh = mesh["tp"] if mesh.mesh_dim_names else mesh
    return mesh.get_local_rank(), mesh.size()


class SharedLoading:
    """Base class of RetNet models: the steps of `from_pretrained` that differ from transformers."""

    @staticmethod
    def _load_pretrained_model(model: PreTrainedModel, state_dict, checkpoint_files, load_config, *args, **kwargs):
        """Loads weights as transformers does. If their names are not ours, `dialect_loading` of conversion loads them.

        Raises:
            ValueError: if the ranks of tensor parallelism cannot share the heads equally.
        """
        share = tensor_parallel_share(load_config)
        for name in ("num_key_value_heads", "attention_num_key_value_heads", "head_norm_groups"):
            groups = getattr(model.config, name, None)
            if share is not None and groups is not None and groups % share[1]:
                raise ValueError(
                    f"{name} must be a multiple of the number of tensor-parallel ranks ({share[1]}), which share the "
                    f"heads, got {groups}."
                )
        model.share_heads(share)
        names = names_in(checkpoint_files) if state_dict is None and checkpoint_files else state_dict or ()
        arguments = (model, state_dict, checkpoint_files, load_config, *args)
        others = None if any(name.endswith(OUR_TENSORS) for name in names) else conversion("dialect_loading")
        if others is None:
            return PreTrainedModel._load_pretrained_model(*arguments, **kwargs)
        return others.load(names, *arguments, **kwargs)

    def share_heads(self, share: tuple[int, int] | None) -> None:
        """Sets the attribute `rank_share`, (rank, ranks), of the modules that hold parameters of all heads."""
        for module in self.modules() if share is not None else ():
            if hasattr(module, "rank_share"):
                module.rank_share = share

    @classmethod
    def maybe_distribute_model(cls, model: PreTrainedModel, distributed_config: Any, mesh_manager: Any):
        """Distributes a model as transformers does. Distributed checkpoints are loaded without `_load_pretrained_model`."""
        model = super().maybe_distribute_model(model, distributed_config, mesh_manager)
        if mesh_manager is not None and distributed_config.tp_size > 1:
            mesh = mesh_manager.get_mesh("tp")
            model.share_heads((mesh.get_local_rank(), mesh.size()))
        return model
