# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Loading by `from_pretrained`: on all ranks of tensor parallelism, and also from folders of other libraries."""

from typing import Any

from transformers.modeling_utils import PreTrainedModel, load_state_dict

from .foreign import conversion


OUR_TENSORS = (".retention.o_proj.weight", ".attention.o_proj.weight")  # no other library has tensors with these names


class SharedLoading:
    """Base class of RetNet models: the steps of `from_pretrained` that differ from transformers."""

    @staticmethod
    def _load_pretrained_model(model: PreTrainedModel, state_dict, checkpoint_files, load_config, *args, **kwargs):
        """Loads weights as transformers does, other names by `dialect_loading`. Raises ValueError for uneven heads."""
        mesh = getattr(load_config, "device_mesh", None)
        if mesh is not None and "tp" in (mesh.mesh_dim_names or ["tp"]):  # a mesh without names has one dimension
            mesh = mesh["tp"] if mesh.mesh_dim_names else mesh
            for name in ("num_key_value_heads", "attention_num_key_value_heads", "head_norm_groups"):
                groups = getattr(model.config, name, None)
                if groups is not None and groups % mesh.size():
                    ranks = f"the number of tensor-parallel ranks ({mesh.size()}), which share the heads"
                    raise ValueError(f"{name} must be a multiple of {ranks}, got {groups}.")
            model.share_heads((mesh.get_local_rank(), mesh.size()))
        names = state_dict or ()
        if state_dict is None and checkpoint_files:  # without reading values
            names = {name for file in checkpoint_files for name in load_state_dict(file, map_location="meta")}
        arguments = (model, state_dict, checkpoint_files, load_config, *args)
        others = None if any(name.endswith(OUR_TENSORS) for name in names) else conversion("dialect_loading")
        if others is None:
            return PreTrainedModel._load_pretrained_model(*arguments, **kwargs)
        return others.load(names, *arguments, **kwargs)

    def share_heads(self, share: tuple[int, int]) -> None:
        """Sets the attribute `rank_share`, (rank, ranks), of the modules that hold parameters of all heads."""
        for module in self.modules():
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
