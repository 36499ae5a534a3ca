# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The operator: every form is one function, against the slow recurrence and against plain removal of tokens."""

import functools
import importlib
import pkgutil
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import random_ids, small_model
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import retnet_hf
from retnet_hf.ops import retention_forms as forms
from retnet_hf.ops.kernels import TORCH
from retnet_hf.ops.layout import layout_of
from retnet_hf.ops.plan import Plan
from retnet_hf.ops.retention_forms import decay_tables, retention, token_ages


operator = importlib.import_module("retnet_hf.ops.retention_forms")
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
FAST_FORMS = ("parallel", "chunkwise")
FORMS = ("recurrent", *FAST_FORMS)
OPTIONS = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "dtype": st.sampled_from(list(TOLERANCE)),
        "length": st.one_of(st.sampled_from([1, 2, 3, 7, 16, 31, 37, 64]), st.integers(1, 50)),
        "initial": st.booleans(),
        "mask": st.booleans(),
        "reset": st.booleans(),
    }
)


class Case:
    """Random operands of one size; everything that a form needs. With `groups`, heads share decay and state in so many."""

    def __init__(self, seed, dtype, length, initial=True, mask=False, reset=False, batch=2, heads=3, groups=0, sizes=(4, 6)):
        generator = torch.Generator().manual_seed(seed)
        groups, (key_dim, value_dim) = groups or heads, sizes

        def normal(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

        self.query, self.key = normal(batch, heads, length, key_dim), normal(batch, groups, length, key_dim)
        self.value = normal(batch, groups, length, value_dim)
        self.state = normal(batch, groups, key_dim, value_dim) if initial else None
        self.log_decay = torch.log(0.3 + 0.7 * torch.rand(groups, generator=generator, dtype=torch.float64)).to(dtype)
        self.mask = torch.rand(batch, length, generator=generator) < 0.6 if mask else None
        self.reset = torch.rand(batch, length, generator=generator) < 0.2 if reset else None

    def run(self, form, **options):
        operands = (self.query, self.key, self.value, self.log_decay, self.state, self.mask, self.reset)
        return retention(*operands, form=form, **options)

    def run_by_head(self, form="recurrent", **options):
        """The same with keys, values, decays and states of every head, of which a group's are equal."""
        times = self.query.shape[1] // self.key.shape[1]
        key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (self.key, self.value))
        state = None if self.state is None else self.state.repeat_interleave(times, dim=1)
        log_decay = self.log_decay.repeat_interleave(times)
        output, state = retention(self.query, key, value, log_decay, state, self.mask, self.reset, form=form, **options)
        of_group = state.unflatten(1, (-1, times))
        assert torch.equal(of_group, of_group[:, :, :1].expand_as(of_group))
        return output, of_group[:, :, 0]

    def gradients(self, output, state):
        weight = torch.linspace(0.5, 1.5, output.numel(), dtype=output.dtype).view_as(output)
        leaves = [leaf for leaf in (self.query, self.key, self.value, self.state) if leaf is not None]
        of_state = torch.linspace(-1, 1, state.numel(), dtype=state.dtype).view_as(state)
        return torch.autograd.grad((weight * output).sum() + (of_state * state).sum(), leaves)

    def compare(self, actual, expected):
        dtype = self.query.dtype
        assert_close(self.checked(actual[0]), self.checked(expected[0]), dtype, "output")
        assert_close(actual[1], expected[1], dtype, "final state")
        names = ("query gradient", "key gradient", "value gradient", "initial state gradient")
        for name, gradient, reference in zip(names, self.gradients(*actual), self.gradients(*expected)):
            assert_close(gradient, reference, dtype, name)

    def checked(self, output):
        """The output, which is exactly zero where a token is absent."""
        assert self.mask is None or not output.movedim(2, 1)[~self.mask].any()
        return output


def assert_close(actual, expected, dtype, name):
    scale = max(expected.abs().max().item(), 1.0) if expected.numel() else 1.0
    worst = (actual - expected).abs().max().item() / scale if expected.numel() else 0.0
    assert worst <= TOLERANCE[dtype], f"{name} differs by {worst:.1e} of its scale"


