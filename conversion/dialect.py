# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A dialect of published weights: how it names the tensors of a RetNet, and which values differ.

`from_pretrained`, the conversion of files and the plugin for vLLM share these tables. A model that was read in any dialect
is saved under our own names.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from retnet_hf.retnet.configuration_retnet import RetNetConfig

from .changes import Change, PairsApart, RotatedFirst, Rows, Split


@dataclass(frozen=True)
class Dialect:
    """One way of naming a RetNet's weights.

    Args:
        sign: the end of a name that no other dialect has.
        modules: (their name, our name), replaced in this order. When a model is written, the first match is used.
        interleaved: whether queries and keys are rotated in pairs (2i, 2i+1), where ours are (i, i + K/2).
        unused: pattern of tensors that follow from the configuration.
        mixer: their name for what is `retention` or `attention` here, by the kind of the layer.
        parts: (their name, our name) of modules of our `retention` and of our `attention`, where `mixer` is given.
        norms_ahead: whether the norm of a branch is named after the branch that follows it, and that of the last
            feed-forward is the last norm of the model.
        changed: tensors whose values change: end of our name, ends of the tensors of ours that it fills, and the change.
        experts: their names of gate, up and down projection of an expert, each in tensors of its own.
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
        """Whether weights with these names are in this dialect."""
        return any(name.endswith(self.sign) for name in names)

    def ours(self, name: str) -> str:
        """Our name for one of theirs, of a dialect whose names do not depend on the configuration."""
        return renamed(name, self.modules)

    def theirs(self, name: str, config: RetNetConfig) -> str:
        """Their name for one of ours."""
        return renamed(name, [(ours, theirs) for theirs, ours in self.modules_of(config)])

    def modules_of(self, config: RetNetConfig) -> list[tuple[str, str]]:
        """(their name, our name) in a model of this configuration, replaced in this order."""
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
        """The tensors whose values change: suffix of our name -> (suffixes of the tensors of ours that it fills, change).

        Args:
            fused: whether gate and up projection are one tensor, as `is_fused` says.
        """
        found = {end: (ends, make(config)) for end, ends, make in self.changed}
        if self.interleaved and config.use_rotary:
            for end in (".retention.q_proj.weight", ".retention.k_proj.weight"):
                found[end] = (end,), PairsApart(config.head_dim)
        if fused and config.use_gated_mlp:
            found[".mlp.gate_proj.weight"] = (".mlp.gate_proj.weight", ".mlp.up_proj.weight"), Split(2)
        return found

    def change(self, name: str, config: RetNetConfig, fused: bool = False) -> tuple[tuple[str, ...], Change]:
        """The tensors of ours that a foreign tensor fills, and how, by our name for it."""
        for end, (ends, change) in self.changes(config, fused).items():
            if name.endswith(end):
                return tuple(name.removesuffix(end) + other for other in ends), change
        return (name,), Change()


def renamed(name: str, modules: Iterable[tuple[str, str]]) -> str:
    """A name in which modules have other names."""
    name = f".{name}"
    for old, new in modules:
        name = name.replace(f".{old}.", f".{new}.")
    return name[1:]


def rotated_first(config: RetNetConfig) -> Change:
    """From heads whose first numbers turn, in pairs (i, i + half of these)."""
    turned = round(config.head_dim * config.rope_parameters.get("partial_rotary_factor", 1))
    return Change() if turned == config.head_dim else RotatedFirst(config.head_dim, turned)


def joint_rows(kind: str) -> Callable[[RetNetConfig], Change]:
    """From one tensor with the rows of queries, of keys and of values of a layer of this kind."""

    def make(config: RetNetConfig) -> Change:
        heads, groups, size, _ = (
            config.mixer_sizes(config.layer_types.index(kind)) if kind in config.layer_types else [1] * 4
        )
        turn = rotated_first(config)
        return Rows([heads * size, groups * size, groups * size], [turn, turn, Change()])

    return make


def is_fused(names: Collection[str]) -> bool:
    """Whether `mlp.gate_proj` holds the rows of the up projection below its own, as in fla's uploads of 2024."""
    return any(name.endswith("mlp.gate_proj.weight") and name.replace("gate", "up") not in names for name in names)
