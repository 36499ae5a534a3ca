# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf inspect`: describes a checkpoint."""

from typing import Annotated

from rich.console import Console

from retnet_hf.conversion.checkpoint_location import locate

from ..named_inputs import require_checkpoint
from ..options import argument
from ..slow_imports import loading


def inspect(
    source: Annotated[str, argument(metavar="INPUT", help="Folder or file of a checkpoint, or its name on the Hub.")],
) -> None:
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
