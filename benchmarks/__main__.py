# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Runs all benchmarks of language models: `python -m benchmarks [--quick]`.

Training, prefill and decoding of this package and of peers with as many parameters. The models take turns, round by round,
and ratios compare the same round. Training and decoding have separate processes, because on a CPU the threads of a backward
pass slow down later decoding. The peak memory of each model is measured in a process of its own.
"""

from . import decoding, prefill, training
from .command_line import main


if __name__ == "__main__":
    main([training.RACE, prefill.RACE, decoding.RACE], __doc__)
