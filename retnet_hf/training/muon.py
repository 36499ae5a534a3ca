# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Muon and AdamW as one optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for values, outputs and feed-forward networks, and `torch.optim.AdamW` for all other parameters.

    Muon (https://kellerjordan.github.io/posts/muon) orthogonalises the update of a matrix. Its updates have the size of
    AdamW's (arXiv 2502.16982), so that both share a learning rate. Queries, keys and gates learn better with AdamW. Usage:

        Trainer(model, ..., optimizer_cls_and_kwargs=(MuonAdamW, {"model": model, "lr": 6e-3}))

    Args:
        lr, weight_decay: of all parameters, but vectors, such as norms and biases, have no weight decay.
        betas: of AdamW. The first is also Muon's momentum.
        matrices: ends of the names of the linear layers whose weights Muon updates.

    Raises:
        ImportError: if PyTorch is older than 2.9 and has no Muon.
        ValueError: if no linear layer with such a name is trained, as with LoRA.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        matrices: tuple[str, ...] = ("v_proj", "o_proj", "up_proj", "down_proj", "fc1", "fc2"),
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ImportError(f"MuonAdamW needs PyTorch 2.9, and this is {torch.__version__}: use torch.optim.AdamW.")
        groups: list[dict[str, Any]] = [{"params": []}, {"params": []}, {"params": [], "weight_decay": 0.0}]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                is_chosen = parameter.ndim == 2 and name.endswith(tuple(f"{end}.weight" for end in matrices))
                is_vector = sum(size > 1 for size in parameter.shape) < 2
                groups[0 if is_chosen else 1 + is_vector]["params"].append(parameter)
        if not groups[0]["params"]:
            raise ValueError(f"matrices must be ends of names of linear layers that are trained, got {matrices}.")
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "momentum": betas[0]})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates all parameters, and returns the result of the closure."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        matrices, *others = self.param_groups
        muon = torch.optim.Muon([matrices], ns_steps=3, adjust_lr_fn="match_rms_adamw")
        for part in (muon, torch.optim.AdamW(others, fused=True)):  # made anew, since loading replaces groups and state
            part.state = self.state
            part.step()
        return loss
