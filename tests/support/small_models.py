# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Small random models whose logits depend on all of the context, and the measuring tools that several test files share."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import retnet_hf
from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridConfig
from retnet_hf.conversion.foreign_config import decays_with_factors
from retnet_hf.retnet.configuration_retnet import OF_HYBRIDS


VOCAB_SIZE = 96
PAD = 0
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "partial_rotary_factor": 0.5}
YARN["original_max_position_embeddings"] = 64

DIALECTS = {
    # the default configuration, that of the fla-hub checkpoints
    "fla": {"num_attention_heads": 4, "intermediate_size": 64},
    # two key/value heads for four query heads; keys and values of other sizes; chunks and forms chosen by themselves; what
    # pretrained transformers have, biases and norms of queries and keys and other rotations; layers that differ
    "grouped": {"num_attention_heads": 4, "num_key_value_heads": 2, "key_expansion": 0.5, "chunk_size": None}
    | {"qkv_bias": True, "use_qk_norm": True, "rope_parameters": YARN, "max_position_embeddings": 256}
    # of the first layer, and of the second; of which the latter alone has a feature map, and states that heads share
    | {"decay_schedule": [[0.6, 0.3, 0.9, 0.99], [0.97, 0.97, 1.0, 1.0]], "feature_map": [None, "silu"]},
    # softmax attention, over all tokens and over the last ones, between layers of retention, of which the last has one state
    # for both its heads
    "hybrid": {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48}
    | {"value_expansion": 1.0}
    | {"layer_types": ["linear_attention", "full_attention", "sliding_attention", "linear_attention"]}
    | {"sliding_window": 6, "decay_schedule": [[0.6, 0.998], [1.0, 1.0], [1.0, 1.0], [0.95, 0.95]]},
    # windows beside which the first tokens of each document stay visible, at a bounded distance
    "sinks": {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 48, "value_expansion": 1.0}
    | {"num_hidden_layers": 3, "layer_types": ["linear_attention", "sliding_attention", "linear_attention"]}
    | {"sliding_window": 5, "attention_sinks": 2, "attention_sink_distance": 6}
    | {"decay_schedule": [[0.6, 0.998], [1.0, 1.0], [0.95, 0.95]]},
    # what learns best from scratch: no head norm, ReLU features, decays that reach further in the second layer
    "from scratch": {"num_attention_heads": 4, "intermediate_size": 40, "value_expansion": 2.0}
    | {"use_embedding_norm": True, "use_head_norm": False, "feature_map": "relu", "initialization": "fan_in"}
    | {"decay_schedule": "geometric", "decay_range": [[1, 8], [2, 64]]},
    # torchscale's: post-norm with DeepNet's factor, embeddings scaled and normalised, the decays of the paper's runs
    "torchscale": {"num_attention_heads": 2, "intermediate_size": 56, "value_expansion": 1.5, "hidden_act": "gelu"}
    | {"decay_schedule": "log_linear", "rotary_endpoint": True, "head_norm_affine": False}
    | {"embedding_multiplier": 32**0.5, "use_embedding_norm": True, "norm_position": "post"}
    | {"residual_multiplier": 1.4, "chunk_size": 5},
}

