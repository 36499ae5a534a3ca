# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The model card of a converted checkpoint: what it is, how to load it, where it is from and under which licence."""

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData
from transformers.modeling_utils import PreTrainedModel

from retnet_hf.configuration_retnet import RetNetConfig
from retnet_hf.image_model_card import PAPERS
from retnet_hf.model_card import model_card
from retnet_hf.version import __version__


_ORIGIN = """
## Origin

Converted from `{source}` ({description}) with retnet-hf {version}. Licence of the source: {licence}.
"""

_VISION = """\
# {name}

A {paper} of {parameters} parameters.

## Use

```bash
pip install retnet-hf
```

```python
import retnet_hf  # registers the model with transformers
from transformers import AutoImageProcessor, {auto_class}

processor = AutoImageProcessor.from_pretrained("{name}")
model = {auto_class}.from_pretrained("{name}")
```
"""


def converted_card(
    model: PreTrainedModel, name: str, source: str, description: str, licence: dict[str, Any] | None
) -> ModelCard:
    """The card.

    Args:
        name: what `from_pretrained` is to be given. source, description: the checkpoint, and whose format it is of.
        licence: of the weights, as the metadata of the source's card states it: `license`, for one without an identifier
            also `license_name` and `license_link`.
    """
    if isinstance(model.config, RetNetConfig):
        card = model_card(model, name)
    else:
        family = type(model.config).__name__.removesuffix("Config")
        classifier = type(model).__name__.endswith("ForImageClassification")
        data = ModelCardData(
            library_name="transformers",
            pipeline_tag="image-classification" if classifier else "image-feature-extraction",
            tags=sorted({model.config.model_type, "retention"}),
        )
        text = _VISION.format(
            name=name,
            paper=PAPERS[family],
            parameters=f"{model.num_parameters():,}",
            auto_class=auto_class_of(model),
        )
        card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")
    licence = licence or {}
    for field, value in licence.items():
        card.data[field] = value
    stated = licence.get("license_name") or licence.get("license") or "not stated"
    stated = ", ".join(map(str, stated)) if isinstance(stated, list) else stated
    card.text += _ORIGIN.format(source=source, description=description, version=__version__, licence=stated)
    return card


def auto_class_of(model: PreTrainedModel) -> str:
    """The Auto class that loads the model."""
    suffix = type(model).__name__.removeprefix(type(model.config).__name__.removesuffix("Config"))
    return {"Backbone": "AutoBackbone", "Model": "AutoModel"}.get(suffix, f"AutoModel{suffix}")


def licence_of(folder: Path) -> dict[str, Any] | None:
    """What the model card in the source's folder says."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    try:
        data = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
        return {field: data[field] for field in ("license", "license_name", "license_link") if field in data}
    except (ValueError, OSError, yaml.YAMLError):
        return None
