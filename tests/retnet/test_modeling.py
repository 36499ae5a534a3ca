# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNetModel: every option in every form, the paper's initialisation, retention maps, gradients through the state."""

import copy
import math

import pytest
import torch
from small_models import close, greedy, random_ids, shake, small_config, small_model
from small_vision_models import VISION_FAMILIES
from torch import nn
from transformers import DynamicCache
from transformers.utils import TransformersKwargs

import retnet_hf
from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridForCausalLM, RetNetModel, RetNetState


OPTIONS = {
    "default": {},
    "log_linear": {"decay_schedule": "log_linear"},
    "linear_transformer": {"decay_schedule": "none", "use_head_norm": False, "use_output_gate": False},
    "one_decay": {"decay_schedule": [127 / 128] * 4},
    "no_gate": {"use_output_gate": False},
    "gelu_gate": {"output_gate_act": "gelu"},
    "no_head_norm": {"use_head_norm": False},
    "plain_head_norm": {"head_norm_affine": False},
    "no_rotation": {"use_rotary": False},
    "rotary_endpoint": {"rotary_endpoint": True},
    "plain_mlp": {"use_gated_mlp": False, "hidden_act": "gelu"},
    "feature_map": {"feature_map": "relu"},
    "of_presets": {"feature_map": ["relu", None], "use_qk_norm": True, "use_head_norm": False, "use_embedding_norm": True},
    "grouped_heads": {"num_key_value_heads": 2},
    "small_keys": {"key_expansion": 0.5, "value_expansion": 1.5},
    "embedding": {"embedding_multiplier": 5.0, "use_embedding_norm": True},
    "post_norm": {"norm_position": "post", "residual_multiplier": 1.6},
}


@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "default"])
def test_every_option_changes_the_function(options):
    ids, model, default = random_ids(1, 12), small_model(**OPTIONS[options]), small_model()
    shapes = [[parameter.shape for parameter in each.parameters()] for each in (model, default)]
    own_weights = {"linear_transformer", "no_gate", "no_head_norm", "plain_head_norm", "plain_mlp", "grouped_heads"}
    assert (shapes[0] != shapes[1]) == (options in own_weights | {"small_keys", "embedding", "of_presets", "post_norm"})
    if shapes[0] == shapes[1]:
        model.load_state_dict(default.state_dict())
    assert (model(ids).logits - default(ids).logits).abs().max() > 1e-3


def test_the_form_comes_from_the_configuration_or_the_call():
    by_config, by_call, ids = small_model(retention_form="recurrent"), small_model(), random_ids(1, 12)
    assert torch.equal(by_config(ids).logits, by_call(ids, retention_form="recurrent").logits)


