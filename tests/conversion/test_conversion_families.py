# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Families of RetNets under other names: MiniMax against transformers, folders, real sizes, and what is refused."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from foreign_folders import folder_of, published_minimax, small_minimax, write_folder
from golden import SMALL, golden, read
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from small_models import FAMILIES, close, greedy, same_tensors, small_config, small_model
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, MiniMaxConfig, MiniMaxForCausalLM
from transformers.models.minimax import modeling_minimax

from retnet_hf import RetNetHybridConfig, RetNetHybridForCausalLM, RetNetHybridModel
from retnet_hf.conversion import families, family_model_types, ring
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.conversion.foreign_config import decays_with_factors
from retnet_hf.conversion.formats import FORMATS
from retnet_hf.conversion.minimax import from_minimax, to_minimax
from retnet_hf.conversion.moves import shapes_of


pytestmark = pytest.mark.usefixtures("no_gradients")
pytest_plugins = ("foreign_folders",)  # the fixture `plain_minimax`

FORMS = ("parallel", "recurrent", "chunkwise")


@pytest.fixture(scope="module")
def theirs() -> MiniMaxForCausalLM:
    return small_minimax()


@pytest.fixture(scope="module")
def ours(theirs) -> RetNetHybridForCausalLM:
    return eager(from_minimax(theirs.state_dict(), theirs.config.to_dict()))


def eager(model):
    """The model with the experts' reference implementation: PyTorch's grouped products have no float64."""
    model.set_experts_implementation("eager")
    return model


