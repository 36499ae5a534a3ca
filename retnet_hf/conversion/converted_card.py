# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The model card of a converted checkpoint, with its origin and licence."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from transformers.modeling_utils import PreTrainedModel

from retnet_hf.hub.cards import model_card
from retnet_hf.version import __version__


_ORIGIN = """
## Origin

Converted from `{source}` ({description}) with retnet-hf {version}. Licence of the source: {licence}.
"""


def converted_card(
    model: PreTrainedModel, name: str, source: str, description: str, licence: dict[str, Any] | None
) -> ModelCard:
    """Returns the card.

    Args:
        name: argument of `from_pretrained`. source, description: the checkpoint, and the description of its format.
        licence: licence of the weights, as in the metadata of the source's card: `license`, and for a licence without an
            identifier also `license_name` and `license_link`.
    """
    card = model_card(model, name)
    licence = licence or {}
    for field, value in licence.items():
        card.data[field] = value
    stated = licence.get("license_name") or licence.get("license") or "not stated"
    stated = ", ".join(map(str, stated)) if isinstance(stated, list) else stated
    card.text += _ORIGIN.format(source=source, description=description, version=__version__, licence=stated)
    return card


def how_to_load(model: PreTrainedModel, folder: str) -> str:
    """Returns a line of Python that loads the model from its folder. AutoBackbone cannot load folders."""
    name, family = type(model).__name__, type(model.config).__name__.removesuffix("Config")
    if name.endswith("Backbone"):
        return f"from retnet_hf import {name}; {name}.from_pretrained({folder!r})"
    suffix = name.removeprefix(family)
    auto_class = f"AutoModel{'' if suffix == 'Model' else suffix}"
    return f"import retnet_hf; from transformers import {auto_class}; {auto_class}.from_pretrained({folder!r})"


def licence_of(folder: Path) -> dict[str, Any] | None:
    """Returns the licence fields of the model card in the source's folder, or None without a card."""
    card = folder / "README.md"
    if not card.is_file():
        return None
    try:
        data = ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
        return {field: data[field] for field in ("license", "license_name", "license_link") if field in data}
    except Exception:  # damaged YAML may lead to any error; the licence is then unknown
        return None
