# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""microsoft/torchscale's RetNet: state dicts of its RetNetDecoder, and fairseq checkpoints with prefix `decoder.`.

The layout of 2023-07, with biases and LayerNorms, is recognised and refused, since RetNetConfig has no option for them.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from retnet_hf.retnet.configuration_retnet import RetNetConfig
from retnet_hf.retnet.modeling_retnet import RetNetForCausalLM, RetNetPreTrainedModel

from .changes import Shape
from .dialect import Dialect, renamed
from .errors import CheckpointError
from .moves import Conversion, Move, dialect_moves, empty_model, model_from, saved_tensors, written, xpos_buffers


NAME, DESCRIPTION = "torchscale", "microsoft/torchscale's RetNet, or a fairseq checkpoint of it"
TORCHSCALE = Dialect(
    name="torchscale",
    sign=".retention.out_proj.weight",
    modules=(
        ("output_projection", "lm_head"),
        ("layernorm_embedding", "embed_norm"),
        ("layer_norm", "norm"),
        ("retention_layer_norm", "retention_norm"),
        ("final_layer_norm", "mlp_norm"),
        ("retention.out_proj", "retention.o_proj"),
        ("ffn.fc1", "mlp.gate_proj"),
        ("ffn.gate", "mlp.up_proj"),
        ("ffn.fc2", "mlp.down_proj"),
    ),
    interleaved=True,
    unused=r"\bretnet_rel_pos\.(angle|decay)$",
)


def recognises(names: Collection[str], config: dict[str, Any] | None) -> bool:
    return of_syncdoth(names, config) is False


def of_syncdoth(names: Collection[str], config: dict[str, Any] | None) -> bool | None:
    """Returns whether a model is syncdoth's, whole or without a head; False for torchscale's, and None for any other."""
    if not TORCHSCALE.names_any_of(names) or (config is not None and "decoder_embed_dim" not in config):
        return None
    headless = not any("output_projection." in name for name in names)
    return any(name.startswith("model.") for name in names) or (headless and (config or {}).get("model_type") == "retnet")


def plan(shapes: Mapping[str, Shape], config: dict[str, Any] | None) -> Conversion:
    if config is not None:  # fairseq saves the arguments that RetNetConfig reads together with hundreds of others
        read = {*torchscale_arguments(RetNetConfig()), "moe_freq", "multiway", "xpos_rel_pos", "use_glu"}
        config = {name: value for name, value in config.items() if name in read}
    prefix = "decoder." if any(name.startswith("decoder.layers.") for name in shapes) else ""
    return plan_with_prefixes(NAME, shapes, config, body=prefix, head=f"{prefix}output_projection.weight")


def plan_with_prefixes(
    target_format: str,
    shapes: Mapping[str, Shape],
    config: dict[str, Any] | None,
    body: str,
    head: str,
    model_class: type[RetNetPreTrainedModel] = RetNetForCausalLM,
) -> Conversion:
    """Returns the plan of torchscale's layout, or of syncdoth's, which has the same tensors under other prefixes."""
    if config is None:
        needed = "a config.json next to the weights, or arguments in them"
        raise CheckpointError(f"the format {target_format} needs a configuration: {needed}")
    homeless = {re.sub(r"^.*layers\.\d+\.", "", name) for name in shapes if re.search(r"\.bias$|ffn_layernorm", name)}
    if homeless:
        said = f"the format {target_format} in this layout has tensors without a place in RetNetConfig"
        raise CheckpointError(f"{said}, which has no biases and only RMS norms: {', '.join(sorted(homeless))}")
    if config.get("vocab_size", -1) <= 0 and f"{body}embed_tokens.weight" in shapes:  # fairseq stores it in its dictionary
        config = {**config, "vocab_size": shapes[f"{body}embed_tokens.weight"][0]}
    ours = RetNetConfig(**config)
    moves = planned_moves(ours, body, head, tied_twice=head in shapes, model_class=model_class)
    used = {source for move in moves for source in move.sources}
    # The buffers may be absent. Conversion.check reports tensors that are left over.
    moves = [move for move in moves if move.targets or move.sources[0] in shapes]
    modules = TORCHSCALE.modules_of(ours)
    moves += [Move((name,), (renamed(name, modules),)) for name in shapes if name not in used]
    return Conversion(target_format, model_class, ours, moves)


def planned_moves(
    ours: RetNetConfig, body: str, head: str, tied_twice: bool, model_class: type[RetNetPreTrainedModel] = RetNetForCausalLM
) -> list[Move]:
    """Returns all moves of the layout. `body`: prefix of names but `head`. `tied_twice`: whether a tied head exists."""

    def theirs(name: str) -> str:
        return head if name == "lm_head.weight" else body + TORCHSCALE.theirs(name.removeprefix("model."), ours)

    copy = head if ours.tie_word_embeddings and tied_twice else None
    moves = dialect_moves(TORCHSCALE, ours, saved_tensors(empty_model(model_class, ours)), theirs, copy)
    return moves + xpos_buffers(f"{body}retnet_rel_pos", ours.head_dim, ours.decays())


def from_torchscale(state_dict: Mapping[str, Tensor], config: dict[str, Any]) -> RetNetForCausalLM:
    """Returns the model of a RetNetDecoder.

    Args:
        state_dict: its tensors. config: the arguments of torchscale's RetNetConfig by name.

    Raises:
        CheckpointError: if a tensor is missing, left over, not finite, or has a wrong shape, or for the layout of 2023-07,
            with the names of all tensors for which RetNetConfig has no option.
        ValueError: for a configuration without a counterpart here.
    """
    return model_from(plan, state_dict, config)


def to_torchscale(model: RetNetForCausalLM) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns state dict and configuration of the same model for torchscale's RetNetDecoder.

    Raises:
        ValueError: for a field of the configuration for which torchscale has no option.
    """
    config = torchscale_arguments(model.config)
    moves = planned_moves(model.config, body="", head="output_projection.weight", tied_twice=True)
    return written(NAME, model, config, plan, moves)


def torchscale_arguments(ours: RetNetConfig) -> dict[str, Any]:
    """Returns the arguments of torchscale's RetNetConfig for our configuration. syncdoth's config.json shares most."""
    return {
        "decoder_embed_dim": ours.hidden_size,
        "decoder_value_embed_dim": round(ours.hidden_size * ours.value_expansion),
        "decoder_retention_heads": ours.num_attention_heads,
        "decoder_ffn_embed_dim": ours.intermediate_size,
        "decoder_layers": ours.num_hidden_layers,
        "decoder_normalize_before": ours.norm_position == "pre",
        "activation_fn": "swish" if ours.hidden_act == "silu" else ours.hidden_act,
        "dropout": ours.hidden_dropout,
        "activation_dropout": ours.activation_dropout,
        "no_scale_embedding": ours.embedding_multiplier == 1,
        "layernorm_embedding": ours.use_embedding_norm,
        "deepnorm": ours.residual_multiplier != 1,
        "share_decoder_input_output_embed": ours.tie_word_embeddings,
        "layernorm_eps": ours.rms_norm_eps,
        "recurrent_chunk_size": ours.chunk_size or 512,
        "vocab_size": ours.vocab_size,
    }
