# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""All foreign formats, and the detection of a checkpoint's format."""

import re
from typing import Any

from . import fla, poolformer, rmt, syncdoth, torchscale, vir_official, vir_pulfer
from .checkpoint import Checkpoint
from .errors import CheckpointError
from .families import MODULES
from .moves import Conversion


# The first format that recognises a checkpoint is used. Vision formats come first, since torchscale shares their names.
_VISION, _LANGUAGE = (vir_official, vir_pulfer, rmt, poolformer), (fla, torchscale, syncdoth)
FORMATS = {module.NAME: module for module in (*_VISION, *_LANGUAGE, *MODULES)}
OURS = "retnet_hf"
_OUR_MODEL_TYPES = ("retnet", "retnet_hybrid", "vir", "rmt", "metaformer")
_TEACHERS = ("llama", "mistral", "qwen2", "qwen3")
_OUR_SIGN = r"\.(retention\.o_proj|attention\.(o_proj|lepe)|mixer_norm)\.weight$"  # names of this package's models only


def format_of(checkpoint: Checkpoint) -> str | None:
    """Returns the name of the format, `OURS` if no conversion is needed, or None if the format is unknown."""
    names, config = checkpoint.shapes, checkpoint.config
    for name, form in FORMATS.items():
        try:
            if form.recognises(names, config):
                return name
        except Exception as error:  # fields of a wrong type may lead to any error
            raise CheckpointError(f"the configuration of {checkpoint.path} cannot be used: {reason_of(error)}") from error
    ours = (config or {}).get("model_type") in _OUR_MODEL_TYPES and any(re.search(_OUR_SIGN, name) for name in names)
    return OURS if ours else None


def advice_for(model_type: Any) -> str:
    """Returns the way from a transformer of a type to a RetNet, after a colon; nothing if there is none."""
    return f": `retnet-hf linearize` makes a RetNet from a {model_type}" if model_type in _TEACHERS else ""


def plan_of(checkpoint: Checkpoint, format_name: str | None = None) -> Conversion:
    """Returns the checked plan for a checkpoint in this format or the recognised one. Raises CheckpointError."""
    found = format_of(checkpoint) if format_name is None else format_name
    if found == OURS:
        raise CheckpointError(f"{checkpoint.path} is already a model of retnet_hf: from_pretrained loads it")
    if found is None:
        model_type = (checkpoint.config or {}).get("model_type")
        declared = f" (model_type {model_type!r} in config.json)" if isinstance(model_type, str) else ""
        hint = advice_for(model_type) or f": its first tensor is {next(iter(checkpoint.shapes))}"
        raise CheckpointError(f"{checkpoint.path}{declared} has none of the formats {', '.join(FORMATS)}{hint}")
    try:
        plan = FORMATS[found].plan(checkpoint.shapes, checkpoint.config)
        plan.config.model_type = type(plan.config).model_type  # the file may have another
        plan.check(checkpoint.shapes)
    except Exception as error:  # checks of a configuration, or errors from values that no check foresees
        recognised, said = format_of(checkpoint), str(error)
        if not isinstance(error, CheckpointError):
            reason = f"{error} is missing" if isinstance(error, KeyError) else reason_of(error)
            said = f"the configuration of {checkpoint.path} does not fit the format {found}: {reason}"
        if recognised == OURS:
            said += f"; {checkpoint.path} is a model of retnet_hf, and from_pretrained loads it"
        elif recognised not in (None, found):
            said += f"; {checkpoint.path} looks like the format {recognised}, not {found}"
        raise CheckpointError(said) from error
    return plan


def reason_of(error: Exception) -> str:
    """Returns the last line of an error's message, which is the sentence in errors of `@strict` configurations."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"^\w*Error: ", "", lines[-1]) if lines else type(error).__name__
