# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Checks of configurations, their named sizes and schedules of decays, and checks of unknown arguments of `forward`."""

import difflib
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from transformers import GenerationConfig
from transformers.utils import TransformersKwargs

from ..hub.saving import SavedWithCode


def is_activation(value: str | list[str | None] | None) -> bool:
    """Returns whether names are those of activations. None is one, since types of fields decide where it is allowed."""
    from transformers.activations import ACT2FN  # importing it takes a second

    return all(name is None or name in ACT2FN for name in (value if isinstance(value, list) else [value]))


# Keys that transformers 4 wrote with their defaults; and auto_map, which names code that is not saved with our models.
WITHOUT_EFFECT_IN_TRANSFORMERS = frozenset((
    "add_cross_attention", "auto_map", "cross_attention_hidden_size", "finetuning_task", "is_decoder", "prefix",
    "pruned_heads", "tf_legacy_loss", "tie_encoder_decoder", "torchscript", "use_bfloat16",
))  # fmt: skip
# Keys that are not fields of a configuration, but that transformers reads if they have a value.
READ_BY_TRANSFORMERS = frozenset((
    "attn_implementation", "experts_implementation", "max_position_embeddings", "model_type", "name_or_path", "num_labels",
    "output_attentions", "partial_rotary_factor", "per_layer_config", "quantization_config", "rope_scaling", "rope_theta",
    "sep_token_id", "task_specific_params", "tokenizer_class", "torch_dtype",
))  # fmt: skip
# Linear layers that PEFT adapts by default in language models: all but heads, which it trains whole for some tasks.
ADAPTED = [f"{name}_proj" for name in ("q", "k", "v", "g", "o", "up", "gate", "down", "q_a", "q_b", "kv_a", "kv_b")]
DECAY_SCHEDULES = ("power_of_two", "log_linear", "alibi", "geometric", "none")
# Arguments that tools pass to every model. Trainer passes use_cache.
PASSED_ON = frozenset((*TransformersKwargs.__annotations__, "seq_idx", "state_rows", "use_cache"))
# names of documents, lengths, masks, states and visibility of tokens in other libraries
CHANGES_RESULTS = re.compile("doc|seg|seq|len|mask|pack|pad|offset|bound|indptr|past|cache|state|encoder|causal|bidirect")
# Sentences about allowed values, and what they allow.
RULES = {
    "positive": lambda value: value > 0,
    "positive, or None": lambda value: value is None or value > 0,
    "a positive integer": lambda value: value > 0,
    "a positive integer or None": lambda value: value is None or value > 0,
    "positive integers": lambda values: all(value > 0 for value in values),
    "in [0, 1)": lambda value: 0 <= value < 1,
    "a name of transformers.activations.ACT2FN": is_activation,
    "None, or a name of transformers.activations.ACT2FN": is_activation,
}


def scheduled_decays(schedule: str | Sequence[float], heads: int, decay_range: Sequence[float] = (2, 512)) -> list[float]:
    """Returns γ of each head, in double precision, by a schedule and range as in `RetNetConfig`."""
    if not isinstance(schedule, str):
        return [float(decay) for decay in schedule]
    if schedule == "power_of_two":
        return [1 - 2.0 ** (-5 - head) for head in range(heads)]
    if schedule == "alibi":
        return [math.exp(-(2 ** (-8 * (head + 1) / heads))) for head in range(heads)]
    if schedule == "none":
        return [1.0] * heads
    if schedule not in DECAY_SCHEDULES:
        raise ValueError(f"decay_schedule must be one of {DECAY_SCHEDULES} or a list of decays, got {schedule!r}.")
    first, last = (math.log(end) for end in ((1 / 32, 1 / 512) if schedule == "log_linear" else decay_range))
    exponents = [first + (last - first) * head / max(heads - 1, 1) for head in range(heads)]
    if schedule == "log_linear":
        return [1 - math.exp(exponent) for exponent in exponents]
    return [math.exp(-math.exp(-exponent)) for exponent in (exponents if heads > 1 else [(first + last) / 2])]


