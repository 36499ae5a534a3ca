# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The folders of a training run.

A run works in `OUTPUT.partial`. When this folder is complete, it replaces `OUTPUT`. If the run stops earlier, `OUTPUT` stays
unchanged, and the partial folder contains the checkpoint to resume from.
"""

import json
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from retnet_hf.conversion.errors import first_line
from retnet_hf.conversion.replaced_folder import claim, locked, require_apart, restore

from .. import ranks
from ..errors import InputError
from ..interrupts import litter


RECORD = "training_run.json"


def step_of(checkpoint: Path) -> int:
    """Returns the step at which a checkpoint was saved."""
    return int(checkpoint.name.rpartition("-")[2])


def checkpoints_of(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, and no copies of them under other names."""
    return [path for path in folder.iterdir() if re.fullmatch(r"checkpoint-\d+", path.name)]


class TrainingFolder:
    """The output folder of a run of `command`, its partial folder, and the rules for replacing and resuming them."""

    def __init__(self, output: Path, command: str) -> None:
        self.command = command
        self.output = output.expanduser().resolve()
        self.partial = self.output.with_name(self.output.name + ".partial")
        self.own = self.output, self.partial

    @contextmanager
    def claim(
        self, resume: bool, overwrite: bool, sources: Iterable[Path | str | None], resumable: bool = True
    ) -> Iterator[None]:
        """Locks the folder for this run inside the block, and refuses to destroy results or sources.

        `resumable` says whether the command has the option --resume. Raises InputError or CheckpointError.
        """
        with locked(self.output) if ranks.FIRST else nullcontext() as lock:
            if lock is not None:
                litter.append(lock)
            restore(self.output)
            for folder in self.own:
                require_apart(folder, (Path(source) for source in sources if source is not None))
            if resume and overwrite:
                raise InputError("--resume and --overwrite exclude each other")
            if self.partial.exists() and any(self.partial.iterdir()) and not (self.partial / RECORD).exists():
                raise InputError(f"{self.partial} is needed for the unfinished model, but contains something else")
            if resume and not self.partial.exists():
                raise InputError(f"there is nothing to resume in {self.output}: its run is finished, or was never begun")
            if resume and (self.partial / RECORD).exists():
                self.read_record()
            if not resume:
                claim(self.output, overwrite)
            if not resume and self.partial.exists() and not overwrite:
                other = ""
                with suppress(InputError):
                    other = "--resume continues it, " if resumable and self.read_record() else ""
                raise InputError(f"{self.partial} holds an interrupted run: {other}--overwrite begins anew")
            yield

    def to_resume(self) -> tuple[Path | None, dict[str, Any]]:
        """Returns the last complete checkpoint, or None, and the record of the run. Raises InputError."""
        if not (self.partial / RECORD).exists():
            return None, {}
        record, reason = self.read_record(), None
        for checkpoint in sorted(checkpoints_of(self.partial), key=step_of, reverse=True):
            try:
                state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))  # its last file
                if state["global_step"] == step_of(checkpoint) and list(checkpoint.glob("*.safetensors")):
                    return checkpoint, record
                reason = f"{checkpoint} is not complete"
            except (OSError, ValueError, TypeError, LookupError) as error:
                reason = first_line(error)
        if reason is not None:
            raise InputError(f"no checkpoint in {self.partial} can be read: {reason}")
        return None, record

    def read_record(self) -> dict[str, Any]:
        """Returns the record that `begin` wrote. Raises InputError if it cannot be read or belongs to another command."""
        try:
            record = dict(json.loads((self.partial / RECORD).read_text(encoding="utf-8")))
            command, *_ = record["command"], record["steps"], dict(record["recipe"])
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            raise InputError(f"{self.partial / RECORD} cannot be read: {first_line(error)}") from error
        if command != self.command:
            held = f"a run of retnet-hf {command}, which retnet-hf {self.command} cannot resume"
            raise InputError(f"{self.partial} holds {held}")
        return record

    def discard(self) -> None:
        """Deletes the partial folder if it contains nothing to resume from."""
        whole = "checkpoint-*/trainer_state.json"  # the last file of a checkpoint
        kept = (whole, f"*/{whole}", "[!c]*/config.json", "*/part-*.safetensors")  # files of a run or its stages
        if self.partial.exists() and not any(any(self.partial.glob(pattern)) for pattern in kept):
            shutil.rmtree(self.partial, ignore_errors=True)
