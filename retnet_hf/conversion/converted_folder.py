# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A converted checkpoint as a complete Hugging Face folder: weights, configurations, tokenizer, model card."""

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, save_torch_state_dict
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.modeling_utils import PreTrainedModel

from retnet_hf.hub.cards import model_card
from retnet_hf.version import __version__
from retnet_hf.vision.image_processing_retention import MetaFormerImageProcessor, RMTImageProcessor, ViRImageProcessor

from .checkpoint import Checkpoint
from .errors import CheckpointError, first_line
from .formats import FORMATS
from .moves import Conversion, Move
from .replaced_folder import TOKENIZER, claim, replace


IMAGE_PROCESSORS = {"vir": ViRImageProcessor, "rmt": RMTImageProcessor, "metaformer": MetaFormerImageProcessor}


def write_folder(
    checkpoint: Checkpoint,
    plan: Conversion,
    output: Path,
    licence: str | None = None,
    overwrite: bool = False,
    done: Callable[[Move], None] = lambda move: None,
    source: str | None = None,
) -> PreTrainedModel:
    """Converts a checkpoint, and replaces `output` with the finished folder. If anything fails, `output` is unchanged.

    Args:
        licence: licence of the weights; if absent, the source's.
        done: called after each move. source: name of the source in the model card; the name of its path if absent.

    Raises:
        CheckpointError: for values that cannot be read or are not finite, or if `output` must not be replaced.
    """
    partial = claim(output, overwrite, (checkpoint.path, *checkpoint.files))
    output = output.expanduser().resolve()
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        (computed := partial / "computed").mkdir()
        numbers = itertools.count()

        def on_disk(tensor: Tensor) -> Tensor:  # mapped, so that only one computed tensor is in memory at a time
            file = computed / f"{next(numbers)}.safetensors"
            save_file({"tensor": tensor}, file)
            return safe_open(file, framework="pt").get_tensor("tensor")

        model = plan.build(checkpoint.tensors, done, on_disk)
        for name in ("generation_config.json", "config.json"):  # older versions of transformers wrote it into config.json
            if model.can_generate() and (checkpoint.folder / name).is_file():
                model.generation_config = _generation_config(checkpoint.folder, name)
                break
        model.save_pretrained(partial, max_shard_size=min(5 * 10**9, max(file.stat().st_size for file in checkpoint.files)))
        shutil.rmtree(computed, ignore_errors=True)
        _copy_tokenizer(checkpoint.folder, partial)
        if model.config.model_type in IMAGE_PROCESSORS:
            options = getattr(FORMATS[plan.format], "image_processor_options", lambda config: {})(model.config)
            size = getattr(model.config, "image_size", None) or 224
            height, width = (size, size) if isinstance(size, int) else size
            processor = IMAGE_PROCESSORS[model.config.model_type](size={"height": height, "width": width}, **options)
            processor.save_pretrained(partial)
        origin = f"Converted from `{source or checkpoint.path.name}` ({FORMATS[plan.format].DESCRIPTION})"
        _write_card(model, checkpoint.folder, partial, output.name, licence, origin)
        replace(output, partial)
        return model
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_foreign_folder(
    model: PreTrainedModel, source: Path, target: str, output: Path, licence: str | None = None, overwrite: bool = False
) -> None:
    """Writes a model and its tokenizer as a folder in another format. If anything fails, `output` is unchanged.

    Raises:
        CheckpointError: if nothing is written in the format, the format cannot express the model, or `output` must stay.
    """
    writers = {name: getattr(form, f"to_{name}") for name, form in FORMATS.items() if hasattr(form, f"to_{name}")}
    if target not in writers:
        raise CheckpointError(f"a model can be written in the formats {', '.join(writers)}, not in {target}")
    partial = claim(output, overwrite, [source])
    output = output.expanduser().resolve()
    shutil.rmtree(partial, ignore_errors=True)
    try:
        state_dict, config = writers[target](model)
        partial.mkdir(parents=True)
        save_torch_state_dict(state_dict, partial)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        model.generation_config.save_pretrained(partial)
        _copy_tokenizer(source, partial)
        origin = f"Converted from `{source.name}` to the format {target} ({FORMATS[target].DESCRIPTION})"
        _write_card(model, source, partial, output.name, licence, origin)
        replace(output, partial)
    except ValueError as error:
        raise CheckpointError(first_line(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _copy_tokenizer(source: Path, partial: Path) -> None:
    for name in TOKENIZER:
        if (source / name).is_file():
            shutil.copyfile(source / name, partial / name)


def _write_card(model: PreTrainedModel, source: Path, partial: Path, name: str, licence: str | None, origin: str) -> None:
    card, fields = model_card(model, name), {"license": licence} if licence else licence_of(source) or {}
    for field, value in fields.items():
        card.data[field] = value
    stated = fields.get("license_name") or fields.get("license") or "not stated"
    stated = ", ".join(map(str, stated)) if isinstance(stated, list) else stated
    card.text += f"\n## Origin\n\n{origin} with retnet-hf {__version__}. Licence of the source: {stated}.\n"
    card.save(partial / "README.md")


def _generation_config(folder: Path, name: str) -> GenerationConfig:
    try:
        config = GenerationConfig.from_pretrained(folder, name, _from_model_config=name == "config.json")
        config.validate(strict=True)  # saving requires this
        return config
    except Exception as error:  # fields of a wrong type may lead to any error
        raise CheckpointError(f"{folder / name} cannot be used: {first_line(error)}") from error


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