def test_the_paper_s_initialisation():
    sizes = {"vocab_size": 50, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    parts = {"q_proj": 2**-2.5, "k_proj": 2**-2.5, "v_proj": 2**-2.5, "g_proj": 2**-2.5, "o_proj": 0.5}
    depth = (8 * 4) ** 0.25
    for initialization in ("xavier", "deepnet", "normal"):
        config = RetNetConfig(**sizes, intermediate_size=512, initializer_range=0.03, initialization=initialization)
        model = RetNetForCausalLM(config)
        for layer in model.model.layers:
            weights = {name: (getattr(layer.retention, name).weight, gain) for name, gain in parts.items()}
            weights["down_proj"] = layer.mlp.down_proj.weight, 1.0
            for name, (weight, gain) in weights.items():
                expected = gain * math.sqrt(2 / sum(weight.shape)) if initialization != "normal" else 0.03
                if initialization == "deepnet" and name not in ("q_proj", "k_proj", "g_proj"):
                    expected /= depth
                assert weight.std().item() == pytest.approx(expected, rel=0.03), (initialization, name)
            assert torch.equal(layer.retention.head_norm.weight, torch.ones(128))
            assert torch.equal(layer.retention_norm.weight, torch.ones(256))
        for module in (model.model.embed_tokens, model.lm_head):
            assert module.weight.std().item() == pytest.approx(0.03, rel=0.05)


def test_fan_in_draws_every_matrix_as_pytorch_draws_a_linear_layer():
    sizes = {"vocab_size": 500, "hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    experts = {"intermediate_size": 48, "num_experts": 3, "first_k_dense_replace": 1}
    model = RetNetHybridForCausalLM(retnet_hf.RetNetHybridConfig(**sizes, **experts, initialization="fan_in"))
    matrices = {name: weight for name, weight in model.named_parameters() if weight.dim() > 1 and "embed" not in name}
    assert len(matrices) == 5 + 3 + 5 + 3 + 1
    for name, weight in matrices.items():
        bound = weight.shape[-1] ** -0.5
        assert bound == pytest.approx(weight.abs().max().item(), rel=0.02), name
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05), name
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize("bidirectional", [False, True])
def test_retention_maps_are_what_the_layer_multiplies_its_values_with(bidirectional):
    model, seen = small_model(model_class=RetNetModel, bidirectional=bidirectional, chunk_size=5).double(), []
    ids, module = random_ids(2, 9), model.layers[1].retention
    module.register_forward_hook(lambda module, args, output: seen.append((args[0], output[0])))
    outputs = model(ids, output_attentions=True)
    assert [maps.shape for maps in outputs.attentions] == [(2, 4, 9, 9)] * 2
    assert outputs.attentions[1].triu(1).any() == bidirectional == (outputs.past_key_values is None)
    [(hidden_states, expected)] = seen
    value = module.v_proj(hidden_states).view(2, 9, 4, -1).transpose(1, 2)
    mixed = module.head_norm(outputs.attentions[1] @ value).transpose(1, 2).reshape(2, 9, -1)
    close(module.o_proj(mixed * module.gate_fn(module.g_proj(hidden_states))), expected, 1e-11)
    assert model(ids).attentions is None


def test_gradients_flow_through_the_state_between_calls():
    """Two calls with the state carried are one call, gradients included: nothing is detached behind the user's back."""
    model, ids = small_model().double().train(), random_ids(1, 14)
    first = model(ids[:, :8], use_cache=True)
    second = model(ids[:, 8:], past_key_values=first.past_key_values)
    found = []
    for logits in (model(ids).logits, torch.cat([first.logits, second.logits], dim=1)):
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    close(*found, 1e-11)


def test_projections_are_plain_linear_layers(model):
    """bitsandbytes and FP8, in transformers, quantise `nn.Linear` and silently leave the classes derived from it."""
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linear) > 10
    assert {type(module) for module in linear} == {torch.nn.Linear}


def test_layers_may_differ_in_decays_and_feature_maps():
    decays, maps = [[0.6, 0.8, 0.9, 0.99], [0.97, 0.3, 1.0, 0.85]], [None, "silu"]
    both, alone = small_model("grouped", RetNetModel, decay_schedule=decays, feature_map=maps), []
    for index in range(2):
        one = small_model("grouped", RetNetModel, decay_schedule=decays[index], feature_map=maps[index])
        one.load_state_dict(both.state_dict())
        alone.append(one)
    ids = random_ids(2, 23)
    with torch.no_grad():
        first = alone[0](ids, output_hidden_states=True).hidden_states[1]
        alone[1].layers, alone[1].config.num_hidden_layers = alone[1].layers[1:], 1
        expected = alone[1](inputs_embeds=first, use_cache=False).last_hidden_state
        close(both(ids).last_hidden_state, expected, 1e-6)


