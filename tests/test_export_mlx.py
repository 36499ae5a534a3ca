# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Models for mlx-lm, run by MLX on a CPU: logits, tokens, 4 bits, prompt caches, and what is refused."""

import numpy as np
import pytest
import torch
from small_models import HEIRS, greedy, random_ids, small_model

from retnet_hf_export import ExportError, export_mlx


mlx = pytest.importorskip("mlx.core", reason="MLX has no package for this platform")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
DIALECTS = ["fla", "grouped", "from scratch", "torchscale"]


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def loaded(model, folder):
    """The model as mlx-lm loads it."""
    from mlx_lm.utils import load_model

    export_mlx(model, folder, overwrite=True)
    return load_model(folder, trust_remote_code=True)[0]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_logits_are_those_of_pytorch_in_pieces_and_steps(dialect, tmp_path):
    """Over more tokens than a chunk."""
    model, ids = small_model(dialect), random_ids(2, 200)
    own, found = loaded(model, tmp_path / "model"), []
    cache = own.make_cache()
    for part in ids.split((7, 1, 1, 150, 1, 40), dim=1):
        found.append(np.array(own(mlx.array(part.numpy()), cache=cache)))
    torch.testing.assert_close(torch.from_numpy(np.concatenate(found, axis=1)), model(ids).logits, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    "fields",
    [
        {"use_head_norm": True, "head_norm_groups": 2},
        {"head_norm_affine": False, "norm_affine": False},
        {"use_output_gate": False, "use_gated_mlp": False, "hidden_act": "relu2"},
        {"use_rotary": False, "query_scale": 0.5, "value_act": "silu"},
        {"tie_word_embeddings": True, "norm_position": "post", "residual_multiplier": 1.3, "mlp_residual_multiplier": 1.1},
    ],
)
def test_options_compute_what_they_do_in_pytorch(fields, tmp_path):
    model, ids = small_model("fla", **fields), random_ids(1, 20)
    found = np.array(loaded(model, tmp_path / "model")(mlx.array(ids.numpy())))
    torch.testing.assert_close(torch.from_numpy(found), model(ids).logits, rtol=1e-4, atol=2e-4)


def test_positions_far_away_are_exact(tmp_path):
    model = small_model("fla")
    own = loaded(model, tmp_path / "model")
    position = np.array([0, 255, 256, 10**6, 2**31 - 1])
    turns = own.model._rotation(mlx.array(position))
    for found, expected in zip(turns, model.model.rotary(torch.from_numpy(position)[None], torch.float64)):
        np.testing.assert_allclose(np.array(found), expected[0, 0].numpy(), atol=2e-6)


def test_mlx_lm_writes_the_tokens_of_pytorch(tmp_path):
    from mlx_lm.generate import generate_step

    model, prompt = small_model("fla"), random_ids(1, 9)
    steps = generate_step(mlx.array(prompt[0].numpy()), loaded(model, tmp_path / "model"), max_tokens=64)
    assert [int(token) for token, _ in steps] == greedy(model, prompt, 64, eos_token_id=None)[0, 9:].tolist()


def test_a_prompt_cache_is_saved_and_resumed(tmp_path):
    from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

    model, ids = small_model("fla"), random_ids(1, 30)
    own = loaded(model, tmp_path / "model")
    cache = own.make_cache()
    own(mlx.array(ids[:, :20].numpy()), cache=cache)
    save_prompt_cache(str(tmp_path / "cache.safetensors"), cache)
    again = load_prompt_cache(str(tmp_path / "cache.safetensors"))
    found = np.array(own(mlx.array(ids[:, 20:].numpy()), cache=again))
    torch.testing.assert_close(torch.from_numpy(found), model(ids).logits[:, 20:], rtol=1e-4, atol=2e-4)


def test_quantised_weights_are_near(tmp_path):
    """Of random weights, which lose more by rounding than trained ones."""
    from mlx.nn import quantize

    model, ids, errors = small_model("fla", hidden_size=64, intermediate_size=64), random_ids(1, 20), {}
    for bits in (8, 4):
        own = loaded(model, tmp_path / "model")
        quantize(own, group_size=32, bits=bits)
        found = torch.from_numpy(np.array(own(mlx.array(ids.numpy()))))
        errors[bits] = float((found - model(ids).logits).norm() / model(ids).logits.norm())
    assert 1e-4 < errors[8] < 0.15 < errors[4] < 1


@pytest.mark.parametrize(
    ("dialect", "fields", "words"),
    [
        ("hybrid", {}, "no softmax attention"),
        ("sinks", {}, "no softmax attention"),
        *((name, {}, "no (softmax attention|learned rotation)") for name in HEIRS),
        ("fla", {"hidden_act": "mish"}, "no activation 'mish'"),
    ],
)
def test_what_the_model_file_does_not_compute_is_refused(dialect, fields, words, tmp_path):
    with pytest.raises(ExportError, match=f"the model file for mlx-lm has {words}"):
        export_mlx(small_model(dialect, **fields), tmp_path / "out")
    assert not list(tmp_path.iterdir())
