# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNetHybrid, a RetNet with softmax attention, windows with sinks, or experts in some layers."""
