# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""RetNetHybrid, a RetNet with softmax attention, windows with sinks, or experts in some layers."""
