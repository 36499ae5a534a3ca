# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Retentive networks as ordinary Hugging Face models. Importing the package registers them with the Auto classes."""

from transformers.models import auto
from transformers.models.auto.image_processing_auto import AutoImageProcessor  # which 5.17 exports with torchvision only
from transformers.utils import is_peft_available

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
    by_backend,
)
from .model_types import register
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
from .retention_2d import downward_manhattan_retention, manhattan_retention
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
from .streaming import CarryState, StreamScore, TokenStreams, score_stream
from .version import __version__


_CLASSES = {
    RetNetConfig: {
        auto.AutoModel: RetNetModel,
        auto.AutoModelForCausalLM: RetNetForCausalLM,
        auto.AutoModelForMaskedLM: RetNetForMaskedLM,
        auto.AutoModelForQuestionAnswering: RetNetForQuestionAnswering,
        auto.AutoModelForSequenceClassification: RetNetForSequenceClassification,
        auto.AutoModelForTokenClassification: RetNetForTokenClassification,
    },
    MetaFormerConfig: {
        auto.AutoModel: MetaFormerModel,
        auto.AutoModelForImageClassification: MetaFormerForImageClassification,
        auto.AutoBackbone: MetaFormerBackbone,
        AutoImageProcessor: by_backend(MetaFormerImageProcessor, MetaFormerImageProcessorPil),
    },
    RMTConfig: {
        auto.AutoModel: RMTModel,
        auto.AutoModelForImageClassification: RMTForImageClassification,
        auto.AutoBackbone: RMTBackbone,
        AutoImageProcessor: by_backend(RMTImageProcessor, RMTImageProcessorPil),
    },
    ViRConfig: {
        auto.AutoModel: ViRModel,
        auto.AutoModelForImageClassification: ViRForImageClassification,
        auto.AutoModelForMaskedImageModeling: ViRForMaskedImageModeling,
        auto.AutoBackbone: ViRBackbone,
        AutoImageProcessor: by_backend(ViRImageProcessor, ViRImageProcessorPil),
    },
}
register(_CLASSES)

if is_peft_available():  # transformers has imported it by now, with the callbacks of its Trainer
    from .peft_targets import register_target_modules

    register_target_modules()

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
    "downward_manhattan_retention",
    "manhattan_retention",
    "packed_retention",
    "parallel_retention",
    "recurrent_retention",
    "retention",
    "score_stream",
    "shard_sequence",
]
