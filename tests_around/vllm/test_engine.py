# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""vLLM says what plain `generate` says, however it cuts, batches and stores what it is asked."""

import pytest
import torch
from engine import MODELS, engine, expected, generated, greedy, model_of, prompts
from foreign_folders import foreign, write_folder
from golden import SMALL, golden
from small_models import rounding
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from vllm.v1.core.sched.scheduler import Scheduler

from retnet_hf import RetNetForCausalLM
from retnet_hf.conversion import minimax, ring
from retnet_hf.conversion.foreign_config import decays_with_factors
from retnet_hf.conversion.hypenet import to_hypenet
from retnet_hf.conversion.transnormer import from_transnormer
from retnet_hf.vllm import register


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_generate(kind, tmp_path):
    """Prompts of 1 to 150 tokens, more of them than there are slots, cut into pieces and mixed with steps of decoding."""
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    with engine(tmp_path, max_num_seqs=3, max_num_batched_tokens=48) as llm:
        assert generated(llm, prompts()) == expected(model, prompts())


def test_prompts_that_begin_alike_are_read_once(tmp_path):
    model = model_of("plain")
    model.save_pretrained(tmp_path)
    (shared,) = prompts((96,), seed=1)
    asked = [shared + tail for tail in prompts((5, 1, 33, 20), seed=2)] + prompts((3,), seed=3)
    with engine(tmp_path, enable_prefix_caching=True, block_size=32) as llm:
        first = generated(llm, asked[:1])
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in asked], greedy(), use_tqdm=False)
    assert [output.num_cached_tokens for output in outputs][:4] == [96, 96, 96, 96]
    assert outputs[4].num_cached_tokens == 0
    new = [list(output.outputs[0].token_ids) for output in outputs]
    assert (new, first) == (expected(model, asked), new[:1])


def test_prefixes_of_a_hybrid_are_read_once_without_being_asked_for(tmp_path):
    model, (shared,) = model_of("softmax attention in some layers"), prompts((300,), seed=1)
    model.save_pretrained(tmp_path)
    asked = [shared + tail for tail in prompts((5, 1, 33), seed=2)]
    with engine(tmp_path, enable_prefix_caching=None) as llm:
        outputs = [llm.generate({"prompt_token_ids": prompt}, greedy(), use_tqdm=False)[0] for prompt in [*asked, *asked]]
    assert [list(output.outputs[0].token_ids) for output in outputs] == 2 * expected(model, asked)
    assert min(output.num_cached_tokens for output in outputs[3:]) >= 128


def test_slots_are_used_again_by_requests_that_waited_and_after_requests_that_were_aborted(tmp_path):
    """Two slots, for six requests; a prompt of one token looks to vLLM like a step of decoding."""
    model = model_of("plain")
    model.save_pretrained(tmp_path)
    asked = prompts((40, 7, 1, 64, 12, 1), seed=4)
    with engine(tmp_path, num_gpu_blocks_override=3) as llm:
        assert generated(llm, asked) == expected(model, asked)
        core = llm.llm_engine
        for number, prompt in enumerate(asked[:2]):
            core.add_request(f"aborted {number}", {"prompt_token_ids": prompt}, greedy(100))
        for _ in range(3):
            core.step()
        core.abort_request(["aborted 0", "aborted 1"])
        one_token = prompts((1, 1, 2), seed=5)
        assert generated(llm, one_token) == expected(model, one_token)  # in the slots of those


def test_a_request_whose_pages_are_taken_away_is_read_again(tmp_path, monkeypatch):
    """A hybrid's keys and values outgrow the memory, so that a request has to give up its own, and its states with them."""
    given_up, preempt = [], Scheduler._preempt_request
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda *given, **more: given_up.append(1) or preempt(*given, **more))
    model = model_of("softmax attention in some layers")
    model.save_pretrained(tmp_path)
    asked = prompts((40, 60, 90, 30), seed=9)
    with engine(tmp_path, num_gpu_blocks_override=9, max_model_len=160) as llm:
        assert generated(llm, asked, 40) == expected(model, asked, 40)
    assert given_up


