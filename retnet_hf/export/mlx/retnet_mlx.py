# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNet (arXiv 2307.08621) for mlx-lm. mlx-lm loads this file by the key `model_file` of config.json.

Shapes: B batch, T tokens, M states, R heads that share a state, K key size, V value size. The decays, angles and sizes of a
model are under the key `mlx` in config.json. The weights are unchanged.
"""

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.base import BaseModelArgs
from mlx_lm.models.cache import ArraysCache


CHUNK = 128  # scores are computed for this many tokens at a time
DIGITS, BASE = 4, 256
ACTIVATIONS = {
    None: lambda x: x,
    "silu": nn.silu,
    "swish": nn.silu,
    "gelu": nn.gelu,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "relu": nn.relu,
    "relu2": nn.relu2,
    "sigmoid": mx.sigmoid,
    "tanh": mx.tanh,
}


@dataclass
class ModelArgs(BaseModelArgs):
    """The part of config.json that determines the function: `mlx`."""

    model_type: str
    mlx: dict


class Norm(nn.Module):
    """RMS norm with or without a weight."""

    def __init__(self, size: int, eps: float, affine: bool = True) -> None:
        super().__init__()
        self.eps = eps
        if affine:
            self.weight = mx.ones((size,))

    def __call__(self, x: mx.array) -> mx.array:
        return mx.fast.rms_norm(x, self.get("weight"), self.eps)


class Rotation:
    """Computes cosines and sines of a position times each frequency, accurately at any position below 2^32.

    A position is a sum of digits d 256^i. The rotation is the product of the rotations by each digit, from tables.
    """

    def __init__(self, frequencies: list, scaling: float) -> None:
        self.scaling = scaling
        with np.errstate(over="ignore"):
            places = np.arange(BASE)[None, :] * BASE ** np.arange(DIGITS)[:, None]  # (DIGITS, BASE)
            phase = places[..., None].astype(np.int64) * np.array(frequencies, dtype=np.int64)  # modulo 2^64
        angle = phase.astype(np.float64) * (2 * np.pi / 2**64)
        self.cos, self.sin = (mx.array(table.astype(np.float32)) for table in (np.cos(angle), np.sin(angle)))

    def __call__(self, position: mx.array) -> tuple:
        """Returns cos, sin (…, K/2) of positions (…)."""
        digits = [(position // BASE**power) % BASE for power in range(DIGITS)]
        cos, sin = self.cos[0][digits[0]], self.sin[0][digits[0]]
        for power in range(1, DIGITS):
            next_cos, next_sin = self.cos[power][digits[power]], self.sin[power][digits[power]]
            cos, sin = cos * next_cos - sin * next_sin, sin * next_cos + cos * next_sin
        return cos * self.scaling, sin * self.scaling


def rotated(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Returns vectors (…, T, K) with the pairs (i, i + K/2) rotated."""
    first, second = mx.split(x, 2, axis=-1)
    return mx.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


def retention(q: mx.array, k: mx.array, v: mx.array, log_decay: mx.array, state: mx.array, count: mx.array) -> tuple:
    """Computes the chunkwise form: q (B, M, R, T, K), k (B, M, T, K), v (B, M, T, V), state -> (B, M, R, T, V), state.

    R heads share a state (B, M, K, V), and `log_decay` (M,) has a value for each state. `count` (B|1, T) counts the tokens
    of a row up to each one. Padding is not counted and has zero keys, so that it changes neither the state nor outputs.
    """
    outputs, log_decay = [], log_decay[:, None]  # (M, 1)
    before = mx.zeros_like(count[:, :1])
    for start in range(0, q.shape[3], CHUNK):
        part = slice(start, start + CHUNK)
        query, key, value = q[:, :, :, part], k[:, :, part], v[:, :, part]
        place = (count[:, part] - before)[:, None]  # (B|1, 1, C)
        before, last = count[:, part][:, -1:], place[..., -1:]
        distance = place[..., None] - place[..., None, :]
        decay = mx.where(distance >= 0, mx.exp(mx.maximum(distance, 0) * log_decay[..., None]), 0)  # (B|1, M, C, C)
        scores = (query @ key[:, :, None].swapaxes(-1, -2)) * decay[:, :, None]
        of_state = mx.exp(place * log_decay)[:, :, None, :, None]  # (B|1, M, 1, C, 1)
        outputs.append(scores @ value[:, :, None] + (query * of_state) @ state[:, :, None])
        after = mx.exp((last - place) * log_decay)[..., None]  # (B|1, M, C, 1)
        state = mx.exp(last * log_decay)[..., None] * state + (key * after).swapaxes(-1, -2) @ value
    return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=3), state


