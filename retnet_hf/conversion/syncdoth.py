# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""syncdoth/RetNet, the port with which Spiral-AI/Spiral-RetNet-3b-base and isek-ai/* were trained.

It has torchscale's tensors under transformers' prefixes. Its variant without a gated feed-forward has biases and an inner
LayerNorm, for which RetNetConfig has no option.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from retnet_hf.retnet.modeling_retnet import RetNetForCausalLM, RetNetModel

from .changes import Shape
from .moves import Conversion, fields_of_transformers, model_from, written
from .torchscale import of_syncdoth, plan_with_prefixes, planned_moves, torchscale_arguments


NAME, DESCRIPTION = "syncdoth", "syncdoth/RetNet (Spiral-AI, isek-ai)"


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return of_syncdoth(names, config) is True


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Conversion:
    complete = any(name.startswith("model.") for name in shapes)
    body, model_class = ("model.", RetNetForCausalLM) if complete else ("", RetNetModel)
    return plan_with_prefixes(NAME, shapes, config, body, "lm_head.weight", model_class)


def from_syncdoth(state_dict: Mapping[str, Tensor], config: dict[str, Any]) -> RetNetForCausalLM | RetNetModel:
    """Returns the model of a syncdoth checkpoint, or the base model if the checkpoint has no head.

    Args:
        state_dict: the checkpoint's tensors. config: the checkpoint's config.json.

    Raises:
        CheckpointError: if a tensor is missing, left over, not finite, or has a wrong shape.
        ValueError: for a configuration without a counterpart here.
    """
    return model_from(plan, state_dict, config)


def to_syncdoth(model: RetNetForCausalLM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns state dict and config.json of the same model for syncdoth/RetNet.

    Raises:
        ValueError: for a field of the configuration for which syncdoth/RetNet has no option.
    """
    ours = model.config
    config = torchscale_arguments(ours)
    del config["share_decoder_input_output_embed"]
    config |= {"use_lm_decay": ours.decay_schedule == "log_linear", "use_glu": True}
    config |= {"z_loss_coeff": 0.0, "forward_impl": "parallel"}
    moves = planned_moves(ours, body="model.", head="lm_head.weight", tied_twice=True)
    return written(NAME, model, config | fields_of_transformers(model), plan, moves)