# Families whose decays are constant, too, each with the options of its published models.
FAMILIES = {
    # norms over all heads, sigmoid gates; softmax attention without rotation, whose queries grow with the position
    "hypenet": {"num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 56, "value_expansion": 1.0}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    | {"rotary_layers": "linear_attention", "attention_num_heads": 2, "attention_num_key_value_heads": 1}
    | {"attention_head_dim": 12, "attention_gate_act": "sigmoid", "attention_log_base": 20}
    | {"decay_schedule": "alibi", "head_norm_groups": 1, "output_gate_act": "sigmoid", "use_qk_norm": True},
    # learned angles in the first layer, no weights of norms, no activations of the gate and of the feed-forward
    "transnormer": {"num_attention_heads": 4, "intermediate_size": 40, "value_expansion": 1.0, "use_rotary": False}
    | {"learned_rotary_layers": [0], "decay_schedule": decays_with_factors("alibi", 4, [1.0, 1e-5])}
    | {"feature_map": "silu", "head_norm_groups": 1, "head_norm_affine": False, "norm_affine": False}
    | {"output_gate_act": "linear", "hidden_act": "linear", "embedding_multiplier": 32**0.5},
    # activations of values, too, sums of normalised stream and branch, experts in every layer
    "minimax": {"num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 24, "value_expansion": 1.0}
    | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    | {"rotary_layers": "softmax_attention", "attention_num_key_value_heads": 2}
    | {"decay_schedule": decays_with_factors("alibi", 4, [1.0, 0.5, 1e-5]), "feature_map": "silu"}
    | {"value_act": "silu", "head_norm_groups": 1, "head_norm_eps": 1e-6, "output_gate_act": "sigmoid"}
    | {"norm_position": "post", "use_embedding_norm": True, "residual_multiplier": 1.5}
    | {"attention_residual_multiplier": 1.25, "mlp_residual_multiplier": 1.4, "num_experts": 4},
    # norms over groups of heads, rotation of a part of each, experts of groups beside one of all tokens
    "ring": {"num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 40, "value_expansion": 1.0}
    | {"layer_types": ["linear_attention", "linear_attention", "full_attention"], "attention_num_key_value_heads": 1}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}, "use_qk_norm": True}
    | {"decay_schedule": decays_with_factors("alibi", 4, [1.5, 1.0, 0.5])}
    | {"head_norm_groups": 2, "output_gate_act": "sigmoid", "num_experts": 8, "num_experts_per_tok": 3}
    | {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_shared_experts": 1, "router_act": "sigmoid"}
    | {"use_router_bias": True, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
}

# The three that differ most. Tests of what a model does by itself, whatever its options are, run with these.
COVERING = ("grouped", "hybrid", "torchscale")
of_every_model = pytest.mark.parametrize("model", [*DIALECTS, *FAMILIES], indirect=True)
FORMS = ("auto", "parallel", "chunkwise", "recurrent")
of_every_form = pytest.mark.parametrize(  # every model in the form of its choice, and those three in all
    ("model", "form"),
    [(name, form) for name in [*DIALECTS, *FAMILIES] for form in (FORMS if name in COVERING else FORMS[:1])],
    indirect=["model"],
)

# One layer of each kind, for exporters, which take seconds for each layer.
ONE_OF_EACH_KIND = {
    "sinks": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "sliding_attention"]}
    | {"decay_schedule": [[0.6, 0.998], [1.0, 1.0]]},
    "ring": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    | {"decay_schedule": decays_with_factors("alibi", 4, [1.5, 0.5])},
}


def config_class_of(fields: dict) -> type[RetNetConfig]:
    """Of a hybrid where one of the fields is of hybrids."""
    return RetNetHybridConfig if OF_HYBRIDS.keys() & fields.keys() else RetNetConfig


def small_config(dialect: str = "fla", **overrides) -> RetNetConfig:
    fields = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "chunk_size": 8}
    fields |= {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None} | (DIALECTS | FAMILIES)[dialect] | overrides
    return config_class_of(fields)(**fields)


@torch.no_grad()
def shake(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights, large enough that every token of the context sways the logits."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() < 2:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5, generator=generator)
    return model


def small_model(dialect: str = "fla", model_class: type = RetNetForCausalLM, seed: int = 0, **overrides):
    """A model of the class, or of its like for hybrids where the configuration is one."""
    config = small_config(dialect, **overrides)
    if config.is_hybrid and not model_class.__name__.startswith("RetNetHybrid"):
        model_class = getattr(retnet_hf, model_class.__name__.replace("RetNet", "RetNetHybrid"))
    return shake(model_class(config), seed).eval()


def small_llama() -> LlamaForCausalLM:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return shake(LlamaForCausalLM(LlamaConfig(**sizes, intermediate_size=64, pad_token_id=PAD, eos_token_id=None))).eval()


@contextmanager
def as_for_a_llama(same: Callable[[LlamaForCausalLM], object]) -> Iterator[None]:
    """Skips a test that fails where `same`, the same use of another library with a tiny Llama, fails likewise."""
    try:
        yield
    except Exception as error:
        try:
            same(small_llama())
        except type(error) as theirs:
            pytest.skip(f"the same fails for a Llama: {theirs}")
        raise


def random_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB_SIZE, (batch, length), generator=torch.Generator().manual_seed(seed))


