# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Usage: convert_syncdoth_to_hf.py INPUT OUTPUT. Reads syncdoth/RetNet (Spiral-AI, isek-ai)."""

from retnet_hf.cli.main import convert_from


if __name__ == "__main__":
    convert_from("syncdoth")
