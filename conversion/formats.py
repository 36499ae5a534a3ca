# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""All foreign formats, and which of them a checkpoint is of."""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from . import fla, poolformer, rmt, syncdoth, torchscale, vir_official, vir_pulfer, yet_another_retnet
from .checkpoint import Checkpoint
from .errors import CheckpointError
from .families import MODULES
from .moves import Conversion
from .shapes import Shape


class Format(Protocol):
    """What the file of a format defines."""

    NAME: str
    DESCRIPTION: str
    recognises: Callable[[Collection[str], dict[str, Any] | None], bool]
    plan: Callable[[Mapping[str, Shape], dict[str, Any] | None], Conversion]


# The first that recognises a checkpoint has it: the vision formats have names that torchscale's also has.
FORMATS: dict[str, Format] = {
    module.NAME: module
    for module in (
        *(vir_official, vir_pulfer, rmt, poolformer),
        *(fla, torchscale, syncdoth, yet_another_retnet),
        *MODULES,
    )
}
OURS = "retnet_hf"
_OUR_MODEL_TYPES = ("retnet", "retnet_hybrid", "vir", "rmt", "metaformer")
# names that only models of this package have
_TEACHERS = ("llama", "mistral", "qwen2", "qwen3")
_OUR_SIGN = r"\.(retention\.o_proj|attention\.(o_proj|lepe)|mixer_norm)\.weight$"


def format_of(checkpoint: Checkpoint) -> str | None:
    """The name of the format, `OURS` for what needs no conversion, or None."""
    names, config = checkpoint.shapes, checkpoint.config
    for name, form in FORMATS.items():
        try:
            if form.recognises(names, config):
                return name
        except Exception as error:  # whatever fields of a wrong type lead to
            raise CheckpointError(f"the configuration of {checkpoint.path} cannot be used: {reason_of(error)}") from error
    ours = (config or {}).get("model_type") in _OUR_MODEL_TYPES
    if ours and any(re.search(_OUR_SIGN, name) for name in names):
        return OURS
    return None


def plan_of(checkpoint: Checkpoint, format_name: str | None = None) -> Conversion:
    """The checked plan for a checkpoint, of the format given or the one that is recognised.

    Raises:
        CheckpointError: where there is none, in a sentence.
    """
    found = format_of(checkpoint) if format_name is None else format_name
    if found == OURS:
        raise CheckpointError(f"{checkpoint.path} is one of our own already: from_pretrained loads it as it is")
    if found is None:
        model_type = (checkpoint.config or {}).get("model_type")
        declared = f", whose config.json says model_type {model_type!r}," if isinstance(model_type, str) else ""
        hint = f": `retnet-hf linearize` makes a RetNet of a {model_type}" if model_type in _TEACHERS else ""
        raise CheckpointError(
            f"{checkpoint.path}{declared} is of none of the formats {', '.join(FORMATS)}"
            + (hint or f": its first tensor is {next(iter(checkpoint.shapes))}")
        )
    try:
        plan = FORMATS[found].plan(checkpoint.shapes, checkpoint.config)
        plan.config.model_type = type(plan.config).model_type  # whatever the file says
        plan.check(checkpoint.shapes)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_recognised_instead(checkpoint, found)}") from error
    except Exception as error:  # what a configuration raises about its fields, or at values that no check foresees
        reason = f"{error} is missing" if isinstance(error, KeyError) else reason_of(error)
        raise CheckpointError(
            f"the configuration of {checkpoint.path} does not fit the format {found}: {reason}"
            f"{_recognised_instead(checkpoint, found)}"
        ) from error
    return plan


def _recognised_instead(checkpoint: Checkpoint, asked: str) -> str:
    """The end of an error about a checkpoint that looks like another format than the one that was asked for."""
    recognised = format_of(checkpoint)
    if recognised in (None, asked):
        return ""
    if recognised == OURS:
        return f"; {checkpoint.path} is one of our own, which from_pretrained loads as it is"
    return f"; {checkpoint.path} looks like the format {recognised}, not {asked}"


def reason_of(error: Exception) -> str:
    """The sentence in an error of a `@strict` configuration, which comes last, or else the whole message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"^\w*Error: ", "", lines[-1]) if lines else type(error).__name__
