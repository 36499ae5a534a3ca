# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Sequences split over ranks: outputs, losses, gradients and states are those of one process."""

import re
from pathlib import Path

import pytest
import torch
from small_models import small_model
from torchrun import torchrun

from retnet_hf import RetNetForMaskedLM, context_parallel, shard_sequence


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_sequences_compute_what_one_process_does(ranks):
    torchrun(ranks, "context_parallel_ranks.py")


def test_the_program_of_the_guide_runs_by_its_own_line(tmp_path):
    guide = (Path(__file__).parent.parent / "docs" / "guides" / "scale.md").read_text(encoding="utf-8")
    program = re.search(r"`(\w+\.py)`:\n\n```py\n(.*?)```", guide, re.DOTALL)
    (tmp_path / program[1]).write_text(program[2], encoding="utf-8")
    line = re.search(r"^torchrun --nproc-per-node 2 (\S+)$", guide, re.MULTILINE)
    assert line[1] == program[1]
    printed = torchrun(2, tmp_path / program[1], OMP_NUM_THREADS="1")
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+), 4096 tokens a rank$", printed, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match="all of whose layers are retention"):
        context_parallel(small_model("hybrid"), "a group")
    with pytest.raises(ValueError, match="got a RetNetForMaskedLM"):
        context_parallel(small_model("fla", RetNetForMaskedLM, bidirectional=True), "a group")
    with pytest.raises(RuntimeError, match="torchrun or accelerate launch"):
        context_parallel(small_model(), "a group")
    with pytest.raises(RuntimeError, match="torchrun or accelerate launch"):
        shard_sequence({"input_ids": torch.ones(1, 4)}, "a group")
