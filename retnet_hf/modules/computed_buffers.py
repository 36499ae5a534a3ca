# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Buffers that are computed from a configuration, such as decays and frequencies. Checkpoints do not contain them."""

from abc import abstractmethod

import torch
from torch import Tensor, nn
from transformers import initialization as init


class ComputedBuffer(nn.Module):
    """A module with a computed buffer, which is computed again whenever weights are loaded.

    Otherwise the buffer could stay uninitialised after loading, because `to_empty` allocates memory with arbitrary values.

    Attributes:
        COMPUTED: name of the buffer.
    """

    COMPUTED: str

    @abstractmethod
    def compute(self, device: torch.device | None = None) -> Tensor:
        """Returns the values of the buffer."""

    def initialize(self) -> None:
        """Fills the buffer. Called by `_init_weights`, because transformers leaves it empty when it loads a checkpoint."""
        buffer = getattr(self, self.COMPUTED)
        init.copy_(buffer, self.compute(buffer.device))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *args) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
        buffer = getattr(self, self.COMPUTED)
        if not buffer.is_meta:
            buffer.copy_(self.compute(buffer.device))
        elif local_metadata.get("assign_to_params_buffers", False):
            self.register_buffer(self.COMPUTED, self.compute(), persistent=False)
