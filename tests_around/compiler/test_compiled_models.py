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
