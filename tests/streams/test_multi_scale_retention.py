# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Retention as a layer of any model, and its streams with `StreamState` and `CausalConv1d`: exact in any pieces."""

import copy
import pickle

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from small_models import close, random_ids, same_state, shake, small_model
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from retnet_hf import CausalConv1d, MultiScaleRetention, RetNetHybridForCausalLM, RetNetState, StreamState


D = 32
GROUPED = {"num_key_value_heads": 2, "key_expansion": 0.5, "decay_schedule": [0.6, 0.6, 0.97, 1.0], "feature_map": "relu"}
BARE = {"use_rotary": False, "use_output_gate": False, "use_head_norm": False, "decay_schedule": "geometric"}
OPTIONS = {"default": {"chunk_size": 4}, "grouped": GROUPED | {"qkv_bias": True, "use_qk_norm": True}}
OPTIONS |= {"bare": BARE | {"value_expansion": 1.0}}


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
    close(*results, 1e-12)


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
    close(*(torch.autograd.grad(output.sum(), weights.values()) for output in (again, expected)), 1e-12)
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
    retention, softmax = RetNetHybridForCausalLM(
        RetNetHybridForCausalLM.config_class.from_preset("tiny", **sizes)
    ).model.layers
    assert retention.retention.k_norm.weight.unique().tolist() == pytest.approx([norm])
    assert softmax.attention.k_norm.weight.unique().tolist() == [1.0]


class Streaming(nn.Module):
    """Retention between two convolutions, one of them dilated and one that reads a single token."""

    def __init__(self, size: int = 8, **options) -> None:
        super().__init__()
        self.conv = CausalConv1d(size, size, 3, groups=size, dilation=2)
        self.retention = MultiScaleRetention(size, 2, **options)
        self.head = CausalConv1d(size, 5, 1)

    def forward(self, frames, state=None, mask=None):
        frames = frames + self.conv(frames, state, mask)[0]
        frames = frames + self.retention(frames, state, mask)[0]
        return self.head(frames, state, mask)[0]


def same(one, other):
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Streaming().double().eval().requires_grad_(False)


def frames(batch: int, tokens: int, seed: int = 0):
    return torch.randn(batch, tokens, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_absent_tokens_change_nothing_wherever_they_are(seed):
    torch.manual_seed(0)
    model, whole = Streaming().double().eval().requires_grad_(False), frames(3, 14)
    mask = torch.rand(3, 14, generator=torch.Generator().manual_seed(seed)) < 0.6
    whole[~mask] = 1e6
    state = StreamState(model)
    output = torch.cat([model(*piece) for piece in zip(whole.split(7, 1), [state] * 2, mask.split(7, 1))], dim=1)
    for row in range(3):
        if mask[row].any():
            same(output[row, mask[row]], model(whole[row, mask[row]][None])[0])


def test_a_causal_convolution_is_a_padded_one_with_the_same_weights():
    conv, causal = nn.Conv1d(4, 6, 5, dilation=3, groups=2).double(), CausalConv1d(4, 6, 5, dilation=3, groups=2).double()
    causal.load_state_dict(conv.state_dict())
    hidden = torch.randn(2, 20, 4, dtype=torch.float64, requires_grad=True)
    output, state = causal(hidden)
    assert state is None
    expected = conv(F.pad(hidden.mT, (12, 0))).mT
    same(output, expected)
    weight = torch.randn_like(output)
    same(torch.autograd.grad(output, hidden, weight)[0], torch.autograd.grad(expected, hidden, weight)[0])


def test_sessions_join_leave_pause_and_begin_anew(model):
    first, second = frames(2, 6, seed=1), frames(1, 6, seed=2)
    two, one = StreamState(model), StreamState(model)
    model(first[:, :3], two)
    model(second[:, :2], one)
    three, pauses = StreamState.concatenate([two, one]), torch.tensor([[True], [False], [True]])
    output = model(torch.stack([first[0, 3:4], first[1, :1], second[0, 2:3]]), three, pauses)
    same(output[0], model(first[:1])[0, 3:4])
    same(output[2], model(second)[0, 2:3])
    same(model(torch.stack([first[0, 4:5], first[1, 3:4], second[0, 3:4]]), three)[1], model(first)[1, 3:4])

    kept = three.clone()
    three.reset_rows(torch.tensor([False, True, False]))
    output = model(torch.stack([first[0, 5:], first[1, :1], second[0, 4:5]]), three)
    same(output, torch.stack([model(first)[0, 5:], model(first)[1, :1], model(second)[0, 4:5]]))
    for rows, number in (([1, 1], 2), ([False, True, False], 1)):
        for selected in (kept.select(rows), kept.select(torch.tensor(rows))):
            same(model(first[[1] * number, 4:5], selected), model(first)[[1] * number, 4:5])
    assert three.nbytes == kept.nbytes == 3 * two.nbytes / 2


def test_a_state_of_many_tokens_is_no_larger_than_one_of_few(model):
    state = StreamState(model)
    model(frames(1, 1), state)
    few = state.nbytes
    model(frames(1, 500), state)
    assert state.nbytes == few > 0
    assert state[model.conv].tail.untyped_storage().nbytes() == state[model.conv].nbytes


def test_gradients_flow_through_a_state(model):
    whole, state = frames(1, 8).requires_grad_(), StreamState(model)
    output = torch.cat([model(piece, state) for piece in whole.split(3, dim=1)], dim=1)
    weight = torch.randn_like(output)
    same(torch.autograd.grad(output, whole, weight)[0], torch.autograd.grad(model(whole), whole, weight)[0])


@pytest.fixture
def saved(model, tmp_path):
    state, file = StreamState(model), tmp_path / "stream.safetensors"
    with pytest.raises(ValueError, match="has read nothing cannot be saved"):
        state.save(file, model)
    model(frames(2, 5), state)
    state.save(file, model)
    return state, file


def test_files_that_are_no_state_of_the_model_are_refused(model, saved, tmp_path):
    state, file = saved
    other = Streaming().double()
    with pytest.raises(ValueError, match="other weights. other_weights=True loads"):
        StreamState.load(file, other)
    assert StreamState.load(file, other, other_weights=True)[other.conv].tail.equal(state[model.conv].tail)
    for other in (Streaming(decay_schedule="geometric").double(), nn.Sequential(model.conv)):
        with pytest.raises(ValueError, match="model of another configuration"):
            StreamState.load(file, other)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        StreamState.load(file, model)
    with pytest.raises(OSError, match="no.such|No such"):
        StreamState.load(tmp_path / "no_such", model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.update({"conv.tail": torch.zeros(2, 3, 8)}), r"holds conv.tail as \(2, 3, 8\)"),
        (lambda tensors: tensors["retention.next_position"].sub_(9), "retention.next_position with negative values"),
        (lambda tensors: tensors["conv.tail"].add_(1), "is damaged"),
    ],
)
def test_changed_files_are_refused(model, saved, change, words):
    _, file = saved
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata=metadata)
    with pytest.raises(ValueError, match=words):
        StreamState.load(file, model)