IDS = torch.randint(1, 96, (1, 21), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def in_float64(monkeypatch):
    """transformers' code without its casts to float32."""
    stand_in = SimpleNamespace(**vars(torch))
    stand_in.float32 = stand_in.float = torch.float64
    monkeypatch.setattr(modeling_minimax, "torch", stand_in)
    monkeypatch.setattr(Tensor, "float", Tensor.double)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("form", FORMS)
def test_without_their_casts_to_float32_logits_are_those_of_transformers_to_1e_10(theirs, ours, form):
    with torch.no_grad():
        close(ours(IDS, retention_form=form).logits, theirs(IDS).logits, 1e-10)


@torch.enable_grad()
def test_loss_with_the_routers_and_gradients_are_those_of_transformers(theirs, ours):
    ids, losses = IDS, []
    for model in (theirs, ours):
        model.zero_grad()
        mask = {"linear_attention": torch.ones_like(ids)} if model is ours else None
        output = model(ids, mask, labels=ids, output_router_logits=True)
        assert output.aux_loss > 0
        losses.append(output.loss.double())
        output.loss.backward()
    close(losses[1], losses[0], 1e-6)
    planned = FORMATS["minimax"].plan(shapes_of(theirs.state_dict()), theirs.config.to_dict())
    mine, compared = {name: parameter.grad for name, parameter in ours.named_parameters()}, []
    for move in planned.moves:
        if move.targets:
            ones = move.change.forward([torch.ones_like(theirs.get_parameter(name)) for name in move.sources])
            factor = ones[0].flatten()[0].item()  # theirs = ours / factor; gradients are times it
            gradients = move.change.backward([mine[name] * factor**2 for name in move.targets])
            for name, gradient in zip(move.sources, gradients, strict=True):
                close(gradient, theirs.get_parameter(name).grad, 1e-5)
            compared += move.sources
    assert sorted(compared) == sorted(name for name, _ in theirs.named_parameters())


def test_what_is_written_loads_in_transformers_and_computes_the_same_for_any_number_of_heads(ours):
    state_dict, config = to_minimax(ours)
    again = eager(MiniMaxForCausalLM(MiniMaxConfig(**config)).double().eval())
    assert not any(again.load_state_dict(state_dict))
    close(again(IDS).logits, ours(IDS).logits, 1e-4)  # their tables of decays are float32
    same_tensors(to_minimax(from_minimax(state_dict, config))[0], state_dict)
    theirs = small_minimax(hidden_size=48, num_attention_heads=6, num_key_value_heads=2)  # no power of two
    assert to_minimax(from_minimax(theirs.state_dict(), theirs.config.to_dict()))[0].keys() == theirs.state_dict().keys()


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
        whole = theirs(IDS).logits
        monkeypatch.setattr(modeling_minimax, "apply_rotary_pos_emb", rotate_a_part)
        expected = theirs(IDS).logits
        assert (whole - expected).abs().max() > 0.1
        close(ours(IDS).logits, expected, 1e-10)


def test_tables_of_decays_that_do_not_follow_from_the_configuration_are_refused(theirs):
    state_dict, name = theirs.state_dict(), "model.layers.1.self_attn.slope_rate"
    with pytest.raises(CheckpointError, match=f"tensor {name} holds other values"):
        from_minimax(state_dict | {name: state_dict[name] * 1.1}, theirs.config.to_dict())


# (family, what is changed in its config.json or left out of it or of the weights, what the error says)
REFUSED = [
    ("hypenet", {"model.layers.0.self_attn.o_norm.weight": ...}, "o_norm.weight is missing"),
    ("hypenet", {"mixer_types": ["gdn"] * 4}, "mixer_types must contain only lightning-attn and attn, got 'gdn'"),
    ("hypenet", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling in config.json must be None"),
    ("hypenet", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters in config.json must have"),
    ("hypenet", {"partial_rotary_factor": 0.5}, "partial_rotary_factor in config.json"),
    ("hypenet", {"lightning_use_short_conv": True}, "lightning_use_short_conv in config.json must be False"),
    ("hypenet", {"sinks": 4}, "sinks in config.json, 4, is not a known field of the format hypenet"),
    ("hypenet", {"attn_logits_scaling": "log n"}, 'attn_logits_scaling must be None or "hype a"'),
    ("transnormer", {"norm_type": "layernorm"}, "norm_type in config.json must be 'simplermsnorm'"),
    ("transnormer", {"bias": True}, "bias in config.json must be False"),
    ("transnormer", {"linear_act_fun": "1+elu"}, "linear_act_fun in config.json must be one of"),
    ("minimax", {"num_local_experts": 7}, r"experts\.6\.w1\.weight is missing"),
    ("minimax", {"postnorm": ...}, "postnorm in config.json must be True"),
    ("minimax", {"shared_intermediate_size": 8}, "shared_intermediate_size in config.json must be 0"),
    ("ring", {"model.layers.1.attention.g_norm.weight": ...}, "g_norm.weight is missing"),
    ("ring", {"num_experts": 12}, r"experts\.8\.gate_proj\.weight is missing"),
    ("ring", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling in config.json must be None"),
    ("ring", {"kv_lora_rank": 512}, "kv_lora_rank in config.json must be None"),
    ("ring", {"score_function": ...}, "score_function is missing in config.json"),
    ("ring", {"rotary_dim": 2}, "rotary_dim in config.json must be partial_rotary_factor"),
    ("ring", {"layer_group_size": 0}, "layer_group_size in config.json must be at least 1"),
    ("ling", {"short_conv_kernel_size": 4}, "short_conv_kernel_size in config.json must be None"),  # Ling-3.0
    ("ling", {"rope_interleave": False}, "rope_interleave in config.json must be True"),
    ("ling", {"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling in config.json must be None"),
    ("ling", {"partial_rotary_factor": 0.3}, "partial_rotary_factor in config.json must fit the size of a head, 8, got 0.3"),
    ("ling", {"kv_lora_rank": None}, "q_lora_rank must be None without kv_lora_rank"),
    ("ling", {"qk_rope_head_dim": 3}, "qk_rope_head_dim must be even"),
    ("ling", {"num_nextn_predict_layers": 0}, r"model\.layers\.5\..* has no place"),
    ("minicpm_sala", {"qk_norm": False}, "qk_norm in config.json must be True"),
    ("minicpm_sala", {"use_output_norm": False}, "use_output_norm in config.json must be True"),
    ("minicpm_sala", {"new_option": 3}, "new_option"),
    ("minicpm_sala", {"sparse_config": {"dense_len": 8192, "new_option": 3}}, "sparse_config .* got 'new_option'"),
    ("minicpm_sala", {"scale_depth": 0}, "scale_depth in config.json must be positive, got 0"),
    ("ring_lite", {"use_bias": True}, "use_bias in config.json must be False"),
    ("ring_lite", {"use_bias": None}, "use_bias in config.json must be False .* got None"),
    ("ring_lite", {"use_linear_gqa": True}, "use_linear_gqa in config.json must be False"),
    ("ring_lite", {"use_qk_norm": True}, "use_qk_norm"),
    ("ring_lite", {"score_function": "sigmoid"}, "score_function"),
]


@pytest.mark.parametrize(("family", "changes", "words"), REFUSED)
def test_what_has_no_counterpart_is_refused(family, changes, words, plain_minimax):
    if family == "minimax":
        weights, config = published_minimax(plain_minimax)
    else:
        weights, config, *_ = golden(f"{family}/published_like", SMALL)
    config = {name: value for name, value in (config | changes).items() if value is not ...}
    weights = {name: value for name, value in weights.items() if name not in changes}
    with pytest.raises((ValueError, StrictDataclassError), match=words):
        getattr(FORMATS[family], f"from_{family}")(weights, config)


def test_what_only_convert_or_nothing_reads_is_refused_by_from_pretrained(plain_minimax, tmp_path):
    content = golden("hypenet/published_like", SMALL).config | {"quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(ValueError, match="load weights that are not quantised"):
        RetNetHybridConfig.from_dict(content)
    plain_minimax.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"mlp_beta_factor": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="mlp_beta_factor in config.json must be 1 or absent, got 0.5: `retnet-hf convert`"):
        RetNetHybridForCausalLM.from_pretrained(tmp_path)


def test_each_family_is_told_from_its_relatives():
    for family in ("ling", "minicpm_sala", "ring_lite", "ring", "hypenet"):
        weights, config, *_ = golden(f"{family}/published_like", SMALL)
        assert next(name for name, form in FORMATS.items() if form.recognises(weights.keys(), config)) == family


@pytest.mark.usefixtures("heard_again", "interruptible")
@pytest.mark.parametrize("family", ["hypenet", "transnormer", "minimax", "ring"])
def test_a_folder_of_each_family_is_converted_to_one_of_ours(family, retnet_hf, tmp_path, in_an_empty_folder, theirs):
    state_dict, config = folder_of(family, tmp_path / "source", theirs)
    answer = retnet_hf("convert", "source", "made", "--license", "mit")
    assert answer.code == 0, answer.err
    made = RetNetHybridForCausalLM.from_pretrained("made", dtype="auto")
    expected = FORMATS[family].plan(shapes_of(state_dict), config).build(state_dict)
    same_tensors(made.state_dict(), expected.state_dict())
    assert json.loads(Path("made/config.json").read_text())["model_type"] == "retnet_hybrid"


def test_the_bias_of_a_router_stays_in_float32(tmp_path):
    """Rounded to bfloat16, it would choose other experts."""
    data = golden("ring/published_like", SMALL)
    biases = {name: value + 4.001 for name, value in data.state_dict.items() if name.endswith("expert_bias")}
    write_folder(tmp_path, {name: value.bfloat16() for name, value in data.state_dict.items()} | biases, data.config)
    model = RetNetHybridForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == torch.bfloat16
    for name, bias in biases.items():
        assert torch.equal(model.model.layers[int(name.split(".")[2])].mlp.router.bias, bias)


@pytest.mark.parametrize("family", ["hypenet", "transnormer", "ring"])
def test_fields_of_transformers_are_kept_or_passed_over(family):
    content = golden(f"{family}/published_like", SMALL).config
    kept = {"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}, "problem_type": "single_label_classification"}
    passed_over = {"tokenizer_class": "PreTrainedTokenizerFast", "name_or_path": "a/b", "attn_implementation": "eager"}
    config, plain = RetNetHybridConfig.from_dict(content | kept | passed_over), RetNetHybridConfig.from_dict(content)
    assert config.architectures == ["RetNetHybridForCausalLM"]  # which `transformers serve` reads
    implementation = {"_attn_implementation": config.to_dict().get("_attn_implementation")}
    assert config.to_dict() | implementation == plain.to_dict() | kept | implementation


def test_a_base_is_read_from_either_place_and_auto_config_reads_fields():
    content = dict(golden("hypenet/published_like", SMALL).config)  # other tests read it, too
    base = {"rope_theta": content.pop("rope_theta", 10000.0)}
    nested = {"rope_parameters": {"rope_type": "default"} | base}
    for fields in (base, nested, base | nested):
        assert RetNetHybridConfig.from_dict(content | fields).rope_parameters["rope_theta"] == base["rope_theta"]
    fields = {name: value for name, value in content.items() if name != "model_type"}
    assert AutoConfig.for_model("hypenet", **fields).to_dict() == RetNetHybridConfig.from_dict(content).to_dict()


@pytest.mark.parametrize("in_memory", [False, True])
def test_minimax_without_a_head_and_in_the_layout_of_memory_loads(in_memory, plain_minimax, tmp_path):
    saved, model_class = (plain_minimax, RetNetHybridForCausalLM) if in_memory else (plain_minimax.model, RetNetHybridModel)
    saved.save_pretrained(tmp_path, save_original_format=not in_memory)
    loaded, report = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    close(eager(loaded)(IDS)[0], saved(IDS)[0], 1e-5)


def test_a_minimax_folder_loads_as_it_is_and_stays_the_model_of_transformers_for_auto_classes(plain_minimax, tmp_path):
    plain_minimax.save_pretrained(tmp_path / "theirs")
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")) is MiniMaxForCausalLM
    assert type(AutoModel.from_pretrained(tmp_path / "theirs")) is modeling_minimax.MiniMaxModel
    model, report = RetNetHybridForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    assert not any(report.values()), report
    close(eager(model)(IDS).logits, plain_minimax(IDS).logits, 1e-5)
    model.save_pretrained(tmp_path / "ours")
    names = load_file(tmp_path / "ours" / "model.safetensors").keys()
    assert not [name for name in names if "self_attn" in name or "moe" in name]
    same_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict(), model.state_dict())


def test_the_published_layout_of_minimax_loads_as_it_is(plain_minimax, tmp_path):
    state_dict, config = published_minimax(plain_minimax)
    write_folder(tmp_path, state_dict, config, "sharded")
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model) is RetNetHybridForCausalLM
    assert not any(report.values()), report
    same_tensors(model.state_dict(), from_minimax(state_dict, config).state_dict())


def test_a_text_that_the_published_model_reads_sparsely_is_refused_at_the_call():
    model, data = read("minicpm_sala/other_options")  # whose dense_len is 50
    ids = data.tensors["input_ids"].repeat(1, 2)
    assert model(ids[:, :49]).logits.isfinite().all()
    with pytest.raises(ValueError, match=r"at most 49 tokens with padding \(attention_max_length\), got 50"):
        model(ids[:, :50])
    state = model(ids[:, :49], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="at most 49 tokens"):
        model(ids[:, :1], past_key_values=state)
    model.generation_config.eos_token_id = None
    assert greedy(model, ids[:, :45], 5).shape == (1, 50)
    with pytest.raises(ValueError, match=r"prompt and new tokens must be at most 50 .*, got 51"):
        greedy(model, ids[:, :45], 6)


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
start = peak = anonymous()
converting = threading.Thread(target=write_folder, args=(checkpoint, plan, Path(sys.argv[2]), "mit"))
converting.start()
while converting.is_alive():
    peak = max(peak, anonymous())
    time.sleep(0.002)
print(peak - start)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells how much memory is anonymous")
def test_a_conversion_takes_the_memory_of_one_shard_and_of_one_tensor(tmp_path):
    """Of 8 files, most of whose tensors are those of experts, which are joined."""
    config = dict(golden("ring/published_like", SMALL).config)
    config |= {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128, "vocab_size": 64, "moe_intermediate_size": 256}
    config |= {"num_experts": 32, "num_hidden_layers": 8, "n_group": 4, "intermediate_size": 256}
    planned = FORMATS["ring"].plan({}, config)
    shapes, folder, homes = shapes_of(planned.reverse(planned.empty_model().to("meta"))), tmp_path / "source", {}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for layer in range(8):
        names = [name for name in shapes if (f".{layer}." in name.split("mlp")[0]) or (layer == 0 and "layers" not in name)]
        tensors = {name: torch.ones(shapes[name], dtype=torch.bfloat16) for name in names}
        save_file(tensors, folder / f"model-{layer:05d}.safetensors")
        homes |= dict.fromkeys(names, f"model-{layer:05d}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": homes}))
    arguments = [sys.executable, "-c", MEMORY_OF_A_CONVERSION, folder, tmp_path / "made"]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the system at once
    answer = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    tensor = max(parameter.numel() for parameter in planned.empty_model().parameters()) * 2
    shard = max(file.stat().st_size for file in folder.glob("*.safetensors"))
    assert sum(file.stat().st_size for file in (tmp_path / "made").glob("*.safetensors")) > 6 * shard
    assert int(answer.stdout.split()[-1]) < shard + 2 * tensor  # one as it is read, and as it is written


def heads(number: int, groups: int) -> dict:
    return {"num_attention_heads": number, "num_key_value_heads": groups, "head_dim": 128}


def mixers(layers: int, softmax: tuple[int, ...], name: str = "attn") -> dict:
    lightning = {"lightning_nh": 32, "lightning_nkv": 32, "lightning_head_dim": 128, "num_hidden_layers": layers}
    return lightning | {"mixer_types": [name if layer in softmax else "lightning-attn" for layer in range(layers)]}


_RING = {"vocab_size": 157184, "num_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4}
MINIMAX = {"model_type": "minimax_text_01", "attn_type_list": [int(layer % 8 == 7) for layer in range(80)]}
MINIMAX |= {"hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000000, "rotary_dim": 64, "router_jitter_noise": 0.0}
MINIMAX |= {"postnorm": True, "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid"}
for kind in ("linear_attention", "full_attention", "mlp"):
    MINIMAX |= {f"layernorm_{kind}_alpha": 3.5565588200778455, f"layernorm_{kind}_beta": 1.0}
# what a config.json of real size states besides the small ones, and the bounds of its billions of parameters
PUBLISHED = {
    "hypenet 5B": (
        {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "expand_kv_proj": True}
        | {**heads(32, 8), **mixers(36, (0, 1, 7, 14, 15, 22, 24, 31, 33))},
        (4.8, 5.2),
    ),
    "transnormer 1B": (
        {"vocab_size": 64000, "decoder_embed_dim": 2048, "hidden_dim": 2048, "decoder_attention_heads": 16}
        | {"decoder_layers": 16, "glu_dim": 5632, "linear_use_lrpe_list": [1] + [0] * 15},
        (0.96, 1.04),
    ),
    "minimax 456B": (
        {**MINIMAX, "hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80, "vocab_size": 200064}
        | {**heads(64, 8), "num_experts_per_tok": 2, "num_local_experts": 32},
        (437.8, 474.2),
    ),
    "ring 16B": (
        {**_RING, "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 20, "moe_intermediate_size": 512}
        | {**heads(16, 4), "layer_group_size": 5, "group_norm_size": 4},
        (15.4, 16.6),
    ),
    "ling 105B": (
        {**_RING, "hidden_size": 4096, "intermediate_size": 9216, "num_hidden_layers": 32, "moe_intermediate_size": 1024}
        | {**heads(32, 32), "layer_group_size": 8, "num_nextn_predict_layers": 0}
        | {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
        (103, 108),
    ),
    "minicpm_sala 9B": (
        {"vocab_size": 73448, "hidden_size": 4096, "intermediate_size": 16384, "dim_model_base": 256}
        | {**heads(32, 2), **mixers(32, (0, 9, 16, 17, 22, 29, 30, 31), "minicpm4")},
        (9.4, 9.6),
    ),
    "ring_lite 17B": (
        {"vocab_size": 126464, "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408}
        | {**heads(16, 4), "num_hidden_layers": 28, "layer_group_size": 7, "num_experts": 64, "num_experts_per_tok": 6},
        (17.0, 17.2),
    ),
}


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_sizes_have_a_place_for_every_tensor_and_as_many_parameters_as_published(size):
    family, (fields, (least, most)) = size.split()[0], PUBLISHED[size]
    small = None if family == "minimax" else golden(f"{family}/published_like", SMALL)
    untied = {"lm_head.weight": ()} if family == "transnormer" else {}
    planned = FORMATS[family].plan(untied, (small.config if small else {}) | fields)
    shapes = shapes_of(planned.reverse(planned.empty_model().to("meta")))
    planned.check(shapes)  # each name used once, each parameter filled once, shapes that fit
    parameters = sum(map(math.prod, shapes.values())) / 1e9
    if family == "transnormer":  # the published numbers count the embedding, and not the head of the same size
        parameters -= math.prod(shapes["lm_head.weight"]) / 1e9
    assert least < parameters < most
    if small:  # names as those of the small weights, which the authors' code wrote
        further = f"layers.{small.config.get('num_hidden_layers')}."
        names = [name for name in small.state_dict if further not in name]
        kinds, expected = ({re.sub(r"\b\d+\b", "#", name) for name in each} for each in (shapes, names))
        assert kinds == expected


def test_published_sizes_have_the_layers_decays_and_limits_of_their_cards():
    ling, sala = (
        RetNetHybridConfig(**FORMATS[family].FAMILY.fields(golden(f"{family}/published_like", SMALL).config | fields))
        for family, fields in (("ling", PUBLISHED["ling 105B"][0]), ("minicpm_sala", PUBLISHED["minicpm_sala 9B"][0]))
    )
    assert [layer for layer, kind in enumerate(ling.layer_types) if kind == "full_attention"] == [7, 15, 23, 31]
    assert ling.decays(0)[0] == pytest.approx(0.431, abs=1e-3)  # exp(-2^(-1/4) (1 + 1e-5))
    softmax = [layer for layer, kind in enumerate(sala.layer_types) if kind == "full_attention"]
    assert (softmax, (sala.logits_scaling, sala.attention_max_length)) == ([0, 9, 16, 17, 22, 29, 30, 31], (16, 8191))
    assert {tuple(sala.decays(layer)) for layer in range(32)} == {tuple(sala.decays(0))}


RING = {"decay_schedule": decays_with_factors("alibi", 4, ring.depth_factors(3))}


def test_a_file_without_optional_keys_has_their_defaults_and_without_others_is_refused():
    content = golden("hypenet/published_like", SMALL).config
    fields = FORMATS["hypenet"].FAMILY.fields(content | {"tie_word_embeddings": True})
    assert RetNetHybridConfig(**fields).tie_word_embeddings
    assert fields["value_expansion"] == 1.0  # of every HypeNet
    with pytest.raises(ValueError, match="hidden_size is missing in config.json, but the format hypenet requires it"):
        FORMATS["hypenet"].FAMILY.fields({name: value for name, value in content.items() if name != "hidden_size"})


@pytest.mark.parametrize(
    ("family", "field", "value", "allowed"),
    [
        ("hypenet", "use_output_gate", False, "True"),
        ("hypenet", "value_expansion", 2.0, "1.0"),
        ("hypenet", "head_norm_groups", 2, "1"),
        ("ring", "head_norm_groups", None, "given"),
        ("ring", "attention_head_dim", 16, "None"),  # which only says what another one means
    ],
)
def test_a_field_that_no_row_writes_is_refused_naming_it_and_its_value(family, field, value, allowed):
    fields = FAMILIES[family] | (RING if family == "ring" else {}) | {field: value}
    with pytest.raises(ValueError, match=f"{field} must be {allowed} for the format {family}, which cannot express {value}"):
        getattr(FORMATS[family], f"to_{family}")(RetNetHybridForCausalLM(small_config(**fields)))


def test_a_tied_head_that_a_checkpoint_has_twice_is_read_and_must_be_equal():
    state_dict, content = FORMATS["hypenet"].to_hypenet(small_model("hypenet", tie_word_embeddings=True))
    assert "lm_head.weight" not in state_dict
    head = {"lm_head.weight": state_dict["model.embed_tokens.weight"].clone()}
    assert torch.equal(FORMATS["hypenet"].from_hypenet(state_dict | head, content).lm_head.weight, head["lm_head.weight"])
    with pytest.raises(CheckpointError, match="lm_head.weight differs from the tensor it is tied to"):
        FORMATS["hypenet"].from_hypenet(state_dict | {"lm_head.weight": head["lm_head.weight"] + 1}, content)


def test_a_checkpoint_without_a_config_json_is_recognised_by_its_names_and_refused_and_so_is_a_plain_model():
    family = FORMATS["hypenet"].FAMILY
    assert family.recognises(golden("hypenet/published_like", SMALL).state_dict, None)
    assert family.recognises((), {"model_type": family.model_types[-1]})
    with pytest.raises(CheckpointError, match="the format hypenet needs a config.json next to the weights"):
        family.plan({}, None)
    with pytest.raises(ValueError, match="the format hypenet needs a RetNetHybridForCausalLM, got a RetNetForCausalLM"):
        family.write(small_model())


def test_the_model_types_of_all_families_are_registered():
    known = {model_type for family in families.FAMILIES for model_type in family.model_types}
    assert sorted(family_model_types.MODEL_TYPES) == sorted(known)
    assert set(family_model_types.MODEL_TYPES) <= set(CONFIG_MAPPING.keys())
