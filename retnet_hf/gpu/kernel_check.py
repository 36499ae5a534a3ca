# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Compares the kernels of this package with PyTorch's operations, once on each device, when they are first used.

Without this check, a compiler or a card that gets a kernel wrong would silently train a wrong model. `kernels.py` imports
this module together with the kernels.
"""

import math
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from transformers.utils import logging

from ..modules.layers import RetNetRMSNorm
from ..ops.kernels import TORCH, VERIFIED, Kernels, Sizes
from ..ops.retention_forms import bidirectional_retention, retention, step_decay


logger = logging.get_logger(__name__)

# Allowed error as a fraction of a head's largest value. Rounding errors are much smaller, errors of wrong kernels larger.
ALLOWED = {torch.bfloat16: 0.03, torch.float16: 0.01, torch.float32: 0.01}
LONGEST_CHUNK = 128
NORM_EPS = 1e-6
VOCABULARY = 9008  # several tiles of the cross entropy, and a multiple of 16, as most vocabularies are

Use = tuple[torch.device, torch.dtype, Sizes]
checked: dict[Use, set[str]] = defaultdict(set)  # parts that were found to be right
wrong: dict[Use, str] = {}  # reasons why kernels are not used any more


def trusted(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, sizes: Sizes, one_token: bool, compiling: bool
) -> bool:
    """Returns whether to use the kernels for a call on this device. The first call of a type checks the kernels it needs.

    Under a compiler, or in a mode in which tensors have no values, kernels are used unless they were found to be wrong.
    While a CUDA graph is captured, only kernels that were checked before are used.

    `dtype` is that of the hidden states: under autocast, operands have autocast's. `one_token`: whether the call is a step.
    """
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    use = (device, dtype, sizes)
    if dtype not in ALLOWED or use in wrong:
        return False
    part = "step" if one_token else "gradients" if torch.is_grad_enabled() else "output"
    if part in checked[use] or compiling or torch._C._len_torch_dispatch_stack() > 0:
        return True
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    # A prompt is followed by steps. Their kernels compile in the same time.
    parts = (part, "step") if part == "output" and not sizes[-1] and "step" not in checked[use] else (part,)
    try:
        # A separate thread is not affected by the caller's modes and hooks.
        with ThreadPoolExecutor(1) as thread:
            reason = thread.submit(difference, kernels, device, dtype, sizes, parts).result()
    except torch.OutOfMemoryError:  # the kernels may still be right
        return False
    except Exception as error:
        reason = f"they fail with {type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    if reason is None:
        checked[use] |= {"output", "gradients"} if part == "gradients" else set(parts)
        if all(other[:2] != (device, dtype) for other in wrong):
            VERIFIED.update((device, dtype, trains) for trains in {False, part == "gradients"})
        return True
    wrong[use] = reason
    VERIFIED.difference_update((device, dtype, trains) for trains in (False, True))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    logger.warning(
        f"PyTorch's operations compute retention in {dtype} on {name}, since the kernels of retnet_hf do not work there "
        f"for head sizes {sizes[3]} and {sizes[4]}: {reason}. Please report this. kernels='torch' silences the warning."
    )
    return False


def difference(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, sizes: Sizes, parts: tuple[str, ...]
) -> str | None:
    """Returns how kernels differ from PyTorch in float64, computed while they compile; None if they agree."""
    with torch.set_grad_enabled("gradients" in parts):
        samples = [Sample(dtype, sizes, part) for part in parts]
        with kernels.compiled_together():
            for sample in samples:
                sample.results(kernels, device, dtype)
            exact = [sample.results(TORCH, torch.device("cpu"), torch.float64) for sample in samples]
        for sample, right in zip(samples, exact):
            for _ in range(2):  # `launch` treats the first launch of a kernel in another way
                found = sample.results(kernels, device, dtype)
                errors = {}  # largest differences, as fractions of the largest value: of the same head in (1, H, ., .)
                for name, expected in right.items():
                    others = (0, 2, 3) if expected.dim() == 4 else tuple(range(expected.dim()))
                    differences = (found[name].detach().cpu().double() - expected.detach()).abs().amax(others)
                    errors[name] = float((differences / expected.detach().abs().amax(others)).max())
                worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
                if not errors[worst] <= ALLOWED[dtype]:
                    return f"{worst} differs by {errors[worst]:.2g} of its largest value"
    return None


class Sample:
    """Random operands of a model's sizes and memory layout. `part` of the results: "output", "gradients" or "step"."""

    def __init__(self, dtype: torch.dtype, sizes: Sizes, part: str) -> None:
        heads, self.groups, matrices, key_dim, value_dim, self.chunk_size, self.bidirectional = sizes
        # The last chunk is not full.
        length = 1 if part == "step" else 2 * min(LONGEST_CHUNK, -(-self.chunk_size // 16) * 16) + 16
        self.part, generator = part, torch.Generator("cpu").manual_seed(0)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)

        def normal(*sizes: int) -> Tensor:  # (1, T, D), or heads (1, H, T, D) that are a view
            numbers = drawn(1, length, *sizes).to(dtype)
            return numbers.transpose(1, 2) if len(sizes) > 1 else numbers

        self.logits, self.labels = drawn(3, VOCABULARY), torch.tensor([[VOCABULARY - 1], [-100], [5]], device="cpu")
        self.state, self.angle = drawn(1, matrices, key_dim, value_dim), 100 * drawn(1, 1, length, key_dim // 2)
        exponents = torch.arange(5, 5 + matrices, device="cpu", dtype=torch.float64).clamp(max=9)
        self.log_decay = torch.log1p(-(2.0**-exponents))
        self.operands = {"queries": normal(heads, key_dim), "keys": normal(self.groups, key_dim)}
        self.operands |= {"values": normal(self.groups, value_dim), "vectors to rotate": normal(heads, key_dim)}
        self.operands |= {"values to norm": normal(heads, value_dim), "gate": normal(heads * value_dim)}
        self.operands |= {"values to gate": normal(heads * value_dim), "weight of the norm": drawn(value_dim).to(dtype)}
        rotated, gated = normal(heads, key_dim), normal(heads * value_dim)
        self.weights = {"the output": normal(heads, value_dim), "the state": torch.ones_like(self.state)}
        self.weights |= {"the rotation": rotated, "the rotation of the keys": rotated[:, : self.groups]}
        self.weights |= dict.fromkeys(("the gated values", "the normed and gated values"), gated)

    def results(self, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns what the kernels compute from the operands on this device and in this dtype, by name."""
        trains, leaves = self.part == "gradients", {}
        for name, operand in self.operands.items():
            leaves[name] = operand.to(device, dtype).detach().requires_grad_(trains)
        leaves["weight of the norm"] = nn.Parameter(leaves["weight of the norm"].detach(), trains)
        norm = RetNetRMSNorm(leaves["weight of the norm"].shape, NORM_EPS, device="meta")
        query, key, value, vectors, values, gate, ungated, norm.weight = leaves.values()
        of_angles = torch.promote_types(dtype, torch.float32)
        output, state = self.retention(kernels, query, key, value, self.log_decay.to(device, of_angles))
        found = {"the output": output} | ({} if state is None else {"the state": state})
        if vectors.shape[-1] % 2 == 0:
            cos, sin = (turn.to(device, of_angles) for turn in (self.angle.cos(), self.angle.sin()))
            turned = kernels.rotate(vectors, vectors[:, : self.groups], (cos, sin), (sin, cos))
            found |= dict(zip(("the rotation", "the rotation of the keys"), turned))
        found["the gated values"] = kernels.gated(ungated, gate, nn.SiLU())
        values = values.to(output.dtype)  # as in a model, so that the model uses the kernel that is compiled here
        found["the normed and gated values"] = kernels.normed_gate(values, norm, gate, nn.SiLU())
        if trains:
            found |= self.gradients(leaves, {name: result for name, result in found.items() if name != "the state"})
            if state is not None:  # alone, because the loss of a usual step of training does not depend on it
                found |= self.gradients({"keys for the state": key, "values for the state": value}, {"the state": state})
            logits, labels = self.logits.to(device, dtype), self.labels.to(device)
            apart, in_place = torch.empty_like(logits), logits.clone()
            for name, source, gradient in (("loss", logits, apart), ("loss in place", in_place, in_place)):
                found[f"the {name}"] = kernels.cross_entropy_(source, labels, -100, of_angles, gradient)
                found[f"the gradient of the {name}"] = gradient
        return found

    def gradients(self, leaves: dict[str, Tensor], results: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the gradients of weighted sums of the results, by name."""
        weights = [self.weights[name].to(result.device, result.dtype) for name, result in results.items()]
        options = {"allow_unused": True, "retain_graph": True}
        found = torch.autograd.grad(list(results.values()), leaves.values(), weights, **options)
        return {f"the gradient of the {name}": each for name, each in zip(leaves, found) if each is not None}

    def retention(
        self, kernels: Kernels, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the output, and the new state of causal retention."""
        if self.part == "step":
            state = self.state.to(log_decay.device, log_decay.dtype, copy=True)
            return kernels.step_(query, key, value, state, step_decay(log_decay))
        if kernels.chunkwise is not None:
            options = {"bidirectional": True} if self.bidirectional else {}
            output, state = kernels.chunkwise(query, key, value, log_decay, chunk_size=self.chunk_size, **options)
            return output, None if self.bidirectional else state
        if self.bidirectional:
            return bidirectional_retention(query, key, value, log_decay, form="parallel"), None
        return retention(query, key, value, log_decay, form="parallel")
