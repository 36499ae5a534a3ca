# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Usage: convert_vir_official_to_hf.py INPUT OUTPUT. Reads anom63931/ViR, by the authors of ViR."""

from retnet_hf.cli.main import convert_from


if __name__ == "__main__":
    convert_from("vir_official")
