# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Checks of configuration fields and call arguments, with error messages for everything else."""
