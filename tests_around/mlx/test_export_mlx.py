# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Models for mlx-lm, run by MLX on a CPU: logits, tokens, 4 bits, prompt caches, batches, a server, and what is refused."""

import json
import os
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from small_models import FAMILIES, greedy, random_ids, small_model, word_tokenizer
from torchrun import free_port, started, wait_for_server

from retnet_hf.export import ExportError, export_mlx


pytestmark = pytest.mark.usefixtures("no_gradients")
mlx = pytest.importorskip("mlx.core", reason="MLX has no package for this platform")
pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
DIALECTS = ["fla", "grouped", "from scratch", "torchscale"]


def loaded(model, folder):
    from mlx_lm.utils import load_model

    export_mlx(model, folder, overwrite=True)
    return load_model(folder, trust_remote_code=True)[0]


MODELS = {name: (name, {}) for name in DIALECTS}
MODELS |= {
    "a norm without weights": ("fla", {"head_norm_affine": False}),
    "no norm of heads": ("fla", {"use_head_norm": False, "use_embedding_norm": True}),
    "no gates": ("fla", {"use_output_gate": False, "use_gated_mlp": False, "hidden_act": "relu2"}),
    "features": ("fla", {"use_rotary": False, "feature_map": "silu"}),
    "tied, post-norm": ("fla", {"tie_word_embeddings": True, "norm_position": "post", "residual_multiplier": 1.3}),
}


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_pytorch_in_pieces_and_steps(kind, tmp_path):
    dialect, fields = MODELS[kind]
    model, ids = small_model(dialect, **fields), random_ids(2, 200)
    own = loaded(model, tmp_path / "model")
    cache, parts = own.make_cache(), ids.split((7, 1, 1, 150, 1, 40), dim=1)
    found = np.concatenate([np.array(own(mlx.array(part.numpy()), cache=cache)) for part in parts], axis=1)
    torch.testing.assert_close(torch.from_numpy(found), model(ids).logits, rtol=1e-4, atol=2e-4)


def test_positions_far_away_are_exact(tmp_path):
    model = small_model("fla")
    own, position = loaded(model, tmp_path / "model"), np.array([0, 255, 256, 10**6, 2**31 - 1])
    turns = own.model._rotation(mlx.array(position))
    for found, expected in zip(turns, model.model.rotary(torch.from_numpy(position)[None], torch.float64)):
        np.testing.assert_allclose(np.array(found), expected[0, 0].numpy(), atol=2e-6)


def written_in_a_batch(own, prompts, most, later=(), caches=None, **sizes):
    """Tokens, logits and prompt cache of each row of a batch, in the order of the rows; `later` join after three tokens."""
    from mlx_lm.generate import BatchGenerator

    batch = BatchGenerator(own, **sizes)
    uids = batch.insert(prompts, most[: len(prompts)], caches=caches)
    rows = {uid: ([], [], None) for uid in uids}
    while any(row[2] is None for row in rows.values()):
        for each in batch.next_generated():
            tokens, logits, _ = rows[each.uid]
            rows[each.uid] = ([*tokens, each.token], [*logits, np.array(each.logprobs)], each.prompt_cache)
        if later and len(rows[uids[-1]][0]) == 3:
            rows |= {uid: ([], [], None) for uid in batch.insert(later, most[len(prompts) :])}
            later = ()
    return list(rows.values())


def require_rows_alone(model, prompts, rows, most):
    for prompt, (tokens, logits, _), count in zip(prompts, rows, most, strict=True):
        assert tokens == greedy(model, torch.tensor([prompt]), count, eos_token_id=None)[0, len(prompt) :].tolist()
        whole = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        torch.testing.assert_close(torch.from_numpy(np.stack(logits)), whole, rtol=1e-3, atol=1e-3)


def prompts_of(*lengths):
    return [random_ids(1, length)[0].tolist() for length in lengths]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_rows_of_a_batch_are_those_of_each_prompt_alone(dialect, tmp_path):
    """Rows of different lengths, longer than a step of the prompt and than a chunk, that end early and that join later."""
    model, most, prompts = small_model(dialect), [12, 2, 7, 12, 5, 9], prompts_of(9, 1, 290, 64, 33, 3)
    own, sizes = loaded(model, tmp_path / "model"), {"prefill_step_size": 140, "completion_batch_size": 5}
    require_rows_alone(model, prompts, written_in_a_batch(own, prompts[:4], most, prompts[4:], **sizes), most)


