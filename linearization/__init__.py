# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""From a pretrained transformer to a RetNet: transfer of its weights, and the training that makes up for what it lost.

from linearization import AlignmentTrainer, measure_heads, prepare_for_alignment, transfer
"""

from .alignment import AlignmentTrainer, align, prepare_for_alignment
from .distillation import DistillationTrainer, StoredTeacher, store_teacher
from .heads import HeadMeasures, measure_heads
from .kept_layers import hardest_layers, spread_layers
from .measures import Scores, losses_of, score
from .recall import associative_recall, needle_recall
from .report import Measures, Report, Training, markdown, measure_decoding, measure_layers, measure_text, recalled_vocabulary
from .sources import SOURCES, SourceError, softmax_config
from .transfer import linearized_config, transfer


__all__ = [
    "SOURCES",
    "AlignmentTrainer",
    "DistillationTrainer",
    "HeadMeasures",
    "Measures",
    "Report",
    "Scores",
    "SourceError",
    "StoredTeacher",
    "Training",
    "align",
    "associative_recall",
    "hardest_layers",
    "linearized_config",
    "losses_of",
    "markdown",
    "measure_decoding",
    "measure_heads",
    "measure_layers",
    "measure_text",
    "needle_recall",
    "prepare_for_alignment",
    "recalled_vocabulary",
    "score",
    "softmax_config",
    "spread_layers",
    "store_teacher",
    "transfer",
]
