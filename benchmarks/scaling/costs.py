# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Formulas for the bytes and the time of a training step on GPUs that are not here, tested against the counts.

Assumptions, printed with the table: bfloat16 activations and float32 states; matrix products reach a share of the device's
peak; a collective has the bandwidth of a rank's link, and a latency for each of its steps; the exchange overlaps with the
products inside chunks.
"""

from typing import NamedTuple


class Shape(NamedTuple):
    """Sizes of a layer: H heads of K and V, D hidden size, and the width of the feed-forward."""

    heads: int
    key_dim: int
    value_dim: int
    hidden_size: int
    width: int
    layers: int


class Machine(NamedTuple):
    """FLOP/s of matrix products, bytes/s of a rank's link, seconds of a step of a collective."""

    flops: float
    bandwidth: float
    latency: float


SHAPES = {
    "1.3B": Shape(8, 256, 512, 2048, 4096, 24),
    "6.7B": Shape(16, 256, 512, 4096, 8192, 32),
}
# H100 SXM: 989 TFLOP/s of bfloat16 (data sheet); training reaches 45 %. Between nodes, a GPU has 50 GB/s (one 400 Gb/s port)
# and 20 µs per step, the value in NCCL's tests for small messages.
H100 = Machine(0.45 * 989e12, 50e9, 20e-6)


def bytes_of_states(shape: Shape, ranks: int, itemsize: int = 4, neighbours: bool = False) -> int:
    """Returns the bytes that a rank sends in a layer, forward and backward, for each sequence."""
    of_state = shape.heads * shape.key_dim * shape.value_dim * itemsize
    return 2 * of_state * (1 if neighbours else ranks - 1)


def bytes_of_ring(shape: Shape, ranks: int, tokens: int, itemsize: int = 2) -> int:
    """Returns the bytes of ring attention: keys and values, and back with gradients. `tokens`: tokens of a rank."""
    of_tokens = shape.heads * (shape.key_dim + shape.value_dim) * tokens * itemsize
    return of_tokens * (ranks - 1) + 2 * of_tokens * ranks


def bytes_of_heads(shape: Shape, ranks: int, tokens: int, itemsize: int = 2) -> int:
    """Returns the bytes of attention by all-to-all: queries, keys, values and outputs, forward and backward."""
    of_tokens = shape.heads * (2 * shape.key_dim + 2 * shape.value_dim) * tokens * itemsize
    return 2 * of_tokens * (ranks - 1) // ranks


def flops_of_layer(shape: Shape, tokens: int, chunk: int = 256) -> float:
    """Returns the operations of a layer, forward and backward: projections, feed-forward, chunkwise retention."""
    key, value = shape.heads * shape.key_dim, shape.heads * shape.value_dim
    projections = 2 * shape.hidden_size * (2 * key + 3 * value + 3 * shape.width)
    retention = 2 * shape.heads * (2 * shape.key_dim * shape.value_dim + chunk * (shape.key_dim + shape.value_dim))
    return 3.0 * tokens * (projections + retention)


class Prediction(NamedTuple):
    """Seconds of computing and of exchanging in a layer and step, and the share that the exchange adds."""

    computing: float
    exchanging: float
    added: float


def predicted(shape: Shape, ranks: int, length: int, machine: Machine = H100, neighbours: bool = False) -> Prediction:
    """Predicts a layer for one sequence of `length` tokens over a number of ranks."""
    tokens = length / ranks
    computing = flops_of_layer(shape, tokens) / machine.flops
    # Each rank computes the state of its tokens a second time, before the exchange, forward and backward.
    again = 2 * 2.0 * tokens * shape.heads * shape.key_dim * shape.value_dim / machine.flops
    steps = 2 * (1 if neighbours else ranks - 1)
    exchanging = bytes_of_states(shape, ranks, neighbours=neighbours) / machine.bandwidth + steps * machine.latency
    inner = 3.0 * tokens * 2 * shape.heads * 256 * (shape.key_dim + shape.value_dim) / machine.flops
    whole = computing + again + max(0.0, exchanging - inner)
    return Prediction(computing, exchanging, 1 - computing / whole)


def seen_through(decay: float, tokens: float, eps: float = 2.0**-23) -> bool:
    """Returns whether float32 keeps a contribution after `tokens`; same bound as NEGLIGIBLE of `retention_split.py`."""
    return decay**tokens >= 2**-4 * eps
