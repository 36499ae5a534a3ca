# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Usage: convert_poolformer_to_hf.py INPUT OUTPUT. Reads PoolFormer (sail-sg, and sail/poolformer_* of transformers)."""

from retnet_hf.cli.main import convert_from


if __name__ == "__main__":
    convert_from("poolformer")
