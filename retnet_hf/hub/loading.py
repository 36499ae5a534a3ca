# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""How `from_pretrained` fills a RetNet: by all ranks of tensor parallelism, and from folders of other libraries, too.

What transformers does not promise to keep is used in `names_in`, `tensor_parallel_share` and the methods, and nowhere else.
"""

import functools
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel, load_state_dict

from .foreign import conversion


OUR_TENSORS = (".retention.o_proj.weight", ".attention.o_proj.weight")  # no other library has a tensor with such a name


def names_in(checkpoint_files: list[str]) -> set[str]:
    """Names of all tensors in the files. No values are read."""
    return {name for file in checkpoint_files for name in load_state_dict(file, map_location="meta")}


def tensor_parallel_share(load_config: Any) -> tuple[int, int] | None:
    """This process's rank among those that share the weights by tensor parallelism, and their number; None without it."""
    mesh = getattr(load_config, "device_mesh", None)
    if mesh is None or "tp" not in (mesh.mesh_dim_names or ["tp"]):  # a mesh without names is of one dimension
        return None
    mesh = mesh["tp"] if mesh.mesh_dim_names else mesh
    return mesh.get_local_rank(), mesh.size()


def require_equal_shares(config: PreTrainedConfig, share: tuple[int, int] | None) -> None:
    """Raises ValueError if the ranks of tensor parallelism cannot share the heads equally."""
    for name in ("num_key_value_heads", "attention_num_key_value_heads", "head_norm_groups"):
        groups = getattr(config, name, None)
        if share is not None and groups is not None and groups % share[1]:
            raise ValueError(
                f"{name} must be a multiple of the {share[1]} ranks of tensor parallelism, which share the heads, "
                f"got {groups}."
            )


class SharedLoading:
    """What a RetNet does while `from_pretrained` loads it, as a base class of its models."""

    @staticmethod
    def _load_pretrained_model(model: PreTrainedModel, state_dict, checkpoint_files, load_config, *args, **kwargs):
        """Transformers' loading. What knows other libraries loads weights whose names are not ours.

        Raises:
            ValueError: if the ranks of tensor parallelism cannot share the heads equally.
        """
        share = tensor_parallel_share(load_config)
        require_equal_shares(model.config, share)
        model.share_heads(share)
        names = names_in(checkpoint_files) if state_dict is None and checkpoint_files else state_dict or ()
        ours = any(name.endswith(OUR_TENSORS) for name in names)
        others = None if ours else conversion("dialect_loading")
        load = PreTrainedModel._load_pretrained_model if others is None else functools.partial(others.load, names)
        return load(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

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
