# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""All races of language models: `python -m benchmarks [--quick]`.

Training, prefill, decoding and generation, ours beside its peers at equal parameter counts, and every figure beside the
limit of the machine. The peers take turns, round by round; ratios are of the same round. Training and decoding have
processes of their own, since on a CPU the threads of a backward pass slow later decoding down. Peak memory is measured
per model, in a process that does nothing else.
"""

from . import decoding, generation, prefill, training
from .command_line import main


if __name__ == "__main__":
    main([training.RACE, prefill.RACE, decoding.RACE, generation.RACE], __doc__)
