# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Training on streams with carried states, state tuning, and sequences split over ranks."""
