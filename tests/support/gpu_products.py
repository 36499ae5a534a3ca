# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Products of bfloat16 as a GPU computes them, on a CPU: exactly but for the operands."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor


def multiply_bfloat16(replace: Callable = setattr) -> list[torch.dtype]:
    """Has retention multiply bfloat16 as such from here on; returns a list of what dtypes were multiplied."""
    plain, multiplied = torch.bmm, []

    def bmm(left: Tensor, right: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        if out_dtype is None:
            return plain(left, right)
        multiplied.extend((left.dtype, right.dtype))
        return plain(left.to(out_dtype), right.to(out_dtype))

    replace(torch, "bmm", bmm)
    for module in ("ops.retention_forms", "ops.plan"):
        replace(sys.modules[f"retnet_hf.{module}"], "multiplies_bfloat16", lambda device: True)
    return multiplied
