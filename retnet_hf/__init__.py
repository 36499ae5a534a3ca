# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Retentive networks as ordinary Hugging Face models. Importing the package registers them with the Auto classes."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_retnet import RetNetConfig
from .modeling_retnet import (
    RetNetForCausalLM,
    RetNetForQuestionAnswering,
    RetNetForSequenceClassification,
    RetNetForTokenClassification,
    RetNetModel,
    RetNetPreTrainedModel,
)
from .retention import chunkwise_retention, parallel_retention, recurrent_retention, retention
from .retention_state import RetNetState
from .version import __version__


AutoConfig.register("retnet", RetNetConfig)
AutoModel.register(RetNetConfig, RetNetModel)
AutoModelForCausalLM.register(RetNetConfig, RetNetForCausalLM)
AutoModelForQuestionAnswering.register(RetNetConfig, RetNetForQuestionAnswering)
AutoModelForSequenceClassification.register(RetNetConfig, RetNetForSequenceClassification)
AutoModelForTokenClassification.register(RetNetConfig, RetNetForTokenClassification)

__all__ = [
    "RetNetConfig",
    "RetNetForCausalLM",
    "RetNetForQuestionAnswering",
    "RetNetForSequenceClassification",
    "RetNetForTokenClassification",
    "RetNetModel",
    "RetNetPreTrainedModel",
    "RetNetState",
    "__version__",
    "chunkwise_retention",
    "parallel_retention",
    "recurrent_retention",
    "retention",
]
