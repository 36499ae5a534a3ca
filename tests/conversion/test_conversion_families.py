# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""HypeNet, TransNormerLLM, MiniMax and Ring are the models that their authors' code, or transformers, computes."""

import json
import logging
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from family_folders import folder_of, published_minimax, small_minimax, write
from golden import SMALL, Golden, golden
from safetensors.torch import load_file, save_file
from small_models import close
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, MiniMaxConfig, MiniMaxForCausalLM, MiniMaxModel
from transformers.models.minimax import modeling_minimax

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridConfig, RetNetHybridForCausalLM, RetNetHybridModel
from retnet_hf.conversion import hypenet, minimax, ring, transnormer
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.conversion.hypenet import from_hypenet, to_hypenet
from retnet_hf.conversion.minimax import from_minimax, to_minimax
from retnet_hf.conversion.moves import Conversion, shapes_of
from retnet_hf.conversion.ring import from_ring, to_ring
from retnet_hf.conversion.transnormer import from_transnormer, to_transnormer


pytest_plugins = ("family_folders",)  # the fixture `plain_minimax`


FORMS = ("parallel", "recurrent", "chunkwise")
FORMATS = {"hypenet": hypenet, "transnormer": transnormer, "minimax": minimax, "ring": ring}
READERS = {"hypenet": from_hypenet, "transnormer": from_transnormer, "ring": from_ring}
WRITERS = {"hypenet": to_hypenet, "transnormer": to_transnormer, "ring": to_ring}
CASES = [f"{family}/{case}" for family in READERS for case in ("published_like", "other_options")]


def family_of(case: str) -> str:
    return case.split("/")[0]


def read(case: str) -> tuple[RetNetHybridForCausalLM, Golden]:
    data = golden(case, SMALL)
    return READERS[family_of(case)](data.state_dict, data.config), data


def plan_of(case: str) -> Conversion:
    data = golden(case, SMALL)
    return FORMATS[family_of(case)].plan(shapes_of(data.state_dict), data.config)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_the_authors_in_every_form(case, form):
    model, data = read(case)
    with torch.no_grad():
        close(model(data.tensors["input_ids"], retention_form=form).logits, data.tensors["logits"], 1e-5)


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_loss_and_gradients_are_the_authors(case):
    model, data = read(case)
    output = model(data.tensors["input_ids"], labels=data.tensors["input_ids"], output_hidden_states=True)
    for layer, ours in enumerate(output.hidden_states[:-1]):
        close(ours, data.tensors[f"hidden_states.{layer}"], 1e-5)
    close(output.loss, data.tensors["loss"][0], 1e-5)
    output.loss.backward()
    ours = {name: parameter.grad for name, parameter in model.named_parameters()}
    expected, compared = data.gradients(), set()
    for move in plan_of(case).moves:
        if expected.keys().isdisjoint(move.sources):
            continue
        # changes are permutations of numbers, which gradients follow as values do
        theirs = move.change.backward([ours[name] for name in move.targets])
        for name, gradient in zip(move.sources, theirs, strict=True):
            if name in expected:
                close(gradient, expected[name], 1e-4)
                compared.add(name)
    assert compared == expected.keys() != set()


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_bit_exact_under_the_authors_names(case):
    model, data = read(case)
    state_dict, config = WRITERS[family_of(case)](model)
    assert state_dict.keys() == data.state_dict.keys()
    assert all(torch.equal(state_dict[name], value) for name, value in data.state_dict.items())
    again = READERS[family_of(case)](state_dict, config)
    unstated = {"max_position_embeddings": None}  # no golden file states it, and writers state a number
    assert again.config.to_dict() | unstated == model.config.to_dict() | unstated


@pytest.mark.parametrize("family", WRITERS)
def test_a_plain_model_is_refused_by_the_writers_of_hybrids(family):
    plain = RetNetForCausalLM(RetNetConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match=f"the format {family} needs a RetNetHybridForCausalLM, got a RetNetForCausalLM"):
        WRITERS[family](plain)


@pytest.fixture(scope="module")
def theirs() -> MiniMaxForCausalLM:
    return small_minimax()


