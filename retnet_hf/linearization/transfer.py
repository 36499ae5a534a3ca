# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Transfer of a transformer's weights to a RetNet: exact in layers that keep softmax attention, a start in other layers."""

import copy
from collections.abc import Collection, Iterable
from functools import partial
from typing import NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridConfig, RetNetHybridForCausalLM
from retnet_hf.arguments.checks import scheduled_decays
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.retnet.configuration_retnet import OF_HYBRIDS


NAMES = {"input_layernorm": "retention_norm", "post_attention_layernorm": "mlp_norm"}
# Maps a model_type to fields: whether queries, keys and values have biases, and whether heads are normalised.
SOURCES: dict[str, dict[str, bool]] = {
    "llama": {"qkv_bias": False, "use_qk_norm": False},
    "mistral": {"qkv_bias": False, "use_qk_norm": False},
    "qwen2": {"qkv_bias": True, "use_qk_norm": False},
    "qwen3": {"qkv_bias": False, "use_qk_norm": True},
}


class SourceError(CheckpointError):
    """Raised for a model that cannot be linearized. The message is a sentence."""


class HeadMeasures(NamedTuple):
    """Measures of each layer and head, (layers, H) float64."""

    distance: Tensor  # mean distance, in tokens, to the tokens that a token attends to, weighted by attention
    rms: Tensor  # root mean square of the head's output


@torch.no_grad()
def measure_heads(source: PreTrainedModel, blocks: Iterable[Tensor]) -> HeadMeasures:
    """Measures the heads on blocks of token ids, (B, T) each, with one layer's attention weights in memory at a time.

    Raises:
        ValueError: if there is no block.
    """
    config, layers = source.config, source.model.layers
    shape, tokens = (len(layers), config.num_attention_heads), 0
    distance, squares = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)

    def attended(index: int, _: nn.Module, __: tuple, output: tuple[Tensor, Tensor]) -> None:
        weights = output[1].float()  # (B, H, T, T)
        place = torch.arange(weights.shape[-1], dtype=torch.float32, device=weights.device)
        # In half precision, the weights of a token hardly ever sum to 1, so their sum is used.
        distance[index] += (place * weights.sum(-1) - weights @ place).cpu().double().sum(dim=(0, 2))

    def entered(index: int, _: nn.Module, inputs: tuple[Tensor]) -> None:
        heads = inputs[0].unflatten(-1, (shape[1], -1)).float()  # (B, T, H, V)
        squares[index] += heads.square().mean(-1).cpu().double().sum(dim=(0, 1))

    handles = []
    for index, layer in enumerate(layers):
        handles.append(layer.self_attn.register_forward_hook(partial(attended, index)))
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(partial(entered, index)))
    implementation, training = source.config._attn_implementation, source.training
    source.set_attn_implementation("eager")  # only "eager" returns attention weights
    source.eval()
    try:
        for ids in blocks:
            tokens += ids.numel()
            source.model(ids.to(source.device), use_cache=False)
    finally:
        source.set_attn_implementation(implementation)
        source.train(training)
        for handle in handles:
            handle.remove()
    if not tokens:
        raise ValueError("blocks must hold at least one block of tokens.")
    return HeadMeasures(distance / tokens, (squares / tokens).sqrt())


def softmax_config(source: PreTrainedConfig) -> RetNetHybridConfig:
    """Returns the configuration of the same function, with softmax attention in every layer.

    Raises:
        SourceError: for another type of model, or a model with a part that RetNet does not have.
    """
    kind = source.model_type
    if kind not in SOURCES:
        supported = f"Supported are {', '.join(SOURCES)}, without mixtures of experts."
        raise SourceError(f"a model of model_type {kind!r} cannot be linearized. {supported}")
    if quantised := getattr(source, "quantization_config", None):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        raise SourceError(f"the model's weights are quantised ({method}): linearization needs full or half precision.")
    for field in ("attention_bias", "mlp_bias"):
        if getattr(source, field, False):
            raise SourceError(f"{field} must be False for linearization: RetNetConfig has no such biases.")
    heads = source.num_attention_heads
    head_dim = getattr(source, "head_dim", None) or source.hidden_size // heads
    if kind == "mistral":
        layer_types = ["full_attention" if source.sliding_window is None else "sliding_attention"] * source.num_hidden_layers
    else:
        layer_types = list(getattr(source, "layer_types", None) or ["full_attention"] * source.num_hidden_layers)
    expansion = heads * head_dim / source.hidden_size
    fields = {
        "key_expansion": expansion,
        "value_expansion": expansion,
        "layer_types": layer_types,
        "sliding_window": source.sliding_window if "sliding_attention" in layer_types else None,
        "rope_parameters": dict(source.rope_parameters),
        "initialization": "normal",
        **SOURCES[kind],
    }
    same = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    same += ("intermediate_size", "hidden_act", "rms_norm_eps", "max_position_embeddings", "initializer_range")
    same += ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    try:
        return RetNetHybridConfig(**{field: getattr(source, field) for field in same}, **fields)
    except (StrictDataclassError, ValueError) as error:
        cause = error.__cause__ or error
        raise SourceError(f"this {kind} model cannot be linearized: {cause}") from error


