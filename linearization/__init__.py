# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""From a pretrained transformer to a RetNet: transfer of its weights, and what has to be measured for it.

from linearization import measure_heads, transfer
"""

from .heads import HeadMeasures, measure_heads
from .sources import SOURCES, SourceError, softmax_config
from .transfer import transfer


__all__ = ["SOURCES", "HeadMeasures", "SourceError", "measure_heads", "softmax_config", "transfer"]