@pytest.fixture(scope="module")
def ours(theirs) -> RetNetHybridForCausalLM:
    return eager(from_minimax(theirs.state_dict(), theirs.config.to_dict()))


def eager(model: RetNetHybridForCausalLM) -> RetNetHybridForCausalLM:
    """The model with the experts' reference implementation: PyTorch's grouped products have no float64."""
    model.set_experts_implementation("eager")
    return model


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 96, (1, length), generator=generator) for length in (21, 9)]


@pytest.mark.parametrize("form", FORMS)
def test_logits_of_a_prompt_are_those_of_transformers(theirs, ours, form):
    with torch.no_grad():
        close(ours(prompts()[0], retention_form=form).logits, theirs(prompts()[0]).logits, 1e-5)


@pytest.fixture
def in_float64(monkeypatch):
    """transformers' code without its casts to float32."""
    stand_in = SimpleNamespace(**vars(torch))
    stand_in.float32 = stand_in.float = torch.float64
    monkeypatch.setattr(modeling_minimax, "torch", stand_in)
    monkeypatch.setattr(Tensor, "float", Tensor.double)


@pytest.mark.usefixtures("in_float64")
def test_without_their_casts_to_float32_logits_are_those_of_transformers_to_1e_10(theirs, ours):
    with torch.no_grad():
        close(ours(prompts()[0]).logits, theirs(prompts()[0]).logits, 1e-10)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_what_transformers_computes_of_each_alone(theirs, ours, side):
    for_side = (lambda missing: (missing, 0)) if side == "left" else (lambda missing: (0, missing))
    rows = [nn.functional.pad(ids, for_side(21 - ids.shape[1])) for ids in prompts()]
    marks = [nn.functional.pad(torch.ones_like(ids), for_side(21 - ids.shape[1])) for ids in prompts()]
    with torch.no_grad():
        logits = ours(torch.cat(rows), attention_mask=torch.cat(marks)).logits
        for row, mask, ids in zip(logits, marks, prompts()):
            close(row[mask[0].bool()], theirs(ids).logits[0], 1e-5)


def test_greedy_tokens_with_the_state_are_those_of_transformers(theirs, ours):
    for ids in prompts():
        expected = theirs.generate(ids, max_new_tokens=12, do_sample=False)
        assert ours.generate(ids, max_new_tokens=12, do_sample=False).equal(expected)


def test_loss_with_the_routers_and_gradients_are_those_of_transformers(theirs, ours):
    ids = prompts()[0]
    losses = []
    for model in (theirs, ours):
        model.zero_grad()
        output = model(ids, labels=ids, output_router_logits=True)
        assert output.aux_loss > 0
        losses.append(output.loss)
        output.loss.backward()
    close(losses[1].double(), losses[0].detach().double(), 1e-6)
    planned = minimax.plan(shapes_of(theirs.state_dict()), theirs.config.to_dict())
    mine = {name: parameter.grad for name, parameter in ours.named_parameters()}
    compared = 0
    for move in planned.moves:
        if move.targets:
            factor = float(move.change.label.partition(", times ")[2] or 1)  # theirs = ours / factor; gradients are times it
            gradients = [mine[name] * factor**2 for name in move.targets]
            for name, gradient in zip(move.sources, move.change.backward(gradients), strict=True):
                close(gradient, theirs.get_parameter(name).grad, 1e-5)
                compared += 1
    assert compared == len(list(theirs.parameters()))


def test_what_is_written_loads_in_transformers_and_computes_the_same(ours):
    state_dict, config = to_minimax(ours)
    again = MiniMaxForCausalLM(MiniMaxConfig(**config)).double().eval()
    again.set_experts_implementation("eager")
    assert not any(again.load_state_dict(state_dict))
    with torch.no_grad():
        close(again(prompts()[0]).logits, ours(prompts()[0]).logits, 1e-4)  # their tables of decays are float32
    read_again, _ = to_minimax(from_minimax(state_dict, config))
    assert read_again.keys() == state_dict.keys()
    assert all(torch.equal(read_again[name], value) for name, value in state_dict.items())


