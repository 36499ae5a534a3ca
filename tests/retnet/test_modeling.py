# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNetModel: every option in every form, the paper's initialisation, retention maps, gradients through the state."""

import math
from types import SimpleNamespace

import pytest
import torch
from small_models import a_state_for_each_head, close, random_ids, small_model

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridConfig, RetNetHybridForCausalLM, RetNetModel, RetNetState


FORMS = ("parallel", "recurrent", "chunkwise", "auto")
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


def build(**fields):
    torch.manual_seed(0)
    defaults = {
        "vocab_size": 50,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "chunk_size": 5,
    }
    model = RetNetForCausalLM(RetNetConfig(**(defaults | fields))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_all_forms_from_the_same_weights(options):
    model = build(**options).double()
    tokens = torch.randint(0, 50, (2, 23))
    with torch.no_grad():
        outputs = {form: model(tokens, retention_form=form, use_cache=True) for form in FORMS}
        state, steps = None, []
        for token in tokens.split(1, dim=1):
            step = model(token, past_key_values=state, use_cache=True)
            state = step.past_key_values
            steps.append(step.logits)
    reference = outputs["recurrent"]
    for form in FORMS:
        assert (outputs[form].logits - reference.logits).abs().max().item() < 1e-10, form
        for layer, expected in zip(outputs[form].past_key_values.layers, reference.past_key_values.layers):
            assert (layer.recurrent_states - expected.recurrent_states).abs().max().item() < 1e-10, form
    assert (torch.cat(steps, dim=1) - reference.logits).abs().max().item() < 1e-10


@pytest.mark.parametrize("options", [name for name in OPTIONS if name != "default"])
def test_every_option_changes_the_function(options):
    tokens = torch.randint(0, 50, (1, 12), generator=torch.Generator().manual_seed(0))
    model, default = build(**OPTIONS[options]), build()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    default_shapes = {name: parameter.shape for name, parameter in default.named_parameters()}
    if shapes == default_shapes:
        model.load_state_dict(default.state_dict())
        assert (model(tokens).logits - default(tokens).logits).abs().max().item() > 1e-3
    else:
        own_weights = {"linear_transformer", "no_gate", "no_head_norm", "plain_head_norm", "plain_mlp"}
        assert options in own_weights | {"grouped_heads", "small_keys", "embedding", "post_norm", "of_presets"}


def with_and_without_shared_states(**fields):
    """A model whose heads share states, two by two, and the same one with a state for each head."""
    fields = {"decay_schedule": [0.6, 0.6, 0.97, 0.97], "chunk_size": 5, **fields}
    shared = small_model("grouped", **fields).double()
    with a_state_for_each_head():
        return shared, small_model("grouped", **fields).double()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("padded", [False, True])
def test_heads_that_share_a_state_compute_what_each_does_with_its_own(form, padded):
    """In one call, in a second that continues it, and token by token."""
    ids, mask = random_ids(2, 40), torch.ones(2, 40, dtype=torch.int64)
    if padded:
        mask[0, :4] = mask[1, 21:26] = mask[1, 37] = 0
    logits, states = [], []
    for model in with_and_without_shared_states():
        state, parts = RetNetState(model.config), []
        with torch.no_grad():
            for tokens in (slice(0, 17), slice(17, 33), *(slice(n, n + 1) for n in range(33, 40))):
                arguments = {"attention_mask": mask[:, tokens], "past_key_values": state, "retention_form": form}
                parts.append(model(ids[:, tokens], **arguments).logits)
        logits.append(torch.cat(parts, dim=1)[mask.bool()])
        states.append([layer.recurrent_states for layer in state.layers])
    close(*logits, 1e-11)
    for shared, by_head in zip(*states):
        assert shared.shape == (2, 2, 4, 16)
        close(shared.repeat_interleave(2, dim=1), by_head, 1e-11)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_through_shared_states_are_those_of_a_state_for_each_head(form):
    ids, gradients = random_ids(2, 17), []
    for model in with_and_without_shared_states():
        first = model(ids[:, :9], retention_form=form, use_cache=True)
        second = model(ids[:, 9:], retention_form=form, past_key_values=first.past_key_values)
        torch.cat([first.logits, second.logits], dim=1).logsumexp(-1).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for shared, by_head in zip(*gradients):
        close(shared, by_head, 1e-10)


def test_maps_and_both_directions_with_decays_that_heads_share():
    ids = random_ids(2, 19)
    with torch.no_grad():
        outputs = [model(ids, output_attentions=True) for model in with_and_without_shared_states()]
        close(outputs[0].logits, outputs[1].logits, 1e-11)
        encoders = with_and_without_shared_states(model_class=RetNetModel, bidirectional=True)
        read = [[model(ids, retention_form=form)[0] for form in FORMS] for model in encoders]
        with_maps = [model(ids, output_attentions=True) for model in encoders]
    for one, other in ((outputs[0], outputs[1]), with_maps):
        assert one.attentions[0].shape[1] == 4
        for shared, by_head in zip(one.attentions, other.attentions):
            close(shared, by_head, 1e-11)
    for hidden_states in (*read[0], *(outputs.last_hidden_state for outputs in with_maps)):
        close(hidden_states, read[1][0], 1e-11)


def test_the_form_comes_from_the_configuration_or_the_call():
    tokens = torch.randint(0, 50, (1, 12))
    by_config = build(retention_form="recurrent")
    by_call = build()
    assert torch.equal(by_config(tokens).logits, by_call(tokens, retention_form="recurrent").logits)
    with pytest.raises(ValueError, match="retention_form must be one of auto, parallel, recurrent, chunkwise, got 'quick'"):
        by_call(tokens, retention_form="quick")


def test_the_paper_s_initialisation():
    config = RetNetConfig(
        vocab_size=50,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        initializer_range=0.03,
    )
    torch.manual_seed(0)
    model = RetNetForCausalLM(config)

    def xavier(gain, linear):
        return gain * math.sqrt(2 / sum(linear.weight.shape))

    for layer in model.model.layers:
        for name, gain in (
            ("q_proj", 2**-2.5),
            ("k_proj", 2**-2.5),
            ("v_proj", 2**-2.5),
            ("g_proj", 2**-2.5),
            ("o_proj", 0.5),
        ):
            projection = getattr(layer.retention, name)
            assert projection.weight.std().item() == pytest.approx(xavier(gain, projection), rel=0.03), name
        assert torch.equal(layer.retention.head_norm.weight, torch.ones(128))
        assert torch.equal(layer.retention_norm.weight, torch.ones(256))
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.03, rel=0.05)
    assert model.lm_head.weight.std().item() == pytest.approx(0.03, rel=0.05)


