# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Muon and AdamW as one optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for values, outputs and feed-forward networks, and `torch.optim.AdamW` for all other parameters.

    Muon (https://kellerjordan.github.io/posts/muon) orthogonalises the update of a matrix. Its updates have the size of
    AdamW's (arXiv 2502.16982), so that both share a learning rate. Queries, keys and gates learn better with AdamW, which
    also updates experts that share a tensor. With Trainer, whose own rate and weight decay then have no effect:

        Trainer(model, ..., optimizer_cls_and_kwargs=(lambda: MuonAdamW, {"lr": 6e-3, "weight_decay": 0.1}))

    Args:
        model: the model to train. Parameters that require no gradients are left out.
        lr, weight_decay: of all parameters, but vectors, such as norms and biases, have no weight decay.
        betas: of AdamW. The first is also Muon's momentum.
        matrices: names, or ends of dotted names, of the linear layers whose weights Muon updates.

    Raises:
        ImportError: if PyTorch is older than 2.9 and has no Muon.
        ValueError: for numbers out of range, or if no matrix of such a layer is trained, as with LoRA.
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
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            given = f"lr={lr}, weight_decay={weight_decay} and betas={betas}"
            raise ValueError(f"lr and weight_decay must not be negative, and betas must be in [0, 1), got {given}.")
        groups: list[dict[str, Any]] = [{"params": []}, {"params": []}, {"params": [], "weight_decay": 0.0}]
        ends = tuple(f".{end}.weight" for end in matrices)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                named = f".{name}".endswith(ends)
                is_vector = sum(size > 1 for size in parameter.shape) < 2
                groups[0 if named and parameter.ndim == 2 else 1 + is_vector]["params"].append(parameter)
        if not groups[0]["params"]:
            known = "linear layers that are trained, and whose weights are not flattened as by FSDP1"
            raise ValueError(f"matrices must be names of {known}, got {matrices}.")
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates all parameters, and returns the result of the closure."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        matrices, *others = self.param_groups
        matrices["momentum"] = matrices["betas"][0]
        for group in others:  # the fused update takes no DTensors beside other tensors
            group["fused"] = all(
                type(each) is nn.Parameter and each.device.type in ("cpu", "cuda") for each in group["params"]
            )
        # Made anew, since loading a checkpoint replaces groups and state.
        for part in (torch.optim.Muon([matrices], adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(others)):
            part.state = self.state
            part.step()
        return loss
