# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Assisted decoding on 50 prompts: greedy tokens unchanged, whoever drafts; the sampling distribution unchanged."""

import copy
from collections import Counter

import pytest
import torch
from small_models import greedy, random_ids, small_llama, small_model


PROMPTS = [random_ids(1, 3 + seed % 17, seed) for seed in range(50)]


def near(model):
    """A draft that is often right: the model with its weights disturbed a little."""
    draft = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1 + 0.02 * torch.randn(parameter.shape, generator=generator))
    return draft


@pytest.mark.parametrize(
    "pair", ["RetNet drafts for RetNet", "Llama drafts for RetNet", "RetNet drafts for Llama", "lookup"]
)
def test_fifty_prompts_keep_their_greedy_tokens(pair):
    retnet = small_model("grouped")
    model = small_llama() if pair == "RetNet drafts for Llama" else retnet
    options = {
        "RetNet drafts for RetNet": lambda: {"assistant_model": near(retnet)},
        "Llama drafts for RetNet": lambda: {"assistant_model": small_llama()},
        "RetNet drafts for Llama": lambda: {"assistant_model": retnet},
        "lookup": lambda: {"prompt_lookup_num_tokens": 3},
    }[pair]()
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1

    for prompt in PROMPTS:
        if pair == "lookup":  # something to look up
            prompt = torch.cat([prompt, prompt, prompt], dim=1)
        expected = greedy(model, prompt, 8)
        hook = model.register_forward_hook(count)
        assert greedy(model, prompt, 8, **options).tolist() == expected.tolist()
        hook.remove()
    tokens_per_step = 8 * len(PROMPTS) / calls
    assert tokens_per_step > (1.5 if pair == "RetNet drafts for RetNet" else 0.99)


def test_the_sampling_distribution_is_unchanged():
    """Two tokens drawn with a draft follow the model's own probabilities, though the draft's are others."""
    model = small_model("fla", vocab_size=4, num_hidden_layers=1, pad_token_id=None, bos_token_id=None, seed=9)
    draft = small_model("fla", vocab_size=4, num_hidden_layers=1, pad_token_id=None, bos_token_id=None, seed=7)
    prompt = torch.tensor([[1, 3, 2]])
    with torch.no_grad():
        first = (model(prompt).logits[0, -1] / 3).softmax(-1)
        continued = torch.cat([prompt.expand(4, -1), torch.arange(4)[:, None]], dim=1)
        second = (model(continued).logits[:, -1] / 3).softmax(-1)
        drafted = (draft(prompt).logits[0, -1] / 3).softmax(-1)
    expected = (first[:, None] * second).flatten()
    assert (first - drafted).abs().sum() > 0.3, "the draft is no test"

    samples = 400
    torch.manual_seed(0)
    counts = Counter()
    for _ in range(samples):
        tokens = model.generate(
            prompt, assistant_model=draft, do_sample=True, temperature=3.0, top_k=0, max_new_tokens=2, min_new_tokens=2
        )
        counts[4 * int(tokens[0, 3]) + int(tokens[0, 4])] += 1
    observed = torch.tensor([counts[pair] / samples for pair in range(16)])
    # total variation: by chance 0.073, give or take 0.015; 0.44 where the first token is the draft's
    assert 0.5 * (observed - expected).abs().sum().item() < 0.16