def test_deepnet_initialisation_shrinks_with_depth_and_normal_is_normal():
    fields = {
        "vocab_size": 50,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 256,
    }

    def stds(initialization):
        torch.manual_seed(0)
        layer = RetNetModel(RetNetConfig(**fields, initialization=initialization)).layers[0]
        retention, mlp = layer.retention, layer.mlp
        modules = (retention.q_proj, retention.v_proj, retention.o_proj, mlp.down_proj)
        return [module.weight.std().item() for module in modules]

    xavier, deepnet, normal = stds("xavier"), stds("deepnet"), stds("normal")
    depth = (8 * 4) ** 0.25
    assert deepnet == pytest.approx([xavier[0], *(std / depth for std in xavier[1:])], rel=0.05)
    assert normal == pytest.approx([0.02] * 4, rel=0.05)


def test_fan_in_draws_every_matrix_as_pytorch_draws_a_linear_layer():
    torch.manual_seed(0)
    sizes = {"vocab_size": 500, "hidden_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    experts = {"intermediate_size": 48, "num_experts": 3, "first_k_dense_replace": 1}
    model = RetNetHybridForCausalLM(RetNetHybridConfig(**sizes, **experts, initialization="fan_in"))
    matrices = {name: weight for name, weight in model.named_parameters() if weight.dim() > 1 and "embed" not in name}
    assert len(matrices) == 5 + 3 + 5 + 3 + 1
    for name, weight in matrices.items():
        bound = weight.shape[-1] ** -0.5
        assert bound == pytest.approx(weight.abs().max().item(), rel=0.02), name
        assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05), name
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)


