# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Sequences split over ranks: outputs, losses, gradients and states are those of one process."""

import re

import pytest
import torch
from places import ROOT
from small_models import small_model
from torchrun import run_ranks, torchrun

from retnet_hf import RetNetForCausalLM, RetNetForMaskedLM, context_parallel, shard_sequence


def test_ranks_that_share_sequences_compute_what_one_process_does():
    run_ranks([2, 3, 4], "context_parallel_ranks.py")


@pytest.mark.parametrize("program", ["train_sharded.py", "train_long.py"])
def test_the_programs_of_the_guide_run_by_their_own_lines(program, tmp_path, monkeypatch):
    guide = (ROOT / "docs" / "guides" / "scale.md").read_text(encoding="utf-8")
    text = re.search(rf"`{program}`:\n\n```py\n(.*?)```", guide, re.DOTALL)[1]
    (tmp_path / program).write_text(text, encoding="utf-8")
    assert re.search(rf"^torchrun --nproc-per-node 2 {program}$", guide, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    printed = torchrun(2, tmp_path / program, OMP_NUM_THREADS="1")
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)", printed, re.MULTILINE)]
    assert len(losses) == 3
    assert losses[0] > losses[1] > losses[2]
    saved = {"train_sharded.py": "trained", "train_long.py": "trained-long"}[program]
    RetNetForCausalLM.from_pretrained(tmp_path / saved)


def test_what_cannot_be_split_is_refused():
    with pytest.raises(ValueError, match="if all layers of the model are retention"):
        context_parallel(small_model("hybrid"), "a group")
    with pytest.raises(ValueError, match="got a RetNetForMaskedLM"):
        context_parallel(small_model("fla", RetNetForMaskedLM, bidirectional=True), "a group")
    with pytest.raises(RuntimeError, match="torchrun or accelerate launch"):
        context_parallel(small_model(), "a group")
    with pytest.raises(RuntimeError, match="torchrun or accelerate launch"):
        shard_sequence({"input_ids": torch.ones(1, 4)}, "a group")