@pytest.mark.parametrize("published", ["fla", "fla of 2024", "syncdoth", "hypenet", "transnormer"])
def test_published_folders_are_served_as_they_are(published, tmp_path):
    if published == "hypenet":
        model = model_of("softmax attention of other heads, gated")
        state_dict, config = to_hypenet(model)
    elif published == "transnormer":
        data = golden("transnormer/published_like", SMALL)
        model, state_dict, config = from_transnormer(data.state_dict, data.config), data.state_dict, data.config
    else:
        model, state_dict, config = foreign(published)
    write_folder(tmp_path, state_dict, config, layout="sharded")
    asked = [[token % model.config.vocab_size for token in prompt] for prompt in prompts((5, 30), seed=6)]
    with engine(tmp_path) as llm:
        assert generated(llm, asked) == expected(model, asked)


@pytest.mark.parametrize("family", ["minimax", "ring"])
def test_families_of_experts_are_served_as_published_and_as_saved_here(family, tmp_path):
    """By vLLM's fused experts, with the router of the family: softmax, or sigmoids with a bias and groups."""
    module, own = {"minimax": (minimax, {"head_norm_eps": 1e-6 / 32}), "ring": (ring, {})}[family]
    model = model_of(family, decay_schedule=decays_with_factors("alibi", 4, module.depth_factors(3)), **own)
    state_dict, config = module.FAMILY.write(model)
    if family == "minimax":
        config["model_type"] = "minimax_text_01"  # vLLM reads transformers' own model type by a class that it cannot serve
    write_folder(tmp_path / "published", state_dict, config, layout="sharded")
    model.save_pretrained(tmp_path / "saved")
    for folder in ("published", "saved"):
        with engine(tmp_path / folder) as llm:
            assert generated(llm, prompts((5, 30, 70), seed=6)) == expected(model, prompts((5, 30, 70), seed=6))


def test_the_router_bias_stays_in_float32(tmp_path):
    """A rounded bias would choose other experts."""
    model = model_of("ring").to(torch.bfloat16)
    for layer in model.model.layers[1:]:
        layer.mlp.router.bias = 8 + torch.rand(8) / 64
    wanted = [layer.mlp.router.bias for layer in model.model.layers[1:]]
    model.save_pretrained(tmp_path)
    with engine(tmp_path, dtype="bfloat16") as llm:
        (found,) = llm.apply_model(lambda it: [each for name, each in it.named_buffers() if name.endswith("router.bias")])
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_the_auto_classes_know_a_retnet_beside_the_engine_and_ling_stays_with_the_classes_of_vllm(tmp_path):
    register()
    model_of("plain").save_pretrained(tmp_path)
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)) is RetNetForCausalLM
    assert "hypenet" in CONFIG_MAPPING
    assert "bailing_hybrid" not in CONFIG_MAPPING._extra_content


def test_in_bfloat16_each_token_is_among_the_best_of_the_model_in_bfloat16(tmp_path):
    """To the rounding of logits, which two ways of batching need not share."""
    model = model_of("plain").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    asked = prompts(seed=7)
    with engine(tmp_path, dtype="bfloat16", max_num_seqs=3) as llm:
        new = generated(llm, asked)
    for prompt, tokens in zip(asked, new):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        spread = rounding(model.config.hidden_size, torch.bfloat16) * logits.abs().amax(1)
        assert (chosen >= logits.amax(1) - spread).all()


REFUSED = {
    'mamba_ssm_cache_dtype must be "auto" or "float32"': {"mamba_ssm_cache_dtype": "float16"},
    "speculative_config must be None": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "tensor_parallel_size must divide": {"tensor_parallel_size": 3, "distributed_executor_backend": "mp"},
    "at most attention_max_length, 100, got 200": {"max_model_len": 200},
    "no weight model.layers.0.retention.r_proj.weight": {},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_served_is_refused_in_a_sentence(message, tmp_path):
    options = REFUSED[message]
    model = model_of("softmax attention in some layers" if "max_model_len" in options else "plain")
    if "max_model_len" in options:
        model.config.attention_max_length = 100
        model.config.rope_parameters = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    model.save_pretrained(tmp_path)
    if not options:
        surplus = {"model.layers.0.retention.r_proj.weight": torch.ones(2, 2)}
        write_folder(tmp_path, model.state_dict() | surplus, model.config.to_dict())
    with pytest.raises(ValueError, match=message), engine(tmp_path, **options):
        pass
