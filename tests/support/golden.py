# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Outputs of public implementations on small random weights.

tests/golden holds one case of each format, without the large gradients. Where the full set, with more options of each,
lies beside a checkout, the tests run on all of it, and `python tests/support/golden.py` makes the small set from it.
"""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from places import ROOT, TESTS
from safetensors.torch import load_file, save_file
from torch import Tensor

from retnet_hf.conversion.formats import FORMATS


SMALL = TESTS / "golden"
FULL = ROOT.parent / "shared" / "golden"

KEPT = ("fla/unfused_nogate_relu", "torchscale/swish_scaled_untied", "syncdoth/published_options", "vir_official/token_last")
KEPT += ("vir_pulfer/non_square_alphas", "rmt/t3_like", "rmt_dense/fpn_t_like")
NAMES = ("torchscale_2023_07/gelu_subln", "syncdoth/ffn_no_glu")  # without values
GRADIENTS = 5  # the smallest of each case, which the small set keeps


class Golden(NamedTuple):
    """One case: a peer's weights by its own names, its configuration, and what it computes."""

    state_dict: dict[str, Tensor]
    config: dict[str, Any]
    tensors: dict[str, Tensor]  # inputs and outputs
    facts: dict[str, Any]  # everything the case's JSON says

    def gradients(self) -> dict[str, Tensor]:
        return {name.removeprefix("grad."): value for name, value in self.tensors.items() if name.startswith("grad.")}


def at_hand(cases: Iterable[str]) -> list[str]:
    return [case for case in cases if case in KEPT + NAMES or FULL.is_dir()]


@cache
def golden(case: str, folder: Path | None = None) -> Golden:
    """The case `peer/name`. Its tensors are shared by all tests, which do not write into them."""
    path = (folder or (FULL if FULL.is_dir() else SMALL)) / case
    facts = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    if not path.with_suffix(".safetensors").exists():  # a layout that is refused by the names of its tensors
        zeros = {name: torch.zeros(of_tensor["shape"]) for name, of_tensor in facts["state_dict"].items()}
        return Golden(zeros, facts["config"], {}, facts)
    tensors = load_file(path.with_suffix(".safetensors"))
    weights = {name.removeprefix("state_dict."): value for name, value in tensors.items() if name.startswith("state_dict.")}
    outputs = {name: value for name, value in tensors.items() if not name.startswith("state_dict.")}
    return Golden(weights, facts["config"], outputs, facts)


def format_of(case: str):
    return FORMATS[case.split("/")[0].replace("fla_2025_02", "fla")]


def read(case: str, folder: Path | None = SMALL) -> tuple:
    data, form = golden(case, folder), format_of(case)
    own = {name: tensor.clone() for name, tensor in data.state_dict.items()}  # other tests read the case, too
    return getattr(form, f"from_{form.NAME}")(own, data.config).eval(), data


def main() -> None:
    for case in KEPT + NAMES:
        full, small = FULL / case, SMALL / case
        small.parent.mkdir(parents=True, exist_ok=True)
        facts = json.loads(full.with_suffix(".json").read_text(encoding="utf-8"))
        small.with_suffix(".json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
        if case in KEPT:
            tensors = load_file(full.with_suffix(".safetensors"))
            gradients = sorted((name for name in tensors if "grad." in name), key=lambda name: tensors[name].numel())
            unused = [name for name in tensors if name.startswith(("logits_fused", "stage_downsampled", "retentions"))]
            kept = set(tensors) - set(gradients[GRADIENTS:]) - set(unused)
            save_file({name: tensors[name] for name in sorted(kept)}, small.with_suffix(".safetensors"))


if __name__ == "__main__":
    main()
