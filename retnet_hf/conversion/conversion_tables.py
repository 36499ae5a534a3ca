# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Tables that describe a checkpoint on the terminal."""

import math
from collections import Counter

import torch
from rich.table import Column, Table
from transformers import AutoConfig, AutoModel, PreTrainedConfig

from retnet_hf.retnet.configuration_retnet import RetNetConfig

from .checkpoint import Checkpoint
from .errors import CheckpointError, printable
from .formats import FORMATS, OURS, format_of, plan_of, reason_of


def require_fitting(checkpoint: Checkpoint, config: PreTrainedConfig) -> None:
    """Raises CheckpointError if weights of a RetNet have other shapes than its configuration says."""
    if not isinstance(config, RetNetConfig) or getattr(config, "quantization_config", None):
        return
    with torch.device("meta"):
        expected = AutoModel.from_config(config).state_dict()
    held = {name.removeprefix("model."): tensor.shape for name, tensor in checkpoint.tensors.items()}
    if unfit := [name for name, shape in held.items() if name in expected and expected[name].shape != shape]:
        many = f"{len(unfit)} have another shape"
        raise CheckpointError(f"the weights in {checkpoint.path} do not fit its config.json: {many}")


def describe(checkpoint: Checkpoint) -> tuple[Table, Table | None]:
    """Returns a table of facts about a checkpoint, and one of its heads' decays, if any. Raises CheckpointError."""
    format_name, config = format_of(checkpoint), None
    files, tensors, types = len(checkpoint.files), checkpoint.tensors.values(), Counter()
    size = sum(file.stat().st_size for file in checkpoint.files)
    for tensor in tensors:
        types[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    known = {OURS: "retnet_hf's own", None: "unknown"}
    facts = Table(Column(style="bold"), Column(), box=None, show_header=False)
    facts.add_row("what", printable(checkpoint.path))
    facts.add_row("format", known.get(format_name) or f"{format_name}: {FORMATS[format_name].DESCRIPTION}")
    facts.add_row("size", f"{size:,} bytes in {files} file{'s' if files > 1 else ''}")
    facts.add_row("tensors", f"{len(tensors):,}, of {types.total():,} numbers")
    facts.add_row("dtype", ", ".join(name for name, _ in types.most_common()))
    if format_name == OURS:
        try:
            config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
        except Exception as error:  # fields of a wrong type may lead to any error
            raise CheckpointError(f"the configuration of {checkpoint.path} cannot be used: {reason_of(error)}") from error
        require_fitting(checkpoint, config)
    elif format_name is not None:
        try:
            plan = plan_of(checkpoint)
        except CheckpointError as error:
            facts.add_row("convertible", printable(f"no: {error}"))
        else:
            config = plan.config
            facts.add_row("convertible", f"yes, to {plan.model_class.__name__}")
            facts.add_row("parameters", f"{sum(parameter.numel() for parameter in plan.empty_model().parameters()):,}")
    if not isinstance(config, RetNetConfig):
        return facts, None
    facts.add_row("shape", f"{config.num_hidden_layers} layers of {config.hidden_size}, vocabulary {config.vocab_size:,}")
    facts.add_row("heads", f"{config.num_attention_heads}, keys of {config.head_dim}, values of {config.value_head_dim}")
    retaining = [layer for layer, kind in enumerate(config.layer_types) if kind == "linear_attention"]
    if not config.bidirectional:
        state = 4 * config.state_size + 8 * len(retaining)  # 8 bytes hold the position
        facts.add_row("state", f"{state:,} bytes per sequence (float32), however long it is")
        if config.has_softmax_attention:
            others = config.num_hidden_layers - len(retaining)
            facts.add_row("attention", f"{others} layers, {config.cache_size_per_token:,} numbers per token that they see")

    each = config.has_decays_per_layer
    titles = [*(["layer"] if each else []), "head", "decay γ", "half-life in tokens", "1 % left after"]
    decays = Table(*(Column(title, justify="right") for title in titles))
    for layer in retaining if each else retaining[:1]:
        for head, decay in enumerate(config.decays(layer)):
            spans = ["never"] * 2 if decay == 1 else [f"{math.log(left) / math.log(decay):,.1f}" for left in (0.5, 0.01)]
            decays.add_row(*([str(layer)] if each else []), str(head), f"{decay:.8g}", *spans)
    return facts, decays
