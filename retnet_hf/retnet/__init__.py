# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The paper's model: configuration, layers, heads, generation. Begin with `modeling_retnet.py`."""
