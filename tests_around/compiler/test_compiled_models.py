# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""torch.compile with the default backend, which writes C++: one graph, the same numbers, and steps that compile once."""

import pytest
import torch
from small_models import close, random_ids, same_state, small_model
from small_vision_models import VISION_FAMILIES, random_images
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

from retnet_hf import RetNetState


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(scope="module")
def one_layer():
    return small_model(num_hidden_layers=1)


def test_compiled_forward(one_layer):
    """Of 21 tokens, which make three chunks; then steps on a state, whose memory stays where it is."""
    ids, compiled = random_ids(2, 21), torch.compile(one_layer, fullgraph=True)
    with torch.no_grad():
        out = compiled(ids, use_cache=False)
        close(out.logits, one_layer(ids).logits)
        assert out.past_key_values is None
        assert not counters["graph_break"]
        state = one_layer(ids[:, :14]).past_key_values
        before = [layer.recurrent_states.data_ptr() for layer in state.layers]
        logits = [compiled(token, past_key_values=state).logits for token in ids[:, 14:].split(1, dim=1)]
        close(torch.cat(logits, dim=1), one_layer(ids).logits[:, 14:])
    assert counters["stats"]["unique_graphs"] == 2
    assert [layer.recurrent_states.data_ptr() for layer in state.layers] == before


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_compiled_forward_of_images(name):
    model, images = VISION_FAMILIES[name].model(**VISION_FAMILIES[name].smallest), random_images()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        close(compiled(images).logits, model(images).logits)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["hybrid", "sinks"])
def test_a_compiled_decode_step_is_compiled_while_windows_fill_and_not_again(padded, family):
    """Not at every token (D4): Llama takes two programs, before its cache's length is taken for a variable."""
    model, ids = small_model(family), random_ids(2, 40)
    mask = torch.ones(2, 9, dtype=torch.int64)
    if padded:
        mask[0, :4] = mask[1, 5] = 0
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter)
    eager, state = (model(ids[:, :9], attention_mask=mask, use_cache=True).past_key_values for _ in range(2))
    for token in ids[:, 9:].split(1, dim=1):
        expected = model(token, past_key_values=eager).logits
        close(compiled(token, past_key_values=state).logits, expected)
    assert counter.frame_count <= 4
    same_state(state, eager)
    windows = [layer.keys.shape[2] for layer in state.layers if getattr(layer, "is_sliding", False)]
    assert max(windows) <= 9 + 2 * model.config.attention_sinks


@pytest.mark.parametrize("family", ["minimax", "ring"])
def test_a_forward_with_experts_compiles_to_one_graph_and_computes_the_same(family):
    model, ids, counter = small_model(family, num_hidden_layers=3), random_ids(2, 9), CompileCounter()
    close(torch.compile(model, backend=counter, fullgraph=True)(ids, use_cache=False).logits, model(ids).logits)
    assert counter.frame_count == 1


def test_a_loaded_state_with_sinks_goes_on_compiled(tmp_path):
    """It holds columns of another row, which nothing in it needs."""
    model, long, short, more = small_model("sinks"), random_ids(1, 12), random_ids(1, 3, seed=1), random_ids(1, 8, seed=2)
    states = [model(ids, use_cache=True).past_key_values for ids in (long, short)]
    RetNetState.concatenate(states).select([1]).save(tmp_path / "state")
    loaded, compiled = RetNetState.load(tmp_path / "state", model), torch.compile(model, backend="eager")
    expected = model(torch.cat([short, more], dim=1)).logits[:, 3:]
    for n, token in enumerate(more.split(1, dim=1)):
        close(compiled(token, past_key_values=loaded).logits[:, 0], expected[:, n])


def test_a_compiled_forward_reads_the_same_mask_columns():
    """A mask of static width, with columns for tokens that are still to come."""
    model, tokens = small_model().double(), torch.randint(0, 50, (2, 12))
    mask = torch.ones(2, 16, dtype=torch.long)
    mask[0, :4] = 0
    compiled = torch.compile(model, backend="eager")
    expected, actual = (each(tokens, attention_mask=mask, use_cache=True) for each in (model, compiled))
    close(actual.logits[1], expected.logits[1], 1e-11)
    close(actual.logits[0, 4:], expected.logits[0, 4:], 1e-11)
    step, following = torch.randint(0, 50, (2, 1)), torch.ones(2, 16, dtype=torch.long)
    following[1, 12] = 0  # the token after the twelve read is absent in the second row
    expected = model(step, attention_mask=following, past_key_values=expected.past_key_values, use_cache=True)
    actual = compiled(step, attention_mask=following, past_key_values=actual.past_key_values, use_cache=True)
    close(actual.logits[0], expected.logits[0], 1e-11)
    assert actual.past_key_values.layers[0].next_position.tolist() == [9, 12]
    assert expected.past_key_values.layers[0].next_position.tolist() == [9, 12]
