# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Usage: convert_hypenet_to_hf.py INPUT OUTPUT. Reads HypeNet (thunlp/hybrid-linear-attention)."""

import sys

from retnet_hf.cli.main import main


if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:], "--from", "hypenet"]))
