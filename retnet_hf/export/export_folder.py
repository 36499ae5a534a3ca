# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What all exports share: the check of a model, and the folder, which appears only when it is complete."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import retnet_hf
from retnet_hf.conversion.errors import first_line
from retnet_hf.conversion.replaced_folder import made_beside

from . import ExportError


CLASSIFIERS = [getattr(retnet_hf, f"{family}ForImageClassification") for family in ("ViR", "RMT", "MetaFormer")]
KINDS = ("float32", "int8", "int4")  # types of weights in ONNX files


def require_exportable(model: Any, kinds: Sequence[str] = ()) -> None:
    """Raises ExportError for a model that cannot be exported, or for an unknown type of weights."""
    if not isinstance(model, (retnet_hf.RetNetForCausalLM, *CLASSIFIERS)):
        others = ", ".join(each.__name__ for each in CLASSIFIERS)
        raise ExportError(f"a {type(model).__name__} cannot be exported: only RetNetForCausalLM, {others} are supported")
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ExportError(f"weights can be float32, int8 or int4, not {unknown[0]!r}")
    if getattr(model.config, "kv_lora_rank", None) is not None:
        raise ExportError("kv_lora_rank must be None: latent attention cannot be exported")
    limited = getattr(model.config, "attention_max_length", None) is not None
    if limited and "full_attention" in model.config.layer_types:
        raise ExportError("attention_max_length must be None: an exported model cannot refuse longer texts")
    if getattr(model, "hf_quantizer", None) is not None:
        raise ExportError("the weights are quantised: load the model in full or half precision, and quantise the export")


@contextmanager
def exported_to(folder: Path | str, overwrite: bool) -> Iterator[Path]:
    """Yields a folder as `made_beside` does. Raises ExportError with the first line of the error if a library fails."""
    output = Path(folder).expanduser().resolve()
    try:
        with made_beside(output, overwrite) as partial:
            yield partial
    except Exception as error:
        of_library = type(error) is Exception or type(error).__module__ != "builtins"
        if not of_library or isinstance(error, (OSError, ValueError)):
            raise
        # Errors of torch.onnx or a runtime, and full disks as reported by packages in Rust.
        raise ExportError(f"{output} could not be exported: {first_line(error.__cause__ or error)}") from error
