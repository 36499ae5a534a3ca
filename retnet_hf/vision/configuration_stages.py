# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Base classes for configurations of image models: feature maps of a backbone, and lists with a value per stage."""

from typing import Any

from transformers.backbone_utils import BackboneConfigMixin

from ..arguments.checks import ConfigMixin


class VisionConfigMixin(ConfigMixin, BackboneConfigMixin):
    """Names the outputs of the stem and the stages, and chooses a backbone's feature maps among them."""

    def __post_init__(self, **kwargs: Any) -> None:
        self.stage_names = ["stem"] + [f"stage{number}" for number in range(1, self.num_hidden_layers + 1)]
        chosen = {name: kwargs.pop(name, None) for name in ("out_features", "out_indices")}
        self.set_output_features_output_indices(**chosen)
        super().__post_init__(**kwargs)


class StagedConfigMixin(VisionConfigMixin):
    """Base class with a value per stage in the fields named by `_per_stage`, which include depths and hidden_sizes."""

    base_model_fsdp_plan = {"stages.*.blocks.*": "free_full_weight"}

    def __post_init__(self, **kwargs: Any) -> None:
        for field in self._per_stage:
            setattr(self, field, list(getattr(self, field)))
        super().__post_init__(**kwargs)

    @property
    def num_hidden_layers(self) -> int:
        """Returns the number of stages. The model returns one hidden state per stage, after the stem's."""
        return len(self.depths)

    @property
    def hidden_size(self) -> int:
        """Returns the width of the last stage."""
        return self.hidden_sizes[-1]

    def _check_stages(self) -> None:
        """Checks the fields that all models with stages have."""
        stages = len(self.depths)
        self._require(stages > 0, "depths", "a list of at least one number")
        allowed = f"a list of one value per stage (depths has {stages})"
        self._check(allowed, *self._per_stage, allows=lambda values: len(values) == stages)
        self._check("positive", "num_channels", "layer_norm_eps", "initializer_range", "layer_scale_init_value")
        self._check("in [0, 1)", "drop_path_rate")
