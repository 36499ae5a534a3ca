# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Retention on a GPU with flash-linear-attention's kernels. `kernels.py` imports this module if they are requested.

The kernels (`chunk_simple_gla`, with constant decays) compute the chunkwise form of sequences without gaps. PyTorch computes
all other cases. Decoding uses the kernel of `retention_triton.py`, since fla's would write a new state in each step. fla's
gated kernels support masks, but compute wrong gradients with some versions of Triton (fla's issue 640).
"""

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.utils import logging

from ..ops.retention_forms import retention
from .retention_triton import check_shapes, multiplies_as_tf32, runs_on
from .retention_triton import recurrent_step_triton_ as recurrent_step_fla_


_REGISTERED = [CONFIG_MAPPING[name] for name in ("retnet",) if name in CONFIG_MAPPING]
from fla.ops.simple_gla import chunk_simple_gla  # noqa: E402  # the full fla package also registers a "retnet"


for _config_class in _REGISTERED:
    AutoConfig.register("retnet", _config_class, exist_ok=True)
logger = logging.get_logger(__name__)

__all__ = ["chunkwise_retention_fla", "recurrent_step_fla_", "runs_on"]


def multiplies(dtype: torch.dtype) -> bool:
    """Returns whether fla's kernels are as exact as PyTorch's products in this dtype.

    They round the output to the operands' dtype, which may overflow in float16, and multiply float32 as TF32.
    """
    return dtype == torch.bfloat16 or (dtype == torch.float32 and multiplies_as_tf32())


def covers(query, key, value, log_decay, initial_state, mask, reset) -> bool:
    """Returns whether fla's kernels support these arguments."""
    heads = {query.shape[1], key.shape[1], value.shape[1], log_decay.numel()}
    plain = mask is None and reset is None and len(heads) == 1 and query.shape[2] > 0
    constant = not (torch.is_grad_enabled() and log_decay.requires_grad)
    types = {query.dtype, key.dtype, value.dtype}
    exact = len(types) == 1 and multiplies(query.dtype)
    of_state = initial_state is None or initial_state.dtype == torch.float32
    tiles = all(size >= 16 and size % 2 == 0 for size in (key.shape[-1], value.shape[-1]))
    return plain and constant and exact and of_state and tiles


class _DifferentiatedOnce(torch.autograd.Function):
    """Identity that raises on double backward. fla's gradients are not recorded, so their gradients would lack terms."""

    @staticmethod
    def forward(ctx, output, state):
        return output.view_as(output), state.view_as(state)

    @staticmethod
    def backward(ctx, output_gradient, state_gradient):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "kernels='fla' support no gradient of a gradient (create_graph=True). Create the model with "
                "kernels='torch', or set RETNET_HF_KERNELS=torch."
            )
        return output_gradient, state_gradient


@torch.compiler.disable
def chunkwise_retention_fla(
    query, key, value, log_decay, initial_state=None, mask=None, reset=None, chunk_size=None
) -> tuple[Tensor, Tensor]:
    """Computes `chunkwise_retention` on a GPU, with its arguments and results. The output has the operands' dtype.

    fla chooses its own chunk size. `chunk_size` applies to the cases that PyTorch computes: masks, resets, heads that share
    keys or states, float16, float64, a gradient of log_decay, and float32 unless PyTorch may multiply it as TF32.

    Raises:
        RuntimeError: for a gradient of the gradient.
    """
    check_shapes(query, key, value, log_decay, initial_state, mask, reset)
    if not multiplies(query.dtype):
        logger.warning_once(
            f"kernels='fla' support only bfloat16, and float32 if TF32 is allowed. PyTorch computes {query.dtype}."
        )
    if not covers(query, key, value, log_decay, initial_state, mask, reset):
        return retention(query, key, value, log_decay, initial_state, mask, reset, "chunkwise", chunk_size)
    operands = (operand.transpose(1, 2) for operand in (query, key, value))  # (B, T, H, ·)
    options = {"g_gamma": log_decay, "scale": 1.0, "initial_state": initial_state, "output_final_state": True}
    output, state = _DifferentiatedOnce.apply(*chunk_simple_gla(*operands, **options))
    return output.transpose(1, 2), state