def greedy(model, input_ids=None, tokens: int = 20, **kwargs):
    return model.generate(input_ids, max_new_tokens=tokens, do_sample=False, **kwargs)


def detailed(model, input_ids=None, tokens: int = 20, **kwargs):
    """As `greedy`, with scores and the state."""
    return greedy(model, input_ids, tokens, output_scores=True, return_dict_in_generate=True, **kwargs)


def left_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts (1, T_i) -> ids and attention mask (B, T)."""
    longest = max(prompt.shape[1] for prompt in prompts)
    ids = torch.cat([nn.functional.pad(prompt, (longest - prompt.shape[1], 0), value=PAD) for prompt in prompts])
    return ids, torch.cat([nn.functional.pad(torch.ones_like(p), (longest - p.shape[1], 0)) for p in prompts])


def rounding(terms: int = 1, dtype: torch.dtype = torch.float32) -> float:
    """The tolerance of `close` for sums of so many `terms` in `dtype`, whose errors grow with the square root of them."""
    return 16 * torch.finfo(dtype).eps * terms**0.5


def close(actual, expected, tolerance: float = 1e-4) -> None:
    """Equal to `tolerance` of the size of the expected values: two tensors, or as many on either side."""
    if not isinstance(expected, Tensor):
        for one, other in zip(actual, expected, strict=True):
            close(one, other, tolerance)
        return
    assert expected.isfinite().all()
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(1.0, expected.abs().max().item()))


def same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].equal(tensor), name


class LargestTensor(TorchDispatchMode):
    """The most elements in a tensor that an operation has made within, and not as a view; but for one number of them."""

    def __init__(self, but: int | None = None) -> None:
        super().__init__()
        self.elements, self.but = 0, but

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not function.is_view:
            made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            self.elements = max([self.elements, *(elements for elements in made if elements != self.but)])
        return result


def tensors_within(thing, seen: set[int] | None = None) -> list[Tensor]:
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, (type, str, bytes)):
        return []
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        return [thing]
    if isinstance(thing, dict):
        children = list(thing.values())
    elif isinstance(thing, (list, tuple, set)):
        children = list(thing)
    else:
        children = list(getattr(thing, "__dict__", {}).values())
    return [tensor for child in children for tensor in tensors_within(child, seen)]


def memory(thing) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_within(thing)}
    return sum(storages.values())


def remembered(layer, row: int) -> list[Tensor]:
    """What a layer's state holds of a sequence: its matrices, or keys and values of the tokens that the next one sees."""
    if hasattr(layer, "recurrent_states"):
        return [layer.recurrent_states[row]]
    count, columns, (window, sinks) = layer.count[row], layer.columns, layer.reach
    seen = (layer.document[row] >= 0) & (count >= count[-1] + 2 - (window or 10**9))
    seen |= columns.beginnings(sinks)[row] & (layer.document[row] == columns.documents[row, -1])
    return [layer.keys[row, :, seen], layer.values[row, :, seen]]


def state_values(state) -> list[Tensor]:
    """What a state knows, as tensors to compare: of each layer what it remembers, and the position that follows."""
    values = []
    for layer in state.layers:
        values += [tensor for row in range(layer.batch_size) for tensor in remembered(layer, row)]
        values.append(layer.next_position)
    return values


def same_state(actual, expected, tolerance: float = 1e-5) -> None:
    assert len(actual.layers) == len(expected.layers) > 0
    close(state_values(actual), state_values(expected), tolerance)


