# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The models of golden cases of language models."""

from pathlib import Path

from golden import SMALL, golden

from retnet_hf.conversion.formats import FORMATS


def format_of(case: str):
    return FORMATS[case.split("/")[0].replace("fla_2025_02", "fla")]


def read(case: str, folder: Path | None = SMALL) -> tuple:
    data, form = golden(case, folder), format_of(case)
    own = {name: tensor.clone() for name, tensor in data.state_dict.items()}  # other tests read the case, too
    return getattr(form, f"from_{form.NAME}")(own, data.config).eval(), data
