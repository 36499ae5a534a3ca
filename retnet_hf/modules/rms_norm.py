# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RMS norm (arXiv 1910.07467) as a module."""

from torch import Tensor, nn

from ..ops.gradients import rms_norm


class RetNetRMSNorm(nn.RMSNorm):
    """RMS norm of the residual stream or of each head. The output has the dtype of the input."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm(hidden_states, self.weight, self.eps)
