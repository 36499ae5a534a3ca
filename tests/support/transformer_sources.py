# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Small models of transformers that are linearized."""

import transformers
from small_models import LLAMA3, shake
from torch import Tensor
from torch.nn import functional as F


SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 512}

# families, and fields of their configurations
SOURCES = {"Llama 3": {"rope_parameters": LLAMA3}, "Qwen2": {}, "Qwen3": {"head_dim": 16}, "Mistral": {"sliding_window": 7}}


def divergence(logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """The Kullback-Leibler divergence of the student from the teacher, in nats: (..., V), (..., V) -> (...)."""
    log_probs, teacher = (each.float().log_softmax(-1) for each in (logits, teacher_logits))
    return F.kl_div(log_probs, teacher, log_target=True, reduction="none").sum(-1)


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:
    """The losses of all tokens but the first, (B, T-1), from logits (B, T, V) for ids (B, T)."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2).float(), ids[:, 1:], reduction="none")


def source_of(name: str, **fields):
    config_class, model_class = (getattr(transformers, name.split()[0] + kind) for kind in ("Config", "ForCausalLM"))
    return shake(model_class(config_class(**(SIZES | SOURCES[name] | {"eos_token_id": None} | fields)))).eval()
