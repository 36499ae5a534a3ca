# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""ConvRetNet: a Conformer whose attention is causal retention, which recognises dialled digits in a stream of samples.

    python examples/convretnet.py --minutes 2 --output dialled

trains on tones that this file makes, with noise, reverberation and changing speed, saves the model, and recognises a new
number in pieces of a few milliseconds.
"""

import argparse
import math
import time

import numpy as np
import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from torch.nn import functional as F

from retnet_hf import CausalConv1d, MultiScaleRetention, StreamState


RATE = 8000  # samples a second
WINDOW, HOP, STACK = 200, 80, 4  # samples of a frame of the spectrum and between frames; frames in a step of the model
STEP = HOP * STACK  # samples, 40 ms
MELS = 40
TONES = {  # Hz of a row and of a column of the keypad
    digit: (row, column)
    for row, keys in zip((697, 770, 852, 941), ("123", "456", "789", " 0 "))
    for column, digit in zip((1209, 1336, 1477), keys)
    if digit != " "
}
DIGITS = sorted(TONES)  # label of a digit: its place in this list plus 1; 0 is the blank of CTC


# Data


def dial(digits: str, generator: np.random.Generator) -> np.ndarray:
    """Returns the sound of dialled digits, float32 samples: at a random speed, in a random room, with noise."""
    pace, volume = generator.uniform(0.7, 1.6), generator.uniform(0.1, 0.5)
    pause = lambda: np.zeros(int(RATE * pace * generator.uniform(0.04, 0.15)))  # noqa: E731
    parts = [pause()]
    for digit in digits:
        seconds = np.arange(int(RATE * pace * generator.uniform(0.05, 0.15))) / RATE
        parts += [sum(np.sin(2 * np.pi * (tone * seconds + generator.random())) for tone in TONES[digit]), pause()]
    sound = volume * np.concatenate([*parts, np.zeros(2 * STEP)])
    room = generator.standard_normal(RATE // 5) * np.exp(-np.arange(RATE // 5) / generator.uniform(100, 500))
    room[0] = 3 * np.linalg.norm(room)
    size = len(sound) + len(room) - 1
    sound = np.fft.irfft(np.fft.rfft(sound, size) * np.fft.rfft(room / np.linalg.norm(room), size), size)[: len(sound)]
    noise = volume * 10 ** (-generator.uniform(-5, 20) / 20)
    return (sound + noise * generator.standard_normal(len(sound))).astype(np.float32)


def examples(count: int, generator: np.random.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns features (B, T, F) of dialled numbers, their mask (B, T), and labels (B, L) with their lengths (B,)."""
    numbers = ["".join(generator.choice(DIGITS, generator.integers(3, 9))) for _ in range(count)]
    features = [log_mel(torch.from_numpy(dial(number, generator))) for number in numbers]
    lengths = torch.tensor([len(each) for each in features])
    labels = [torch.tensor([1 + DIGITS.index(digit) for digit in number]) for number in numbers]
    pad = nn.utils.rnn.pad_sequence
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    return pad(features, batch_first=True), mask, pad(labels, batch_first=True), torch.tensor([len(each) for each in labels])


# Front end


def mel_filters() -> Tensor:
    """Returns triangular filters, (WINDOW // 2 + 1, MELS), whose centres are equally spaced on the mel scale."""
    mel = np.linspace(0, 2595 * np.log10(1 + RATE / 2 / 700), MELS + 2)
    centres = 700 * (10 ** (mel / 2595) - 1)
    rising = (np.fft.rfftfreq(WINDOW, 1 / RATE)[:, None] - centres[:-1]) / np.diff(centres)
    return torch.from_numpy(np.minimum(rising[:, :-1], 1 - rising[:, 1:]).clip(0)).float()


FILTERS, WEIGHTS = mel_filters(), torch.hann_window(WINDOW)


def log_mel(samples: Tensor) -> Tensor:
    """Returns the features of all whole steps, (T, STACK * MELS). A step reads its samples and 120 more."""
    steps = (len(samples) - WINDOW - (STACK - 1) * HOP) // STEP + 1
    frames = samples[: (steps * STACK - 1) * HOP + WINDOW].unfold(0, WINDOW, HOP) * WEIGHTS
    spectrum = torch.fft.rfft(frames).abs() @ FILTERS
    return ((spectrum + 1e-3).log() / 2).view(steps, -1)


# Model


class Branch(nn.Sequential):
    """A feed-forward branch with the norm in front of it."""

    def __init__(self, size: int) -> None:
        super().__init__(nn.LayerNorm(size), nn.Linear(size, 4 * size), nn.SiLU(), nn.Linear(4 * size, size))


