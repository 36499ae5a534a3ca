# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What linearization preserves of a small transformer, with several seeds."""
