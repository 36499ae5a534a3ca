# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Converted language models compute what the authors' code, or plain programs, compute, and are written in their layouts."""

import json
import logging
import math

import pytest
import torch
from foreign_folders import write_folder
from golden import SMALL, Golden, at_hand, format_of, golden, read
from safetensors.torch import load_file
from small_models import close, small_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridConfig, RetNetHybridForCausalLM
from retnet_hf.conversion.changes import known
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.conversion.fla import from_fla, hybrid_fields, to_fla
from retnet_hf.conversion.moves import Conversion, Move, shapes_of
from retnet_hf.conversion.syncdoth import to_syncdoth
from retnet_hf.conversion.torchscale import from_torchscale, to_torchscale


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


EXPRESSIBLE = {"rotary_endpoint": True, "head_norm_affine": False}

INEXPRESSIBLE = [
    (to_fla, {"rotary_endpoint": True}, "rotary_endpoint"),
    (to_fla, {"hidden_act": "gelu"}, "hidden_act"),
    (to_fla, {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters"),
    (to_torchscale, EXPRESSIBLE | {"use_qk_norm": True}, "use_qk_norm"),
    (to_torchscale, {}, "rotary_endpoint"),
    (to_torchscale, EXPRESSIBLE | {"embedding_multiplier": 3.0}, "embedding_multiplier"),
    (to_syncdoth, EXPRESSIBLE | {"decay_schedule": "none"}, "decay_schedule"),
]


@pytest.mark.parametrize(("writer", "fields", "named"), INEXPRESSIBLE)
def test_what_a_format_cannot_express_is_refused_by_the_field(writer, fields, named):
    with pytest.raises(ValueError, match=rf"^{named} must"):
        writer(small_model(**fields))


NAME = "model.layers.1.attn.k_proj.weight"

PLACES = [
    (NAME, None, rf"tensor {NAME} is missing"),
    ("model.layers.0.attn.extra.weight", torch.ones(2), "tensor model.layers.0.attn.extra.weight has no place"),
    (NAME, torch.ones(32, 31), rf"tensor {NAME} has shape \(32, 31\), but .* \(32, 32\)"),
    (NAME, torch.full((32, 32), math.nan), rf"tensor {NAME} holds values that are not finite"),
    (NAME, torch.ones(32, 32, dtype=torch.complex64), rf"{NAME} is of type torch.complex64: only checkpoints of 16 bits or"),
    (NAME, torch.ones(32, 32).to(torch.float8_e4m3fn), rf"{NAME} is of type torch.float8_e4m3fn: only checkpoints of 16"),
    (NAME, torch.ones(32, 32, dtype=torch.int32), rf"tensor {NAME} has dtype torch.int32, but .* cannot have it"),
    ("model.layers.0.retention.q_proj.weight", torch.ones(32, 32), r"2 tensors .* would become .*\.0\.retention\.q_proj\."),
]


@pytest.mark.parametrize(("name", "tensor", "sentence"), PLACES)
def test_every_tensor_is_used_once_or_named(name, tensor, sentence):
    state_dict, config = to_fla(small_model())
    changed = {key: value for key, value in (state_dict | {name: tensor}).items() if value is not None}
    with pytest.raises(CheckpointError, match=sentence):
        from_fla(changed, config)


def test_a_tensor_that_would_be_used_twice_is_refused():
    model = small_model()
    names = {name: name for name in model.state_dict()} | {"model.norm.weight": "model.layers.0.mlp_norm.weight"}
    plan = Conversion("ours", RetNetForCausalLM, model.config, [Move((names[name],), (name,)) for name in names])
    with pytest.raises(CheckpointError, match=r"tensor model\.layers\.0\.mlp_norm\.weight would be used 2 times"):
        plan.check(shapes_of(model.state_dict()))


def test_buffers_and_heads_that_contradict_the_configuration_are_refused():
    state_dict, config = to_torchscale(small_model(**EXPRESSIBLE))
    decay = torch.full_like(state_dict["retnet_rel_pos.decay"], -0.5)
    with pytest.raises(CheckpointError, match=r"retnet_rel_pos\.decay holds other values"):
        from_torchscale(state_dict | {"retnet_rel_pos.decay": decay}, config)
    without = {name: value for name, value in state_dict.items() if "retnet_rel_pos" not in name}
    assert from_torchscale(without, config).num_parameters() == small_model(**EXPRESSIBLE).num_parameters()
    state_dict, config = to_torchscale(small_model(**EXPRESSIBLE, tie_word_embeddings=True))
    state_dict["output_projection.weight"] = state_dict["output_projection.weight"] + 1
    with pytest.raises(CheckpointError, match="output_projection.weight differs"):
        from_torchscale(state_dict, config)


def test_the_frequencies_of_another_convention_are_told_at_any_size():
    size = 256  # at which the two conventions are nowhere further apart than 0.003
    angle = 10000 ** -torch.linspace(0, 1, size // 2)
    known(angle).forward([angle.bfloat16()])
    with pytest.raises(CheckpointError, match="other values"):
        known(angle).forward([10000 ** -(torch.arange(0, size, 2) / size)])


@pytest.mark.parametrize("write", [to_fla, to_syncdoth])
def test_a_model_that_trainer_has_left_without_cache_is_written_with_it(write):
    model = small_model(**({} if write is to_fla else EXPRESSIBLE))
    model.config.use_cache = False  # as Trainer does
    assert write(model)[1]["use_cache"] is True


def test_a_torchscale_preset_of_another_width_is_still_expressible():
    config = RetNetConfig.from_preset("torchscale-base", hidden_size=96, intermediate_size=64, vocab_size=31)
    assert to_torchscale(RetNetForCausalLM(config))[1]["no_scale_embedding"] is False


def test_full_and_windowed_layers_are_two_specifications():
    kinds = ["full_attention", "linear_attention", "sliding_attention"]
    options = {"num_hidden_layers": 3, "layer_types": kinds, "sliding_window": 4, "attention_head_dim": 8}
    model, ids = small_model(**options), torch.arange(20)[None]
    state_dict, config = to_fla(model)
    assert [(spec["layers"], spec["window_size"]) for spec in config["attn"]] == [([0], None), ([2], 4)]
    again = from_fla(state_dict, json.loads(json.dumps(config))).eval()
    close(again(ids).logits, model(ids).logits, 1e-5)
    assert again.config.layer_types == kinds


def test_what_attn_does_not_state_has_the_values_of_fla():
    content = {"num_hidden_layers": 3, "hidden_size": 32, "attn": {"layers": [1], "num_heads": 4}}
    config = RetNetHybridConfig(num_attention_heads=4, **hybrid_fields(content))
    assert (config.attention_rope_theta, config.attention_qkv_bias) == (10000.0, False)
    assert config.mixer_sizes(1) == (4, 4, 8, 8)


def test_no_softmax_layer_is_a_plain_retnet():
    data = golden("fla/hybrid_full", SMALL)
    config = data.config | {"attn": {"layers": [], "num_heads": 2}, "num_hidden_layers": 1}
    weights = {name: tensor for name, tensor in data.state_dict.items() if ".1." not in name and ".2." not in name}
    assert type(from_fla(weights, config)) is RetNetForCausalLM


SPECIFICATION = "attn in config.json must have num_heads, a number, layers, a list.* and no key but "
REFUSED_ATTENTION = [
    ({"layers": [3], "num_heads": 4}, "layers of attn in config.json must be distinct numbers below 3, got 3"),
    ({"layers": [1, 1], "num_heads": 4}, "must be distinct numbers below 3, got 1"),
    ({"layers": ["1"], "num_heads": 4}, "must be distinct numbers below 3, got '1'"),
    ({"layers": [True], "num_heads": 4}, "must be distinct numbers below 3, got True"),
    ({"layers": [1], "num_heads": None}, SPECIFICATION),
    ({"layers": 1, "num_heads": 4}, SPECIFICATION),
    ({"layers": [1], "num_heads": 4, "gate": True}, SPECIFICATION),
    ("full", SPECIFICATION),
    ([{"layers": [0], "num_heads": 4}, {"layers": [1], "num_heads": 2}], "num_heads of attn in config.json must be the"),
    ([{"layers": [layer], "num_heads": 4, "window_size": 3 - layer} for layer in (0, 1)], "window_size of attn in config"),
]


@pytest.mark.parametrize(("attn", "words"), REFUSED_ATTENTION)
def test_softmax_layers_without_a_counterpart_are_refused(attn, words, tmp_path):
    data = golden("fla/hybrid_full", SMALL)
    with pytest.raises(ValueError, match=words):
        from_fla(data.state_dict, data.config | {"attn": attn})
    write_folder(tmp_path, {}, data.config | {"attn": attn})
    with pytest.raises(ValueError, match=words):
        AutoConfig.from_pretrained(tmp_path)


def test_a_plain_retnet_says_how_a_hybrid_is_loaded(tmp_path):
    data = golden("fla/hybrid_full", SMALL)
    write_folder(tmp_path, data.state_dict, data.config)
    with pytest.raises(ValueError, match="RetNetForCausalLM"):
        RetNetForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Load the folder with AutoConfig or RetNetHybridConfig"):
        RetNetConfig(**data.config)
