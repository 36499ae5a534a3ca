# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""vLLM's engine with one of two models of equal size, and the times of its tokens."""

import os
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from retnet_hf import RetNetConfig, RetNetForCausalLM


VOCABULARY, HIDDEN_SIZE, LAYERS, HEADS, WIDTH = 8192, 256, 6, 4, 512
BATCHED_TOKENS = 2048  # in a step
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN_SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "bos_token_id": 0,
    "eos_token_id": None,
}


def retnet() -> RetNetForCausalLM:
    return RetNetForCausalLM(RetNetConfig(**COMMON, intermediate_size=WIDTH, decay_schedule="geometric"))


def llama() -> LlamaForCausalLM:
    """Returns a Llama with as many parameters: a wider feed-forward replaces wider values and the gate."""
    width = WIDTH + 4 * HIDDEN_SIZE // 3 // 8 * 8
    return LlamaForCausalLM(LlamaConfig(**COMMON, intermediate_size=width, max_position_embeddings=2**17))


MODELS = {"retnet": retnet, "llama": llama}


class Answer(NamedTuple):
    """The tokens of a request, and their times in seconds after the request."""

    tokens: list[int]
    times: list[float]


class Point(NamedTuple):
    """Times of requests of one length that start at once.

    Attributes:
        first: seconds to the first token of each request. steps: seconds of each step in which all requests decode.
        seconds: time of all answers. tokens: number of all new tokens. bytes_per_request: memory in use by the engine.
    """

    first: list[float]
    steps: list[float]
    seconds: float
    tokens: int
    bytes_per_request: float


def saved(name: str, folder: Path) -> PreTrainedModel:
    """Saves a model with random weights and returns it."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)  # makes tokens depend on the prompt
    model.save_pretrained(folder)
    return model


class Engine:
    """vLLM's engine in this process."""

    def __init__(self, folder: Path, length: int, requests: int, memory: int) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
        from vllm import LLM

        self.engine = LLM(
            str(folder),
            dtype="float32",
            skip_tokenizer_init=True,
            enforce_eager=True,
            enable_prefix_caching=False,
            max_model_len=length,
            max_num_seqs=requests,
            max_num_batched_tokens=BATCHED_TOKENS,
            kv_cache_memory_bytes=memory,
        ).llm_engine
        self.count = 0

    def ask(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams

        self.count += 1
        name = str(self.count)
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        return name

    @property
    def bytes_in_use(self) -> float:
        scheduler = self.engine.engine_core.engine_core.scheduler
        tensors = scheduler.kv_cache_config.kv_cache_tensors
        return scheduler.kv_cache_manager.usage * sum(tensor.size for tensor in tensors)

    def measure(self, context: int, requests: int, tokens: int = 32, seed: int = 0) -> Point:
        """Sends requests of `context` tokens at once; they decode until all have decoded `tokens` tokens simultaneously."""
        drawn = random.Random(seed)
        prompts = [[drawn.randrange(1, VOCABULARY) for _ in range(context)] for _ in range(requests)]
        wanted = tokens + requests * context // BATCHED_TOKENS + 1
        start = last = time.perf_counter()
        names = {self.ask(prompt, wanted) for prompt in prompts}
        written: dict[str, int] = dict.fromkeys(names, 0)
        first, steps, in_use = [], [], 0.0
        while self.engine.has_unfinished_requests():
            outputs = self.engine.step()
            now = time.perf_counter()
            all_wrote = len(outputs) == requests and all(written.values())
            for output in outputs:
                if not written[output.request_id]:
                    first.append(now - start)
                written[output.request_id] = len(output.outputs[0].token_ids)
            if all_wrote:
                steps.append(now - last)
                in_use = max(in_use, self.bytes_in_use)
            last = now
        return Point(first, steps, last - start, requests * wanted, in_use / requests)


def worker(connection: Any, name: str, folder: str, length: int, requests: int, memory: int) -> None:
    """Measures the points that it receives until it receives None."""
    engine = Engine(Path(folder), length, requests, memory)
    connection.send("ready")
    while (point := connection.recv()) is not None:
        connection.send(engine.measure(*point))