def test_a_compiled_step_computes_the_same_without_new_graphs(model, fresh_compiler):
    graphs, numbers, outputs, state, whole = [], [], [], StreamState(model), frames(2, 8)
    step = torch.compile(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward, fullgraph=True)
    model(whole[:, :2], state)
    with torch.no_grad():
        for place in range(2, 8):
            outputs.append(step(whole[:, place : place + 1], state))
            numbers.append(len(graphs))
    assert 0 < numbers[1] == numbers[-1]
    same(torch.cat(outputs, dim=1), model(whole)[:, 2:])


def test_what_cannot_stream_is_refused(model):
    state, other, three = StreamState(model), StreamState(Streaming()), StreamState(model)
    model(frames(3, 4), three)
    for call, sentence in (
        (lambda: StreamState(nn.Linear(2, 2)), "Linear has no streaming layer"),
        (lambda: StreamState(MultiScaleRetention(8, 2, bidirectional=True)), "a bidirectional layer has no state"),
        (lambda: CausalConv1d(2, 2, 3, stride=2), "stride is no option of CausalConv1d"),
        (lambda: StreamState.concatenate([state, other]), "one or more states of one model"),
        (lambda: StreamState.concatenate(each for each in [state]), "states that have read something"),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
    for rows in ([True, False], [], 1, [0.5]):
        with pytest.raises(ValueError, match="a list of one or more indices, or one bool for each of the 3 rows"):
            three.select(rows)
    for rows in ([True, False, True], torch.tensor([0, 1, 0]), torch.tensor([True])):
        with pytest.raises(ValueError, match=r"rows must be a tensor \(3,\) of bool"):
            three.reset_rows(rows)


def test_absent_tokens_may_hold_nan_and_leave_the_state_as_it_was(model):
    state = StreamState(model)
    model(frames(2, 3), state)
    before, hole, mask = state.clone(), frames(2, 2), torch.tensor([[True], [False]]).expand(2, 2)
    hole[1] = torch.nan
    same(model.conv(hole, None, mask)[0][0], model.conv(hole[:1])[0][0])
    model.conv.weight.requires_grad_()
    model.conv(hole, None, mask)[0][0].sum().backward()
    assert model.conv.weight.grad.isfinite().all()
    model.retention(hole, state, mask)
    layer, old = (each[model.retention].layers[0] for each in (state, before))
    assert layer.recurrent_states[1].equal(old.recurrent_states[1])
    assert layer.next_position[1].equal(old.next_position[1])
    assert layer.recurrent_states.isfinite().all()


@pytest.mark.parametrize("layer", ["conv", "retention"])
def test_arguments_that_do_not_fit_are_refused_in_a_sentence(model, layer):
    layer, state, hidden = getattr(model, layer), StreamState(model), frames(2, 3)
    model(hidden, state)
    shape = r"hidden_states must be \(batch, tokens, 8\), with at least one token"
    for arguments, sentence in (
        ((hidden[0],), shape),
        ((frames(2, 0),), shape),
        ((hidden[..., :4],), shape),
        ((hidden, state, torch.ones(2, 2) > 0), r"mask must be \(batch, tokens\), \(2, 3\) here, got \(2, 2\)"),
        ((hidden, state, torch.zeros(2, 3)), "mask must be bool, or integers"),
        ((frames(3, 3), state), "state holds 2 rows, but hidden_states have 3"),
        ((hidden, torch.ones(2, 3)), "state must be a StreamState, a .* or None, got a Tensor"),
        ((hidden, StreamState(Streaming())), "the state has no part for this .*: it was made for another model"),
    ):
        with pytest.raises((TypeError, ValueError), match=sentence):
            layer(*arguments)


@torch.no_grad()
def test_a_layer_takes_neither_the_state_of_other_options_nor_that_of_other_weights(tmp_path):
    first, second, hidden = MultiScaleRetention(8, 2), MultiScaleRetention(8, 2), torch.randn(1, 3, 8)
    state, own = first.new_state(), second.new_state()
    first(hidden, state)
    with pytest.raises(ValueError, match="state is that of a layer with other options"):
        MultiScaleRetention(8, 2, use_rotary=False)(hidden, state)
    state.save(tmp_path / "state.safetensors")
    for each in (state, RetNetState.load(tmp_path / "state.safetensors", second.config)):
        with pytest.raises(ValueError, match="computed by a MultiScaleRetention with other weights"):
            second(hidden, each)
    second(hidden, own)
    copy.deepcopy(second).bfloat16()(hidden.bfloat16(), own)
    assert torch.equal(copy.deepcopy(first)(hidden, state.clone())[0], first(hidden, state)[0])


def wrapped_layers(model):
    model.conv = torch.compile(model.conv, backend="eager")
    model.retention = checkpoint_wrapper(model.retention)
    return model


@pytest.mark.parametrize("wrapped", [lambda it: it, lambda it: torch.compile(it, backend="eager"), wrapped_layers])
def test_a_state_is_saved_and_loaded_by_the_names_of_the_model(model, wrapped, saved, fresh_compiler):
    state, file = saved
    expected = model(frames(2, 3, seed=1), state)
    model = wrapped(model)
    assert list(StreamState(model).layers) == ["conv", "retention", "head"]
    with torch.no_grad():
        same(model(frames(2, 3, seed=1), StreamState.load(file, model)), expected)
    with pytest.raises(ValueError, match="moves to devices alone"):
        state.to(torch.float16)


def test_a_submodule_called_module_has_layers_of_its_own():
    model = nn.Module()
    model.conv, model.module = CausalConv1d(8, 8, 3), nn.ModuleDict({"conv": CausalConv1d(8, 8, 3)})
    assert list(StreamState(model).layers) == ["conv", "module.conv"]


def test_a_copy_of_a_model_with_its_state_is_independent(model):
    whole = frames(2, 5)
    expected, model.stream = model(whole), StreamState(model)
    model(whole[:, :3], model.stream)
    copies = [copy.deepcopy((model, model.stream)), pickle.loads(pickle.dumps((model, model.stream)))]
    copies.append(((twin := copy.deepcopy(model)), twin.stream))
    for twin, state in copies:
        same(twin(whole[:, 3:], state), expected[:, 3:])
    same(model(whole[:, 3:], model.stream), expected[:, 3:])


def test_a_state_is_saved_with_the_weights_that_computed_it(model, saved):
    state, file = saved
    with pytest.raises(ValueError, match="model must be the model that has computed the state"):
        state.save(file, Streaming())
    model.conv.weight.mul_(2)
    state.save(file, model)
    with pytest.raises(ValueError, match="other weights"):
        StreamState.load(file, model)
    loaded, fresh = StreamState.load(file, model, other_weights=True), StreamState(model)
    model(frames(2, 5), fresh)
    fresh.save(file, model)
    assert StreamState.load(file, model).nbytes == loaded.nbytes == state.nbytes
    for stale in (loaded, copy.deepcopy(state), StreamState.concatenate([fresh, state]), state.select([1])):
        stale.save(file, model)
        with pytest.raises(ValueError, match="other weights"):
            StreamState.load(file, model)
    twin, copied = copy.deepcopy((model, fresh))
    copied.save(file, twin)
    assert StreamState.load(file, model).nbytes == state.nbytes