@pytest.mark.usefixtures("in_float64")
def test_the_published_layout_rotates_the_part_of_a_head_that_it_states(theirs, monkeypatch):
    """transformers reads past `rotary_dim`: here its rotation is replaced by that of the first 8 of 16 numbers."""

    def rotate_a_part(query, key, cos, sin, *args, **kwargs):
        turned, rates = 8, 1e6 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        angle = torch.arange(query.shape[2], dtype=torch.float64)[:, None] * rates
        rotated = []
        for vectors in (query, key):
            first, second = vectors[..., :turned].chunk(2, dim=-1)
            parts = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
            rotated.append(torch.cat([*parts, vectors[..., turned:]], dim=-1))
        return tuple(rotated)

    state_dict, config = published_minimax(theirs)
    ours = eager(from_minimax(state_dict, config))
    assert ours.config.rope_parameters["partial_rotary_factor"] == 0.5
    with torch.no_grad():
        whole = theirs(prompts()[0]).logits
        monkeypatch.setattr(modeling_minimax, "apply_rotary_pos_emb", rotate_a_part)
        expected = theirs(prompts()[0]).logits
        assert (whole - expected).abs().max() > 0.1
        close(ours(prompts()[0]).logits, expected, 1e-10)


def test_tables_of_decays_that_do_not_follow_from_the_configuration_are_refused(theirs):
    state_dict = theirs.state_dict()
    name = "model.layers.1.self_attn.slope_rate"
    with pytest.raises(CheckpointError, match=f"tensor {name} holds other values"):
        from_minimax(state_dict | {name: state_dict[name] * 1.1}, theirs.config.to_dict())


