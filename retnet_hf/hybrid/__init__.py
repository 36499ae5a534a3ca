# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""RetNetHybrid, a RetNet some of whose layers are something else: softmax attention, windows with sinks, experts."""
