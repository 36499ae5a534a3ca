# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The public names of the package, and their registration with the Auto classes of transformers."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import is_torchvision_available, is_vision_available, logging

from .hub.foreign import conversion
from .hybrid.configuration_hybrid import RetNetHybridConfig
from .hybrid.modeling_hybrid import (
    RetNetHybridForCausalLM,
    RetNetHybridForMaskedLM,
    RetNetHybridForQuestionAnswering,
    RetNetHybridForSequenceClassification,
    RetNetHybridForTokenClassification,
    RetNetHybridModel,
    RetNetHybridPreTrainedModel,
)
from .ops.retention_forms import (
    bidirectional_retention,
    chunkwise_retention,
    parallel_retention,
    recurrent_retention,
    retention,
)
from .ops.retention_packed import packed_retention
from .retnet.configuration_retnet import RetNetConfig
from .retnet.modeling_retnet import (
    RetNetForCausalLM,
    RetNetForMaskedLM,
    RetNetForQuestionAnswering,
    RetNetForSequenceClassification,
    RetNetForTokenClassification,
    RetNetModel,
    RetNetPreTrainedModel,
)
from .state.prefix_states import PrefixStates
from .state.retention_state import RetNetState
from .streams.causal_convolution import CausalConv1d
from .streams.multi_scale_retention import MultiScaleRetention
from .streams.stream_state import StreamState
from .training.muon import MuonAdamW
from .training.split_over_ranks import context_parallel, shard_sequence
from .training.state_tuning import StateTuning
from .version import __version__
from .vision.configuration_metaformer import MetaFormerConfig
from .vision.configuration_rmt import RMTConfig
from .vision.configuration_vir import ViRConfig
from .vision.manhattan_retention import manhattan_retention
from .vision.modeling_metaformer import (
    MetaFormerBackbone,
    MetaFormerForImageClassification,
    MetaFormerModel,
    MetaFormerPreTrainedModel,
)
from .vision.modeling_rmt import RMTBackbone, RMTForImageClassification, RMTModel, RMTPreTrainedModel
from .vision.modeling_vir import (
    ViRBackbone,
    ViRForImageClassification,
    ViRForMaskedImageModeling,
    ViRModel,
    ViRPreTrainedModel,
)


__all__ = ["RetNetConfig", "RetNetForCausalLM", "RetNetForMaskedLM", "RetNetForQuestionAnswering", "RetNetModel"]
__all__ += ["RetNetForSequenceClassification", "RetNetForTokenClassification", "RetNetPreTrainedModel"]
__all__ += ["RetNetHybridConfig", "RetNetHybridForCausalLM", "RetNetHybridForMaskedLM", "RetNetHybridForQuestionAnswering"]
__all__ += ["RetNetHybridForSequenceClassification", "RetNetHybridForTokenClassification", "RetNetHybridModel"]
__all__ += ["RetNetHybridPreTrainedModel", "RetNetState", "PrefixStates", "StateTuning", "CarryState", "StreamScore"]
__all__ += ["TokenStreams", "score_stream", "MuonAdamW", "context_parallel", "shard_sequence", "__version__"]
__all__ += ["CausalConv1d", "MultiScaleRetention", "StreamState", "manhattan_retention", "retention", "packed_retention"]
__all__ += ["bidirectional_retention", "chunkwise_retention", "parallel_retention", "recurrent_retention"]
__all__ += ["ViRBackbone", "ViRConfig", "ViRForImageClassification", "ViRForMaskedImageModeling", "ViRModel"]
__all__ += ["ViRPreTrainedModel", "RMTBackbone", "RMTConfig", "RMTForImageClassification", "RMTModel", "RMTPreTrainedModel"]
__all__ += ["MetaFormerBackbone", "MetaFormerConfig", "MetaFormerForImageClassification", "MetaFormerModel"]
__all__ += ["MetaFormerPreTrainedModel"]

if TYPE_CHECKING:
    from .training.streaming import CarryState, StreamScore, TokenStreams, score_stream

