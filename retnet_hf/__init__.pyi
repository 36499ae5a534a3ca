# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The public names, for type checkers. `__init__.py` reads here which module each of them is in."""

from .configuration_metaformer import MetaFormerConfig
from .configuration_retnet import RetNetConfig
from .configuration_rmt import RMTConfig
from .configuration_vir import ViRConfig
from .image_processing_retention import (
    MetaFormerImageProcessor,
    MetaFormerImageProcessorPil,
    RMTImageProcessor,
    RMTImageProcessorPil,
    ViRImageProcessor,
    ViRImageProcessorPil,
)
from .modeling_metaformer import (
    MetaFormerBackbone,
    MetaFormerForImageClassification,
    MetaFormerModel,
    MetaFormerPreTrainedModel,
)
from .modeling_retnet import (
    RetNetForCausalLM,
    RetNetForMaskedLM,
    RetNetForQuestionAnswering,
    RetNetForSequenceClassification,
    RetNetForTokenClassification,
    RetNetModel,
    RetNetPreTrainedModel,
)
from .modeling_rmt import RMTBackbone, RMTForImageClassification, RMTModel, RMTPreTrainedModel
from .modeling_vir import (
    ViRBackbone,
    ViRForImageClassification,
    ViRForMaskedImageModeling,
    ViRModel,
    ViRPreTrainedModel,
)
from .retention_2d import manhattan_retention
from .retention_forms import (
    bidirectional_retention,
    chunkwise_retention,
    parallel_retention,
    recurrent_retention,
    retention,
)
from .retention_packed import packed_retention
from .retention_state import RetNetState
from .split_over_ranks import context_parallel, shard_sequence
from .state_tuning import StateTuning
from .streaming import CarryState, StreamScore, TokenStreams, score_stream
from .version import __version__

__all__ = [
    "CarryState",
    "MetaFormerBackbone",
    "MetaFormerConfig",
    "MetaFormerForImageClassification",
    "MetaFormerImageProcessor",
    "MetaFormerImageProcessorPil",
    "MetaFormerModel",
    "MetaFormerPreTrainedModel",
    "RMTBackbone",
    "RMTConfig",
    "RMTForImageClassification",
    "RMTImageProcessor",
    "RMTImageProcessorPil",
    "RMTModel",
    "RMTPreTrainedModel",
    "RetNetConfig",
    "RetNetForCausalLM",
    "RetNetForMaskedLM",
    "RetNetForQuestionAnswering",
    "RetNetForSequenceClassification",
    "RetNetForTokenClassification",
    "RetNetModel",
    "RetNetPreTrainedModel",
    "RetNetState",
    "StateTuning",
    "StreamScore",
    "TokenStreams",
    "ViRBackbone",
    "ViRConfig",
    "ViRForImageClassification",
    "ViRForMaskedImageModeling",
    "ViRImageProcessor",
    "ViRImageProcessorPil",
    "ViRModel",
    "ViRPreTrainedModel",
    "__version__",
    "bidirectional_retention",
    "chunkwise_retention",
    "context_parallel",
    "manhattan_retention",
    "packed_retention",
    "parallel_retention",
    "recurrent_retention",
    "retention",
    "score_stream",
    "shard_sequence",
]