# what is done to a folder, and what the error names
BAD_FOLDERS = {
    "hypenet, a missing norm": ("hypenet", "model.layers.0.self_attn.o_norm.weight", None, "o_norm.weight is missing"),
    "hypenet, another mixer": ("hypenet", "mixer_types", ["gdn"] * 4, "mixer_types"),
    "hypenet, another rotation": ("hypenet", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_scaling"),
    "hypenet, a part of each head": ("hypenet", "partial_rotary_factor", 0.5, "partial_rotary_factor in config.json"),
    "hypenet, convolutions": ("hypenet", "lightning_use_short_conv", True, "lightning_use_short_conv in config.json"),
    "hypenet, another scaling": ("hypenet", "attn_logits_scaling", "log n", "attn_logits_scaling"),
    "hypenet, an unknown field": ("hypenet", "attn_softcap", 30.0, "attn_softcap in config.json, 30.0"),
    "transnormer, another norm": ("transnormer", "norm_type", "layernorm", "norm_type in config.json"),
    "transnormer, biases": ("transnormer", "bias", True, "bias in config.json"),
    "transnormer, another activation": ("transnormer", "linear_act_fun", "1+elu", "linear_act_fun"),
    "transnormer, an unknown field": ("transnormer", "gate_dim", 16, "gate_dim in config.json, 16"),
    "minimax, too few experts": ("minimax", "num_local_experts", 5, "experts.5"),
    "minimax, too many experts": ("minimax", "num_local_experts", 7, "experts.6.w1.weight is missing"),
    "minimax, another norm": ("minimax", "postnorm", False, "postnorm in config.json"),
    "minimax, a shared expert": ("minimax", "shared_intermediate_size", 8, "shared_intermediate_size in config.json"),
    "minimax, an unknown field": ("minimax", "attention_sinks", 4, "attention_sinks in config.json, 4"),
    "ring, a missing norm": ("ring", "model.layers.1.attention.g_norm.weight", None, "g_norm.weight is missing"),
    "ring, too many experts": ("ring", "num_experts", 12, "experts.8.gate_proj.weight is missing"),
    "ring, another rotation": ("ring", "rope_scaling", {"rope_type": "yarn", "factor": 4.0}, "rope_scaling"),
    "ring, compressed keys": ("ring", "kv_lora_rank", 512, "kv_lora_rank in config.json"),
    "ring, no rule of scores": ("ring", "score_function", None, "score_function is missing in config.json"),
    "ring, an unknown field": (
        "ring",
        "num_kv_heads_for_linear_attn",
        64,
        "num_kv_heads_for_linear_attn in config.json, 64",
    ),
}


@pytest.mark.usefixtures("heard_again", "interruptible")
@pytest.mark.parametrize("bad", BAD_FOLDERS)
def test_a_bad_folder_is_refused_naming_what_is_wrong_and_nothing_is_written(bad, retnet_hf, tmp_path, monkeypatch, theirs):
    monkeypatch.chdir(tmp_path)
    family, name, value, named = BAD_FOLDERS[bad]
    state_dict, config = folder_of(family, tmp_path / "source", theirs)
    if name in state_dict:
        del state_dict[name]
    elif value is None:
        del config[name]
    else:
        config[name] = value
    write(tmp_path / "source", state_dict, config)
    answer = retnet_hf("convert", "source", "made")
    assert answer.code == 2
    assert named in " ".join(answer.err.split()), answer.err
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.usefixtures("heard_again", "interruptible")
@pytest.mark.parametrize("family", FORMATS)
def test_a_folder_of_each_family_is_converted_to_one_of_ours(family, retnet_hf, tmp_path, monkeypatch, theirs):
    monkeypatch.chdir(tmp_path)
    state_dict, config = folder_of(family, tmp_path / "source", theirs)
    answer = retnet_hf("convert", "source", "made", "--license", "mit")
    assert answer.code == 0, answer.err
    if family == "ring":
        assert "experts.0-7.gate_proj.weight" in answer.out  # in the table, in one name
    made = RetNetHybridForCausalLM.from_pretrained("made", dtype="auto")
    expected = FORMATS[family].plan(shapes_of(state_dict), config).build(state_dict)
    assert all(torch.equal(made.state_dict()[name], value) for name, value in expected.state_dict().items())
    assert json.loads(Path("made/config.json").read_text())["model_type"] == "retnet_hybrid"


@pytest.mark.parametrize("case", [*CASES, "transnormer/published_like, unnamed"])
def test_a_folder_loads_as_it_is_and_is_saved_under_our_names(case, tmp_path, caplog):
    case, _, unnamed = case.partition(", ")  # published files of TransNormerLLM state no model_type
    data = golden(case, SMALL)
    config = {name: value for name, value in data.config.items() if not unnamed or name != "model_type"}
    write(tmp_path / "source", data.state_dict, config)
    auto_class = RetNetHybridForCausalLM if unnamed else AutoModelForCausalLM
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(caplog.handler)
    try:
        model, report = auto_class.from_pretrained(tmp_path / "source", output_loading_info=True)
        assert type(RetNetHybridForCausalLM.from_pretrained(tmp_path / "source")) is type(model) is RetNetHybridForCausalLM
    finally:
        transformers_logger.removeHandler(caplog.handler)
    assert not any(report.values()), report
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text
    expected, _ = read(case)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.state_dict().items())
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == "retnet_hybrid"
    saved = load_file(tmp_path / "again" / "model.safetensors").keys()
    assert saved <= again.state_dict().keys()
    with torch.no_grad():
        close(again(data.tensors["input_ids"]).logits, data.tensors["logits"], 1e-5)


