# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a user asks of linearizing."""

import math
import re
from dataclasses import dataclass, fields, replace

from retnet_hf_linearization import spread_layers

from .. import ranks
from ..errors import InputError


AUTO_SHARE = 0.25
STAGE_TIMES = {"align": 1.0, "distill": 2.4, "long": 2.0}  # of a token, in those of stage 1: of a SmolLM2 of 135M
HELD_OUT_BLOCKS = 64  # of the longest, at the least, where the text is long enough
BLOCK_SIZE, MOST_BLOCK_SIZE = 512, 2048  # tokens of a sequence whose length is left open, at the least and at the most
WINDOWS_OF_BLOCK = 8  # that such a sequence is as long as, between the two
MEASURED_HIDDEN_SIZE, MEASURED_TOKENS = 128, 2048  # hidden size, and tokens of a step, that learning rates were measured at
MEASURED_DIVERGENCE = 0.1  # nats at the beginning of stage 2, where its rate was measured
LEAST_DIVERGENCE = 0.001  # nats below which the rate falls no more: a measured divergence of nearly 0 may be negative


@dataclass(frozen=True)
class KeptLayers:
    """Which layers stay softmax attention: some by number, a share at equal distances, or the share that costs most."""

    layers: tuple[int, ...] = ()
    share: float = 0.0
    costliest: bool = False

    @classmethod
    def parse(cls, text: str) -> "KeptLayers":
        """From "0,4,8", "25%", "auto" or "auto:25%". Raises InputError for anything else."""
        number = r"(\d+(?:\.\d+)?)%"
        if match := re.fullmatch(rf"(auto)(?::{number})?|{number}", text.strip()):
            auto, auto_share, spread_share = match.groups()
            share = float(auto_share or spread_share or 100 * AUTO_SHARE) / 100
            if 0 < share < 1:
                return cls(share=share, costliest=auto is not None)
        elif re.fullmatch(r"\d+(\s*,\s*\d+)*", text.strip()):
            return cls(layers=tuple(sorted({int(number) for number in text.split(",")})))
        raise InputError(
            f"--keep-attention takes layers such as 0,4,8, a share such as 25%, or auto or auto:25%, got {text!r}"
        )

    def guess_of(self, layers: int) -> list[int]:
        """So many layers as are kept, those that cost most being taken for others."""
        return spread_layers(layers, self.share) if self.share else list(self.layers)

    def of(self, layers: int) -> list[int]:
        """The layers that are kept of so many, as far as that is known without the source."""
        return spread_layers(layers, self.share) if self.share and not self.costliest else list(self.layers)


@dataclass(frozen=True)
class Recipe:
    """What decides the linearized weights, besides the text. A run is only resumed with the recipe it began with.

    Steps of 0 leave a stage out. Learning rates are of Adam, at their highest. `report` is the share of a whole
    report that there is time for.
    """

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
    report: float = 1.0

    def with_block_size(self, positions: int | None, keeps_batch: bool = True) -> "Recipe":
        """With a length of sequences where it was left open: well beyond the window, within what the source was made for.

        Args:
            positions: that the source was made for; None where it does not say.
            keeps_batch: whether longer sequences are as many in a step. Otherwise a step has about as many tokens.
        """
        if self.block_size:
            return self
        size = min(self.open_block_size, positions or self.open_block_size)
        batch = self.batch_size if keeps_batch else ranks.shareable(self.batch_size * BLOCK_SIZE // max(BLOCK_SIZE, size))
        return replace(self, block_size=size, batch_size=batch)

    @property
    def open_block_size(self) -> int:
        """The length of sequences, if it is left open and the source allows it."""
        return min(MOST_BLOCK_SIZE, max(BLOCK_SIZE, WINDOWS_OF_BLOCK * (self.window or 0)))

    def rate(self, stage: str, hidden_size: int, divergence: float | None = None) -> float:
        """The highest learning rate of a stage, as it was given, or as follows.

        3e-3 for stage 1 and 1e-3 for stage 2 were measured at a hidden size of 128. Towards the sizes of pretrained models
        they fall, the former with the square root of the size and the latter in proportion to it, to about those of RADLADS
        (arXiv 2505.03005). With steps of fewer tokens, the latter falls with the square root of their number. Layers with a
        window begin near what they are to learn, and higher rates than these make a SmolLM2 of 135 million parameters worse.

        Args:
            divergence: of the model from its source as stage 2 begins, in nats; None where it is not known. What a rate
                disturbs grows with its square, so that the rate falls with the square root of what there is to learn.
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
        """Options of the command that make another recipe than the default, as they are written there."""
        changed = []
        for field in fields(self):
            value = getattr(self, field.name)
            default = self.open_block_size if field.name == "block_size" else field.default
            if field.name in ("source", "report") or value == default:
                continue
            changed.append(f"--{field.name.replace('_', '-')}")
            if not isinstance(value, bool):
                changed.append(f"{value:g}" if isinstance(value, float) else str(value))
        return " ".join(changed)

    @property
    def steps(self) -> dict[str, int]:
        """How many steps the stages have that are not left out, in their order."""
        steps = {"align": self.align_steps, "distill": self.distill_steps, "long": self.long_steps}
        return {stage: count for stage, count in steps.items() if count}

    def block_size_of(self, stage: str) -> int:
        """Tokens of a sequence of a stage."""
        return self.long_block_size if stage == "long" else self.block_size

    def share_of_time(self, stage: str) -> float:
        """How much of all training a stage is, by its tokens and what one of them takes."""
        times = {name: count * self.block_size_of(name) * STAGE_TIMES[name] for name, count in self.steps.items()}
        return times[stage] / sum(times.values())

    @property
    def kept(self) -> KeptLayers:
        return KeptLayers() if self.keep_attention is None else KeptLayers.parse(self.keep_attention)

    @property
    def longest_block(self) -> int:
        """Tokens of the longest sequences that are trained on."""
        return max(self.block_size, self.long_block_size if self.long_steps else 0)

    @property
    def sink_distance(self) -> int:
        """How far away sinks seem at the most: as far as training or the window shows them."""
        return max(self.longest_block, (self.window or 0) + self.sinks) - 1

    @property
    def tokens(self) -> int:
        """Tokens of a text that no stage sees a block of twice, and that enough of is held out to measure on."""
        training = max((steps * self.block_size_of(stage) for stage, steps in self.steps.items()), default=0)
        held_out = HELD_OUT_BLOCKS * self.longest_block / self.eval_fraction
        return math.ceil(max(self.batch_size * training / (1 - self.eval_fraction), held_out))
