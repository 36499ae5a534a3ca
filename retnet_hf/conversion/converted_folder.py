# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A converted checkpoint as a complete Hugging Face folder: weights, configurations, tokenizer, model card."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import GenerationConfig
from transformers.modeling_utils import PreTrainedModel

from retnet_hf.vision.image_processing_retention import MetaFormerImageProcessor, RMTImageProcessor, ViRImageProcessor

from .checkpoint import Checkpoint
from .converted_card import converted_card, licence_of
from .errors import CheckpointError, first_line
from .formats import FORMATS
from .model_files import TOKENIZER
from .moves import Conversion, Move
from .replaced_folder import claim, replace


IMAGE_PROCESSORS = {"vir": ViRImageProcessor, "rmt": RMTImageProcessor, "metaformer": MetaFormerImageProcessor}


class Computed:
    """Saves computed tensors in files and maps them from there, so that only one of them is in memory at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns a tensor with the same values, mapped from disk."""
        self.folder.mkdir(exist_ok=True)
        self.count += 1
        file = self.folder / f"{self.count}.safetensors"
        save_file({"tensor": tensor}, file)
        return safe_open(file, framework="pt").get_tensor("tensor")


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
        model = plan.build(checkpoint.tensors, done, Computed(partial / "computed"))
        for name in ("generation_config.json", "config.json"):  # older versions of transformers wrote it into config.json
            if model.can_generate() and (checkpoint.folder / name).is_file():
                model.generation_config = _generation_config(checkpoint.folder, name)
                break
        model.save_pretrained(partial, max_shard_size=min(5 * 10**9, max(file.stat().st_size for file in checkpoint.files)))
        shutil.rmtree(partial / "computed", ignore_errors=True)
        for name in TOKENIZER:
            if (checkpoint.folder / name).is_file():
                shutil.copyfile(checkpoint.folder / name, partial / name)
        options = getattr(FORMATS[plan.format], "image_processor_options", lambda config: {})
        save_image_processor(model, partial, options(model.config))
        described = FORMATS[plan.format].DESCRIPTION
        stated = {"license": licence} if licence else licence_of(checkpoint.folder)
        card = converted_card(model, output.name, source or checkpoint.path.name, described, stated)
        card.save(partial / "README.md")
        replace(output, partial)
        return model
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _generation_config(folder: Path, name: str) -> GenerationConfig:
    try:
        config = GenerationConfig.from_pretrained(folder, name, _from_model_config=name == "config.json")
        config.validate(strict=True)  # saving requires this
        return config
    except Exception as error:  # fields of a wrong type may lead to any error
        raise CheckpointError(f"{folder / name} cannot be used: {first_line(error)}") from error


def save_image_processor(model: PreTrainedModel, folder: Path, options: dict[str, Any]) -> None:
    """Saves the image processor of a vision model's family, for the model's image size, with further options."""
    config = model.config
    if config.model_type not in IMAGE_PROCESSORS:
        return
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else size
    IMAGE_PROCESSORS[config.model_type](size={"height": height, "width": width}, **options).save_pretrained(folder)
