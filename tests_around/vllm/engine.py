# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""vLLM's engine in this process, on a CPU, and what plain `generate` says to the same prompts."""

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

from small_models import VOCAB_SIZE, small_model  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402


LENGTHS = (1, 5, 17, 40, 100, 3, 1, 64, 33, 2, 150, 9)
# vLLM's attention on a CPU needs heads of 32 at least
WIDE = {"hidden_size": 128, "num_attention_heads": 4}
MODELS = {
    "plain": ("fla", {}),
    "grouped heads, layers that differ": ("grouped", {}),
    "post-norm": ("torchscale", {}),
    "tied": ("fla", {"tie_word_embeddings": True, "use_output_gate": False}),
    "softmax attention in some layers": ("hybrid", WIDE | {"num_key_value_heads": 2, "decay_schedule": "geometric"}),
    "softmax attention of other heads, gated": ("hypenet", WIDE | {"attention_head_dim": 64, "num_key_value_heads": 2}),
    "from scratch": ("from scratch", {}),
    "minimax": ("minimax", WIDE),
    "ring": ("ring", WIDE),
    "learned angles": ("transnormer", {}),
}


def model_of(kind: str, **overrides: Any):
    dialect, fields = MODELS[kind]
    return small_model(dialect, **(fields | overrides))


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def expected(model, prompts: list[list[int]], tokens: int = 12) -> list[list[int]]:
    new = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        whole = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
        new.append(whole[0, len(prompt) :].tolist())
    return new


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[LLM]:
    defaults = {"skip_tokenizer_init": True, "enforce_eager": True, "kv_cache_memory_bytes": 16 << 20, "dtype": "float32"}
    defaults |= {"max_model_len": 512, "enable_prefix_caching": False}
    llm = LLM(str(folder), **(defaults | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def greedy(tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)


def generated(llm: LLM, prompts: list[list[int]], tokens: int = 12) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy(tokens), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
