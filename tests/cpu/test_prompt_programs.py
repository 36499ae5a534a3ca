# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet_hf.cpu.compile(model, prompts=True)`: programs around the operator, here uncompiled, compute what a layer does."""

import copy
import pickle
from functools import partial

import pytest
import torch
from plain_programs import KINDS, read, same
from small_models import close, random_ids, small_model
from torch import nn

import retnet_hf.cpu
from retnet_hf import RetNetState, cpu
from retnet_hf.cpu import number_of_programs, original
from retnet_hf.cpu.programs import prompt_programs


pytest_plugins = ("plain_programs",)  # the fixture `made`

compiled = partial(retnet_hf.cpu.compile, prompts=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer(made, tmp_path, kind, dtype):
    dialect, options = KINDS[kind]
    model = small_model(dialect, **options).to(dtype)
    fast = compiled(model, tmp_path)
    for shape in ((1, 90), (2, 7)):
        made.clear()
        same(read(fast, random_ids(*shape)), read(model, random_ids(*shape)), 1e-4 if dtype == torch.float32 else 0.05)
        assert len(made.of_prompts) == 2 * 2


@pytest.mark.parametrize(
    "inputs",
    [
        {"attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0]])},
        {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 1]])},
        {"retention_form": "recurrent"},
        {"retention_form": "parallel"},
    ],
    ids=["padding", "documents", "recurrent", "parallel"],
)
def test_the_operator_between_programs_is_that_of_the_call(made, tmp_path, inputs):
    model, ids = small_model(), random_ids(2, 7)
    same(read(compiled(model, tmp_path), ids, **inputs), read(model, ids, **inputs))
    assert len(made.of_prompts) == 4


def of_packed_documents(model) -> tuple:
    state, offsets = RetNetState.zeros(model.config, 2), torch.tensor([0, 4, 9], dtype=torch.int32)
    for rows in ([0, 1], [1, 0]):  # the second call continues the documents, in another order
        options = {"cu_seq_lens_q": offsets, "state_rows": rows}
        logits = model(random_ids(1, 9), past_key_values=state, **options).logits
    return logits, state


def of_a_state_that_is_taken_back(model) -> tuple:
    state, ids = RetNetState(model.config), random_ids(1, 12)
    state.activate_past_recording()
    logits = [model(part, past_key_values=state).logits for part in (ids[:, :5], ids[:, 5:])]
    state.crop(-4)
    return logits[1], state


@pytest.mark.parametrize("call", [of_packed_documents, of_a_state_that_is_taken_back])
def test_prompts_continue_states(made, tmp_path, call):
    model = small_model()
    with torch.no_grad():
        same(*map(call, (compiled(model, tmp_path), model)))
    assert len(made.of_prompts) == 2 * 4


@pytest.mark.parametrize("change", [{}, {"rotate": torch.add}, {"cast_dtypes": (torch.float32,)}], ids=len)
def test_another_rotation_is_left_to_the_layer(made, tmp_path, change):
    fast, hidden_states = compiled(small_model(), tmp_path), torch.randn(1, 7, 32)
    plan = fast.model.plan(hidden_states)[0]
    vars(plan.rotate).update(change)
    with torch.no_grad():
        assert fast.model.layers[0].prompts.computes(hidden_states, plan) == (not change)


def test_what_programs_do_not_compute_the_layers_do(made, tmp_path):
    model, ids = small_model(), random_ids(1, 7)
    fast = compiled(model, tmp_path)
    fast(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            close(fast(ids).logits.float(), model(ids).logits.float(), 0.01)
        maps = fast(ids, output_attentions=True).attentions
        close(maps, model(ids, output_attentions=True).attentions)
        close(torch.compile(fast, backend="eager")(ids).logits, model(ids).logits)
        close(fast.train()(ids).logits, model(ids).logits)  # there is no dropout
        fast.eval()
        stacked = torch.func.vmap(lambda each: fast(each[None]).logits[0])(random_ids(2, 7))
        close(stacked, model(random_ids(2, 7)).logits)
        half = compiled(small_model().to(torch.bfloat16), tmp_path)
        with pytest.raises(RuntimeError, match="same dtype"):
            half(inputs_embeds=torch.ones(1, 7, 32))
        handle = fast.model.layers[0].retention.o_proj.register_forward_hook(lambda *_: None)
        assert made.of_prompts == []
        close(fast(ids).logits, model(ids).logits)
        assert len(made.of_prompts) == 2  # of the other layer
        handle.remove()


def test_what_hooks_compute_is_in_no_file(made, tmp_path, monkeypatch):
    """A program of a hooked layer would be loaded by others, which have no hooks."""
    warnings, model = [], small_model()
    monkeypatch.setattr(cpu.logger, "warning", warnings.append)
    handle = model.model.layers[0].retention.register_forward_hook(lambda module, inputs, output: (0 * output[0], output[1]))
    fast = compiled(model, tmp_path)
    assert number_of_programs(fast) == 1
    assert "no programs of steps for 1 of 2 layers of retention, since they have hooks" in warnings[0]
    same(read(fast, random_ids(1, 7)), read(model, random_ids(1, 7)))
    handle.remove()
    same(read(compiled(model, tmp_path), random_ids(1, 7)), read(model, random_ids(1, 7)))


def test_layers_without_plain_weights_have_no_programs(made, tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(cpu.programs.logger, "warning", warnings.append)
    model = torch.ao.quantization.quantize_dynamic(small_model(), {nn.Linear})
    fast = compiled(model, tmp_path)
    assert number_of_programs(fast) == 0
    assert "are of class torch.ao.nn.quantized.dynamic.modules.linear.Linear" in warnings[0]
    same(read(fast, random_ids(1, 7)), read(model, random_ids(1, 7)))

    class Quantised(nn.Parameter):
        """As in torchao, whose weights are parameters of classes of their own."""

    model = small_model()
    first, second, *_ = model.model.layers
    first.mlp.up_proj.weight = Quantised(first.mlp.up_proj.weight.detach())
    for layers in ([first, second], [second, first]):
        assert list(prompt_programs(layers, model.config, tmp_path)) == [second]


def test_new_values_are_read_copies_have_no_programs_and_new_weights_end_them_with_a_warning(made, tmp_path, monkeypatch):
    warnings, ids = [], random_ids(1, 7)
    monkeypatch.setattr(cpu.programs.logger, "warning_once", warnings.append)
    fast = compiled(small_model(), tmp_path)
    with torch.no_grad():
        for parameter in fast.parameters():
            parameter.mul_(0.9)
    for twin in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):  # copies have no programs
        same(read(twin, ids), read(original(fast), ids))
    assert len(made.of_prompts) == 4
    fast.load_state_dict({name: tensor + 0.01 for name, tensor in fast.state_dict().items()}, assign=True)
    for _ in range(2):
        same(read(fast, ids), read(original(fast), ids))
    assert len(made.of_prompts) == 4
    assert len(warnings) == 2  # one a layer; users see the first