class Block(nn.Module):
    """Half a feed-forward branch, retention, a gated depthwise convolution, and the other half."""

    def __init__(self, size: int, heads: int, longest: float) -> None:
        super().__init__()
        decays = torch.exp(
            -1 / torch.logspace(0, np.log10(longest), heads)
        ).tolist()  # time constants of 1 step to `longest`
        self.first, self.last, self.norm = Branch(size), Branch(size), nn.LayerNorm(size)
        self.retention_norm, self.conv_norm, self.inner_norm = (nn.LayerNorm(size) for _ in range(3))
        self.retention = MultiScaleRetention(size, heads, decay_schedule=decays, feature_map="relu", use_head_norm=False)
        self.gate, self.conv, self.out = (
            nn.Linear(size, 2 * size),
            CausalConv1d(size, size, 9, groups=size),
            nn.Linear(size, size),
        )

    def forward(self, hidden: Tensor, state: StreamState | None, mask: Tensor | None) -> Tensor:
        hidden = hidden + self.first(hidden) / 2
        hidden = hidden + self.retention(self.retention_norm(hidden), state, mask)[0]
        convolved, _ = self.conv(F.glu(self.gate(self.conv_norm(hidden))), state, mask)
        hidden = hidden + self.out(F.silu(self.inner_norm(convolved)))
        return self.norm(hidden + self.last(hidden) / 2)


class ConvRetNet(nn.Module, PyTorchModelHubMixin, library_name="retnet_hf"):
    """Features of steps (B, T, F) to logits of CTC (B, T, labels), as a whole or in pieces with a `StreamState`."""

    def __init__(self, size: int = 96, heads: int = 4, layers: int = 3, labels: int = 1 + len(DIGITS)) -> None:
        super().__init__()
        self.front = nn.Linear(STACK * MELS, size)
        self.blocks = nn.ModuleList(Block(size, heads, longest=8 * 4**layer) for layer in range(layers))
        self.head = nn.Linear(size, labels)

    def forward(self, features: Tensor, state: StreamState | None = None, mask: Tensor | None = None) -> Tensor:
        hidden = self.front(features)
        for block in self.blocks:
            hidden = block(hidden, state, mask)
        return self.head(hidden)


def train(model: ConvRetNet, minutes: float, steps: float = math.inf, seed: int = 0) -> list[float]:
    """Trains by CTC on numbers that are made on the way, for some minutes or steps, and returns the losses."""
    generator, started, losses = np.random.default_rng(seed), time.monotonic(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    while (over := max((time.monotonic() - started) / 60 / minutes, len(losses) / steps)) < 1:
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1, (len(losses) + 1) / 50) * (1 - over)
        features, mask, labels, lengths = examples(16, generator)
        log_probabilities = model(features, mask=mask).log_softmax(-1).transpose(0, 1)  # (T, B, labels)
        loss = F.ctc_loss(log_probabilities, labels, mask.sum(1), lengths)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


# Streams


class Listener:
    """Recognises many streams of samples at once. Rows of one `StreamState` are the sessions."""

    def __init__(self, model: ConvRetNet, sessions: int) -> None:
        self.model, self.state = model.eval(), StreamState(model)
        self.samples, self.last = [torch.zeros(0)] * sessions, [0] * sessions

    @torch.no_grad()
    def hear(self, pieces: list[np.ndarray]) -> list[str]:
        """Reads a piece of any length of each session, which may be empty, and returns the digits that became known."""
        self.samples = [torch.cat([kept, torch.from_numpy(new)]) for kept, new in zip(self.samples, pieces)]
        features = [
            log_mel(kept) if len(kept) >= WINDOW + STEP - HOP else torch.zeros(0, STACK * MELS) for kept in self.samples
        ]
        self.samples = [kept[len(steps) * STEP :] for kept, steps in zip(self.samples, features)]
        lengths = torch.tensor([len(steps) for steps in features])
        if not lengths.any():
            return [""] * len(pieces)
        features = nn.utils.rnn.pad_sequence(features, batch_first=True)  # (B, T, F)
        logits = self.model(features, self.state, torch.arange(features.shape[1]) < lengths[:, None])
        return [
            self._digits(row, best[:length]) for row, (best, length) in enumerate(zip(logits.argmax(-1).tolist(), lengths))
        ]

    def _digits(self, row: int, labels: list[int]) -> str:
        found = [label for before, label in zip([self.last[row], *labels], labels) if label not in (0, before)]
        self.last[row] = labels[-1] if labels else self.last[row]
        return "".join(DIGITS[label - 1] for label in found)

    def begin(self, row: int) -> None:
        """Gives a row to a new session, which knows nothing of the one before it."""
        self.samples[row], self.last[row] = torch.zeros(0), 0
        self.state.reset_rows(torch.arange(len(self.last)) == row)


def correct(model: ConvRetNet, count: int = 200, seed: int = 1) -> float:
    """Returns the share of new numbers that are recognised without an error."""
    generator, right = np.random.default_rng(seed), 0
    for _ in range(count):
        number = "".join(generator.choice(DIGITS, 6))
        right += Listener(model, 1).hear([dial(number, generator)]) == [number]
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--output", default="convretnet-digits")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = ConvRetNet()
    print(f"{sum(weight.numel() for weight in model.parameters()):,} parameters")
    losses = train(model, options.minutes)
    print(f"{len(losses)} steps of 16 numbers; {correct(model):.0%} of new numbers without an error")
    model.save_pretrained(options.output)
    sound, listener = dial("0123456789", np.random.default_rng(2)), Listener(ConvRetNet.from_pretrained(options.output), 1)
    for piece in np.array_split(sound, len(sound) // 100):  # 12.5 ms
        print(*listener.hear([piece]), end="", flush=True)
    print(f"\nsaved: {options.output}; a stream keeps {listener.state.nbytes:,} bytes")


if __name__ == "__main__":
    main()
