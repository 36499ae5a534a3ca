# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Mixins and checks for several configurations: known fields, allowed values and presets."""

import difflib
from dataclasses import fields
from typing import Any

from transformers import GenerationConfig
from transformers.configuration_utils import PreTrainedConfig

from ..hub.adapter_targets import offer_to_adapters
from ..hub.saving import TRAVELS, SavedWithCode


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


class KnownFieldsMixin(SavedWithCode):
    """Mixin of configurations that refuse unknown names. Unknown names in files are allowed and become attributes."""

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """Builds a configuration as in transformers, and checks it. Drops `auto_map`, except in code saved with a model."""
        if not TRAVELS:
            config_dict = {name: value for name, value in config_dict.items() if name != "auto_map"}
        made = super().from_dict(config_dict | {"_of_file": True}, **kwargs)
        (made[0] if isinstance(made, tuple) else made).validate()  # transformers sets `kwargs` after its own check
        return made

    def __post_init__(self, **kwargs: Any) -> None:
        self.auto_map = {}  # TRL reads this attribute of every configuration
        if getattr(self, "kernels", None) == "fla":  # of earlier versions
            self.kernels = "auto"
        if not kwargs.pop("_of_file", False) and kwargs:
            of_transformers = {*READ_BY_TRANSFORMERS, *WITHOUT_EFFECT_IN_TRANSFORMERS, *GenerationConfig().to_dict()}
            for name in kwargs.keys() - of_transformers - vars(self).keys():
                if not name.startswith("_"):
                    nearest = difflib.get_close_matches(
                        name, [*(field.name for field in fields(self)), *self.attribute_map], 1
                    )
                    advice = f": did you mean {nearest[0]!r}?" if nearest else ""
                    raise ValueError(f"{type(self).__name__} has no field {name!r}{advice}.")
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields, and `auto_map` if code is saved with the model."""
        offer_to_adapters(self.model_type, hasattr(self, "vocab_size"))
        content = super().to_dict()
        return content if self.auto_map else {name: value for name, value in content.items() if name != "auto_map"}


class PresetsMixin:
    """Mixin of configurations with named sizes. `_presets` maps each name to its fields."""

    _presets: dict[str, dict[str, Any]]

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


class FieldChecks:
    """Checks of a configuration's fields. Each raises ValueError with the field, the allowed values and the given value."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config

    def require(self, condition: bool, field: str, allowed: str) -> None:
        if not condition:
            raise ValueError(f"{field} must be {allowed}, got {getattr(self.config, field)!r}.")

    def one_of(self, field: str, allowed: tuple[str, ...]) -> None:
        self.require(getattr(self.config, field) in allowed, field, "one of " + ", ".join(allowed))

    def positive(self, *fields: str, allowed: str = "positive") -> None:
        for field in fields:
            self.require(getattr(self.config, field) > 0, field, allowed)

    def positive_integer(self, *fields: str) -> None:
        self.positive(*fields, allowed="a positive integer")

    def positive_integers(self, *fields: str) -> None:
        for field in fields:
            self.require(all(number > 0 for number in getattr(self.config, field)), field, "positive integers")

    def positive_integer_or_none(self, *fields: str) -> None:
        for field in fields:
            value = getattr(self.config, field)
            self.require(value is None or value > 0, field, "a positive integer or None")

    def positive_or_none(self, *fields: str) -> None:
        for field in fields:
            value = getattr(self.config, field)
            self.require(value is None or value > 0, field, "positive, or None")

    def rate(self, *fields: str) -> None:
        for field in fields:
            self.require(0 <= getattr(self.config, field) < 1, field, "in [0, 1)")

    def activation(self, *fields: str, allowed: str = "a name of transformers.activations.ACT2FN") -> None:
        from transformers.activations import ACT2FN  # importing it takes a second

        for field in fields:
            value = getattr(self.config, field)  # None is only possible if the field's type allows it
            names = value if isinstance(value, list) else [value]
            self.require(all(name is None or name in ACT2FN for name in names), field, allowed)

    def decay_schedule(self, schedules: tuple[str, ...]) -> None:
        """Checks that `decay_schedule` is the name of a schedule or a list of decays."""
        schedule, heads = self.config.decay_schedule, self.config.num_attention_heads
        if isinstance(schedule, str):
            self.one_of("decay_schedule", schedules)
        else:
            numbers = len(schedule) == heads and all(0 < decay <= 1 for decay in schedule)
            self.require(numbers, "decay_schedule", f"a list of num_attention_heads ({heads}) numbers in (0, 1]")

    def decay_range(self, layers: int = 0) -> None:
        """Checks that `decay_range` is a pair of time constants, or a list of pairs for `layers` layers."""
        stated = self.config.decay_range
        allowed = "a pair of time constants in tokens, the first at least 0.1 and the second not below it"
        if stated and isinstance(stated[0], list):
            spans, allowed = stated, f"{allowed}, or a list of one pair for each of the {layers} layers"
            self.require(len(spans) >= layers, "decay_range", allowed)
        else:
            spans = [stated]
        self.require(all(len(span) == 2 and 0.1 <= span[0] <= span[1] for span in spans), "decay_range", allowed)