@settings(max_examples=150, deadline=None)
@given(
    options=OPTIONS,
    chunk_size=st.integers(1, 40),
    block_size=st.sampled_from([1, 60, 2**10]),
    groups=st.sampled_from([1, 2, 3, 6]),
    form=st.sampled_from((*FORMS, "auto")),
)
def test_all_forms_are_one_function_outputs_state_and_gradients(options, chunk_size, block_size, groups, form):
    """Whatever the number of chunks that are computed at once, and where heads that share a decay share a state."""
    case = Case(**options, heads=6, groups=groups)
    expected = case.run_by_head()
    with mock.patch.object(operator, "BLOCK_SIZE_ON_CPU", block_size):
        actual = case.run(form, chunk_size=chunk_size)
        case.compare(actual, expected)
        with torch.no_grad():
            output, state = case.run(form, chunk_size=chunk_size)
    assert state.shape == (2, groups, 4, 6)
    assert_close(case.checked(output), expected[0], options["dtype"], "output without a gradient")
    assert_close(state, expected[1], options["dtype"], "final state without a gradient")


@settings(max_examples=40, deadline=None)
@given(
    options=OPTIONS,
    cuts=st.lists(st.integers(1, 39), max_size=4),
    forms=st.lists(st.sampled_from((*FORMS, "auto")), min_size=5, max_size=5),
)
def test_any_split_into_calls_is_one_call(options, cuts, forms):
    case, length = Case(**options), options["length"]
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    outputs, state = [], case.state
    for form, start, end in zip(forms, edges, edges[1:]):
        operands = (tensor[:, :, start:end] for tensor in (case.query, case.key, case.value))
        mask, reset = (marks if marks is None else marks[:, start:end] for marks in (case.mask, case.reset))
        output, state = retention(*operands, case.log_decay, state, mask, reset, form=form, chunk_size=5)
        outputs.append(output)
    case.compare((torch.cat(outputs, dim=2), state), case.run("recurrent"))


@pytest.mark.parametrize("form", FORMS)
def test_grouped_key_value_heads_serve_their_query_heads(form):
    case = Case(5, torch.float64, 12, heads=4)
    key, value = case.key[:, :2], case.value[:, :2]
    by_head = (case.query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), case.log_decay, case.state)
    case.compare(retention(case.query, key, value, *by_head[3:], form=form, chunk_size=5), retention(*by_head))


@pytest.mark.parametrize("groups", [4, 2])
def test_gradients_hold_numerically_and_can_be_differentiated_again(groups):
    case = Case(0, torch.float64, 6, mask=True, batch=1, heads=4, sizes=(2, 3), groups=groups)

    def chunkwise(query, key, value, state, log_decay=case.log_decay):
        output, final = retention(query, key, value, log_decay, state, case.mask, form="chunkwise", chunk_size=4)
        return case.checked(output), final

    operands = (case.query, case.key, case.value, case.state)
    assert torch.autograd.gradgradcheck(chunkwise, operands)
    learned = case.log_decay.clone().requires_grad_()
    assert torch.autograd.gradcheck(chunkwise, (*operands, learned))
    assert torch.autograd.grad(chunkwise(*operands, learned)[0].sum(), learned)[0].abs().min() > 0