ORDERS = {"cut": [0, 1], "cut in front": [1, 2, 3], "moved": [2, 1, 0, 3], "copied": [0, 1, 1, 2, 3, 2]}
PLAIN = RetNetConfig.from_preset("tiny", vocab_size=100, eos_token_id=None)  # decays and feature maps differ by layer
MODELS = {
    "plain": (RetNetForCausalLM, PLAIN),
    **{name: (RetNetHybridForCausalLM, small_config(name)) for name in ("sinks", "hypenet", "minimax")},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("change", ORDERS)
@torch.no_grad()
def test_layers_keep_what_they_compute_and_what_is_saved_computes_the_same(name, change, tmp_path):
    model_class, config = MODELS[name]
    model, order, ids = shake(model_class(copy.deepcopy(config))).eval(), ORDERS[change], random_ids(2, 20)
    order = [layer for layer in order if layer < config.num_hidden_layers]
    network, layers = model.model, model.model.layers
    hidden = network.embed_tokens(ids) * config.embedding_multiplier
    hidden = hidden if network.embed_norm is None else network.embed_norm(hidden)
    plans = network.plan(hidden)
    for layer in order:
        hidden = layers[layer](hidden, plan=plans[layer])
    expected = model.lm_head(network.norm(hidden)) / (getattr(config, "logits_scaling", None) or 1)

    network.layers = nn.ModuleList(copy.deepcopy(layers[layer]) for layer in order)
    close(model(ids, use_cache=False).logits, expected)
    model.save_pretrained(tmp_path)
    again = model_class.from_pretrained(tmp_path)
    close(again(ids).logits, expected)
    assert again.config.num_hidden_layers == len(order)
    assert greedy(model, ids, 6).equal(greedy(again, ids, 6, use_cache=False))
    model(ids, use_cache=True).cache.save(tmp_path / "state")
    assert RetNetState.load(tmp_path / "state", again).get_seq_length() == 20


@torch.no_grad()
def test_layers_are_moved_in_one_model_and_no_layer_stands_twice():
    config, ids = copy.deepcopy(PLAIN), random_ids(2, 20)
    model, other = shake(RetNetForCausalLM(config)).eval(), shake(RetNetForCausalLM(config)).eval()
    expected, layers = other(ids).logits, model.model.layers
    model.model.layers = nn.ModuleList([layers[2], layers[0]])
    model(ids)
    assert (model.config.num_hidden_layers, config.num_hidden_layers) == (2, 4)
    assert other(ids).logits.equal(expected)
    model.model.layers = nn.ModuleList([layers[2], layers[0], layers[0]])
    with pytest.raises(ValueError, match="each layer must be a module of its own"):
        model(ids)
    model.model.layers = nn.ModuleList()
    with pytest.raises(ValueError, match="must have at least one layer"):
        model(ids)


IDS = random_ids(2, 5)
EMBEDDED = {"inputs_embeds": torch.zeros(2, 5, 32)}
ADDED = torch.zeros(2, 5).index_fill(1, torch.tensor([0]), torch.finfo(torch.float32).min)
OF_A_LLAMA = DynamicCache()
OF_A_LLAMA.update(torch.zeros(2, 4, 3, 8), torch.zeros(2, 4, 3, 8), 0)
BAD_CALLS = [
    ({}, "exactly one of input_ids or inputs_embeds"),
    ({"input_ids": IDS} | EMBEDDED, "exactly one of input_ids or inputs_embeds"),
    ({"input_ids": IDS[0]}, r"input_ids must be \(batch, tokens\).*got input_ids \(5,\)"),
    ({"input_ids": IDS[:0]}, "at least one sequence"),
    ({"input_ids": IDS, "retention_form": "quick"}, "must be one of auto, parallel, recurrent, chunkwise, got 'quick'"),
    ({"input_ids": IDS, "retention_form": "chunkwise", "output_attentions": True}, "must be auto or parallel with output"),
    ({"input_ids": IDS, "attention_mask": torch.ones(2, 4)}, r"attention_mask must be \(batch, tokens\)"),
    ({"input_ids": IDS, "attention_mask": torch.ones(1, 5)}, r"attention_mask must be \(batch, tokens\)"),
    ({"input_ids": IDS, "attention_mask": torch.ones(2, 1, 5, 5)}, r"attention_mask must be \(batch, tokens\)"),
    ({"input_ids": IDS, "attention_mask": ADDED}, "attention_mask must be 0 where a token is absent"),
    ({"input_ids": IDS, "position_ids": torch.arange(4)}, r"position_ids must be \(batch, tokens\) = \(2, 5\)"),
    ({"input_ids": IDS, "position_ids": torch.zeros(3, 5, dtype=torch.long)}, r"position_ids must be \(batch, tokens\)"),
    ({"input_ids": IDS, "position_ids": torch.arange(5.0)[None]}, "position_ids must be integers, got torch.float32"),
    ({"input_ids": IDS, "position_ids": torch.ones(1, 5, dtype=torch.bool)}, "must be integers, got torch.bool"),
    ({"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 5])}, "offsets of documents in one row"),
    ({"input_ids": IDS, "past_key_values": OF_A_LLAMA}, "cache must be a RetNetState or an empty cache for 2 layers"),
    ({"input_ids": IDS, "skip_logits": True}, "skip_logits must be False without labels"),
]


@pytest.mark.parametrize(("call", "sentence"), BAD_CALLS)
def test_bad_calls_get_a_sentence(fla_model, call, sentence):
    with pytest.raises(ValueError, match=sentence):
        fla_model(**call)


def test_a_state_of_another_batch_size_gets_a_sentence(fla_model):
    state = fla_model(IDS, use_cache=True).past_key_values
    for batch, length in ((1, 1), (3, 1), (3, 5)):
        with pytest.raises(ValueError, match=f"cache holds 2 sequences, but the batch has {batch}"):
            fla_model(random_ids(batch, length), past_key_values=state)


CONFIGS = [RetNetConfig, retnet_hf.ViRConfig, retnet_hf.RMTConfig, retnet_hf.MetaFormerConfig]


@pytest.mark.parametrize("config_class", CONFIGS)
def test_a_configuration_names_the_nearest_field_and_takes_what_it_writes(config_class):
    with pytest.raises(ValueError, match=r"has no field 'hidden_siz'.*did you mean 'hidden_size"):
        config_class(hidden_siz=64)
    with pytest.raises(ValueError, match="has no field 'xyzzy'.$"):
        config_class.from_preset(config_class.presets()[0], xyzzy=1)
    content = config_class().to_dict()
    assert config_class(**content).to_dict() == content
    assert config_class.from_dict(content | {"note": "mine"}).note == "mine"
    assert config_class(num_labels=3, torch_dtype="bfloat16").num_labels == 3


OF_OTHERS = (
    "cu_seqlens cu_seq_lens cu_seqlens_q cu_seq_lens_k seq_lens segment_ids document_ids doc_ids attention_masks attn_mask "
    "padding_mask key_padding_mask lengths position_id seq_ids use_caches retention_forms offsets indptr cache_params "
    "incremental_state layer_past initial_state encoder_hidden_states"
)


@pytest.mark.parametrize("name", OF_OTHERS.split())
def test_forward_refuses_what_means_tokens_elsewhere(name):
    for model in (small_model(), small_model(model_class=retnet_hf.RetNetForMaskedLM, bidirectional=True)):
        with pytest.raises(ValueError, match=f"{name} is no argument of RetNetModel"):
            model(IDS, **{name: torch.tensor([0, 4, 8])})
        model(IDS, **{name: None})


@pytest.mark.parametrize("bidirectional", [True, False])
def test_what_tokens_see_is_not_said_by_a_call(bidirectional):
    """A Llama takes is_causal from a call."""
    model = small_model(model_class=RetNetModel, bidirectional=bidirectional)
    with pytest.raises(ValueError, match="is_causal is no argument of RetNetModel: .*bidirectional in the configuration"):
        model(IDS, is_causal=bidirectional)
    assert torch.equal(model(IDS, is_causal=not bidirectional).last_hidden_state, model(IDS).last_hidden_state)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_images_have_no_masks_of_tokens(family):
    with pytest.raises(ValueError, match="attention_mask is no argument of"):
        VISION_FAMILIES[family].model()(torch.rand(1, 3, 32, 32), attention_mask=torch.ones(1, 4))


def test_what_transformers_and_its_tools_hand_on_passes(fla_model):
    """Models around a RetNet, such as Llava, hand masks on by the names of layer_types from transformers 5.24 on."""
    handed_on = {"token_type_ids": IDS, "return_loss": True, "adapter_names": ["a"], "max_length_q": 8}
    assert fla_model(IDS, **handed_on, is_first_iteration=True).logits.equal(fla_model(IDS).logits)
    assert {"cu_seq_lens_q", "num_items_in_batch"} <= set(TransformersKwargs.__annotations__)
    mask = (torch.arange(5) >= torch.tensor([[3], [0]])).long()
    by_kind = {"linear_attention": mask, "full_attention": None}
    assert fla_model(IDS, attention_mask=by_kind).logits.equal(fla_model(IDS, attention_mask=mask).logits)
