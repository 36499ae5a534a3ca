# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Folders of this checkout."""

from pathlib import Path


SUPPORT = Path(__file__).resolve().parent  # modules that tests of several rooms import
TESTS = SUPPORT.parent
ROOT = TESTS.parent
