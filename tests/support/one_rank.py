# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A process group of one process, for what is computed the same way in a group of any size."""

from torch import distributed as dist


def join_alone() -> dist.ProcessGroup:
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD
