# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Usage: convert_vir_official_to_hf.py INPUT OUTPUT. Reads anom63931/ViR, by the authors of ViR."""

import sys

from retnet_hf.cli.main import main


if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:], "--from", "vir_official"]))
