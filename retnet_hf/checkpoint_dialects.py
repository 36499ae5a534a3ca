# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The dialects that published RetNet weights are written in, told apart by their names alone.

Tables of names, and the two changes of values that are not mere names. `from_pretrained` uses them to read a published
folder as it is, `conversion/` to go there and back. Whatever is read is saved under our own names.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Dialect:
    """One way of naming a RetNet's weights."""

    name: str
    sign: str  # pattern of a name that no other dialect has
    renamings: tuple[tuple[str, str], ...]  # (pattern of theirs, ours), applied in this order
    interleaved: bool  # whether queries and keys are rotated in pairs (2i, 2i+1), where ours are (i, i + K/2)
    unused: str | None = None  # pattern of tensors that follow from the configuration

    def canonical(self, name: str) -> str:
        """Our name for one of theirs."""
        for pattern, replacement in self.renamings:
            name = re.sub(pattern, replacement, name)
        return name


FLA = Dialect(
    name="fla",
    sign=r"\.attn\.q_proj\.weight$",
    renamings=(
        (r"\bembeddings\.", "embed_tokens."),
        (r"\.attn\.g_norm(_swish_gate)?\.", ".retention.head_norm."),
        (r"\.attn_norm\.", ".retention_norm."),
        (r"\.attn\.", ".retention."),
    ),
    interleaved=False,
)

TORCHSCALE = Dialect(
    name="torchscale",
    sign=r"\.retention\.out_proj\.weight$",
    renamings=(
        (r"\boutput_projection\.", "lm_head."),
        (r"\blayernorm_embedding\.", "embed_norm."),
        (r"\blayer_norm\.", "norm."),
        (r"\.retention_layer_norm\.", ".retention_norm."),
        (r"\.final_layer_norm\.", ".mlp_norm."),
        (r"\.retention\.out_proj\.", ".retention.o_proj."),
        (r"\.ffn\.fc1\.", ".mlp.gate_proj."),
        (r"\.ffn\.gate\.", ".mlp.up_proj."),
        (r"\.ffn\.fc2\.", ".mlp.down_proj."),
    ),
    interleaved=True,
    unused=r"\bretnet_rel_pos\.(angle|decay)$",
)

DIALECTS = (FLA, TORCHSCALE)


def dialect_of(names: Collection[str]) -> Dialect | None:
    """The dialect that these weights are named in, or None where it is ours or unknown."""
    return next((dialect for dialect in DIALECTS if any(re.search(dialect.sign, name) for name in names)), None)


def is_fused(names: Collection[str]) -> bool:
    """Whether `mlp.gate_proj` holds the rows of the up projection below its own, as in fla's uploads of 2024."""
    return any(name.endswith("mlp.gate_proj.weight") and name.replace("gate", "up") not in names for name in names)


def pairs_apart(weight: Tensor, head_dim: int) -> Tensor:
    """Rows (H K, D) of a query or key projection: from pairs (2i, 2i+1) of each head to pairs (i, i + K/2)."""
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def pairs_together(weight: Tensor, head_dim: int) -> Tensor:
    """The inverse of `pairs_apart`."""
    return weight.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)
