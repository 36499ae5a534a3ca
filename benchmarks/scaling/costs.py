# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a training step sends and takes, in formulas that are tested against the counts, for GPUs that are not here.

Assumptions, printed beside the table: bfloat16 activations and float32 states; products at a share of the peak of the
device; a collective at the bandwidth of a rank's link, and a latency for each of its steps; of the exchange, what fits
beside the products within chunks is hidden.
"""

from typing import NamedTuple


class Shape(NamedTuple):
    """Of a layer: H heads of K and V, D hidden size, and the width of its feed-forward."""

    heads: int
    key_dim: int
    value_dim: int
    hidden_size: int
    width: int
    layers: int


class Machine(NamedTuple):
    """FLOP/s that products reach, bytes/s of a rank's link to others, seconds of a step of a collective."""

    flops: float
    bandwidth: float
    latency: float


SHAPES = {
    "1.3B": Shape(8, 256, 512, 2048, 4096, 24),
    "6.7B": Shape(16, 256, 512, 4096, 8192, 32),
}
# H100 SXM: 989 TFLOP/s of bfloat16 (data sheet), 45 % of which training reaches; 50 GB/s a GPU between nodes (one 400 Gb/s
# port each), and 20 µs for a step, as NCCL's tests report for small messages between nodes.
H100 = Machine(0.45 * 989e12, 50e9, 20e-6)


def bytes_of_states(shape: Shape, ranks: int, itemsize: int = 4, neighbours: bool = False) -> int:
    """That a rank sends in a layer, forwards and backwards, for each sequence."""
    of_state = shape.heads * shape.key_dim * shape.value_dim * itemsize
    return 2 * of_state * (1 if neighbours else ranks - 1)


def bytes_of_ring(shape: Shape, ranks: int, tokens: int, itemsize: int = 2) -> int:
    """Of softmax attention: keys and values go round, and back with their gradients. `tokens` are those of a rank."""
    of_tokens = shape.heads * (shape.key_dim + shape.value_dim) * tokens * itemsize
    return of_tokens * (ranks - 1) + 2 * of_tokens * ranks


def bytes_of_heads(shape: Shape, ranks: int, tokens: int, itemsize: int = 2) -> int:
    """By all-to-all: queries, keys, values and outputs, forwards and backwards."""
    of_tokens = shape.heads * (2 * shape.key_dim + 2 * shape.value_dim) * tokens * itemsize
    return 2 * of_tokens * (ranks - 1) // ranks


def flops_of_layer(shape: Shape, tokens: int, chunk: int = 256) -> float:
    """Of a layer of RetNet, forwards and backwards: projections, feed-forward, and retention in chunks."""
    key, value = shape.heads * shape.key_dim, shape.heads * shape.value_dim
    projections = 2 * shape.hidden_size * (2 * key + 3 * value + 3 * shape.width)
    retention = 2 * shape.heads * (2 * shape.key_dim * shape.value_dim + chunk * (shape.key_dim + shape.value_dim))
    return 3.0 * tokens * (projections + retention)


class Prediction(NamedTuple):
    """Of a layer and step: seconds of computing, of exchanging, and the share of the whole that the latter adds."""

    computing: float
    exchanging: float
    added: float


def predicted(shape: Shape, ranks: int, length: int, machine: Machine = H100, neighbours: bool = False) -> Prediction:
    """One sequence of `length` tokens over so many ranks."""
    tokens = length / ranks
    computing = flops_of_layer(shape, tokens) / machine.flops
    # the state of its own tokens once more, before the exchange can begin, forwards and backwards
    again = 2 * 2.0 * tokens * shape.heads * shape.key_dim * shape.value_dim / machine.flops
    steps = 2 * (1 if neighbours else ranks - 1)
    exchanging = bytes_of_states(shape, ranks, neighbours=neighbours) / machine.bandwidth + steps * machine.latency
    inner = 3.0 * tokens * 2 * shape.heads * 256 * (shape.key_dim + shape.value_dim) / machine.flops
    whole = computing + again + max(0.0, exchanging - inner)
    return Prediction(computing, exchanging, 1 - computing / whole)


def seen_through(decay: float, tokens: float, eps: float = 2.0**-23) -> bool:
    """Whether float32 sees anything through so many tokens; NEGLIGIBLE of `retention_split.py` is the same bound."""
    return decay**tokens >= 2**-4 * eps
