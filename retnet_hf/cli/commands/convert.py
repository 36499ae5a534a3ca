# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf convert` turns a checkpoint into a folder that transformers loads; `retnet-hf inspect` describes it."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from retnet_hf.conversion.checkpoint_location import locate
from retnet_hf.conversion.replaced_folder import claim, locked

from ..errors import require_one_of
from ..interrupts import leaving_order, litter
from ..named_inputs import load, require_checkpoint
from ..options import Overwrite, argument, loading


Source = Annotated[str, argument(metavar="INPUT", help="Folder or file of a checkpoint, or NAME@REVISION on the Hub.")]


def convert(
    context: typer.Context,
    source: Source,
    output: Annotated[Path, argument(metavar="OUTPUT", help="Folder of the converted model.")],
    format_name: Annotated[str | None, typer.Option("--from", metavar="FORMAT", help="Absent: detected from names.")] = None,
    to: Annotated[str | None, typer.Option(metavar="FORMAT", help="Write a RetNet in this format instead.")] = None,
    licence: Annotated[str | None, typer.Option("--license", help="Licence, if the source does not state it.")] = None,
    overwrite: Overwrite = False,
) -> None:
    """Turn a checkpoint of another implementation into a folder that transformers loads.

    Formats: fla, torchscale, syncdoth; hypenet, minicpm_sala, transnormer, minimax, ring, ring_lite, ling; vir_official,
    vir_pulfer, rmt, poolformer. Folders of fla, syncdoth, and the second seven need
    no conversion: from_pretrained reads them directly. --to writes the formats of the first two groups.

    [bold]Examples[/bold]

    retnet-hf convert checkpoint_last.pt my-retnet --from torchscale

    retnet-hf convert fla-hub/retnet-1.3B-100B retnet-1.3B

    retnet-hf convert my-model my-fla-model --to fla
    """
    console = Console(highlight=False, markup=False)
    require_checkpoint(source)
    litter.append(context.with_resource(locked(output)))
    claim(output, overwrite, [Path(source)])
    with loading(console):
        from rich.progress import track

        from retnet_hf.conversion.checkpoint import Checkpoint
        from retnet_hf.conversion.converted_folder import how_to_load, write_folder, write_foreign_folder
        from retnet_hf.conversion.formats import FORMATS, plan_of

        from ..text.generation import REPORTED, whole

    require_one_of("--from", format_name, FORMATS)
    if to is not None:
        from transformers import AutoModelForCausalLM

        folder = locate(source)
        model = whole(*load(AutoModelForCausalLM, str(folder), dtype="auto", **REPORTED), source)
        write_foreign_folder(model, folder, to, output, licence, overwrite)
        console.print(f"{model.num_parameters():,} parameters, in the format {to}, saved: {output}", soft_wrap=True)
        return
    checkpoint = Checkpoint(path := locate(source))
    plan = plan_of(checkpoint, format_name)
    bar = Console(stderr=True)
    progress = iter(track(plan.moves, "converting", console=bar, transient=True, disable=not bar.is_terminal))
    next(progress)
    repository = None if path == Path(source).expanduser() else source
    with leaving_order():
        model = write_folder(checkpoint, plan, output, licence, overwrite, lambda move: next(progress, None), repository)
    tensors = f"{sum(len(move.sources) for move in plan.moves):,} tensors of format {plan.format}, each used once"
    console.print(f"{tensors}, became {model.num_parameters():,} parameters in {output}")
    console.print(f"load it: {how_to_load(model, str(output))}", soft_wrap=True)


def inspect(source: Source) -> None:
    """Describe a checkpoint: format, size, parameters, size of the state, and how long each head remembers.

    [bold]Examples[/bold]

    retnet-hf inspect retnet-model

    retnet-hf inspect pytorch_model.bin
    """
    require_checkpoint(source)
    console = Console(highlight=False, markup=False)
    with loading(console):
        from retnet_hf.conversion.checkpoint import Checkpoint
        from retnet_hf.conversion.conversion_tables import describe

    facts, decays = describe(Checkpoint(locate(source)))
    console.print(facts, soft_wrap=True)
    if decays is not None:
        console.print(decays)
