# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNetState, a cache of transformers: layers, file format, fingerprint, and packed documents that continue from it."""
