# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The models of golden cases of families."""

from golden import SMALL, Golden, golden

from retnet_hf import RetNetHybridForCausalLM
from retnet_hf.conversion.formats import FORMATS


def read(case: str) -> tuple[RetNetHybridForCausalLM, Golden]:
    family, data = case.split("/")[0], golden(case, SMALL)
    own = {name: tensor.clone() for name, tensor in data.state_dict.items()}  # other tests read the case, too
    return getattr(FORMATS[family], f"from_{family}")(own, data.config).eval(), data
