# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The options of linearizing, and what follows from them: the stages, their rates, and the text that they need."""

import math
import re
from dataclasses import dataclass, fields, replace

import torch

from retnet_hf.linearization import spread_layers

from .. import ranks
from ..errors import InputError


AUTO_SHARE = 0.25
STAGE_TIMES = {"align": 1.0, "distill": 2.4, "long": 2.0}  # time of a token relative to stage 1, with SmolLM2-135M
HELD_OUT_BLOCKS = 64  # minimal number of the longest blocks, if the text is long enough
BLOCK_SIZE, MOST_BLOCK_SIZE = 512, 2048  # limits of the default length of sequences, in tokens
WINDOWS_OF_BLOCK = 8  # default length of sequences in windows, within these limits
MEASURED_HIDDEN_SIZE, MEASURED_TOKENS = 128, 2048  # hidden size and tokens of a step when learning rates were measured
MEASURED_DIVERGENCE = 0.1  # nats at the beginning of stage 2 when its rate was measured
LEAST_DIVERGENCE = 0.001  # nats; a smaller measured divergence may be negative, and does not reduce the rate further
LARGE = 512  # hidden size from which bfloat16 products are faster on a CPU


@dataclass(frozen=True)
class KeptLayers:
    """The layers that stay softmax attention: given by number, a share at equal distances, or the costliest share."""

    layers: tuple[int, ...] = ()
    share: float = 0.0
    costliest: bool = False

    @classmethod
    def parse(cls, text: str) -> "KeptLayers":
        """Parses "0,4,8", "25%", "auto" or "auto:25%". Raises InputError for anything else."""
        number = r"(\d+(?:\.\d+)?)%"
        if match := re.fullmatch(rf"(auto)(?::{number})?|{number}", text.strip()):
            auto, auto_share, spread_share = match.groups()
            share = float(auto_share or spread_share or 100 * AUTO_SHARE) / 100
            if 0 < share < 1:
                return cls(share=share, costliest=auto is not None)
        elif re.fullmatch(r"\d+(\s*,\s*\d+)*", text.strip()):
            return cls(layers=tuple(sorted({int(number) for number in text.split(",")})))
        known = "layers such as 0,4,8, a share such as 25%, or auto or auto:25%"
        raise InputError(f"--keep-attention takes {known}, got {text!r}")

    def of(self, layers: int) -> list[int]:
        """Returns the kept ones of a number of layers, as far as they are known without the source."""
        return spread_layers(layers, self.share) if self.share and not self.costliest else list(self.layers)


@dataclass(frozen=True)
class Recipe:
    """All options that affect the linearized weights, except the text. A run is resumed only with the same options."""

    source: str
    keep_attention: str | None = None
    window: int | None = None
    sinks: int = 4
    decays: str = "alibi"
    gate: str = "silu"
    share_states: bool = False
    eval_fraction: float = 0.05
    block_size: int | None = None
    batch_size: int = 8
    align_steps: int = 500
    distill_steps: int = 1500
    long_steps: int = 0
    long_block_size: int = 2048
    align_lr: float | None = None
    distill_lr: float | None = None
    long_lr: float | None = None
    lora_rank: int | None = None
    top_logits: int | None = None
    seed: int = 0

    def with_block_size(self, positions: int | None, keeps_batch: bool = True) -> "Recipe":
        """Returns the recipe with a length of sequences. Unless `keeps_batch`, long ones keep the tokens of a step."""
        if self.block_size:
            return self
        size = min(self.open_block_size, positions or self.open_block_size)
        batch = self.batch_size if keeps_batch else ranks.shareable(self.batch_size * BLOCK_SIZE // max(BLOCK_SIZE, size))
        return replace(self, block_size=size, batch_size=batch)

    @property
    def open_block_size(self) -> int:
        """Returns the default length of sequences, without the limit of the source."""
        return min(MOST_BLOCK_SIZE, max(BLOCK_SIZE, WINDOWS_OF_BLOCK * (self.window or 0)))

    def rate(self, stage: str, hidden_size: int, divergence: float | None = None) -> float:
        """Returns the highest learning rate of a stage: the user's, or a default.

        Defaults of 3e-3 for stage 1 and 1e-3 for stage 2 were measured at a hidden size of 128. For larger models, the rate
        of stage 1 falls with the square root of the size, and the rate of stage 2 in proportion to the size, to about the
        rates of RADLADS (arXiv 2505.03005). With fewer tokens in a step, the rate of stage 2 falls with the square root of
        their number. Layers with a window begin near their target: with higher rates, SmolLM2-135M becomes worse.

        The damage of a rate grows with its square, so the rate of stage 2 falls with the square root of the `divergence` of
        the model from its source, in nats.
        """
        given = getattr(self, f"{stage}_lr")
        if given is not None:
            return given
        if stage == "long":
            return self.rate("distill", hidden_size, divergence) / 3
        ratio, tokens = min(1.0, MEASURED_HIDDEN_SIZE / hidden_size), self.batch_size * self.block_size
        if stage == "align":
            rate = 3e-3 * math.sqrt(ratio)
            return rate if self.window is None else rate / 5
        rate = 1e-3 * ratio * math.sqrt(min(1.0, tokens / MEASURED_TOKENS))
        rate = rate if self.window is None else rate / 3
        divergence = MEASURED_DIVERGENCE if divergence is None else max(LEAST_DIVERGENCE, divergence)
        return rate * math.sqrt(min(1.0, divergence / MEASURED_DIVERGENCE))

    @property
    def options(self) -> str:
        """Returns the options that differ from their defaults, as on the command line."""
        changed = []
        for field in fields(self):
            value = getattr(self, field.name)
            default = self.open_block_size if field.name == "block_size" else field.default
            if field.name == "source" or value == default:
                continue
            changed.append(f"--{field.name.replace('_', '-')}")
            if not isinstance(value, bool):
                changed.append(f"{value:g}" if isinstance(value, float) else str(value))
        return " ".join(changed)

    @property
    def steps(self) -> dict[str, int]:
        """Returns the number of steps of each stage that is not skipped, in order."""
        steps = {"align": self.align_steps, "distill": self.distill_steps, "long": self.long_steps}
        return {stage: count for stage, count in steps.items() if count}

    def block_size_of(self, stage: str) -> int:
        """Returns the number of tokens in a sequence of a stage."""
        return self.long_block_size if stage == "long" else self.block_size

    @property
    def kept(self) -> KeptLayers:
        return KeptLayers() if self.keep_attention is None else KeptLayers.parse(self.keep_attention)

    @property
    def longest_block(self) -> int:
        """Returns the number of tokens in the longest training sequences."""
        return max(self.block_size, self.long_block_size if self.long_steps else 0)

    @property
    def tokens(self) -> int:
        """Returns the tokens of a text that is long enough: no stage repeats a block, and enough is held out."""
        training = max((steps * self.block_size_of(stage) for stage, steps in self.steps.items()), default=0)
        held_out = HELD_OUT_BLOCKS * self.longest_block / self.eval_fraction
        return math.ceil(max(self.batch_size * training / (1 - self.eval_fraction), held_out))


def trains_in_bfloat16(hidden_size: int) -> bool:
    """Returns whether to compute matrix products in bfloat16: if the device has units for it and the model is not tiny."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    supported = ("_is_amx_tile_supported", "_is_avx512_bf16_supported")
    has_units = any(getattr(torch.cpu, name, lambda: False)() for name in supported)
    return not torch.accelerator.is_available() and has_units and hidden_size >= LARGE
