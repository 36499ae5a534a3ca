"""The decode step, eager and compiled, beside the time that reading the weights takes: `python -m benchmarks.decode_step`"""

import argparse
import time
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters

from retnet_hf import RetNetConfig, RetNetForCausalLM

from .machine import read_bandwidth
from .measuring import Spread


@torch.no_grad()
def race(model: RetNetForCausalLM, tokens: int, batch: int) -> tuple[list[float], list[float], int]:
    """Seconds per eager step and per compiled step, taken in turn, and how often the compiled one was compiled again."""
    prompt = torch.randint(3, model.config.vocab_size, (batch, 64))
    eager_state = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
    compiled_state = eager_state.clone()
    for layer in compiled_state.layers:
        torch._dynamo.mark_static_address(layer.recurrent_state)
    step = torch.compile(model, fullgraph=True, dynamic=False)
    token = prompt[:, :1].clone(memory_format=torch.contiguous_format)  # as the tokens that are to come
    for _ in range(3):  # compiles, and compiles for the state that generation goes on with
        step(token, past_key_values=compiled_state, use_cache=True)
    counters.clear()
    eager, compiled = [], []
    for _ in range(tokens):
        for times, run, state in ((eager, model, eager_state), (compiled, step, compiled_state)):
            start = time.perf_counter()
            logits = run(token, past_key_values=state, use_cache=True).logits
            times.append(time.perf_counter() - start)
        token = logits[:, -1:].argmax(-1)
    return eager, compiled, counters["stats"]["unique_graphs"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="small", help="a name of RetNetConfig.presets()")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = RetNetForCausalLM(RetNetConfig.from_preset(arguments.preset, vocab_size=8192)).eval()
    # The embedding is looked up, not read; every other weight is read once per step.
    weights = sum(p.nbytes for p in model.parameters()) - model.model.embed_tokens.weight.nbytes
    table = Table(
        title=f"decode step, {arguments.preset}, {weights / 2**20:.0f} MiB of weights read, {arguments.tokens} tokens"
    )
    for column in (
        "batch",
        "bound ms",
        "eager ms",
        "eager / bound",
        "compiled ms",
        "compiled / bound",
        "speed-up",
        "recompiled",
    ):
        table.add_column(column, justify="right")
    for batch in arguments.batches:
        torch._dynamo.reset()
        eager, compiled, recompiled = race(model, arguments.tokens, batch)
        config = model.config
        state = 4 * batch * config.num_hidden_layers * config.num_attention_heads * config.head_dim * config.value_head_dim
        bound = (weights + 2 * state) / read_bandwidth()  # the state is read and written
        table.add_row(
            str(batch),
            f"{1e3 * bound:.2f}",
            f"{1e3 * median(eager):.2f}",
            f"{median(eager) / bound:.2f}",
            f"{1e3 * median(compiled):.2f}",
            f"{median(compiled) / bound:.2f}",
            str(Spread.of(slow / fast for slow, fast in zip(eager, compiled))),
            str(recompiled),
        )
    Console().print(table)


if __name__ == "__main__":
    main()
