# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Small versions of the RetNet paper's tables: models with equal parameters, equal tokens and one recipe."""
