# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Usage: convert_minicpm_sala_to_hf.py INPUT OUTPUT. Reads MiniCPM-SALA (openbmb), up to dense_len tokens."""

import sys

from retnet_hf.cli.main import main


if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:], "--from", "minicpm_sala"]))