def decays_by_distance(schedule: str, distance: Tensor, decay_range: tuple[float, float], groups: int | None) -> list[float]:
    """Returns γ of each head of a layer, from `schedule`: the fastest for the head with the least `distance` (H,). Adjacent
    heads of one of `groups`, if given, share a decay by their mean distance.
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
    """Returns the configuration with retention, or windows of softmax attention, in all layers except the kept ones.

    The arguments are the arguments of `transfer`.

    Raises:
        SourceError: if a kept layer does not exist, if states cannot be shared, or if the model already has windows.
    """
    if window is not None and softmax.sliding_window is not None:
        raise SourceError(f"the model already has windows of {softmax.sliding_window} tokens, and can have only one size.")
    layers = range(softmax.num_hidden_layers)
    if share_states and softmax.num_key_value_heads == softmax.num_attention_heads:
        raise SourceError("states cannot be shared: each key/value head of the model serves a single query head.")
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
    """Returns a RetNet with the weights of a transformer of a type in `SOURCES`.

    If every layer is kept, it computes the same function as the transformer. In layers where retention replaces softmax
    attention, heads that look back less get faster decays. The output projection is multiplied by the size of each head's
    output, because the head norm removes it. A sigmoid gate with zero weights halves the output, and the projection is
    doubled. Training then has to learn only the difference between the two types of attention.

    Args:
        kept: layers that keep softmax attention; all by default.
        measures: result of `measure_heads`. Without it, decays follow the order of heads, and outputs have size 1.
        schedule, decay_range: schedule of the decays that are distributed over the heads of a layer, as in RetNetConfig.
        gate_act: activation of the gate. A gate with another activation than "sigmoid" is initialised as in RetNet.
        window: replaces the source's attention by softmax attention over this many tokens, without retention.
        sinks: number of first tokens that stay visible in addition to the window.
        share_states: whether the query heads of a key/value head share one decay, and therefore one state.
        sink_distance: `attention_sink_distance` of the configuration, if there are sinks.

    Returns:
        The model in evaluation mode, with dtype, device and generation config of the source.

    Raises:
        SourceError: if the model cannot be linearized.
    """
    config = softmax = softmax_config(source.config)
    if kept is not None:
        options = (schedule, decay_range, gate_act, window, measures, share_states, sinks, sink_distance)
        config = linearized_config(softmax, kept, *options)
    with torch.device("meta"):
        model = (RetNetHybridForCausalLM if config.is_hybrid else RetNetForCausalLM)(config)
    model = model.to_empty(device=source.device)
    for mine, theirs in zip(model.model.layers, source.model.layers, strict=True):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj", *(("q_norm", "k_norm") if config.use_qk_norm else ())):
            _copy(getattr(mine.mixer, name), getattr(theirs.self_attn, name))
        for name in ("gate_proj", "up_proj", "down_proj"):
            _copy(getattr(mine.mlp, name), getattr(theirs.mlp, name))
        for before, after in NAMES.items():
            _copy(getattr(mine, after), getattr(theirs, before))
    _copy(model.model.embed_tokens, source.model.embed_tokens)
    _copy(model.model.norm, source.model.norm)
    if not config.tie_word_embeddings:
        _copy(model.lm_head, source.lm_head)
    model.init_weights()  # initialises modules without a counterpart
    model.to(source.dtype)

    heads = config.num_attention_heads
    for index, layer in enumerate(model.model.layers):
        if config.layer_types[index] != "linear_attention":
            continue
        # The output projection compensates for the effect of norm and gate on the size of a head's output.
        factor = torch.ones(heads, dtype=torch.float64) if measures is None else measures.rms[index]
        if config.output_gate_act == "sigmoid":
            layer.retention.g_proj.weight.zero_()
            factor = 2 * factor
        weight = layer.retention.o_proj.weight  # (D, H V)
        weight.copy_((weight.unflatten(1, (heads, -1)) * factor.to(weight)[:, None]).flatten(1))
    model.generation_config = copy.deepcopy(source.generation_config)
    return model.eval()


def _copy(mine: nn.Module, theirs: nn.Module) -> None:
    """Copies the parameters of one module to another with the same names and shapes."""
    mine.load_state_dict(theirs.state_dict())
    for parameter in mine.parameters():
        parameter._is_hf_initialized = True  # transformers then does not initialise it
