# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Converted language models compute what the authors' code computes, and are written under the authors' names.

The expected outputs of Ling, MiniCPM-SALA and Ring-lite were computed in float64 by plain programs.
"""

import json
import logging

import pytest
import torch
from foreign_folders import write_folder
from golden import SMALL, Golden, at_hand, format_of, golden, read
from safetensors.torch import load_file
from small_models import close
from torch import Tensor
from transformers import AutoModelForCausalLM

from retnet_hf import RetNetHybridForCausalLM
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.conversion.moves import shapes_of


FORMS = ("parallel", "recurrent", "chunkwise")
PLAIN = at_hand(
    [f"fla/{case}" for case in ("hub_options", "gqa_noaffine", "unfused_nogate_relu", "left_padded")]
    + ["fla_2025_02/fused_gate_proj"]
    + [f"torchscale/{case}" for case in ("swish_scaled_untied", "gelu_tied_lnemb", "deepnorm_postnorm")]
    + [f"syncdoth/{case}" for case in ("published_options", "lm_decay_tied", "left_padded")]
)
HYBRIDS = ["fla/hybrid_full", "fla/hybrid_window"]  # RetNets with layers of softmax attention, described by `attn`
FAMILIES, PROGRAMS = (
    [f"{family}/{case}" for family in families for case in ("published_like", "other_options")]
    for families in (("hypenet", "transnormer", "ring"), ("ling", "minicpm_sala", "ring_lite"))
)
# Where the norms' epsilon counts, the peer's parallel form is this far from its own recurrence, which is what we compute.
SPREAD = {"torchscale/gelu_tied_lnemb": 1e-3}


def model_of(case: str) -> tuple[torch.nn.Module, Golden]:
    return read(case, None if case in PLAIN else SMALL)


def near(case: str, actual: Tensor, expected: Tensor, atol: float = 2e-4) -> None:
    tolerance = (atol, 1e-4) if case in PLAIN else (1e-5 * expected.abs().max().item(), 0)
    torch.testing.assert_close(actual, expected, atol=tolerance[0], rtol=tolerance[1])


def same_weights(actual, expected: dict[str, Tensor]) -> None:
    assert all(torch.equal(actual.state_dict()[name], value) for name, value in expected.items())


def mask_of(data: Golden) -> Tensor:
    return data.tensors.get("attention_mask", torch.ones_like(data.tensors["input_ids"]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", PLAIN + HYBRIDS + FAMILIES + PROGRAMS)
def test_logits_are_the_authors_in_every_form(case, form):
    model, data = model_of(case)
    names = {"logits", "logits_padded", "logits_recurrent", "logits_steps", "logits_chunk", "logits_parallel"}
    names = (names & data.tensors.keys()) - ({"logits"} if case in SPREAD else set())
    assert names
    for name in names:
        mask = torch.ones_like(mask_of(data)) if case in HYBRIDS and name == "logits" else mask_of(data)
        with torch.no_grad():
            logits = model(data.tensors["input_ids"], attention_mask=mask, retention_form=form).logits
        near(case, logits[mask.bool()], data.tensors[name][mask.bool()])


@pytest.mark.parametrize("form", ["parallel", "chunkwise"])
@pytest.mark.parametrize("case", PLAIN + FAMILIES + PROGRAMS)
def test_hidden_states_loss_and_gradients_are_the_authors(case, form):
    model, data = model_of(case)
    ids, real = data.tensors["input_ids"], mask_of(data).bool()
    labels = data.tensors.get("labels", ids)
    output = model(ids, attention_mask=mask_of(data), labels=labels, retention_form=form, output_hidden_states=True)
    expected = {f"hidden_states.{layer}": hidden for layer, hidden in enumerate(output.hidden_states[:-1])}
    expected["last_hidden_state"] = output.hidden_states[-1]
    names = expected.keys() & data.tensors.keys()
    assert case in PROGRAMS or len(names) >= 3
    for name in names:
        near(case, expected[name][real], data.tensors[name][real], SPREAD.get(case, 2e-4))
    loss = output.loss
    if coefficient := data.config.get("z_loss_coeff"):  # syncdoth's own term, of the tokens that are predicted
        loss = loss + coefficient * output.logits[:, :-1][labels[:, 1:] != -100].logsumexp(-1).log().mean()
    near(case, loss.detach().reshape(1), data.tensors["loss"].reshape(1), 1e-4)
    loss.backward()

    theirs, compared = data.gradients(), set()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    for move in format_of(case).plan(shapes_of(data.state_dict), data.config).moves:
        if theirs.keys().isdisjoint(move.sources):
            continue
        # changes are permutations of numbers, which gradients follow as values do
        gradients = move.change.backward([ours[name] for name in move.targets])
        for name, gradient in zip(move.sources, gradients, strict=True):
            if name in theirs:
                pad, peers = data.config.get("pad_token_id"), theirs[name].clone()
                if case in PLAIN and "embed_tokens" in move.targets[0] and pad is not None:
                    gradient[pad] = peers[pad] = 0  # the peer's embedding never learns it
                atol = 3e-4 if case in PLAIN else 1e-4 * max(1.0, peers.abs().max().item())
                torch.testing.assert_close(gradient, peers, atol=atol, rtol=1e-4 if case in PLAIN else 0)
                compared.add(name)
    assert compared == theirs.keys()
    assert compared or case in PROGRAMS


@pytest.mark.parametrize("case", PLAIN + HYBRIDS + FAMILIES + PROGRAMS)
def test_there_and_back_is_bit_exact_under_exactly_the_authors_names(case):
    model, data = model_of(case)
    form = format_of(case)
    written, config = getattr(form, f"to_{form.NAME}")(model)
    expected = dict(data.state_dict)
    if case in HYBRIDS:
        expected = {name.replace("g_norm.", "g_norm_swish_gate."): tensor for name, tensor in expected.items()}
        stated = data.config["attn"]
        assert config["attn"] == stated | {"num_kv_heads": stated["num_kv_heads"] or stated["num_heads"]}
    if case in PROGRAMS:  # without layers that predict further tokens
        further = f"layers.{data.config['num_hidden_layers']}."
        expected = {name: tensor for name, tensor in expected.items() if further not in name}
        without_effect = ("attention_dropout", "linear_mode", "num_nextn_predict_layers")
        assert all(config.get(name) == value or name in without_effect for name, value in data.config.items())
    if "2025" not in case:  # to_fla writes the present layout
        assert written.keys() == expected.keys()
        for name, theirs in expected.items():
            tolerance = 1e-6 if "retnet_rel_pos" in name else 0  # these are recomputed
            torch.testing.assert_close(written[name], theirs, atol=0, rtol=tolerance)
    again = getattr(form, f"from_{form.NAME}")(written, json.loads(json.dumps(config))).eval()
    unstated = {"max_position_embeddings": None}  # no golden file states it, and writers state a number
    if case in FAMILIES + PROGRAMS:
        assert again.config.to_dict() | unstated == model.config.to_dict() | unstated
    same_weights(again, model.state_dict())
    with torch.no_grad():
        ids = data.tensors["input_ids"]
        assert torch.equal(again(ids).logits, model(ids).logits)


@pytest.mark.parametrize("case", ["fla/unfused_nogate_relu", "torchscale/swish_scaled_untied", "syncdoth/published_options"])
def test_what_is_written_keeps_the_type(case):
    data, form = golden(case), format_of(case)
    half = {name: value.bfloat16() for name, value in data.state_dict.items()}
    model = getattr(form, f"from_{form.NAME}")(half, data.config)
    assert model.dtype == model.config.dtype == torch.bfloat16
    assert torch.equal(model.model.decay.log_decay, model_of(case)[0].model.decay.log_decay)
    written, _ = getattr(form, f"to_{form.NAME}")(model)
    assert all(torch.equal(written[name], value) for name, value in half.items() if "retnet_rel_pos" not in name)


@pytest.mark.parametrize("case", [*HYBRIDS, *FAMILIES, *PROGRAMS, "transnormer/published_like, unnamed"])
def test_a_folder_loads_as_it_is_and_is_saved_under_our_names(case, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    case, _, unnamed = case.partition(", ")  # published files of TransNormerLLM state no model_type
    data = golden(case, SMALL)
    write_folder(tmp_path / "source", data.state_dict, data.config, "sharded")
    if unnamed:
        content = {name: value for name, value in data.config.items() if name != "model_type"}
        (tmp_path / "source" / "config.json").write_text(json.dumps(content))
    auto_class = RetNetHybridForCausalLM if unnamed else AutoModelForCausalLM
    model, report = auto_class.from_pretrained(tmp_path / "source", output_loading_info=True)
    assert type(RetNetHybridForCausalLM.from_pretrained(tmp_path / "source")) is type(model) is RetNetHybridForCausalLM
    report["unexpected_keys"] = [name for name in report["unexpected_keys"] if "layers.5." not in name]  # of Ling
    assert not any(report.values()), report
    assert case.startswith("ling") or not [record for record in caplog.records if record.levelno >= logging.WARNING]
    same_weights(model, model_of(case)[0].state_dict())

    ids = data.tensors["input_ids"][:, :20].expand(2, -1)
    mask = (torch.arange(20) >= torch.tensor([[0], [7]])).long()
    with torch.no_grad():
        close(model(ids, attention_mask=mask).logits[1, 7:], model(ids[1:, 7:]).logits[0], 2e-5)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.config.model_type == "retnet_hybrid"
    assert load_file(tmp_path / "again" / "model.safetensors").keys() <= again.state_dict().keys()
    same_weights(again, model.state_dict())


REFUSED = {
    "torchscale_2023_07/gelu_subln": ["retention.q_proj.bias", "ffn.ffn_layernorm.weight"],
    "syncdoth/ffn_no_glu": ["ffn.fc1.bias", "ffn.fc2.bias", "ffn.ffn_layernorm.weight"],
}


@pytest.mark.parametrize("case", at_hand(REFUSED))
def test_layouts_without_a_counterpart_are_refused_by_the_names_of_what_has_no_place(case):
    data, form = golden(case), format_of(case.replace("_2023_07", ""))
    with pytest.raises(CheckpointError, match="without a place in RetNetConfig") as error:
        getattr(form, f"from_{form.NAME}")(data.state_dict, data.config)
    assert all(name in str(error.value) for name in REFUSED[case])