def test_fan_in_begins_with_queries_and_keys_of_the_size_that_they_have_without_their_norm():
    sizes = {"num_hidden_layers": 2, "vocab_size": 50}
    tokens = torch.randint(0, 50, (8, 64))
    found, unrotated = [], SimpleNamespace(rotate=lambda query, key: (query, key))
    for use_qk_norm in (True, False):
        torch.manual_seed(0)
        config = RetNetConfig.from_preset("tiny", use_qk_norm=use_qk_norm, feature_map=None, use_rotary=False, **sizes)
        model = RetNetForCausalLM(config)
        model.model.layers[0].retention.register_forward_pre_hook(
            lambda layer, args: found.append(
                [part.square().mean().sqrt().item() for part in layer.operands(args[0], unrotated)[:2]]
            )
        )
        model(tokens)
    assert found[0] == pytest.approx([3**-0.5] * 2, rel=1e-4)
    assert found[0] == pytest.approx(found[1], rel=0.1)
    xavier = RetNetForCausalLM(RetNetConfig.from_preset("tiny", initialization="xavier", **sizes))
    assert xavier.model.layers[0].retention.q_norm.weight.unique().tolist() == [1.0]
    hybrid = RetNetHybridForCausalLM(RetNetHybridConfig.from_preset("tiny", **sizes)).model.layers
    assert hybrid[0].retention.k_norm.weight.unique().tolist() == pytest.approx([3**-0.5])
    assert hybrid[1].attention.k_norm.weight.unique().tolist() == [1.0]


def test_retention_maps_are_what_the_layer_multiplies_its_values_with():
    model = build().double()
    tokens = torch.randint(0, 50, (2, 9))
    captured = {}

    def hook(module, args, kwargs, output):
        hidden_states = args[0]
        captured["value"] = module.v_proj(hidden_states).view(2, 9, 4, -1).transpose(1, 2)
        captured["gate"] = module.gate_fn(module.g_proj(hidden_states))
        captured["output"] = output[0]

    module = model.model.layers[1].retention
    handle = module.register_forward_hook(hook, with_kwargs=True)
    outputs = model(tokens, output_attentions=True)
    handle.remove()
    assert len(outputs.attentions) == 2
    assert outputs.attentions[1].shape == (2, 4, 9, 9)
    assert not outputs.attentions[1].triu(1).any()
    mixed = module.head_norm(outputs.attentions[1] @ captured["value"]).transpose(1, 2).reshape(2, 9, -1)
    close(module.o_proj(mixed * captured["gate"]), captured["output"], 1e-11)
    assert model(tokens).attentions is None
    with pytest.raises(ValueError, match="retention_form must be auto or parallel with output_attentions=True"):
        model(tokens, output_attentions=True, retention_form="chunkwise")


def test_without_use_cache_a_state_is_read_and_left_alone():
    model = build()
    tokens = torch.randint(0, 50, (1, 10))
    with torch.no_grad():
        state = model(tokens[:, :6], use_cache=True).past_key_values
        before = state.layers[1].recurrent_states.clone()
        read = model(tokens[:, 6:], past_key_values=state, use_cache=False)
        assert read.past_key_values is None
        assert torch.equal(state.layers[1].recurrent_states, before)
        assert int(state.get_seq_length()) == 6
        taken = model(tokens[:, 6:], past_key_values=state, use_cache=True)
    assert torch.equal(read.logits, taken.logits)
    assert int(state.get_seq_length()) == 10


@pytest.mark.parametrize("base", [False, True])
def test_a_state_given_is_updated_though_the_configuration_says_no_cache(base):
    """Trainer saves models with use_cache off."""
    model = build(use_cache=False)
    model = model.model if base else model
    tokens = torch.randint(0, 50, (1, 10))
    with torch.no_grad():
        assert model(tokens).past_key_values is None
        state = model(tokens, use_cache=True).past_key_values
        model(tokens, past_key_values=state)
    assert int(state.get_seq_length()) == 20


def test_gradients_flow_through_the_state_between_calls():
    """Two calls with the state carried are one call, gradients included: nothing is detached behind the user's back."""
    model = build().double().train()
    tokens = torch.randint(0, 50, (1, 14))

    def backward(logits):
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()

    backward(model(tokens).logits)
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    first = model(tokens[:, :8], use_cache=True)
    second = model(tokens[:, 8:], past_key_values=first.past_key_values, use_cache=True)
    backward(torch.cat([first.logits, second.logits], dim=1))
    for name, parameter in model.named_parameters():
        assert parameter.grad.allclose(expected[name], rtol=0, atol=1e-11), name


def test_projections_are_plain_linear_layers(model):
    """bitsandbytes and FP8, in transformers, quantise `nn.Linear` and silently leave the classes derived from it."""
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linear) > 10
    assert {type(module) for module in linear} == {torch.nn.Linear}


def test_layers_may_differ_in_decays_and_feature_maps():
    decays, maps = [[0.6, 0.8, 0.9, 0.99], [0.97, 0.3, 1.0, 0.85]], [None, "silu"]
    both = small_model("grouped", RetNetModel, decay_schedule=decays, feature_map=maps)
    alone = []
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
