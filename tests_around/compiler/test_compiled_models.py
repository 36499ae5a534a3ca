# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""torch.compile with the default backend, which writes C++: one graph, the same numbers, and steps that compile once."""

import pytest
import torch
from small_models import close, random_ids, small_model
from small_vision_models import VISION_FAMILIES, random_images
from torch._dynamo.utils import counters


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(scope="module")
def one_layer():
    return small_model(num_hidden_layers=1)


def test_compiled_forward(one_layer):
    """21 tokens make three chunks."""
    ids = random_ids(2, 21)
    compiled = torch.compile(one_layer, fullgraph=True)
    with torch.no_grad():
        out = compiled(ids, use_cache=False)
        close(out.logits, one_layer(ids).logits)
    assert out.past_key_values is None
    assert not counters["graph_break"]


def test_compiled_decode(one_layer):
    ids = random_ids(2, 14)
    step = torch.compile(one_layer, fullgraph=True)
    with torch.no_grad():
        state = one_layer(ids[:, :7]).past_key_values
        before = [layer.recurrent_states.data_ptr() for layer in state.layers]
        logits = []
        for token in ids[:, 7:].split(1, dim=1):
            logits.append(step(token, past_key_values=state).logits)
        close(torch.cat(logits, dim=1), one_layer(ids).logits[:, 7:])
    assert counters["stats"]["unique_graphs"] == 1
    assert [layer.recurrent_states.data_ptr() for layer in state.layers] == before


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_compiled_forward_of_images(name):
    model, images = VISION_FAMILIES[name].model(**VISION_FAMILIES[name].smallest), random_images()
    compiled = torch.compile(model, fullgraph=True)
    with torch.no_grad():
        close(compiled(images).logits, model(images).logits)