@pytest.mark.parametrize("groups", [None, 1], ids=["", "shared"])
@pytest.mark.parametrize("reset", [None, torch.tensor([[True], [False]])], ids=["", "reset"])
@pytest.mark.parametrize("mask", [None, torch.tensor([[True], [False]])], ids=["", "mask"])
def test_one_token_in_place(mask, reset, groups):
    case = Case(6, torch.float64, 1, groups=groups)
    case.mask, case.reset = mask, reset
    expected, expected_state = case.run("parallel")
    decay = forms.step_decay(case.log_decay, case.mask, case.reset)
    with torch.no_grad():
        state = case.state.detach().clone()
        output, _ = forms.recurrent_step_(case.query, case.key, case.value, state, decay)
    assert_close(case.checked(output), case.checked(expected), torch.float64, "output")
    assert_close(state, expected_state, torch.float64, "state")


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("marked", [False, True])
def test_maps_of_masks_and_documents_times_the_values_are_the_output(marked, groups, bidirectional):
    case = Case(8, torch.float64, 23, initial=False, mask=marked, reset=marked, heads=4, groups=groups)
    tables = decay_tables(case.log_decay, 23, bidirectional=bidirectional)
    maps = forms.retention_map(case.query, case.key, tables, token_ages(case.mask, case.reset))
    output = maps @ case.value.repeat_interleave(4 // groups, dim=1)
    operands, marks = (case.query, case.key, case.value, case.log_decay), {"mask": case.mask, "reset": case.reset}
    if bidirectional:
        expected = forms.bidirectional_retention(*operands, **marks, form="recurrent")
    else:
        expected, _ = retention(*operands, **marks, form="recurrent")
    assert_close(case.checked(output), case.checked(expected), torch.float64, "output")


def test_decay_tables_of_a_padded_batch_are_those_of_a_sequence_without_a_mask():
    """Apart from one number for each token: no table of (C, C) depends on the batch, unless a chunk has holes."""
    mask, tables = torch.ones(8, 4096, dtype=torch.bool), decay_tables(torch.full((8,), -0.01), 4096, 256)
    operands = [torch.empty(8, 8, 4096, 1)] * 3
    mask[0, :300], mask[1, -300:] = False, False
    padded = tables.blocks(*operands, token_ages(mask, None), at_once=True)[0]
    assert padded.inner is tables.inner
    assert padded.query.numel() == padded.key.numel() == 8 * 8 * 4096
    mask[0, [310, 400]] = False
    with_holes = tables.blocks(*operands, token_ages(mask, None), at_once=True)[0]
    assert with_holes.inner.shape == (8, 8, 16, 256, 256)


@torch.no_grad()
def test_no_product_is_computed_that_nobody_needs():
    """For a shared state, for a final state that is not wanted, and for an encoder of one chunk."""

    def products(run, *operands, **options):
        with FlopCounterMode(display=False) as counter, mock.patch.object(operator, "BLOCK_SIZE_ON_CPU", 1):
            run(*operands, **options)
        return counter.get_total_flops()

    case = Case(0, torch.float32, 64, initial=False, batch=1, heads=8, groups=2)
    for form in ("chunkwise", "parallel"):
        of_states = [products(run, form=form, chunk_size=16) for run in (case.run_by_head, case.run)]
        assert of_states[0] - of_states[1] == (8 - 2) * 2 * 64 * 4 * 6
    case = Case(0, torch.float32, 32, initial=False, batch=1, sizes=(32, 32))
    for chunk_size in (None, 16):
        operands = (case.query, case.key, case.value, None, decay_tables(case.log_decay, 32, chunk_size))
        of_output = [products(forms.retention_in_chunks, *operands, with_final=wanted) for wanted in (True, False)]
        assert of_output[0] - of_output[1] == 2 * 3 * (chunk_size or 32) * 32 * 32
    operands = (case.query, case.key, case.value, case.log_decay)
    assert products(forms.bidirectional_retention, *operands, form="parallel") == 2 * 3 * 32 * 32 * (32 + 32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_at_65536_tokens_is_finite_and_no_worse_than_attention(dtype):
    """|x| up to 1e3 over 65,536 tokens; then the error against float64 beside that of SDPA on the same operands."""
    torch.manual_seed(0)
    log_decay = torch.log(torch.tensor([1 - 2.0**-5, 1 - 2.0**-12]))
    shape = (1, 2, 65536, 16)
    large = [(torch.rand(shape) * 2e3 - 1e3).to(dtype) for _ in range(3)]
    output, state = retention(*large, log_decay, form="chunkwise")
    assert output.dtype == state.dtype == torch.float32
    assert torch.isfinite(output).all()
    assert torch.isfinite(state).all()

    query, key, value = (torch.randn(1, 2, 4096, 16).to(dtype) for _ in range(3))
    exact = forms.chunkwise_retention(query.double(), key.double(), value.double(), log_decay.double())[0]
    attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    exact_attention = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=True)

    def error(actual, reference):
        return ((actual.double() - reference).norm() / reference.norm()).item()

    for form in FAST_FORMS:
        ours = retention(query, key, value, log_decay, form=form)[0]
        assert error(ours, exact) <= error(attention, exact_attention)


@pytest.mark.parametrize("form", FORMS)
def test_a_float64_state_lasts(form):
    case = Case(10, torch.float32, 20)
    operands = case.query, case.key, case.value, case.log_decay, case.state.double() + 1e-12
    found, expected = retention(*operands, form=form, chunk_size=8), forms.recurrent_retention(*operands)
    assert found[0].dtype == found[1].dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("length", "form"), [(30, "chunkwise"), (30, "recurrent"), (1, "step")])
