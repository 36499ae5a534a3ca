# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Families of models that are RetNets under another name, as tables of rows that read a config.json, and write one."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from retnet_hf.hybrid.configuration_hybrid import RetNetHybridConfig
from retnet_hf.hybrid.modeling_hybrid import RetNetHybridForCausalLM

from .changes import Shape
from .dialect import Dialect
from .errors import CheckpointError
from .foreign_config import ForeignConfig
from .moves import Conversion, dialect_moves, empty_model, fields_of_transformers, model_from, saved_tensors, written


_REQUIRED = object()  # instead of a default: files without the key are refused


@dataclass(frozen=True)
class Row:
    """A key of their config.json, and our field with the same meaning.

    Args:
        theirs: the key. ours: the field; the name of the key if absent.
        default: value of the key in files without it. If absent, these files are refused.
        values: maps their values to ours, if only these have a counterpart. If two of theirs have one meaning, the last is
            written.
        there: returns our value, from their value and the fields of ours that earlier rows have read.
        back: returns their value, from our value and our configuration.
    """

    theirs: str
    ours: str | None = None
    default: Any = _REQUIRED
    values: Mapping[Any, Any] | None = None
    there: Callable[[Any, Mapping[str, Any]], Any] = lambda value, fields: value
    back: Callable[[Any, RetNetHybridConfig], Any] = lambda value, ours: value

    def read(self, config: ForeignConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Returns our field as a dict with one item."""
        value = config[self.theirs] if self.default is _REQUIRED else config.get(self.theirs, self.default)
        if self.values is None:
            return {self.ours or self.theirs: self.there(value, fields)}
        if value not in self.values:
            raise ValueError(f"{self.theirs} in config.json must be one of {', '.join(self.values)}, got {value!r}")
        return {self.ours or self.theirs: self.values[value]}

    def write(self, ours: RetNetHybridConfig, target_format: str) -> dict[str, Any]:
        """Returns their key as a dict with one item."""
        name = self.ours or self.theirs
        stated = getattr(ours, name, None)
        if self.values is None:
            value, allowed = self.back(stated, ours), "given"
        else:
            value = next((theirs for theirs, own in reversed(self.values.items()) if own == stated), None)
            allowed = " or ".join(repr(choice) for choice in self.values.values())
        if value is None and self.default is not None:
            raise ValueError(f"{name} must be {allowed} for the format {target_format}, which cannot express {stated!r}.")
        return {self.theirs: value}


@dataclass(frozen=True)
class Together:
    """Keys that together determine several fields. `read` returns our fields as a dict, and `back` their keys."""

    read: Callable[[ForeignConfig, Mapping[str, Any]], dict[str, Any]]
    back: Callable[[RetNetHybridConfig], dict[str, Any]]

    def write(self, ours: RetNetHybridConfig, target_format: str) -> dict[str, Any]:
        return self.back(ours)


def same(*required: str, **defaults: Any) -> list[Row]:
    """Returns rows of keys with the names of our fields: keys that a file must have, and keys with a default."""
    return [Row(name) for name in required] + [Row(name, default=value) for name, value in defaults.items()]


COMMON = same("vocab_size", initializer_range=0.02, tie_word_embeddings=False)
COMMON += same(pad_token_id=None, bos_token_id=None, eos_token_id=None)


def positions(unstated: int) -> Row:
    """Returns the row of the training length. `unstated` is written if our configuration has none."""
    return Row("max_position_embeddings", default=None, back=lambda number, ours: number or unstated)


def head_dim(fields: Mapping[str, Any]) -> int:
    """Returns the size of a query head for our fields, or 1 if they do not fit each other, which is refused later."""
    return max(round(fields["hidden_size"] * fields["key_expansion"]) // max(fields["num_attention_heads"], 1), 1)


def heads_there(config: ForeignConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns our number and size of heads of retention. Each head has its own keys, whatever num_key_value_heads says."""
    hidden, heads = fields["hidden_size"], config["num_attention_heads"]
    expansion = heads * (config.get("head_dim") or hidden // heads) / hidden
    return {"num_attention_heads": heads, "key_expansion": expansion, "value_expansion": expansion}


# For families that have equal numbers and sizes of heads in both types of layers, and retention without shared keys.
HEADS = Together(
    lambda config, fields: heads_there(config, fields) | {"attention_num_key_value_heads": config["num_key_value_heads"]},
    lambda ours: {
        "num_attention_heads": ours.num_attention_heads,
        "head_dim": ours.head_dim,
        "num_key_value_heads": ours.attention_num_key_value_heads or ours.num_key_value_heads,
    },
)


@dataclass(frozen=True)
class Family:
    """The table of a family.

    Args:
        model_types: allowed model types in its config.json. The first is written, together with `architecture`.
        dialects: names of its tensors. The first dialect is read and written, unless `dialect_of` chooses another.
        rows: their keys and our fields, read in this order, after the rows of `COMMON`.
        implied: fields of ours that are the same in every model of the family, or functions of the fields read.
        fixed: keys that change what the model computes, each with the only value that has a counterpart here.
        without_effect: pattern of keys that do not affect a layer's output.
        own_key: a key that identifies the family in a config.json without a model_type.
        named_apart: whether the names of tensors identify the family, because no other family has them.
        by_architecture: whether only config.json with this `architecture` belongs to the family, since another family has
            the same model type.
    """

    name: str
    description: str
    model_types: tuple[str, ...]
    architecture: str
    dialects: tuple[Dialect, ...]
    rows: tuple[Row | Together, ...]
    implied: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    without_effect: str = ""
    own_key: str | None = None
    named_apart: bool = True
    by_architecture: bool = False

    def recognises(self, names: Collection[str], config: dict[str, Any] | None) -> bool:
        """Returns whether tensors of these names, with this config.json, belong to the family."""
        named = self.named_apart and any(dialect.names_any_of(names) for dialect in self.dialects)
        config = config or {}
        asked = not self.by_architecture or self.architecture in (config.get("architectures") or ())
        return named or (asked and config.get("model_type") in self.model_types)

    def fields(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the fields of RetNetHybridConfig for a config.json. Raises ValueError for unknown options."""
        config = ForeignConfig(content, self.name, self.without_effect)
        config.require_one_value(**self.fixed)
        fields: dict[str, Any] = {"initialization": "normal"}
        for row in (*COMMON, *self.rows):
            fields |= row.read(config, fields)
        config.require_all_read()
        return fields | {name: value(fields) if callable(value) else value for name, value in self.implied.items()}

    def dialect_of(self, names: Collection[str] | None) -> Dialect:
        """Returns the dialect of a checkpoint with these names, or, for None, of a checkpoint to be written."""
        return self.dialects[0]

    def plan(self, shapes: Mapping[str, Shape] | None, config: dict[str, Any] | None) -> Conversion:
        """Returns the conversion of a checkpoint with these tensors, or, without shapes, of a checkpoint to be written."""
        if config is None:
            raise CheckpointError(f"the format {self.name} needs a config.json next to the weights")
        ours = RetNetHybridConfig(**self.fields(config))
        copy = "lm_head.weight" if ours.tie_word_embeddings and "lm_head.weight" in (shapes or ()) else None
        tensors = saved_tensors(empty_model(RetNetHybridForCausalLM, ours))
        moves = dialect_moves(self.dialect_of(shapes), ours, tensors, copy=copy)
        return Conversion(self.name, RetNetHybridForCausalLM, ours, moves)

    def read(self, state_dict: Mapping[str, Tensor], config: dict[str, Any]) -> RetNetHybridForCausalLM:
        """Returns the model of a checkpoint.

        Args:
            state_dict: tensors with the family's names. config: the checkpoint's config.json.

        Raises:
            CheckpointError: if a tensor is missing, left over, not finite, or has a wrong shape.
            ValueError: for an option without a counterpart here.
        """
        return model_from(self.plan, state_dict, config)

    def write(self, model: RetNetHybridForCausalLM) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns state dict and config.json of the same model in the family's format.

        Raises:
            ValueError: for a field of the configuration for which the family has no option.
        """
        ours = model.config
        if not ours.is_hybrid:
            raise ValueError(f"the format {self.name} needs a RetNetHybridForCausalLM, got a {type(model).__name__}.")
        config = fields_of_transformers(model) | {"architectures": [self.architecture], "model_type": self.model_types[0]}
        config |= {name: value for name, value in self.fixed.items() if value is not None}
        for row in self.rows:
            config |= row.write(ours, self.name)
        return written(self.name, model, config, self.plan)
