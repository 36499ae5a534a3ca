# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What every family's model computes of a golden case."""

import torch
from golden import Golden
from small_models import close
from torch import Tensor


@torch.no_grad()
def check_form(model, data: Golden, form: str) -> None:
    """Logits and loss in a form are those of the case."""
    ids = data.tensors["input_ids"]
    output = model(ids, labels=ids, retention_form=form)
    close(output.logits, data.tensors["logits"], 1e-5 * data.tensors["logits"].abs().max().item())
    close(output.loss, data.tensors["loss"][0], 1e-5)


@torch.no_grad()
def check_padded(model, ids: Tensor, published: Tensor, alone: float, whole: float) -> None:
    """Each of two rows is what it is alone, the second one without its padding, and the first one is as published."""
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    padded = model(ids, attention_mask=mask).logits
    close(padded[1, 6:], model(ids[1:, 6:]).logits[0], alone)
    close(padded[0], published, whole)
