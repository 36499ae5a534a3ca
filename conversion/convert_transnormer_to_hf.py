# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Usage: convert_transnormer_to_hf.py INPUT OUTPUT. Reads TransNormerLLM (OpenNLPLab/TransNormerLLM-*)."""

from retnet_hf.cli.main import convert_from


if __name__ == "__main__":
    convert_from("transnormer")
