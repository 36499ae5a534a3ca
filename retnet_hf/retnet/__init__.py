# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The paper's model: configuration, layers, heads, generation. Begin with `modeling_retnet.py`."""
