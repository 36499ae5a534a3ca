# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Usage: convert_minicpm_sala_to_hf.py INPUT OUTPUT. Reads MiniCPM-SALA (openbmb), up to dense_len tokens."""

from retnet_hf.cli.main import convert_from


if __name__ == "__main__":
    convert_from("minicpm_sala")
