# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
# ruff: noqa: F401
"""Linearization of a pretrained transformer into a RetNet: transfer of its weights, and training that recovers the loss.

from retnet_hf.linearization import AlignmentTrainer, measure_heads, prepare_for_alignment, transfer

The modules `measures`, `recall` and `what_was_kept` measure the loss of a model.
"""

from .alignment import AlignmentTrainer, LayersBefore, align, prepare_for_alignment
from .distillation import DistillationTrainer, StoredTeacher, divergence_from, prepare_for_distillation, store_teacher
from .gguf import gguf_file, unpacked
from .kept_layers import costliest_layers, layer_costs, spread_layers
from .transfer import SOURCES, HeadMeasures, SourceError, linearized_config, measure_heads, softmax_config, transfer
