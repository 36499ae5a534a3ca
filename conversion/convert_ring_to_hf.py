# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Usage: convert_ring_to_hf.py INPUT OUTPUT. Reads Ring-mini-linear-2.0 and Ring-flash-linear-2.0 (inclusionAI)."""

import sys

from retnet_hf.cli.main import main


if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:], "--from", "ring"]))