def test_padding_on_either_side_changes_nothing(tmp_path):
    from mlx_lm.models.cache import ArraysCache

    model, (short, whole) = small_model("fla"), prompts_of(20, 150)
    own, expected = loaded(model, tmp_path / "model"), model(torch.tensor([short])).logits[0]
    for side in ("left", "right"):
        caches = [ArraysCache(2, left_padding=[130, 0] if side == "left" else None) for _ in own.layers]
        for cache in caches if side == "right" else ():
            cache.prepare(lengths=[20, 150])
        ids, found = mlx.array([[0] * 130 + short if side == "left" else short + [0] * 130, whole]), []
        for part in (ids[:, :70], ids[:, 70:]):
            found.append(np.array(own(part, cache=caches)))
        row = np.concatenate(found, axis=1)[0]
        logits = torch.from_numpy(row[130:] if side == "left" else row[:20])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)
        for cache in caches:
            cache.finalize()
        after = torch.from_numpy(np.array(own(mlx.array([[7], [7]]), cache=caches))[:, 0])
        alone = torch.stack([model(torch.tensor([[*row, 7]])).logits[0, -1] for row in (short, whole)])
        torch.testing.assert_close(after, alone, rtol=1e-4, atol=2e-4)


def test_prompt_caches_of_rows_are_saved_and_joined_in_another_batch(tmp_path):
    from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

    model, most = small_model("fla"), [4, 6]
    own, prompts, files = loaded(model, tmp_path / "model"), prompts_of(11, 40), []
    rows = written_in_a_batch(own, prompts, most)
    begun = [prompt + tokens for prompt, (tokens, _, _) in zip(prompts, rows)]
    for index, (_, _, cache) in enumerate(rows):
        save_prompt_cache(str(tmp_path / f"{index}.safetensors"), cache)
        files.append(load_prompt_cache(str(tmp_path / f"{index}.safetensors")))
    more = prompts_of(5, 17, 8)
    caches = [*files, own.make_cache()]  # the last row has read nothing
    rows = written_in_a_batch(own, more, [8] * 3, caches=caches)
    require_rows_alone(model, [begun[0] + more[0], begun[1] + more[1], more[2]], rows, [8] * 3)


def test_the_server_of_mlx_lm_answers_two_at_once(tmp_path):
    """As it is started by its own command; each answer is what PyTorch writes alone."""
    model, port, tokenizer = small_model("fla", eos_token_id=None), free_port(), word_tokenizer()
    export_mlx(model, tmp_path / "model", tokenizer)
    arguments = ["--model", str(tmp_path / "model"), "--port", str(port), "--trust-remote-code", "--temp", "0"]
    prompts = [tokenizer.decode(prompt) for prompt in prompts_of(9, 60)]

    def asked(prompt):
        body = json.dumps({"prompt": prompt, "max_tokens": 12}).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body, headers)
        return json.load(urllib.request.urlopen(request, timeout=60))["choices"][0]["text"]

    with started([sys.executable, "-m", "mlx_lm", "server", *arguments], env=os.environ | {"HF_HUB_OFFLINE": "1"}) as server:
        wait_for_server(server, f"http://127.0.0.1:{port}/health")
        with ThreadPoolExecutor() as pool:
            answers = list(pool.map(asked, prompts))
        answers.append(asked(prompts[1]))  # by the prompt cache of the first time
    for prompt, answer in zip([*prompts, prompts[1]], answers, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        expected = tokenizer.decode(greedy(model, ids, 12, eos_token_id=None)[0, ids.shape[1] :])
        assert answer.split() == expected.split()


@pytest.mark.parametrize("dialect", ["hybrid", "sinks", "fla", *FAMILIES])
def test_what_the_model_file_does_not_compute_is_refused(dialect, tmp_path):
    fields, words = {}, "supports only a plain RetNet, not a RetNetHybrid"
    if dialect == "fla":
        fields, words = {"hidden_act": "mish"}, "has no activation 'mish'"
    with pytest.raises(ExportError, match=f"the model file for mlx-lm {words}"):
        export_mlx(small_model(dialect, **fields), tmp_path / "out")
    assert not list(tmp_path.iterdir())
