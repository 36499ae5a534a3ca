# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The models of the races by name. Their modules are imported only when they run."""

import importlib
import importlib.util
from typing import Any, NamedTuple

import torch

from .peer import SIZES, Peer, Size


class Contender(NamedTuple):
    """An entry of the list below.

    Attributes:
        label: name for people. It means the chunkwise form, and the recurrent form in decoding, unless it names another.
        module, peer: module and name of its class.
        options: arguments of the class besides the size.
        needs: a package that must be importable.
        install: command that installs it.
        caps: longest lengths by race; longer ones would be too slow.
    """

    label: str
    module: str
    peer: str
    options: dict[str, Any] = {}
    needs: str = "transformers"
    install: str = "pip install transformers"
    caps: dict[str, int] = {}

    @property
    def is_compiled(self) -> bool:
        """Returns whether the model is compiled before it starts."""
        return bool(self.options.get("compiled") or self.options.get("programs"))


_TORCHSCALE = {"needs": "torchscale", "install": "pip install --no-deps torchscale==0.3.0"}
_TORCHAO = {"needs": "torchao", "install": "pip install torchao"}
_YET_ANOTHER = {"needs": "yet_another_retnet", "install": "pip install yet-another-retnet"}

_QUADRATIC = {"training": 2048, "prefill": 2048}  # beyond, chunkwise forms are more than twice as fast

CONTENDERS = {
    "ours": Contender("retnet_hf", "ours", "Ours"),
    "ours-compiled": Contender("retnet_hf, compiled", "ours", "Ours", {"compiled": True}),
    "ours-scratch": Contender("retnet_hf, options of its sizes", "ours", "Ours", {"from_scratch": True}),
    "ours-scratch-programs": Contender(
        "retnet_hf, options of its sizes, programs", "ours", "Ours", {"from_scratch": True, "programs": True}
    ),
    "ours-programs": Contender("retnet_hf, programs", "ours", "Ours", {"programs": True}),
    "ours-int8": Contender("retnet_hf, int8, programs", "ours", "Ours", {"programs": True, "bits": 8}, **_TORCHAO),
    "ours-int4": Contender("retnet_hf, int4, programs", "ours", "Ours", {"programs": True, "bits": 4}, **_TORCHAO),
    "ours-int8-eager": Contender("retnet_hf, int8 of torchao", "ours", "Ours", {"bits": 8}, **_TORCHAO),
    "llama": Contender("Llama", "llama", "Llama"),
    "llama-static": Contender("Llama, static cache", "llama", "Llama", {"static": True}),
    "llama-compiled": Contender("Llama, compiled", "llama", "Llama", {"static": True, "compiled": True}),
    "mamba2": Contender("Mamba2", "mamba2", "Mamba2", caps={"training": 512, "prefill": 2048}),
    "torchscale": Contender("torchscale", "torchscale_retnet", "TorchscaleRetNet", {"form": "chunkwise"}, **_TORCHSCALE),
    "torchscale-parallel": Contender(
        "torchscale, parallel", "torchscale_retnet", "TorchscaleRetNet", {"form": "parallel"}, **_TORCHSCALE, caps=_QUADRATIC
    ),
    "yet-another": Contender("yet-another-retnet", "yet_another", "YetAnotherRetNet", {"form": "chunkwise"}, **_YET_ANOTHER),
    "yet-another-parallel": Contender(
        "yet-another-retnet, parallel",
        "yet_another",
        "YetAnotherRetNet",
        {"form": "parallel"},
        **_YET_ANOTHER,
        caps=_QUADRATIC,
    ),
}
REFERENCE = "llama"


def missing(name: str) -> str | None:
    """Returns a sentence that says why a contender cannot run here, or None."""
    contender = CONTENDERS[name]
    installed = importlib.util.find_spec(contender.needs) is not None
    return None if installed else f"{contender.label} is not installed: {contender.install}"


def build(name: str, size: Size) -> Peer:
    contender = CONTENDERS[name]
    torch.manual_seed(0)
    return getattr(importlib.import_module(f".{contender.module}", __package__), contender.peer)(size, **contender.options)


__all__ = ["CONTENDERS", "REFERENCE", "SIZES", "Contender", "Peer", "Size", "build", "missing"]
