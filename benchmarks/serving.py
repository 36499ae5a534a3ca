# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Compares RetNet and Llama of equal size on vLLM, on a CPU: `python -m benchmarks.serving`.

Requests of equal length start at once. Each model has an engine in its own process, and the engines take turns. A decode
step is timed while all requests decode. The time of reading prompts counts in the time to the first token and in the
requests per second. `--table` writes the table of docs/guides/serve.md from the committed measurements.

Requires an environment with vLLM, see `docs/guides/serve.md`.
"""

import argparse
import json
import multiprocessing
import os
import random
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from retnet_hf import PrefixStates, RetNetConfig, RetNetForCausalLM

from . import machine
from .quality.tables import table
from .quality.write_tables import fill
from .whole_files import write_whole


ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "serving.json", ROOT / "docs" / "guides" / "serve.md"
BATCHED_TOKENS = 2048  # in a step
TOKENS = 32  # that all requests decode simultaneously
SIZES = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": None,
}
# Llama has as many parameters: a wider feed-forward replaces wider values and the gate.
MODELS = {
    "retnet": lambda: RetNetForCausalLM(RetNetConfig(**SIZES, intermediate_size=512, decay_schedule="geometric")),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=848, max_position_embeddings=2**17)),
}


class Point(NamedTuple):
    """Times of requests of one length that start at once.

    Attributes:
        first: seconds to the first token of each request. steps: seconds of each step in which all requests decode.
        seconds: time of all answers. bytes_per_request: memory in use by the engine.
    """

    first: list[float]
    steps: list[float]
    seconds: float
    bytes_per_request: float


def serve(connection: Connection, folder: str, length: int, most: int, memory: int) -> None:
    """Measures (tokens of a prompt, requests, seed) with vLLM's engine in this process, until it receives None."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=length,
        max_num_seqs=most,
        max_num_batched_tokens=BATCHED_TOKENS,
        kv_cache_memory_bytes=memory,
    ).llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    nbytes = sum(tensor.size for tensor in scheduler.kv_cache_config.kv_cache_tensors)
    connection.send("ready")
    while (job := connection.recv()) is not None:
        context, requests, seed = job
        drawn = random.Random(seed)
        wanted = TOKENS + requests * context // BATCHED_TOKENS + 1
        sampling = SamplingParams(max_tokens=wanted, temperature=0, ignore_eos=True, detokenize=False)
        prompts = [[drawn.randrange(1, SIZES["vocab_size"]) for _ in range(context)] for _ in range(requests)]
        start = last = time.perf_counter()
        written = {}
        for number, prompt in enumerate(prompts):
            name = f"{context}-{requests}-{seed}-{number}"
            written[name] = 0
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        first, steps, in_use = [], [], 0.0
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            all_wrote = len(outputs) == requests and all(written.values())
            for output in outputs:
                if not written[output.request_id]:
                    first.append(now - start)
                written[output.request_id] = len(output.outputs[0].token_ids)
            if all_wrote:
                steps.append(now - last)
                in_use = max(in_use, scheduler.kv_cache_manager.usage * nbytes)
            last = now
        connection.send(Point(first, steps, last - start, in_use / requests))


def race(folders: dict[str, Path], grid: list[tuple[int, int]], rounds: int, memory: int) -> list[dict]:
    """Returns medians over rounds for each model, context and number of requests."""
    spawn = multiprocessing.get_context("spawn")
    length, most = max(context for context, _ in grid) + 512, max(requests for _, requests in grid)
    connections = {}
    for name, folder in folders.items():
        connections[name], theirs = spawn.Pipe()
        spawn.Process(target=serve, args=(theirs, str(folder), length, most, memory), daemon=True).start()
        connections[name].recv()
    found = []
    for context, requests in grid:
        points: dict[str, list[Point]] = {name: [] for name in folders}
        for seed in range(rounds):
            for name, connection in connections.items():
                connection.send((context, requests, seed))
                points[name].append(connection.recv())
        for name, measured in points.items():
            step = median(seconds for point in measured for seconds in point.steps)
            entry = {
                "model": name,
                "context": context,
                "requests": requests,
                "decoding, tokens/s": requests / step,
                "step, ms": 1e3 * step,
                "first token, ms": 1e3 * median(seconds for point in measured for seconds in point.first),
                "requests/s": requests / median(point.seconds for point in measured),
                "bytes per request": measured[-1].bytes_per_request,
            }
            found.append(entry)
            print(entry, flush=True)
    for connection in connections.values():
        connection.send(None)
    return found


def measured(report: dict) -> str:
    """Returns a table with a row for each context and number of requests."""
    points = {(entry["context"], entry["requests"], entry["model"]): entry for entry in report["points"]}
    rows = []
    for context, requests in sorted({key[:2] for key in points}):
        pair = [points[context, requests, model] for model in MODELS]

        def both(name: str, scale: float, digits: int, pair: list = pair) -> list[str]:
            return [f"{entry[name] * scale:,.{digits}f}" for entry in pair]

        decoding, answered = (f"{pair[0][name] / pair[1][name]:.2f}" for name in ("decoding, tokens/s", "requests/s"))
        cells = [f"{context:,}", str(requests), *both("step, ms", 1, 1), decoding]
        rows.append([*cells, *both("first token, ms", 1e-3, 2), answered, *both("bytes per request", 1e-6, 1)])
    header = ["tokens of a prompt", "requests", "step, ms: RetNet", "Llama", "tokens/s: RetNet / Llama"]
    header += ["first token, s: RetNet", "Llama", "requests/s: RetNet / Llama", "MB a request: RetNet", "Llama"]
    return table(header, rows)


def conversation(turns: int = 10, new: int = 800) -> None:
    """Prints the seconds to the first token of each turn of `new` tokens, with and without states of prompts."""
    torch.manual_seed(0)
    model = MODELS["retnet"]().eval()
    states, text = PrefixStates(model), torch.empty(1, 0, dtype=torch.int64)
    for turn in range(1, turns + 1):
        text, seconds = torch.cat([text, torch.randint(1, SIZES["vocab_size"], (1, new))], dim=1), []
        for generate in (model.generate, states.generate):
            start = time.perf_counter()
            generate(text, max_new_tokens=1, do_sample=False)
            seconds.append(time.perf_counter() - start)
        print(
            f"turn {turn}, {text.shape[1]:,} tokens: {seconds[0]:.3f} s without states, {seconds[1]:.3f} s with", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--most", type=int, default=2**16, help="tokens of all prompts of a point, at the most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory", type=int, default=4 << 30, help="bytes that each engine shares out among requests")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--conversation", action="store_true", help="time ten turns with and without states of prompts")
    parser.add_argument("--table", action="store_true", help="write the table of the guide from the committed figures")
    settings = parser.parse_args()
    if settings.conversation:
        conversation()
        return
    if settings.table:
        fill(PAGE, {"serving": measured(json.loads(RESULTS.read_text(encoding="utf-8")))})
        return
    grid = [(c, n) for c in settings.contexts for n in settings.requests if c * n <= settings.most]
    report = {"machine": machine.describe("cpu", torch.get_num_threads()), "torch": torch.__version__, "parameters": {}}
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: Path(folder) / name for name in MODELS}
        for name, path in folders.items():
            torch.manual_seed(0)
            model = MODELS[name]()
            report["parameters"][name] = model.num_parameters()
            model.save_pretrained(path)
        report["points"] = race(folders, grid, settings.rounds, settings.memory)
    if settings.json:
        write_whole(settings.json, json.dumps(report, indent=1) + "\n")
    print(measured(report))


if __name__ == "__main__":
    main()
