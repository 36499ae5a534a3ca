# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Engines that share out data, weights, layers or heads: several processes compute what one does, in float64 to 1e-11,
also of padded batches, and read published folders to the same weights.
"""

from torchrun import run_ranks


def test_every_engine_computes_what_one_process_does(tmp_path):
    run_ranks([2, 4], "parallel_engines_ranks.py", tmp_path)
