# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Retention as a layer of any model: it is the mixer of a RetNet, and its streams are exact."""

import copy

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import close, random_ids, same_state, shake, small_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from retnet_hf import MultiScaleRetention, RetNetHybridConfig, RetNetHybridForCausalLM, RetNetState


D = 32
GROUPED = {"num_key_value_heads": 2, "key_expansion": 0.5, "decay_schedule": [0.6, 0.6, 0.97, 1.0], "feature_map": "relu"}
BARE = {"use_rotary": False, "use_output_gate": False, "use_head_norm": False, "decay_schedule": "geometric"}
OPTIONS = {
    "default": {"chunk_size": 4},
    "grouped": GROUPED | {"qkv_bias": True, "use_qk_norm": True},
    "bare": BARE | {"value_expansion": 1.0},
}


def layer_of(name: str = "default", **options) -> MultiScaleRetention:
    return shake(MultiScaleRetention(D, 4, **(OPTIONS[name] | options))).double()


def random_states(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, tokens, D, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dialect", ["fla", "grouped", "from scratch", "torchscale"])
def test_it_computes_what_the_mixer_of_a_model_computes_and_its_gradients(dialect):
    model = small_model(dialect, num_hidden_layers=1, decay_schedule="log_linear", feature_map=None, decay_range=(2, 512))
    config, mixer = model.config, model.model.layers[0].retention.double()
    names = "num_key_value_heads key_expansion value_expansion rotary_endpoint rope_parameters qkv_bias use_qk_norm"
    names += " use_head_norm head_norm_affine chunk_size rms_norm_eps decay_schedule max_position_embeddings"
    options = {name: getattr(config, name, None) for name in names.split()}
    layer = MultiScaleRetention(config.hidden_size, config.num_attention_heads, **options).double()
    assert layer.state_dict().keys() == mixer.state_dict().keys()
    layer.load_state_dict(mixer.state_dict())
    hidden_states, documents = random_states(2, 21), torch.arange(21).expand(2, -1) // 8
    mask = torch.ones(2, 21, dtype=torch.bool)
    mask[0, :4] = mask[1, 7] = False
    plans, results = model.model.plan(hidden_states, mask, seq_idx=documents), []
    for each, arguments in ((layer, (None, mask, documents)), (mixer, (plans[0],))):
        output = each(hidden_states, *arguments)[0][mask]
        results.append([output, *torch.autograd.grad(output.square().sum(), list(each.parameters()))])
    for found, expected in zip(*results, strict=True):
        close(found, expected, 1e-12)


@settings(max_examples=20, deadline=None)
@given(cuts=st.sets(st.integers(1, 22), max_size=4), name=st.sampled_from(sorted(OPTIONS)))
@torch.no_grad()
def test_pieces_are_the_whole(cuts, name):
    layer, hidden_states = layer_of(name), random_states(2, 23)
    state = layer.new_state()
    pieces = [layer(piece, state)[0] for piece in hidden_states.tensor_split(sorted(cuts), dim=1)]
    close(torch.cat(pieces, dim=1), layer(hidden_states)[0], 1e-11)


@pytest.mark.parametrize("dialect", ["hybrid", "sinks", "grouped"])
@torch.no_grad()
def test_rows_of_a_model_begin_anew(dialect):
    model, ids = small_model(dialect), random_ids(2, 12)
    state = model(ids[:, :7]).past_key_values
    state.reset_rows(torch.tensor([False, True]))
    found = model(ids[:, 7:], past_key_values=state).logits
    close(found[:1], model(ids[:1]).logits[:, 7:])
    close(found[1:], model(ids[1:, 7:]).logits)
    with pytest.raises(ValueError, match=r"rows must be a tensor \(2,\) of bool, one for each row, got \(3,\)"):
        state.reset_rows(torch.zeros(3, dtype=torch.bool))


@pytest.mark.parametrize("dialect", ["fla", "hybrid"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_rows_that_begin_anew_change_no_gradient_of_what_was_read(dialect, checkpointed):
    ids, gradients = random_ids(2, 12), []
    for anew in (False, True):
        model = small_model(dialect).train()
        if checkpointed:
            model.gradient_checkpointing_enable()
        with torch.no_grad():
            state = model(ids[:, :5], use_cache=True, past_key_values=RetNetState(model.config)).past_key_values
        loss = model(ids[:, 5:], labels=ids[:, 5:], past_key_values=state).loss
        if anew:
            with torch.no_grad():
                state.reset_rows(torch.tensor([True, True]))
        gradients.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    assert all(found is expected is None or found.equal(expected) for found, expected in zip(*gradients))


@pytest.mark.parametrize("dialect", ["fla", "hybrid"])
@torch.no_grad()
def test_a_state_of_inference_mode_changes_outside_it(dialect):
    model, ids = small_model(dialect), random_ids(2, 12)
    with torch.inference_mode():
        swapped, anew = (model(ids[:, :7]).past_key_values for _ in range(2))
        rewound = RetNetState(model.config)
        rewound.activate_past_recording()
        model(ids, past_key_values=rewound)
    rewound.crop(-5)
    same_state(rewound, model(ids[:, :7]).past_key_values)
    swapped.reorder_cache(torch.tensor([1, 0]))
    anew.reset_rows(torch.tensor([True, True]))
    close(model(ids.flip(0)[:, 7:], past_key_values=swapped).logits, model(ids.flip(0)).logits[:, 7:])
    close(model(ids[:, 7:], past_key_values=anew).logits, model(ids[:, 7:]).logits)


def test_both_directions():
    layer, hidden_states = layer_of(bidirectional=True, use_rotary=False, use_head_norm=False), random_states(1, 9)
    output, state = layer(hidden_states)
    assert state is None
    close(layer(hidden_states.flip(1))[0].flip(1), output, 1e-11)
    with pytest.raises(ValueError, match="state must be None in a bidirectional layer"):
        layer(hidden_states, layer_of().new_state())
    with pytest.raises(ValueError, match="a bidirectional layer has no state"):
        layer.new_state()


def test_it_takes_the_place_of_attention():
    class Block(nn.TransformerEncoderLayer):
        def _sa_block(self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal=False) -> Tensor:
            return self.dropout1(self.self_attn(x, mask=None if key_padding_mask is None else key_padding_mask == 0)[0])

    block = Block(D, 4, dim_feedforward=48, dropout=0.0, batch_first=True, norm_first=True, dtype=torch.float64)
    block.self_attn = layer_of()
    hidden_states, absent = random_states(2, 8), torch.arange(8) >= torch.tensor([[8], [5]])
    output = block(hidden_states, src_key_padding_mask=absent)
    close(output[1, :5], block(hidden_states[1:, :5])[0], 1e-11)
    output.sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in block.self_attn.parameters())
    encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
    with torch.no_grad():
        assert torch.equal(encoder.train()(hidden_states), encoder.eval()(hidden_states))


def test_transforms_autocast_checkpoints_copies_and_devices():
    layer, hidden_states = layer_of(), random_states(3, 9)
    expected, weights = layer(hidden_states)[0], dict(layer.named_parameters())
    mapped = torch.func.vmap(lambda row: torch.func.functional_call(layer, weights, (row[None],))[0][0])
    close(mapped(hidden_states), expected, 1e-11)
    again = checkpoint(lambda states: layer(states)[0], hidden_states, use_reentrant=False)
    for one, other in zip(*(torch.autograd.grad(output.sum(), weights.values()) for output in (again, expected))):
        close(one, other, 1e-12)
    close(copy.deepcopy(layer)(hidden_states)[0], expected, 1e-12)
    single = layer.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert single(hidden_states.float())[0].isfinite().all()
    with torch.device("meta"):
        empty = MultiScaleRetention(D, 4)
    empty = empty.to_empty(device="cpu")
    empty.load_state_dict(single.state_dict())
    torch.testing.assert_close(empty.decay.log_decay, single.decay.log_decay)


@torch.no_grad()
def test_it_compiles_to_one_graph_and_exports():
    layer, hidden_states = layer_of(), random_states(2, 9)
    expected, _ = layer(hidden_states)
    close(torch.compile(layer, backend="eager", fullgraph=True)(hidden_states)[0], expected, 1e-12)
    close(torch.export.export(layer, (hidden_states,)).module()(hidden_states)[0], expected, 1e-11)


def test_what_does_not_fit_is_refused_by_a_sentence():
    with pytest.raises(ValueError, match="vocab_size is not an option of MultiScaleRetention. Its options are num_key"):
        MultiScaleRetention(D, 4, vocab_size=3)
    with pytest.raises(ValueError, match=r"hidden_size \(32\) must be a multiple of num_heads \(5\)"):
        MultiScaleRetention(D, 5)
    with pytest.raises(StrictDataclassError, match="value_expansion must be"):
        MultiScaleRetention(D, 4, value_expansion=0.3)
    with pytest.raises(ValueError, match=r"documents must be \(batch, tokens\)"):
        layer_of()(random_states(2, 3), documents=torch.ones(3))


@pytest.mark.parametrize(("initialization", "norm"), [("fan_in", 3**-0.5), ("xavier", 1.0)])
def test_weights_begin_again_as_those_of_a_model(initialization, norm):
    layer = MultiScaleRetention(32, 2, use_qk_norm=True, initialization=initialization)
    for _ in range(2):
        assert layer.q_norm.weight.unique().tolist() == pytest.approx([norm])
        assert layer.head_norm.weight.unique().tolist() == [1.0]
        for parameter in layer.parameters():
            parameter.data.fill_(7.0)
        layer.reset_parameters()
    assert all((parameter != 7.0).all() for parameter in layer.parameters())
    sizes = {"num_hidden_layers": 2, "vocab_size": 50, "initialization": initialization}
    retention, softmax = RetNetHybridForCausalLM(RetNetHybridConfig.from_preset("tiny", **sizes)).model.layers
    assert retention.retention.k_norm.weight.unique().tolist() == pytest.approx([norm])
    assert softmax.attention.k_norm.weight.unique().tolist() == [1.0]
