# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A soak test: many requests of mixed lengths, some of which are aborted, and a check of every answer.

The model itself checks the tokens, in one call per request: each must be the most probable token after the tokens before it,
or as probable within the rounding of float32.
"""

import random
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from transformers import PreTrainedModel

from .engine import VOCABULARY, Engine


AT_ONCE = 48
ABORTED = 0.1  # share of the requests
MARGIN = 1e-3  # in logits


class Soak(NamedTuple):
    """The result of a soak test.

    Attributes:
        right, wrong: numbers of requests. aborted: number of aborted requests among them; their first tokens are checked.
        memory: bytes of the process after each tenth of the requests.
    """

    right: int
    wrong: int
    aborted: int
    memory: list[int]


def soak(folder: Path, model: PreTrainedModel, requests: int, memory: int) -> Soak:
    engine, drawn, process = Engine(folder, 1024, 32, memory), random.Random(0), psutil.Process()
    waiting = [
        (
            [drawn.randrange(1, VOCABULARY) for _ in range(drawn.choice((1, 2, 9, 40, 150, 400)))],
            drawn.choice((1, 5, 20, 60)),
        )
        for _ in range(requests)
    ]
    asked, given_up, counts, done = {}, {}, [0, 0, 0], 0
    sizes: list[int] = []
    while waiting or asked:
        while waiting and len(asked) < AT_ONCE:
            prompt, tokens = waiting.pop()
            name = engine.ask(prompt, tokens)
            asked[name] = prompt
            if drawn.random() < ABORTED:
                given_up[name] = drawn.randrange(tokens)
        for output in engine.engine.step():
            name, tokens = output.request_id, list(output.outputs[0].token_ids)
            leaves = len(tokens) > given_up.get(name, len(tokens))
            if not (output.finished or leaves):
                continue
            if not output.finished:
                engine.engine.abort_request([name])
                counts[2] += 1
            counts[0 if is_right(model, asked.pop(name), tokens) else 1] += 1
            done += 1
            if done % max(1, requests // 10) == 0:
                sizes.append(process.memory_info().rss)
    return Soak(*counts, sizes)


@torch.inference_mode()
def is_right(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> bool:
    logits = model(torch.tensor([prompt + tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return bool((chosen >= logits.amax(1) - MARGIN).all())
