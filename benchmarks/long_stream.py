"""Scores a text of any length in constant memory: `python -m benchmarks.long_stream MODEL TEXT [--tokens N]`.

Scores the text as one stream (repeated up to N tokens), prints the peak memory after every tenth, and compares an excerpt
with one parallel pass.
"""

import argparse
import math
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from retnet_hf import score_stream


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def repeated(ids: torch.Tensor, tokens: int) -> Iterator[torch.Tensor]:
    """Yields pieces of a text, repeated up to `tokens`, and reports progress."""
    piece, taken, reported, start = 4096, 0, 0, time.perf_counter()
    while taken < tokens:
        for chunk in ids.split(piece):
            chunk = chunk[: tokens - taken]
            if not len(chunk):
                return
            yield chunk
            taken += len(chunk)
            if taken * 10 // tokens > reported:
                reported = taken * 10 // tokens
                speed = taken / (time.perf_counter() - start)
                print(f"{taken:>10,} tokens  peak memory {peak_mib():8.0f} MiB  {speed:8.0f} tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a RetNet")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, help="read the text again until so many tokens; once by default")
    arguments = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(arguments.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = torch.tensor(tokenizer(arguments.text.read_text(encoding="utf-8")).input_ids)

    excerpt = ids[:4096]
    with torch.no_grad():
        logits = model(excerpt[None], retention_form="parallel", use_cache=False).logits[0]
    parallel = math.exp(F.cross_entropy(logits[:-1], excerpt[1:]).item())
    streamed = score_stream(model, excerpt, 256).perplexity
    print(f"excerpt of {len(excerpt)} tokens: one parallel pass {parallel:.6f}, stream {streamed:.6f}, "
          f"relative difference {abs(streamed / parallel - 1):.1e}")  # fmt: skip
    del logits

    score = score_stream(model, repeated(ids, arguments.tokens or len(ids)), 2048)
    print(f"{score.tokens:,} tokens scored, perplexity {score.perplexity:.3f}, state {score.state.nbytes:,} bytes")


if __name__ == "__main__":
    main()
