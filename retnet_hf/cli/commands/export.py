# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf export`: writes a model for runtimes outside of Python."""

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

import retnet_hf.export
from retnet_hf.conversion.replaced_folder import claim, locked

from ..errors import InputError
from ..interrupts import leaving_order, litter
from ..named_inputs import load, model_source
from ..options import Model, Overwrite, argument, loading


def export(
    context: typer.Context,
    model: Model,
    output: Annotated[Path, argument(metavar="OUTPUT", help="Folder of the exported model.")],
    to: Annotated[
        Literal["onnx", "web", "mlx"], typer.Option("--to", help="web: a page for a browser. mlx: for mlx-lm.")
    ] = "onnx",
    quantize: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="Weights in float32, int8 or int4. May be repeated.",
            show_default="float32; int8 for a page",
        ),
    ] = None,
    any_size: Annotated[
        bool, typer.Option("--any-size", help="An image classifier accepts other image sizes than in training.")
    ] = False,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="Initial state of texts in a page, written by RetNetState.save.",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a model for ONNX Runtime, for a browser, or for mlx-lm. ONNX files are compared with the model first.

    [bold]Examples[/bold]

    retnet-hf export my-retnet my-retnet-onnx --quantize float32 --quantize int8

    retnet-hf export my-retnet my-page --to web      (then: python3 -m http.server -d my-page)

    retnet-hf export my-retnet my-mlx --to mlx       (then: mlx_lm.load("my-mlx", trust_remote_code=True))
    """
    console = Console(highlight=False, markup=False)
    name = model_source(model)
    if to == "mlx" and quantize:
        raise InputError("--quantize is for ONNX files and pages; mlx-lm quantises the models that it loads")
    kinds = quantize or ["int8" if to == "web" else "float32"]
    if to == "web" and len(kinds) > 1:
        raise InputError("--to web takes one --quantize: a page has one file of weights")
    if state is not None and to != "web":
        raise InputError("--state is for --to web; other runtimes take a state as inputs")
    litter.append(context.with_resource(locked(output)))
    claim(output, overwrite, [Path(name), *([] if state is None else [state])])
    with loading(console):
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

        from retnet_hf import MetaFormerConfig, RMTConfig, ViRConfig

        from ..text.generation import REPORTED, load_model, load_state, whole

    config = load(AutoConfig, name)
    if getattr(config, "bidirectional", False) and not isinstance(config, ViRConfig):
        raise InputError("an encoder cannot be exported: it has no state that continues from token to token")
    if isinstance(config, (MetaFormerConfig, RMTConfig, ViRConfig)):
        loaded = whole(*load(AutoModelForImageClassification, name, **REPORTED), name)
        processor = load(AutoImageProcessor, name, "image processor")
    else:
        loaded, processor = load_model(name)
        if any_size:
            raise InputError("--any-size is for image classifiers, and this is a language model")
    console.print(f"exporting {name} to {to}, in a minute or two", soft_wrap=True)
    with leaving_order(), console.status("exporting"):
        if to == "web":
            begins_with = None if state is None else load_state(state, loaded)
            options = (processor, kinds[0], Path(name).name, begins_with, overwrite)
            files = [retnet_hf.export.export_web(loaded, output, *options)]
        elif to == "mlx":
            retnet_hf.export.export_mlx(loaded, output, processor, overwrite)
            files = []
        else:
            files = retnet_hf.export.export_onnx(loaded, output, processor, kinds, any_size, overwrite)
    for file in files:
        checked = "as expected with so few bits" if file.kind != "float32" else "and 64 greedy tokens as in PyTorch"
        checked = f", {checked}" if file.equal_tokens is not None else ""
        console.print(f"{file.name}: {file.size / 1e6:,.1f} MB, logits within {file.error:.1e}{checked}", soft_wrap=True)
    console.print(f"saved: {output}", soft_wrap=True)
    if to == "web":
        console.print(f"open it: python3 -m http.server --directory {output}, then http://localhost:8000", soft_wrap=True)