class Retention(nn.Module):
    """Gated retention, equation 8 of the paper."""

    def __init__(self, sizes: dict, layer: int) -> None:
        super().__init__()
        self.sizes, own = sizes, sizes["layers"][layer]
        hidden, heads, groups = sizes["hidden_size"], sizes["heads"], sizes["groups"]
        key, value = sizes["head_dim"], sizes["value_head_dim"]
        self.q_proj = nn.Linear(hidden, heads * key, bias=sizes["qkv_bias"])
        self.k_proj = nn.Linear(hidden, groups * key, bias=sizes["qkv_bias"])
        self.v_proj = nn.Linear(hidden, groups * value, bias=sizes["qkv_bias"])
        self.o_proj = nn.Linear(heads * value, hidden, bias=False)
        if sizes["gate_act"] is not None:
            self.g_proj = nn.Linear(hidden, heads * value, bias=False)
        if sizes["qk_norm"]:
            self.q_norm, self.k_norm = (Norm(key, sizes["eps"], True) for _ in range(2))
        if sizes["head_norm"]:
            self.head_norm = Norm(value, sizes["eps"], sizes["head_norm_affine"])
        self._log_decay = mx.array(own["log_decays"], dtype=mx.float32)
        self._feature_map = ACTIVATIONS[own["feature_map"]]

    def __call__(self, x: mx.array, turn: tuple, cache: ArraysCache, mask: mx.array, count: mx.array) -> mx.array:
        (batch, length, _), sizes = x.shape, self.sizes
        heads, groups, states = sizes["heads"], sizes["groups"], len(self._log_decay)
        shape = (batch, length, -1)
        query = self.q_proj(x).reshape(*shape, sizes["head_dim"]).swapaxes(1, 2)
        key = self.k_proj(x).reshape(*shape, sizes["head_dim"]).swapaxes(1, 2)
        value = self.v_proj(x).reshape(*shape, sizes["value_head_dim"]).swapaxes(1, 2)
        if sizes["qk_norm"]:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = (each.astype(mx.float32) for each in (self._feature_map(query), self._feature_map(key), value))
        if turn is not None:
            query, key = rotated(query, *turn), rotated(key, *turn)
        query = (query * sizes["head_dim"] ** -0.5).reshape(batch, states, heads // states, length, -1)
        if states > groups:  # heads share keys and values, but have different decays
            key, value = (mx.repeat(each, states // groups, axis=1) for each in (key, value))
        if mask is not None:
            key = mx.where(mask[:, None, :, None], key, 0)
        state = cache[0]
        if state is None:
            state = mx.zeros((batch, states, sizes["head_dim"], sizes["value_head_dim"]))
        output, cache[0] = retention(query, key, value, self._log_decay, state, count)
        output = output.reshape(batch, heads, length, -1).swapaxes(1, 2)  # (B, T, H, V)
        if sizes["head_norm"]:
            output = self.head_norm(output)
        output = output.reshape(*shape).astype(x.dtype)
        if sizes["gate_act"] is not None:
            output = output * ACTIVATIONS[sizes["gate_act"]](self.g_proj(x))
        return self.o_proj(output)


class MLP(nn.Module):
    def __init__(self, sizes: dict) -> None:
        super().__init__()
        hidden, inner = sizes["hidden_size"], sizes["intermediate_size"]
        self.up_proj, self.down_proj = nn.Linear(hidden, inner, bias=False), nn.Linear(inner, hidden, bias=False)
        if sizes["gated_mlp"]:
            self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self._act = ACTIVATIONS[sizes["hidden_act"]]

    def __call__(self, x: mx.array) -> mx.array:
        inner = self.up_proj(x)
        return self.down_proj(inner * self._act(self.gate_proj(x)) if "gate_proj" in self else self._act(inner))


class Layer(nn.Module):
    def __init__(self, sizes: dict, layer: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.retention, self.mlp = Retention(sizes, layer), MLP(sizes)
        self.retention_norm, self.mlp_norm = (Norm(sizes["hidden_size"], sizes["eps"]) for _ in range(2))

    def __call__(self, x: mx.array, *call) -> mx.array:
        multiplier = self.sizes["residual_multiplier"]
        if self.sizes["pre_norm"]:
            x = x * multiplier + self.retention(self.retention_norm(x), *call)
            return x * multiplier + self.mlp(self.mlp_norm(x))
        x = self.retention_norm(x * multiplier + self.retention(x, *call))
        return self.mlp_norm(x * multiplier + self.mlp(x))


class Stack(nn.Module):
    def __init__(self, sizes: dict) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes["vocab_size"], sizes["hidden_size"])
        self.layers = [Layer(sizes, layer) for layer in range(len(sizes["layers"]))]
        norm = sizes["hidden_size"], sizes["eps"]
        if sizes["embed_norm"]:
            self.embed_norm = Norm(*norm)
        if sizes["pre_norm"]:
            self.norm = Norm(*norm)
        frequencies = sizes["frequencies"]
        self._rotation = None if frequencies is None else Rotation(frequencies, sizes["rotary_scaling"])

    def __call__(self, ids: mx.array, cache: list) -> mx.array:
        batch, length = ids.shape
        mask = cache[0].make_mask(length)  # (B, T), False for padding; None without padding
        count = mx.arange(1, length + 1)[None] if mask is None else mx.cumsum(mask.astype(mx.int32), axis=1)
        read = mx.zeros((batch,), mx.int32) if cache[0][1] is None else cache[0][1]  # (B,), number of earlier tokens
        position = mx.maximum(read[:, None] + count - 1, 0)
        turn = None if self._rotation is None else [each[:, None] for each in self._rotation(position)]
        x = self.embed_tokens(ids) * self.sizes["embedding_multiplier"]
        x = self.embed_norm(x) if "embed_norm" in self else x
        for layer, own in zip(self.layers, cache):
            x = layer(x, turn, own, mask, count)
            own[1] = read + count[:, -1]
            own.advance(length)
        return self.norm(x) if "norm" in self else x


class Model(nn.Module):
    """The language model with the interface of mlx-lm."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args, self.model_type = args, args.model_type
        self.model = Stack(args.mlx)
        if not args.mlx["tied"]:
            self.lm_head = nn.Linear(args.mlx["hidden_size"], args.mlx["vocab_size"], bias=False)

    def __call__(self, inputs: mx.array, cache: list = None) -> mx.array:
        x = self.model(inputs, self.make_cache() if cache is None else cache)
        return self.model.embed_tokens.as_linear(x) if self.args.mlx["tied"] else self.lm_head(x)

    @property
    def layers(self) -> list:
        return self.model.layers

    def make_cache(self) -> list:
        """Returns a cache for each layer, for the state and the number of tokens read."""
        return [ArraysCache(size=2) for _ in self.layers]