def test_autocast_does_not_narrow_the_state(length, form):
    case = Case(10, torch.float32, length)

    def found():
        state = case.state.detach().clone()
        if form == "recurrent":
            return forms.recurrent_retention(case.query, case.key, case.value, case.log_decay, state)
        if length > 1:
            return case.run("chunkwise", chunk_size=8)
        with torch.no_grad():
            output, _ = forms.recurrent_step_(case.query, case.key, case.value, state, forms.step_decay(case.log_decay))
        return output, state

    expected = found()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = found()
    assert all(ours.dtype == torch.float32 and torch.equal(ours, theirs) for ours, theirs in zip(actual, expected))


def test_the_chunkwise_form_keeps_nothing_but_its_operands_for_the_backward_pass():
    case, kept = Case(0, torch.float32, 50, mask=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        case.run("chunkwise", chunk_size=8)
    operands = {tensor.data_ptr() for tensor in (case.query, case.key, case.value, case.state)}
    assert {tensor.data_ptr() for tensor in kept} == operands


def test_torch_func_finds_mixed_second_derivatives_and_takes_batches():
    """By decays of a gradient by queries, which the levels of torch.func do not show each other."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 20, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    log_decay, mixed, batched = torch.tensor([-0.3, -0.1], dtype=torch.float64), [], []
    for form in ("chunkwise", "recurrent"):

        def loss(query, log_decay, form=form):
            return retention(query, key, value, log_decay, form=form)[0].square().sum()

        of_query = torch.func.grad(loss)
        mixed.append(torch.func.grad(lambda decay, of_query=of_query: of_query(query, decay).sin().sum())(log_decay))
        batched.append(torch.func.vmap(of_query, (0, None))(torch.stack([query, 2 * query]), log_decay))
    torch.testing.assert_close(*mixed, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*batched, rtol=1e-10, atol=1e-10)


def test_the_output_of_a_projection_that_was_cut_into_heads_lies_as_the_projection_does():
    value, case = torch.randn(2, 20, 3 * 6), Case(0, torch.float32, 20)
    output, _ = retention(case.query, case.key, value.view(2, 20, 3, 6).transpose(1, 2), case.log_decay, form="chunkwise")
    assert output.transpose(1, 2).is_contiguous()


def test_default_chunk_size_keeps_states_smaller_than_keys_and_values():
    for key_dim, value_dim in [(16, 16), (64, 128), (128, 128), (128, 256), (256, 512)]:
        chunk_size = forms.default_chunk_size(key_dim, value_dim)
        assert key_dim * value_dim <= chunk_size * (key_dim + value_dim)


def test_bad_input_gets_a_sentence():
    case = Case(12, torch.float32, 4)
    query, key, value, log_decay = case.query, case.key, case.value, case.log_decay
    for operands, options, sentence in (
        ((query, key, value, log_decay), {"form": "fast"}, "form must be one of auto, parallel, recurrent, chunkwise, got"),
        ((query, key[:, :, :2], value, log_decay), {}, "query and key must be"),
        ((query, key, value[:, :, :2], log_decay), {}, "key and value must have"),
        ((query, key[:, :2], value[:, :2], log_decay), {}, "a multiple of their heads"),
        ((query[:, :, :0], key[:, :, :0], value[:, :, :0], log_decay), {}, "query must have at least one token"),
        ((query, key[:, :1], value[:, :1], log_decay[:1], case.state), {}, r"must have 1 heads, .* got \(2, 3, 4, 6\)"),
    ):
        with pytest.raises(ValueError, match=sentence):
            retention(*operands, **options)


@pytest.mark.parametrize("asking", [(0,), (0, 1, 2), (1, 3)], ids=["query", "all but the state", "key and state"])
def test_a_gradient_of_a_gradient_where_not_everything_asks_for_one(asking):
    operands = [torch.randn(1, 2, 9, 3, dtype=torch.float64) for _ in range(3)]
    operands.append(torch.randn(1, 2, 3, 3, dtype=torch.float64))
    log_decay, mask = torch.tensor([-0.1, -0.5], dtype=torch.float64), torch.tensor([[True] * 3 + [False] * 2 + [True] * 4])
    second = []
    for function in (functools.partial(forms.chunkwise_retention, chunk_size=4), forms.recurrent_retention):
        leaves = [operand.clone().requires_grad_(place in asking) for place, operand in enumerate(operands)]
        output, state = function(*leaves[:3], log_decay, leaves[3], mask)
        asked = [leaves[place] for place in asking]
        first = torch.autograd.grad(output.square().sum() + state.square().sum(), asked, create_graph=True)
        second.append(torch.autograd.grad(sum(gradient.square().sum() for gradient in first), asked))
    torch.testing.assert_close(*second, rtol=1e-10, atol=1e-10)


def test_the_final_state_alone_has_no_gradient_for_the_query():
    case = Case(0, torch.float64, 9)
    _, state = case.run("chunkwise")
    [gradient] = torch.autograd.grad(state.sum(), case.query, create_graph=True, allow_unused=True)
    assert gradient is None or not gradient.any()


def test_no_public_name_hides_a_module():
    """`import retnet_hf.retention as R` would give the function of that name."""
    modules = {module.name for module in pkgutil.iter_modules(retnet_hf.__path__)}
    assert modules.isdisjoint(retnet_hf.__all__)
    assert dir(retnet_hf) == sorted(retnet_hf.__all__)


def plan_of(model, length: int = 20, **kwargs) -> Plan:
    inputs = model.model.embed_tokens(random_ids(2, length))
    return model.model.plan(inputs, **kwargs)[0]


def test_a_plan_moves_with_all_its_tensors_and_what_layers_share_stays_shared():
    plan = plan_of(small_model(), attention_mask=torch.arange(20)[None] >= torch.tensor([[3], [0]]))
    assert plan.decays(plan.log_decays[0]).inner.device.type == "cpu"
    moved = plan.to("meta")
    assert moved.log_decays[0] is moved.log_decays[1]
    tensors = [moved.decays(moved.log_decays[1]).inner, moved.layout.ages.age, moved.layout.present]
    tensors += [*moved.rotate.query_angles, *moved.rotate.key_angles]
    assert ({tensor.device.type for tensor in tensors}, plan.layout.present.device.type) == ({"meta"}, "cpu")


def test_softmax_layers_keep_their_keys_in_the_dtype_of_the_model():
    """Their rotation computes in float32, and returns the dtype that it was given."""
    model = small_model("hybrid").to(torch.bfloat16)
    with torch.no_grad():
        layer = model(random_ids(1, 5), use_cache=True).past_key_values.layers[1]
    assert layer.keys.dtype == layer.values.dtype == torch.bfloat16


def test_what_a_kernel_computes_for_absent_tokens_is_dropped():
    """Kernels leave numbers without a meaning there."""
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :3] = 0
    layout = layout_of((2, 6), torch.device("cpu"), mask)
    kernels = TORCH._replace(chunkwise=lambda query, *others, **options: (torch.ones_like(query), None))
    plan = Plan(layout, None, 1.0, [torch.zeros(4)], "auto", 4, kernels=kernels)
    output, *_ = plan.compute(0, *[torch.zeros(2, 4, 6, 8)] * 3)
    assert output.movedim(2, 1)[mask == 1].eq(1).all()
    assert not output.movedim(2, 1)[mask == 0].any()
