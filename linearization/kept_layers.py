# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Which layers stay softmax attention, where only their share is given."""

from collections.abc import Mapping


def _count(layers: int, share: float) -> int:
    """One at least, and never all of them."""
    return min(layers - 1, max(1, round(share * layers)))


def spread_layers(layers: int, share: float) -> list[int]:
    """A share of the layers, at equal distances, the last among them: of 8 layers a quarter is 3 and 7.

    As in the hybrid of the paper's later version, with one layer of attention after every three of retention.
    """
    count = _count(layers, share)
    return [layers * (place + 1) // count - 1 for place in range(count)]


def hardest_layers(errors: Mapping[int, float], share: float) -> list[int]:
    """A share of the layers, those in whose place retention does worst, by the error of each."""
    return sorted(sorted(errors, key=errors.__getitem__, reverse=True)[: _count(len(errors), share)])
