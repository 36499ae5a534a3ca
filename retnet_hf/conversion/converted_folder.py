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
from retnet_hf.retnet.modeling_retnet import RetNetPreTrainedModel
from retnet_hf.version import __version__
from retnet_hf.vision.image_processing_retention import MetaFormerImageProcessor, RMTImageProcessor, ViRImageProcessor

from .checkpoint import Checkpoint
from .errors import CheckpointError, first_line
from .formats import FORMATS, advice_for
from .moves import Conversion, Move
from .replaced_folder import TOKENIZER, made_beside


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
    """Converts a checkpoint, and replaces `output` with the finished folder, or leaves it and raises CheckpointError.

    `licence`: of the weights, by default the source's. `done`: called after each move. `source`: its name in the card.
    """
    folder = checkpoint.folder
    with made_beside(output, overwrite, (checkpoint.path, *checkpoint.files)) as partial:
        (computed := partial / "computed").mkdir()
        numbers = itertools.count()

        def on_disk(tensor: Tensor) -> Tensor:  # mapped, so that only one computed tensor is in memory at a time
            file = computed / f"{next(numbers)}.safetensors"
            save_file({"tensor": tensor}, file)
            return safe_open(file, framework="pt").get_tensor("tensor")

        model = plan.build(checkpoint.tensors, done, on_disk)
        for name in ("generation_config.json", "config.json"):  # older versions of transformers wrote it into config.json
            if model.can_generate() and (folder / name).is_file():
                try:
                    generation = GenerationConfig.from_pretrained(folder, name, _from_model_config=name == "config.json")
                    generation.validate(strict=True)  # saving requires this
                    model.generation_config = generation
                except Exception as error:  # fields of a wrong type may lead to any error
                    raise CheckpointError(f"{folder / name} cannot be used: {first_line(error)}") from error
                break
        model.save_pretrained(partial, max_shard_size=min(5 * 10**9, max(file.stat().st_size for file in checkpoint.files)))
        shutil.rmtree(computed, ignore_errors=True)
        if model.config.model_type in IMAGE_PROCESSORS:
            options = {}
            if model.config.model_type == "metaformer":  # the crop of PoolFormer's evaluation is larger for wide models
                options["crop_pct"] = 0.95 if model.config.hidden_size > 512 else 0.9
            size = getattr(model.config, "image_size", None) or 224
            height, width = (size, size) if isinstance(size, int) else size
            processor = IMAGE_PROCESSORS[model.config.model_type](size={"height": height, "width": width}, **options)
            processor.save_pretrained(partial)
        origin = f"Converted from `{source or checkpoint.path.name}` ({FORMATS[plan.format].DESCRIPTION})"
        _complete(partial, model, folder, output, licence, origin)
    return model


def write_foreign_folder(
    model: PreTrainedModel, source: Path, target: str, output: Path, licence: str | None = None, overwrite: bool = False
) -> None:
    """Writes model and tokenizer in another format. `output` is unchanged if that fails, with CheckpointError."""
    writers = {name: getattr(form, f"to_{name}") for name, form in FORMATS.items() if hasattr(form, f"to_{name}")}
    if target not in writers:
        raise CheckpointError(f"a model can be written in the formats {', '.join(writers)}, not in {target}")
    if not isinstance(model, RetNetPreTrainedModel):
        kind = model.config.model_type
        raise CheckpointError(f"{source} is a model of type {kind}, not a RetNet{advice_for(kind)}")
    try:
        with made_beside(output, overwrite, [source]) as partial:
            state_dict, config = writers[target](model)
            save_torch_state_dict(state_dict, partial)
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            model.generation_config.save_pretrained(partial)
            origin = f"Converted from `{source.name}` to the format {target} ({FORMATS[target].DESCRIPTION})"
            origin += ", which loads it after `import fla`," if target == "fla" else ""
            _complete(partial, model, source, output, licence, origin)
    except ValueError as error:
        raise CheckpointError(first_line(error)) from error


def _complete(partial: Path, model: PreTrainedModel, source: Path, output: Path, licence: str | None, origin: str) -> None:
    """Adds the source's tokenizer and a model card with the source's licence, unless another is given."""
    for name in TOKENIZER:
        if (source / name).is_file():
            shutil.copyfile(source / name, partial / name)
    fields = {"license": licence} if licence else licence_of(source)
    stated = fields.get("license_name") or fields.get("license") or "not stated"
    stated = ", ".join(map(str, stated)) if isinstance(stated, list) else stated
    text = f"\n## Origin\n\n{origin} with retnet-hf {__version__}. Licence of the source: {stated}.\n"
    card = model_card(model, output.expanduser().resolve().name, training=text)
    vars(card.data).update(fields)
    card.save(partial / "README.md")


def how_to_load(model: PreTrainedModel, folder: str) -> str:
    """Returns a line of Python that loads the model from its folder. AutoBackbone cannot load folders."""
    name, family = type(model).__name__, type(model.config).__name__.removesuffix("Config")
    if name.endswith("Backbone"):
        return f"from retnet_hf import {name}; {name}.from_pretrained({folder!r})"
    suffix = name.removeprefix(family)
    auto_class = f"AutoModel{'' if suffix == 'Model' else suffix}"
    return f"import retnet_hf; from transformers import {auto_class}; {auto_class}.from_pretrained({folder!r})"


def licence_of(folder: Path) -> dict[str, Any]:
    """Returns the licence fields of the model card in the source's folder, or {} if there is none."""
    try:
        data = ModelCard.load(folder / "README.md", ignore_metadata_errors=True).data.to_dict()
        return {field: data[field] for field in ("license", "license_name", "license_link") if field in data}
    except Exception:  # no card, or damaged YAML, which may lead to any error
        return {}
