# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The weights of a transformer, in a RetNet: as they are where softmax attention stays, and as a start where it does not."""

import copy
from collections.abc import Collection

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridConfig, RetNetHybridForCausalLM
from retnet_hf.arguments.decay_schedules import scheduled_decays
from retnet_hf.retnet.configuration_retnet import OF_HYBRIDS

from .reach_of_heads import HeadMeasures
from .teachers import SourceError, softmax_config


NAMES = {"input_layernorm": "retention_norm", "post_attention_layernorm": "mlp_norm"}


def decays_by_distance(
    schedule: str, distance: Tensor, decay_range: tuple[float, float] = (2, 512), groups: int | None = None
) -> list[float]:
    """γ of each head of a layer: the decays of a schedule, the fastest for the head that looks back least.

    Args:
        schedule: a name that `decay_schedule` of RetNetConfig knows. distance: (H,), of each head.
        groups: of heads side by side that share a decay, which goes by their mean distance; a decay for each head if absent.
    """
    heads = len(distance)
    distance = distance.view(groups or heads, -1).mean(1)
    decays = sorted(scheduled_decays(schedule, len(distance), decay_range))
    ranks = distance.argsort(stable=True).argsort(stable=True)
    return [decays[rank] for rank in ranks.tolist() for _ in range(heads // len(distance))]


def linearized_config(
    softmax: RetNetHybridConfig,
    kept: Collection[int] = (),
    schedule: str = "alibi",
    decay_range: tuple[float, float] = (2, 512),
    gate_act: str = "sigmoid",
    window: int | None = None,
    measures: HeadMeasures | None = None,
    share_states: bool = False,
    sinks: int = 0,
    sink_distance: int | None = None,
) -> RetNetConfig:
    """The configuration with retention, or with windows of softmax attention, in all layers but those kept.

    The arguments are those of `transfer`.

    Raises:
        SourceError: for a layer that is not there, states that nobody could share, or windows in a model that has some.
    """
    if window is not None and softmax.sliding_window is not None:
        raise SourceError(f"it has windows of its own, of {softmax.sliding_window} tokens, and a model has one window.")
    layers = range(softmax.num_hidden_layers)
    if share_states and softmax.num_key_value_heads == softmax.num_attention_heads:
        raise SourceError("its states cannot be shared: each of its key/value heads serves one query head alone.")
    if unknown := sorted(set(kept) - set(layers)):
        raise SourceError(f"layer {unknown[0]} cannot be kept: the model has layers 0 to {len(layers) - 1}.")
    replacement = "linear_attention" if window is None else "sliding_attention"
    kinds = [kind if layer in kept else replacement for layer, kind in enumerate(softmax.layer_types)]
    slides = "sliding_attention" in kinds
    if window is not None:
        fields = {"layer_types": kinds, "sliding_window": window if slides else None}
        if slides and sinks:
            fields |= {"attention_sinks": sinks, "attention_sink_distance": sink_distance}
        return RetNetHybridConfig.from_dict(softmax.to_dict() | fields)
    fields = softmax.to_dict() | {
        "layer_types": kinds,
        "sliding_window": softmax.sliding_window if slides else None,
        "use_output_gate": True,
        "output_gate_act": gate_act,
    }
    groups = softmax.num_key_value_heads if share_states else None
    if measures is None and not share_states:
        fields |= {"decay_schedule": schedule, "decay_range": list(decay_range)}
    else:
        in_order = torch.arange(softmax.num_attention_heads).double().expand(len(layers), -1)
        distance = in_order if measures is None else measures.distance
        fields["decay_schedule"] = [decays_by_distance(schedule, row, decay_range, groups) for row in distance]
    if "linear_attention" in kinds and len(set(kinds)) == 1:
        plain = {name: value for name, value in fields.items() if name not in OF_HYBRIDS}
        return RetNetConfig.from_dict(plain | {"model_type": "retnet"})
    return RetNetHybridConfig.from_dict(fields)


@torch.no_grad()
def transfer(
    source: PreTrainedModel,
    kept: Collection[int] | None = None,
    measures: HeadMeasures | None = None,
    schedule: str = "alibi",
    decay_range: tuple[float, float] = (2, 512),
    gate_act: str = "sigmoid",
    window: int | None = None,
    share_states: bool = False,
    sinks: int = 0,
    sink_distance: int | None = None,
) -> RetNetForCausalLM:
    """A RetNet with the weights of a transformer of the kinds in `SOURCES`.

    With every layer kept it computes what the transformer computes. Where retention takes the place of softmax attention,
    the decays of heads go by how far they look back, and the output projection is multiplied by the size of each head's
    output, which the norm of the head takes away; a sigmoid gate with weights of 0 halves, which the projection undoes. What
    is left for training is the difference between the two kinds of attention.

    Args:
        kept: layers that stay softmax attention; all by default.
        measures: of the heads, by `measure_heads`; without them heads are taken in their order, and as large as 1.
        schedule, decay_range: whose decays the heads of a layer share out among them, as in RetNetConfig.
        gate_act: activation of the gate. With another than "sigmoid" the gate begins as RetNet's does.
        window: softmax attention over so many tokens takes the place of the source's, and there is no retention.
        sinks: first tokens that stay visible beside the window.
        share_states: whether the heads of a key/value head have one decay, and with it one state in the place of as many as
            they are.
        sink_distance: `attention_sink_distance` of the configuration, where it has sinks.

    Returns:
        The model in the dtype and on the device of the source, with its generation config, in evaluation mode.

    Raises:
        SourceError: for a model that cannot be linearized, in a sentence.
    """
    softmax = softmax_config(source.config)
    layers = range(softmax.num_hidden_layers)
    config = softmax
    if kept is not None:
        options = (schedule, decay_range, gate_act, window, measures, share_states, sinks, sink_distance)
        config = linearized_config(softmax, kept, *options)
    with torch.device("meta"):
        model = (RetNetHybridForCausalLM if config.is_hybrid else RetNetForCausalLM)(config)
    model = model.to_empty(device=source.device)
    for mine, theirs in zip(model.model.layers, source.model.layers, strict=True):
        mixer = mine.mixer
        names = ["q_proj", "k_proj", "v_proj", "o_proj", *(["q_norm", "k_norm"] if config.use_qk_norm else [])]
        for name in names:
            _copy(getattr(mixer, name), getattr(theirs.self_attn, name))
        for name in ("gate_proj", "up_proj", "down_proj"):
            _copy(getattr(mine.mlp, name), getattr(theirs.mlp, name))
        for before, after in NAMES.items():
            _copy(getattr(mine, after), getattr(theirs, before))
    _copy(model.model.embed_tokens, source.model.embed_tokens)
    _copy(model.model.norm, source.model.norm)
    if not config.tie_word_embeddings:
        _copy(model.lm_head, source.lm_head)
    model.init_weights()  # of what has no counterpart
    model.to(source.dtype)

    for layer in layers:
        if config.layer_types[layer] == "linear_attention":
            _calibrate(model, layer, measures)
    model.generation_config = copy.deepcopy(source.generation_config)
    return model.eval()


def _copy(mine: nn.Module, theirs: nn.Module) -> None:
    """The parameters of one module into those of another, which must be alike in names and shapes."""
    mine.load_state_dict(theirs.state_dict())
    for parameter in mine.parameters():
        parameter._is_hf_initialized = True  # for transformers, which leaves it alone then


def _calibrate(model: RetNetForCausalLM, layer: int, measures: HeadMeasures | None) -> None:
    """Makes up for what norm and gate do to the size of a head's output."""
    retention, config = model.model.layers[layer].retention, model.config
    factor = torch.ones(config.num_attention_heads, dtype=torch.float64) if measures is None else measures.rms[layer]
    if config.output_gate_act == "sigmoid":
        retention.g_proj.weight.zero_()
        factor = 2 * factor
    weight = retention.o_proj.weight  # (D, H V)
    by_head = weight.unflatten(1, (config.num_attention_heads, -1)) * factor.to(weight)[:, None]
    weight.copy_(by_head.flatten(1))
