# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""One layer of retention: `python -m benchmarks.layer [--lengths 512 4096] [--threads 1]`.

`MultiScaleRetention` takes turns with the mixer that the models contain, and with the layers of torchscale and of
yet-another-retnet, if they are installed. It prints the time of each over the time of ours, as median and spread of the
rounds, and the memory of a training step in a process of its own. torchscale and ours have values twice as wide as keys.
yet-another-retnet has values as wide as keys: compare it with the row above it.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from retnet_hf import MultiScaleRetention
from retnet_hf.retnet.modeling_retnet import RetNetRetention

from .measuring import Failure, PeakMemory, Spread, Turn, in_its_own_process, in_turns


SIZE, HEADS = 512, 4
CHUNK = 512  # of both peers


def ours(**options: float) -> Callable[[Tensor], Tensor]:
    layer = MultiScaleRetention(SIZE, HEADS, decay_schedule="geometric", **options)
    return lambda hidden: layer(hidden)[0]


def narrow() -> Callable[[Tensor], Tensor]:
    """Ours with the sizes of yet-another-retnet."""
    return ours(value_expansion=1.0)


def mixer() -> Callable[[Tensor], Tensor]:
    """The mixer of a RetNet with a plan that is made once, as the layers of a model share it."""
    layer = MultiScaleRetention(SIZE, HEADS, decay_schedule="geometric")
    plans = {}

    def call(hidden: Tensor) -> Tensor:
        if hidden.shape not in plans:
            plan_of = layer.plan_of_layout
            layer.plan_of_layout = lambda *call: plans.setdefault(hidden.shape, plan_of(*call))
            layer(hidden)
            layer.plan_of_layout = plan_of
        return RetNetRetention.forward(layer, hidden, plans[hidden.shape], None)[0]

    return call


def torchscale() -> Callable[[Tensor], Tensor]:
    from .peers.torchscale_retnet import RetNetConfig  # isort: skip, torchscale cannot be imported before
    from torchscale.architecture.retnet import RetNetRelPos
    from torchscale.component.multiscale_retention import MultiScaleRetention as Layer

    sizes = {"decoder_embed_dim": SIZE, "decoder_retention_heads": HEADS}
    config = RetNetConfig(chunkwise_recurrent=True, recurrent_chunk_size=CHUNK, **sizes)
    layer, positions = Layer(config, SIZE, 2 * SIZE, HEADS), RetNetRelPos(config)

    def call(hidden: Tensor) -> Tensor:
        return layer(hidden, positions(hidden.shape[1], chunkwise_recurrent=True), chunkwise_recurrent=True)

    return call


def yet_another() -> Callable[[Tensor], Tensor]:
    from yet_another_retnet.retention import MultiScaleRetention as Layer

    layer = Layer(SIZE, HEADS, batch_first=True)

    def call(hidden: Tensor) -> Tensor:
        outputs, state = [], None
        for number, chunk in enumerate(hidden.split(CHUNK, dim=1)):
            output, state = layer.forward_chunkwise(chunk, chunk, chunk, number * CHUNK, state)
            outputs.append(output)
        return torch.cat(outputs, dim=1)

    return call


LAYERS = {
    "MultiScaleRetention": ours,
    "the models' mixer": mixer,
    "torchscale": torchscale,
    "ours, narrow values": narrow,
    "yet-another-retnet": yet_another,
}


def training_step(make: Callable[[], Callable[[Tensor], Tensor]], length: int) -> Callable[[], None]:
    torch.manual_seed(0)
    layer, hidden = make(), torch.randn(1, length, SIZE, requires_grad=True)
    return lambda: layer(hidden).sum().backward()


def peak(make: Callable[[], Callable[[Tensor], Tensor]], length: int, threads: int) -> int:
    torch.set_num_threads(threads)
    memory = PeakMemory("cpu")
    training_step(make, length)()
    return memory.nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    settings = parser.parse_args()
    torch.set_num_threads(settings.threads)
    makers = {}
    for name, make in LAYERS.items():
        try:
            make()
            makers[name] = make
        except ImportError as error:
            print(f"{name} does not run: {error}")
    for length in settings.lengths:
        turns = {name: Turn(training_step(make, length)) for name, make in makers.items()}
        seconds = in_turns(turns, settings.rounds, 0.3)
        print(f"\ntraining, {length:,} tokens: time over ours, peak memory")
        for name, make in makers.items():
            nbytes = in_its_own_process(peak, make, length, settings.threads)
            memory = nbytes.reason if isinstance(nbytes, Failure) else f"{nbytes / 2**20:,.0f} MiB"
            ratios = Spread.of(other / own for other, own in zip(seconds[name], seconds["MultiScaleRetention"]))
            print(f"{name:20} {ratios!s:22} {memory}")


if __name__ == "__main__":
    main()