def word_tokenizer(end: int | None = None) -> PreTrainedTokenizerFast:
    """Words "w3" … "w95" are the tokens 3 … 95, one of which may end texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"<pad>": PAD, "<s>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "unk_token": "<unk>"}
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, padding_side="left")
    words.eos_token = None if end is None else f"w{end}"
    return words


# The beginning of a program for another process, in which `retnet_hf` cannot be imported.
PACKAGE_ABSENT = """
import gc; gc.disable()
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "retnet_hf":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def multiply_bfloat16(replace: Callable = setattr) -> list[torch.dtype]:
    """Has retention multiply bfloat16 as such from here on; returns a list of what dtypes were multiplied."""
    plain, multiplied = torch.bmm, []

    def bmm(left: Tensor, right: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        if out_dtype is None:
            return plain(left, right)
        multiplied.extend((left.dtype, right.dtype))
        return plain(left.to(out_dtype), right.to(out_dtype))

    replace(torch, "bmm", bmm)
    for module in ("ops.retention_forms", "ops.plan"):
        replace(sys.modules[f"retnet_hf.{module}"], "multiplies_bfloat16", lambda device: True)
    return multiplied


HYBRID = {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 4}
SLIDING = {"layer_types": ["linear_attention", "sliding_attention"], "sliding_window": 5}
EXPERTS = {"num_experts": 4}
SIZES = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
LATENT = {"layer_types": ["linear_attention", "full_attention"], "kv_lora_rank": 6} | SIZES

# another value of each field with an effect, and, where that depends on other fields, those
CHANGES = {"vocab_size": 60, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
CHANGES |= {"num_key_value_heads": 2, "intermediate_size": 96, "hidden_act": "gelu", "key_expansion": 0.5}
CHANGES |= {"value_expansion": 1.0, "decay_schedule": "log_linear"}
CHANGES |= {"decay_range": ((3, 512), {"decay_schedule": "geometric"})}
CHANGES |= {"layer_types": (["linear_attention", "full_attention"], {}), "sliding_window": (5, HYBRID)}
CHANGES |= {"attention_sinks": (2, SLIDING), "attention_sink_distance": (9, SLIDING | {"attention_sinks": 2})}
CHANGES |= {"attention_num_heads": (8, HYBRID), "attention_num_key_value_heads": (2, HYBRID)}
CHANGES |= {"attention_head_dim": (6, HYBRID), "attention_gate_act": ("sigmoid", HYBRID)}
CHANGES |= {"attention_qkv_bias": (True, HYBRID), "attention_use_qk_norm": (True, HYBRID)}
CHANGES |= {"attention_rope_theta": (500.0, HYBRID), "attention_max_length": (50, HYBRID), "kv_lora_rank": (8, LATENT)}
CHANGES |= {"q_lora_rank": (8, LATENT), **dict.fromkeys(SIZES, (8, LATENT))}
CHANGES |= {"qk_norm_eps": (0.5, {"use_qk_norm": True}), "logits_scaling": 4.0, "attention_log_base": (500.0, HYBRID)}
CHANGES |= {"attention_residual_multiplier": (2.0, HYBRID), "mlp_residual_multiplier": 2.0}
CHANGES |= {"rotary_layers": ("linear_attention", HYBRID), "learned_rotary_layers": [0], "head_norm_groups": 1}
CHANGES |= {"head_norm_eps": 1e-3, "value_act": "silu", "norm_affine": False, "num_experts": 4}
CHANGES |= {"num_experts_per_tok": (3, EXPERTS), "moe_intermediate_size": (24, EXPERTS)}
CHANGES |= {"first_k_dense_replace": (1, EXPERTS), "n_shared_experts": (1, EXPERTS)}
CHANGES |= {"router_act": ("sigmoid", EXPERTS), "use_router_bias": (True, EXPERTS)}
CHANGES |= {"n_group": (2, EXPERTS | {"topk_group": 1, "num_experts_per_tok": 1})}
CHANGES |= {"topk_group": (2, EXPERTS | {"n_group": 2}), "norm_topk_prob": (False, EXPERTS)}
CHANGES |= {"routed_scaling_factor": (2.5, EXPERTS), "use_rotary": False, "rotary_endpoint": True}
CHANGES |= {"rope_parameters": ({"rope_type": "default", "rope_theta": 500.0}, {}), "qkv_bias": True}
CHANGES |= {"use_qk_norm": True, "use_output_gate": False, "output_gate_act": "gelu", "use_head_norm": False}
CHANGES |= {"head_norm_affine": False, "use_gated_mlp": False, "feature_map": "relu", "embedding_multiplier": 5.0}
CHANGES |= {"use_embedding_norm": True, "norm_position": "post", "residual_multiplier": 2.0, "bidirectional": True}
CHANGES |= {"rms_norm_eps": 1e-5}