try:
    from .vision.image_processing_retention import (
        MetaFormerImageProcessor,
        MetaFormerImageProcessorPil,
        RMTImageProcessor,
        RMTImageProcessorPil,
        ViRImageProcessor,
        ViRImageProcessorPil,
    )
except Exception as error:  # Pillow is not installed, or an installed torchvision fails in one of many ways
    _missing = "needs Pillow, which is not installed: pip install Pillow"
    if is_vision_available():
        _missing = f"cannot be imported: {error}"
else:
    __all__ += ["MetaFormerImageProcessor", "MetaFormerImageProcessorPil", "RMTImageProcessor", "RMTImageProcessorPil"]
    __all__ += ["ViRImageProcessor", "ViRImageProcessorPil"]
    # transformers 5.17 exports it only with torchvision, and a broken torchvision may be installed.
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    for _config_class in (MetaFormerConfig, RMTConfig, ViRConfig):
        _name = _config_class.__name__.replace("Config", "ImageProcessor")  # such as ViRImageProcessor
        if is_torchvision_available():
            _classes = {"pil": globals()[f"{_name}Pil"], "torchvision": globals()[_name]}
        else:
            _classes = {"pil": globals()[_name]}
        AutoImageProcessor.register(_config_class, image_processor_classes=_classes, exist_ok=True)


def __getattr__(name: str) -> Any:
    if name in ("CarryState", "StreamScore", "TokenStreams", "score_stream"):
        from .training import streaming  # not before: transformers' module of Trainer's callbacks imports PEFT

        return getattr(streaming, name)
    if name.endswith(("ImageProcessor", "ImageProcessorPil")) and "_missing" in globals():
        raise ImportError(f"{name} {_missing}")
    raise AttributeError(f"module 'retnet_hf' has no attribute {name!r}")


def register(config_class: type[PreTrainedConfig], models: Mapping[Any, type]) -> None:
    """Registers a configuration, and the class of models for each Auto class.

    The class names are also added to the table behind each Auto class, which Trainer, pipelines, `transformers serve` and
    lm-eval read. A configuration of another library with the same model_type is replaced, with a warning that names both.
    """
    model_type = config_class.model_type
    if model_type in CONFIG_MAPPING:
        try:
            other = CONFIG_MAPPING[model_type]
            other_name = f"{other.__module__}.{other.__qualname__}"
        except Exception:  # transformers imports its configurations here, and an import may fail for many reasons
            other_name = "a configuration of transformers"
        logging.get_logger(__name__).warning(
            f"The model_type {model_type!r} was registered with AutoConfig for {other_name}. "
            f"It is registered for {config_class.__module__}.{config_class.__qualname__} from now on. "
            "The classes of both can still be used by name."
        )
    AutoConfig.register(model_type, config_class, exist_ok=True)
    for auto_class, model_class in models.items():
        auto_class.register(config_class, model_class, exist_ok=True)  # transformers may have a model of this name
        auto_class._model_mapping._model_mapping.setdefault(model_type, model_class.__name__)


# Auto classes by the suffix of a model class.
_AUTO_CLASSES = {"Model": transformers.AutoModel, "Backbone": transformers.AutoBackbone}
_TASKS = ("CausalLM", "MaskedLM", "QuestionAnswering", "SequenceClassification", "TokenClassification")
for _task in (*_TASKS, "ImageClassification", "MaskedImageModeling"):
    _AUTO_CLASSES[f"For{_task}"] = getattr(transformers, f"AutoModelFor{_task}")
for _config_class in (RetNetConfig, RetNetHybridConfig, MetaFormerConfig, RMTConfig, ViRConfig):
    _family = _config_class.__name__.removesuffix("Config")
    _ends = (end for end in _AUTO_CLASSES if _family + end in __all__)
    register(_config_class, {_AUTO_CLASSES[end]: globals()[_family + end] for end in _ends})
conversion("family_model_types")  # registers the model types of other families that are RetNets
