# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Continuous batching of transformers gives the tokens of plain generation, whatever shares a batch or a slot."""

import pytest
import torch
from small_models import greedy, random_ids, small_model
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM


# before 5.20 or so it was built otherwise
pytest.importorskip("transformers.generation.continuous_batching.cache_allocators", reason="another version of transformers")
from transformers import ContinuousBatchingConfig  # noqa: E402
from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR  # noqa: E402

from retnet_hf import continuous_batching as ours  # noqa: E402


PROMPTS = [random_ids(1, length, seed)[0].tolist() for seed, length in enumerate([7, 1, 40, 3, 12, 1, 25, 9, 1, 2])]
NEW = 8


def generated(model, prompts=PROMPTS, **options) -> list[list[int]]:
    """By continuous batching, in the order of the prompts."""
    settings = {"num_blocks": 32, "page_size": 32, "max_batch_tokens": 64, "max_requests_per_batch": 8} | options
    found = model.generate_batch(
        prompts,
        generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(**settings),
        progress_bar=False,
    )
    assert not any(answer.error for answer in found.values())
    by_prompt = {tuple(answer.prompt_ids): answer.generated_tokens for answer in found.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


@pytest.fixture
def allocators(monkeypatch) -> list:
    """Those of all caches that are made."""
    made, register = [], ours._StateBlocks.register_cache_tensor

    def watched(self, *arguments):
        register(self, *arguments)
        made.append(self)

    monkeypatch.setattr(ours._StateBlocks, "register_cache_tensor", watched)
    return made


def alone(model, prompts=PROMPTS) -> list[list[int]]:
    """Each by plain generation."""
    return [greedy(model, torch.tensor([prompt]), NEW)[0, len(prompt) :].tolist() for prompt in prompts]


@pytest.mark.parametrize("dialect", ["fla", "grouped", "torchscale"])
def test_tokens_are_those_of_plain_generation(dialect):
    model = small_model(dialect)
    assert generated(model) == alone(model)


def test_prompts_are_read_in_parts_and_slots_are_used_again(allocators):
    """Sixteen tokens in a batch; two slots, which prompts of one token find as others have left them."""
    model = small_model("grouped")
    numbers = (
        max(model.config.state_heads(layer) for layer in range(2)) * model.config.head_dim * model.config.value_head_dim
    )
    of_block = 2 * model.config.num_key_value_heads * model.config.head_dim  # numbers of keys and values of a token
    slots = {"num_blocks": 2, "page_size": -(-numbers // of_block), "safety_margin": 0.0}
    assert generated(model, max_batch_tokens=16, max_requests_per_batch=4, **slots) == alone(model)
    assert allocators[0].num_blocks <= 3 < len(PROMPTS)


def test_a_model_in_half_precision_keeps_its_states_in_float32(allocators):
    model = small_model("fla").to(torch.bfloat16)
    assert [len(tokens) for tokens in generated(model)] == [NEW] * len(PROMPTS)
    assert {layer.recurrent_states.dtype for layer in allocators[0].state.layers} == {torch.float32}


def test_hybrids_are_refused():
    with pytest.raises(ValueError, match="all of whose layers are retention"):
        generated(small_model("hybrid"))


CACHE, BATCHES = (f"transformers.generation.continuous_batching.{name}" for name in ("cache", "input_outputs"))


@pytest.mark.parametrize("change", ["a method less", "a kind of its own"])
def test_a_version_of_transformers_that_is_built_otherwise_is_refused(monkeypatch, change):
    own = change == "a kind of its own"
    monkeypatch.setattr(f"{CACHE}.ATTN_TYPE_TO_ALLOCATOR", {ours.KIND: object} if own else {})
    if not own:
        monkeypatch.delattr(f"{BATCHES}.ContinuousBatchingIOs._setup_static_tensors")
    with pytest.raises(RuntimeError, match="made for transformers 5.23, and .* is built otherwise"):
        small_model("fla").init_continuous_batching()


def test_other_models_meet_nothing_of_it():
    ours.register(small_model("fla").config)
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.5)).eval()
    assert generated(llama) == alone(llama)
    allocator = ATTN_TYPE_TO_ALLOCATOR[ours.KIND]
    with pytest.raises(ValueError, match="Invalid layer type: linear_attention"):
        allocator(0, llama.config, 2, torch.float32, 32, [0, 1], False)