def test_the_bias_of_a_router_stays_in_float32(tmp_path):
    """Rounded to bfloat16, it would choose other experts."""
    data = golden("ring/published_like", SMALL)
    biases = {name: value + 4.001 for name, value in data.state_dict.items() if name.endswith("expert_bias")}
    others = {name: value.bfloat16() for name, value in data.state_dict.items()}
    write(tmp_path, others | biases, data.config)
    model = RetNetHybridForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == torch.bfloat16
    for name, bias in biases.items():
        layer = int(name.split(".")[2])
        assert torch.equal(model.model.layers[layer].mlp.router.bias, bias)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("hypenet", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters in config.json must have"),
        ("hypenet", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters in config.json must have"),
        ("hypenet", {"quantization_config": {"quant_method": "gptq"}}, "load weights that are not quantised"),
        ("ring", {"rotary_dim": 2}, "rotary_dim in config.json must be partial_rotary_factor"),
        ("ring", {"layer_group_size": 0}, "layer_group_size in config.json must be at least 1"),
        ("ring", {"hidden_size": None}, "hidden_size is missing in config.json"),
        ("hypenet", {"attn_softcap": 30.0}, "attn_softcap in config.json, 30.0"),
    ],
)
def test_a_field_that_means_another_function_is_refused(family, fields, message):
    content = golden(f"{family}/published_like", SMALL).config | fields
    content = {name: value for name, value in content.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        RetNetHybridConfig.from_dict(content)


def test_published_fields_of_minimax_without_norms_of_the_stream_are_refused(plain_minimax):
    _, content = published_minimax(plain_minimax)
    with pytest.raises(ValueError, match="postnorm in config.json must be True"):
        RetNetHybridConfig.from_dict({name: value for name, value in content.items() if name != "postnorm"})


@pytest.mark.parametrize("family", READERS)
def test_fields_of_transformers_are_kept_or_passed_over(family):
    content = golden(f"{family}/published_like", SMALL).config
    labels = {"0": "no", "1": "yes", "2": "perhaps"}
    of_transformers = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "name_or_path": "a/b",
        "id2label": labels,
        "label2id": {label: int(number) for number, label in labels.items()},
        "problem_type": "single_label_classification",
        "attn_implementation": "eager",
    }
    config, plain = RetNetHybridConfig.from_dict(content | of_transformers), RetNetHybridConfig.from_dict(content)
    assert config.id2label == {0: "no", 1: "yes", 2: "perhaps"}
    assert config.num_labels == 3
    assert config.architectures == ["RetNetHybridForCausalLM"]  # which `transformers serve` reads
    assert config.problem_type == "single_label_classification"
    differ = ("id2label", "label2id", "problem_type", "_attn_implementation")
    assert {name: value for name, value in config.to_dict().items() if name not in differ} == {
        name: value for name, value in plain.to_dict().items() if name not in differ
    }


def test_a_base_is_read_from_either_place():
    content = golden("hypenet/published_like", SMALL).config
    base = content.pop("rope_theta", 10000.0)
    for fields in ({"rope_theta": base}, {"rope_parameters": {"rope_type": "default", "rope_theta": base}}):
        assert RetNetHybridConfig.from_dict(content | fields).rope_parameters["rope_theta"] == base
    both = {"rope_theta": base, "rope_parameters": {"rope_type": "default", "rope_theta": base}}
    assert RetNetHybridConfig.from_dict(content | both).rope_parameters["rope_theta"] == base


def test_auto_config_makes_our_configuration_of_the_fields_of_a_family():
    content = golden("hypenet/published_like", SMALL).config
    fields = {name: value for name, value in content.items() if name != "model_type"}
    assert AutoConfig.for_model("hypenet", **fields).to_dict() == RetNetHybridConfig.from_dict(content).to_dict()


@pytest.mark.parametrize("layout", ["without a head", "in memory"])
def test_other_layouts_of_transformers_minimax_load(layout, plain_minimax, tmp_path):
    if layout == "in memory":
        plain_minimax.save_pretrained(tmp_path, save_original_format=False)
        loaded, report = RetNetHybridForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        loaded = eager(loaded).model
    else:
        plain_minimax.model.save_pretrained(tmp_path)
        loaded, report = RetNetHybridModel.from_pretrained(tmp_path, output_loading_info=True)
        eager(loaded)
    assert not any(report.values()), report
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        close(loaded(ids).last_hidden_state, plain_minimax.model(ids).last_hidden_state, 1e-5)


def test_a_minimax_of_heads_that_are_no_power_of_two_is_there_and_back():
    theirs = small_minimax(hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
    model = from_minimax(theirs.state_dict(), theirs.config.to_dict())
    state_dict, _ = to_minimax(model)
    assert state_dict.keys() == theirs.state_dict().keys()


def test_a_minimax_folder_loads_as_it_is_and_stays_the_model_of_transformers_for_auto_classes(plain_minimax, tmp_path):
    ids = prompts()[0]
    plain_minimax.save_pretrained(tmp_path / "theirs")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")) is MiniMaxForCausalLM
    assert type(AutoModel.from_pretrained(tmp_path / "theirs")) is MiniMaxModel
    model, report = RetNetHybridForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    eager(model)
    assert not any(report.values()), report
    with torch.no_grad():
        close(model(ids).logits, plain_minimax(ids).logits, 1e-5)
    model.save_pretrained(tmp_path / "ours")
    names = load_file(tmp_path / "ours" / "model.safetensors").keys()
    assert not [name for name in names if "self_attn" in name or "moe" in name]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())


