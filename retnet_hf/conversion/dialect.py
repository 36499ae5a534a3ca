# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Dialects of published weights: their names for the tensors of a RetNet, and their differences in values.

`from_pretrained`, the conversion of files and the plugin for vLLM share these tables. A model that was read in any dialect
is saved with our own names.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from retnet_hf.retnet.configuration_retnet import RetNetConfig

from .changes import Change, reordered, rotated_last, rows, split


@dataclass(frozen=True)
class Dialect:
    """A scheme of names for a RetNet's weights.

    Args:
        sign: suffix of a name that no other dialect has.
        modules: (their name, our name), replaced in this order. When a model is written, the first match is used.
        interleaved: whether queries and keys are rotated in pairs (2i, 2i+1) instead of our (i, i + K/2).
        unused: pattern of tensors that the configuration implies.
        mixer: their name for the module that is `retention` or `attention` here, by the type of the layer.
        parts: (their name, our name) of modules in our `retention` and in our `attention`, if `mixer` is given.
        norms_ahead: whether the norm of a branch is named after the next branch, and the norm of the last feed-forward is
            the last norm of the model.
        changed: tensors with changed values: suffix of our name, suffixes of our tensors that it fills, and the change.
        experts: their names of gate, up and down projection, if each expert has separate tensors.
    """

    name: str
    sign: str
    modules: tuple[tuple[str, str], ...]
    interleaved: bool = False
    unused: str | None = None
    mixer: str | None = None
    parts: Mapping[str, tuple[tuple[str, str], ...]] = field(default_factory=dict)
    norms_ahead: bool = False
    changed: tuple[tuple[str, tuple[str, ...], Callable[[RetNetConfig], Change]], ...] = ()
    experts: tuple[str, str, str] | None = None

    def names_any_of(self, names: Collection[str]) -> bool:
        """Returns whether weights with these names are in this dialect."""
        return any(name.endswith(self.sign) for name in names)

    def theirs(self, name: str, config: RetNetConfig) -> str:
        """Returns their name for one of ours."""
        return renamed(name, [(ours, theirs) for theirs, ours in self.modules_of(config)])

    def modules_of(self, config: RetNetConfig) -> list[tuple[str, str]]:
        """Returns pairs (their name, our name) for a model of this configuration, replaced in this order."""
        modules, last = list(self.modules), config.num_hidden_layers - 1
        for layer, kind in enumerate(config.layer_types if self.mixer else ()):
            own = "retention" if kind == "linear_attention" else "attention"
            theirs, ours = f"layers.{layer}.{self.mixer}", f"layers.{layer}.{own}"
            modules += [(f"{theirs}.{part}", f"{ours}.{name}") for part, name in self.parts.get(own, ())]
            modules.append((theirs, ours))
        if self.norms_ahead:
            modules.append(("layers.0.input_layernorm", "embed_norm"))
            modules += [(f"layers.{layer + 1}.input_layernorm", f"layers.{layer}.mlp_norm") for layer in range(last)]
            modules.append(("norm", f"layers.{last}.mlp_norm"))
        return modules

    def changes(self, config: RetNetConfig, fused: bool) -> dict[str, tuple[tuple[str, ...], Change]]:
        """Returns {suffix of our name: (suffixes of our tensors that it fills, change)}. `fused` is from `is_fused`."""
        found = {end: (ends, make(config)) for end, ends, make in self.changed}
        if self.interleaved and config.use_rotary:
            for end in (".retention.q_proj.weight", ".retention.k_proj.weight"):
                found[end] = (end,), rotated_last(config.head_dim, config.head_dim)
        if fused and config.use_gated_mlp:
            found[".mlp.gate_proj.weight"] = (".mlp.gate_proj.weight", ".mlp.up_proj.weight"), split(2)
        return found

    def change(self, name: str, config: RetNetConfig, fused: bool = False) -> tuple[tuple[str, ...], Change]:
        """Returns our tensors that a foreign tensor fills, and the change of its values, by our name for it."""
        for end, (ends, change) in self.changes(config, fused).items():
            if name.endswith(end):
                return tuple(name.removesuffix(end) + other for other in ends), change
        return (name,), Change()


def renamed(name: str, modules: Iterable[tuple[str, str]]) -> str:
    """Returns a name with the modules in it renamed."""
    name = f".{name}"
    for old, new in modules:
        name = name.replace(f".{old}.", f".{new}.")
    return name[1:]


def rotated_first(config: RetNetConfig) -> Change:
    """Reorders heads whose first elements rotate, in pairs (i, i + turned/2). Here the first of pairs (i, i + K/2) do."""
    turned = round(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1))
    if turned == config.head_dim:
        return Change()
    first, rest = torch.arange(config.head_dim).split([turned, config.head_dim - turned])
    order = [first[: turned // 2], rest.chunk(2)[0], first[turned // 2 :], rest.chunk(2)[1]]
    return reordered(torch.cat(order))


def joint_rows(kind: str, config: RetNetConfig) -> Change:
    """Returns the change for a joint tensor of queries, keys and values in layers of this type."""
    present = kind in config.layer_types
    heads, groups, size, _ = config.mixer_sizes(config.layer_types.index(kind)) if present else [1] * 4
    turn = rotated_first(config)
    return rows([heads * size, groups * size, groups * size], [turn, turn, Change()])


def is_fused(names: Collection[str]) -> bool:
    """Returns whether `mlp.gate_proj` also holds the rows of the up projection, as in fla's uploads of 2024."""
    return any(name.endswith("mlp.gate_proj.weight") and name.replace("gate", "up") not in names for name in names)
