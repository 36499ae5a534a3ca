# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Usage: convert_vir_pulfer_to_hf.py INPUT OUTPUT. Reads BrianPulfer/vision-retention-networks' ViR."""

import sys

from retnet_hf.cli.main import main


if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:], "--from", "vir_pulfer"]))