def test_the_published_layout_of_minimax_loads_as_it_is(plain_minimax, tmp_path):
    state_dict, config = published_minimax(plain_minimax)
    write(tmp_path, state_dict, config | {"model_type": "minimax_text_01"})
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is RetNetHybridForCausalLM
    assert not any(report.values()), report
    expected = FORMATS["minimax"].plan(shapes_of(state_dict), config).build(state_dict)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in expected.state_dict().items())


def test_factors_on_branches_of_a_minimax_are_for_convert(plain_minimax, tmp_path):
    plain_minimax.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"mlp_beta_factor": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="mlp_beta_factor in config.json must be 1 or absent, got 0.5: `retnet-hf convert`"):
        RetNetHybridForCausalLM.from_pretrained(tmp_path)


# Of a process of its own: the memory beyond what it began with, without pages of files, while a folder is converted.
MEMORY_OF_A_CONVERSION = """
import sys, threading, time
from pathlib import Path
from retnet_hf.conversion.checkpoint import Checkpoint
from retnet_hf.conversion.converted_folder import write_folder
from retnet_hf.conversion.formats import plan_of

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

checkpoint = Checkpoint(Path(sys.argv[1]))
plan = plan_of(checkpoint)
plan.empty_model()  # what is imported for it is no part of the conversion
start, peak, over = anonymous(), 0, False

def watch():
    global peak
    while not over:
        peak = max(peak, anonymous())
        time.sleep(0.002)

watching = threading.Thread(target=watch)
watching.start()
write_folder(checkpoint, plan, Path(sys.argv[2]), "mit")
over = True
watching.join()
print(peak - start)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells how much memory is anonymous")
def test_a_conversion_takes_the_memory_of_one_shard_and_of_one_tensor(tmp_path, monkeypatch):
    """Of 8 files, most of whose tensors are those of experts, which are joined."""
    config = dict(golden("ring/published_like", SMALL).config)
    config |= {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128, "vocab_size": 64, "moe_intermediate_size": 256}
    config |= {"num_experts": 32, "num_hidden_layers": 8, "n_group": 4, "intermediate_size": 256}
    planned = ring.plan({}, config)
    shapes = shapes_of(planned.reverse(planned.empty_model().to("meta")))
    folder, homes = tmp_path / "source", {}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for layer in range(8):
        names = [name for name in shapes if (f".{layer}." in name.split("mlp")[0]) or (layer == 0 and "layers" not in name)]
        homes |= dict.fromkeys(names, f"model-{layer:05d}.safetensors")
        save_file(
            {name: torch.ones(shapes[name], dtype=torch.bfloat16) for name in names},
            folder / f"model-{layer:05d}.safetensors",
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    arguments = [sys.executable, "-c", MEMORY_OF_A_CONVERSION, folder, tmp_path / "made"]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the system at once
    answer = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    taken = int(answer.stdout.split()[-1])
    tensor = max(math.prod(parameter.shape) for parameter in planned.empty_model().parameters()) * 2
    shard = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in (tmp_path / "made").glob("*.safetensors")) > 6 * shard
    assert taken < shard + 2 * tensor  # one as it is read, and as it is written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "source"]


_S, _L = "attn", "lightning-attn"
_HYPENET = {
    "model_type": "hypenet",
    "attn_use_rope": False,
    "attn_use_output_gate": True,
    "expand_kv_proj": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "lightning_use_rope": True,
    "lightning_head_dim": 128,
    "lightning_scale": "1/sqrt(d)",
    "lightning_use_qk_norm": True,
    "lightning_use_output_norm": True,
    "lightning_use_output_gate": True,
    "max_position_embeddings": 1048576,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
_TRANSNORMER = {
    "model_type": "transnormer",
    "pad_token_id": 0,
    "vocab_size": 64000,
    "norm_type": "simplermsnorm",
    "linear_act_fun": "swish",
    "add_bos_token": False,
    "no_scale_embedding": False,
}
_RING = {
    "model_type": "bailing_moe_linear",
    "vocab_size": 157184,
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 8,
    "topk_group": 4,
    "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "router_dtype": "fp32",
    "use_qk_norm": True,
    "use_rmsnorm": True,
    "partial_rotary_factor": 0.5,
    "routed_scaling_factor": 2.5,
    "max_window_layers": 20,
    "embedding_dropout": 0.0,
}


def with_softmax(layers: int, softmax: list[int]) -> dict:
    return {
        "num_hidden_layers": layers,
        "mixer_types": [_S if layer in softmax else _L for layer in range(layers)],
    }


# what a config.json of real size states, and how many parameters the model has, in billions
PUBLISHED = {
    "hypenet 2B": (
        _HYPENET
        | with_softmax(28, [2, 3, 6, 8, 9, 21, 25])
        | {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16}
        | {"lightning_nh": 16, "lightning_nkv": 16, "attn_logits_scaling": "hype 500"},
        2,
    ),
    "hypenet 5B": (
        _HYPENET
        | with_softmax(36, [0, 1, 7, 14, 15, 22, 24, 31, 33])
        | {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32}
        | {"lightning_nh": 32, "lightning_nkv": 32},
        5,
    ),
    "transnormer 385M": (
        _TRANSNORMER
        | {"decoder_embed_dim": 1024, "hidden_dim": 1024, "decoder_layers": 24, "decoder_attention_heads": 8}
        | {"glu_dim": 2816, "linear_use_lrpe_list": [1] + [0] * 23, "vocab_size": 50272, "linear_act_fun": "none"},
        0.385,
    ),
    "transnormer 1B": (
        _TRANSNORMER
        | {"decoder_embed_dim": 2048, "hidden_dim": 2048, "decoder_layers": 16, "decoder_attention_heads": 16}
        | {"glu_dim": 5632, "linear_use_lrpe_list": [1] + [0] * 15},
        1,
    ),
    "minimax 456B": (
        {
            "model_type": "minimax_text_01",
            "attn_type_list": [int(layer % 8 == 7) for layer in range(80)],
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 6144,
            "intermediate_size": 9216,
            **{f"layernorm_{branch}_alpha": 3.5565588200778455 for branch in ("linear_attention", "full_attention", "mlp")},
            **{f"layernorm_{branch}_beta": 1.0 for branch in ("linear_attention", "full_attention", "mlp")},
            "max_position_embeddings": 10240000,
            "num_attention_heads": 64,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 80,
            "num_key_value_heads": 8,
            "num_local_experts": 32,
            "postnorm": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000000,
            "rotary_dim": 64,
            "router_jitter_noise": 0.0,
            "shared_intermediate_size": 0,
            "shared_moe_mode": "sigmoid",
            "vocab_size": 200064,
        },
        456,
    ),
    "ring mini 16B": (
        _RING
        | {"hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20, "num_attention_heads": 16}
        | {"moe_intermediate_size": 512, "layer_group_size": 5, "group_norm_size": 4},
        16,
    ),
    "ring flash 104B": (
        _RING
        | {"hidden_size": 4096, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 32}
        | {"moe_intermediate_size": 1024, "layer_group_size": 8, "group_norm_size": 8},
        104,
    ),
}


def kinds_of_names(names) -> set[str]:
    """Names without their numbers."""
    return {re.sub(r"\b\d+\b", "#", name) for name in names}


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes_have_a_place_for_every_tensor_and_as_many_parameters_as_published(size):
    family = size.split()[0]
    config, billions = PUBLISHED[size]
    planned = FORMATS[family].plan({"lm_head.weight": ()} if family == "transnormer" else {}, config)
    model = planned.empty_model()
    shapes = shapes_of(planned.reverse(model.to("meta")))
    planned.check(shapes)  # each name used once, each parameter filled once, shapes that fit
    parameters = sum(map(math.prod, shapes.values())) / 1e9
    if family == "transnormer":  # the published numbers count the embedding, and not the head of the same size
        parameters -= math.prod(shapes["lm_head.weight"]) / 1e9
    assert math.isclose(parameters, billions, rel_tol=0.04), parameters
    if family in READERS:  # names as those of the small weights, which the authors' code wrote
        small = golden(f"{family}/published_like", SMALL)
        assert kinds_of_names(shapes) == kinds_of_names(small.state_dict)