class ConfigMixin(SavedWithCode):
    """Mixin of configurations. They have named sizes, and refuse unknown fields; in files, these become attributes."""

    _presets: dict[str, dict[str, Any]]  # fields of each named size

    @classmethod
    def presets(cls) -> tuple[str, ...]:
        """Returns the names that `from_preset` accepts."""
        return tuple(cls._presets)

    @classmethod
    def from_preset(cls, name: str, **overrides: Any):
        """Returns the configuration of a named size. Any field may be overridden.

        Raises:
            ValueError: for an unknown name.
        """
        if name not in cls._presets:
            raise ValueError(f"preset must be one of {', '.join(cls._presets)}, got {name!r}.")
        return cls(**(cls._presets[name] | overrides))

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """Builds a configuration as in transformers, and checks it. Classes of this package, unlike their copies that were
        saved with a model, and classes derived from them, drop `auto_map`."""
        if cls.__module__.startswith("retnet_hf."):
            config_dict = {name: value for name, value in config_dict.items() if name != "auto_map"}
        made = super().from_dict(config_dict | {"_of_file": True}, **kwargs)
        (made[0] if isinstance(made, tuple) else made).validate()  # transformers sets `kwargs` after its own check
        return made

    def __post_init__(self, **kwargs: Any) -> None:
        self.auto_map = {}  # TRL reads this attribute of every configuration
        if getattr(self, "kernels", None) == "fla":  # of earlier versions
            self.kernels = "auto"
        if not kwargs.pop("_of_file", False) and kwargs:
            known = {*READ_BY_TRANSFORMERS, *WITHOUT_EFFECT_IN_TRANSFORMERS, *GenerationConfig().to_dict(), *vars(self)}
            if unknown := [name for name in kwargs if name not in known and not name.startswith("_")]:
                names = [*(field.name for field in fields(self)), *self.attribute_map]
                nearest = difflib.get_close_matches(unknown[0], names, 1)
                advice = f": did you mean {nearest[0]!r}?" if nearest else ""
                raise ValueError(f"{type(self).__name__} has no field {unknown[0]!r}{advice}.")
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, and `auto_map` if code is saved with the model.

        Adds the model_type to PEFT's tables of default targets of LoRA and similar methods. PEFT calls `to_dict` before it
        looks the type up.
        """
        for name, table in list(vars(sys.modules.get("peft.utils", object)).items()):
            targets = table if name.endswith("_TARGET_MODULES_MAPPING") and isinstance(table, dict) else {}
            if targets.get("llama") == ["q_proj", "v_proj"]:
                targets.setdefault(self.model_type, ADAPTED.copy() if hasattr(self, "vocab_size") else "all-linear")
        return {name: value for name, value in super().to_dict().items() if name != "auto_map" or value}

    def _require(self, condition: bool, field: str, allowed: str) -> None:
        """Raises ValueError with the field, what is allowed and the given value, unless the condition holds."""
        if not condition:
            raise ValueError(f"{field} must be {allowed}, got {getattr(self, field)!r}.")

    def _check(self, allowed: str | tuple[str, ...], *fields: str, allows: Callable[[Any], bool] | None = None) -> None:
        """Checks that fields have one of the allowed names, or a value that `allows` or the rule of a sentence allows."""
        if isinstance(allowed, tuple):
            allows, allowed = allowed.__contains__, "one of " + ", ".join(allowed)
        for field in fields:
            self._require((allows or RULES[allowed])(getattr(self, field)), field, allowed)

    def _check_decay_schedule(self, layers: int = 0) -> None:
        """Checks that `decay_schedule` is a name, a list of decays or, with `layers`, a list of one such list per layer."""
        schedule, heads = self.decay_schedule, self.num_attention_heads
        if isinstance(schedule, str):
            return self._check(DECAY_SCHEDULES, "decay_schedule")
        lists, allowed = [schedule], f"num_attention_heads ({heads}) numbers in (0, 1]"
        if layers and any(isinstance(entry, list) for entry in schedule):
            lists, allowed = schedule, f"one list per layer (num_hidden_layers is {layers}) of {allowed}"
        else:
            layers, allowed = 1, f"a list of {allowed}"
        valid = all(isinstance(decays, list) and len(decays) == heads for decays in lists) and len(lists) >= layers
        valid = valid and all(0 < decay <= 1 for decays in lists for decay in decays)
        self._require(valid, "decay_schedule", allowed)

    def _check_decay_range(self, layers: int = 0) -> None:
        """Checks that `decay_range` is a pair of time constants, or a list of pairs for `layers` layers."""
        spans = self.decay_range
        allowed = "a pair of time constants in tokens, the first at least 0.1 and the second not below it"
        if spans and isinstance(spans[0], list):
            allowed += f", or a list of one pair for each of the {layers} layers"
        else:
            spans, layers = [spans], 1
        valid = len(spans) >= layers and all(len(span) == 2 and 0.1 <= span[0] <= span[1] for span in spans)
        self._require(valid, "decay_range", allowed)


def cache_of_call(cache: Any, past_key_values: Any) -> Any:
    """Returns the state that a call passes by one of two names, or None. Raises ValueError for two states."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one argument: pass one of them.")
    return past_key_values if cache is None else cache


def require_known_arguments(model: Any, given: dict[str, Any]) -> None:
    """Ignores arguments that tools pass to every model, and refuses arguments that would change results elsewhere.

    Args:
        given: keyword arguments of `forward` that are not in its signature.

    Raises:
        ValueError: for another library's names of documents, lengths, masks or states, and for misspelt arguments.
    """
    passed = PASSED_ON if "cu_seq_lens_q" in given else PASSED_ON - {"cu_seq_lens_k"}  # which has no meaning alone
    if given.get("is_causal") is getattr(model.config, "bidirectional", True):  # it contradicts the configuration
        passed = passed - {"is_causal"}
    if passed.issuperset(given):
        return
    known = passed.union(inspect.signature(model.forward).parameters)
    for name in given.keys() - known:
        nearest = difflib.get_close_matches(name, known, 1, 0.8)
        if given[name] is not None and (nearest or CHANGES_RESULTS.search(name)):
            advice = f": did you mean {nearest[0]}?" if nearest else ""
            if not nearest and "attention_mask" in known:
                advice = (
                    ": pass absent tokens as attention_mask, documents in one row as cu_seq_lens_q or seq_idx, and a state "
                    "as cache. Whether tokens see later tokens is set by bidirectional in the configuration."
                )
            raise ValueError(f"{name} is no argument of {type(model).__name__}{advice}")


def with_arguments_of(base: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `forward` of a head with a signature that includes the arguments it passes on to its base model.

    Tools such as Trainer read from the signature which dataset columns and options a model accepts.
    """
    own, handed_on = (inspect.signature(each).parameters for each in (function, base))
    further = [argument for name, argument in handed_on.items() if name not in own]
    if not further:  # e.g. in a class derived from a head: no wrapper is needed
        return function

    @functools.wraps(function)
    def forward(*arguments, **options):
        return function(*arguments, **options)

    *named, rest = own.values()
    forward.__signature__ = inspect.Signature([*named, *further, rest])
    return forward
