# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Muon and AdamW as one optimizer."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for values, outputs and feed-forward networks, and `torch.optim.AdamW` for all other parameters.

    Muon (https://kellerjordan.github.io/posts/muon) orthogonalises the update of a matrix. The update has the size
    of AdamW's (arXiv 2502.16982), so that one learning rate and one weight decay serve both. Queries, keys and gates learn
    better with AdamW (docs/results.md). With Trainer:

        Trainer(model, ..., optimizer_cls_and_kwargs=(MuonAdamW, {"model": model, "lr": 6e-3}))

    Args:
        model: any model. Parameters without gradients are left out.
        lr, weight_decay: of both. Vectors, such as norms and biases, have no weight decay.
        betas: of AdamW. The first is also Muon's momentum.
        matrices: endings of the names of the linear layers whose weights Muon updates.

    Raises:
        ImportError: if PyTorch is older than 2.9 and has no Muon.
        ValueError: if no linear layer that is trained has such a name, as with LoRA.
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
        linear = (
            module.weight
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name.endswith(matrices)
        )
        chosen = {weight for weight in linear if weight.requires_grad}
        if not chosen:
            raise ValueError(f"matrices must be endings of names of linear layers that are trained, got {matrices}.")
        groups: list[dict[str, Any]] = [{"params": []}, {"params": []}, {"params": [], "weight_decay": 0.0}]
        for parameter in filter(lambda parameter: parameter.requires_grad, model.parameters()):
            is_vector = sum(size > 1 for size in parameter.shape) < 2
            groups[0 if parameter in chosen else 1 + is_vector]["params"].append(parameter)
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "momentum": betas[0]})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates all parameters, and returns the result of the closure."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        matrices, *others = self.param_groups
        # Made anew, since loading a checkpoint and FSDP replace groups and state.
        for part in (
            torch.optim.Muon([matrices], ns_steps=3, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, fused=True),
        ):
            part.state = self.state
            part.step()
        return loss
