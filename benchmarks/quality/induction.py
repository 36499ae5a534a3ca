# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Tests H3 and Hyena on the task of H3's paper: `python -m benchmarks.quality.induction`.

Induction heads (arXiv 2212.14052, section 3): 30 tokens of a vocabulary of 20, with one mark. The mark appears again at the
end, and the model must name the token after its first occurrence. Two layers of width 32 train on the same 5,000 examples
repeatedly, and are tested on other examples. The paper reports, in percent: attention 100, H3 100, a diagonal state space
alone (S4D) 35.6, chance 5.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from .decoder import Decoder
from .h3 import H3, DiagonalStateSpace
from .hyena import Hyena
from .training import fit, parameter_groups, rate_of


VOCABULARY, LENGTH, SIZE, LAYERS, WIDTH = 20, 30, 32, 2, 64
MARK = VOCABULARY - 1
EXAMPLES = 5000
BATCH, RATE = 64, 3e-3


def examples(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns sequences (N, 30) that end with their second mark, and the tokens (N,) after the first mark."""
    ids = torch.randint(MARK, (count, LENGTH), generator=generator)
    places = torch.randint(LENGTH - 2, (count, 1), generator=generator)
    ids.scatter_(1, places, MARK)
    ids[:, -1] = MARK
    return ids, ids.gather(1, places + 1)[:, 0]


class StateSpaceAlone(nn.Module):
    """A diagonal state space, GELU and a linear map, without the shift and the products of H3."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.state_space = DiagonalStateSpace(size, states=64)
        self.o_proj = nn.Linear(size, size)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, D) -> (B, T, D)."""
        return self.o_proj(F.gelu(self.state_space(hidden_states.transpose(1, 2)).transpose(1, 2)))


def _decoder(mixer: Callable[[], nn.Module]) -> nn.Module:
    return Decoder(mixer, VOCABULARY, SIZE, LAYERS, WIDTH)


def _llama() -> nn.Module:
    sizes = {"hidden_size": SIZE, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": WIDTH}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": _llama,
    "H3": lambda: _decoder(lambda: H3(SIZE)),
    "Hyena": lambda: _decoder(lambda: Hyena(SIZE, length=LENGTH)),
    "diagonal state space": lambda: _decoder(lambda: StateSpaceAlone(SIZE)),
}


def accuracy(model: str, seed: int, steps: int) -> float:
    """Returns the share of correct answers in 1,000 examples after a number of steps."""
    torch.manual_seed(seed)
    network, generator = MODELS[model](), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(parameter_groups(network), lr=RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of(steps))

    all_ids, all_followed = examples(EXAMPLES, generator)

    def loss_of(_: int) -> Tensor:
        places = torch.randint(EXAMPLES, (BATCH,), generator=generator)
        return F.cross_entropy(network(all_ids[places], use_cache=False).logits[:, -1], all_followed[places])

    for _ in fit(network, optimizer, schedule, map(loss_of, range(steps))):
        pass
    ids, followed = examples(1000, torch.Generator().manual_seed(2**31 + seed))
    with torch.no_grad():
        return (network(ids, use_cache=False).logits[:, -1].argmax(-1) == followed).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    for model in arguments.models:
        shares = [accuracy(model, seed, arguments.steps) for seed in arguments.seeds]
        print(f"{model}: {', '.join(f'{share:.1%}' for share in shares)}", flush=True)


if __name__ == "__main__":
    main()
