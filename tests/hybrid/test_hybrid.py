# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Layers of softmax attention beside retention, and one state for all of them."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from small_models import FAMILIES, close, random_ids, same_state, small_config, small_model

from retnet_hf import RetNetHybridConfig, RetNetHybridModel, RetNetModel, RetNetState
from retnet_hf.hub.cards import model_card
from retnet_hf.hybrid.softmax_attention import AttentionPlan, AttentionStateLayer
from retnet_hf.ops.layout import layout_of
from retnet_hf.ops.plan import Rotation


pytestmark = pytest.mark.usefixtures("no_gradients")


def blocks_of(config, kind: str = "sliding_attention", batch: int = 1, length: int = 6, **options):
    """The columns that each block of queries reads, in layers of a kind; rotation does not count here."""
    layout = layout_of((batch, length), torch.device("cpu"), **options)
    return AttentionPlan(config, layout, batch, torch.float32, lambda position=None: Rotation(None), kind).blocks


def mask_without(spans: dict[int, tuple[int, int]], batch: int, length: int) -> torch.Tensor:
    mask = torch.ones(batch, length, dtype=torch.int64)
    for row, (start, stop) in spans.items():
        mask[row, start:stop] = 0
    return mask


@pytest.mark.parametrize("family", ["hybrid", "sinks", "minimax"])
def test_implementations_of_attention_agree(family):
    model, ids, mask = small_model(family), random_ids(2, 30), mask_without({0: (0, 7)}, 2, 30)
    assert model.config._attn_implementation == "sdpa"
    expected, padded = model(ids).logits, model(ids, attention_mask=mask).logits
    out = model(ids, output_attentions=True)
    model.set_attn_implementation("eager")
    for logits in (out.logits, model(ids).logits):
        close(logits, expected)
    close(model(ids, attention_mask=mask).logits[mask == 1], padded[mask == 1])
    if family == "hybrid":
        _, full, sliding, _ = out.attentions
        close(full.sum(-1), torch.ones(2, 2, 30))
        assert (full.triu(1) == 0).all()
        assert (sliding.tril(-6) == 0).all()
        assert (sliding.diagonal(-5, -2, -1) > 0).all()


def test_a_sliding_layer_holds_no_more_than_its_window_and_sinks():
    for family, expected in (("hybrid", [70, 5]), ("sinks", [2 + 4])):
        model, mask = small_model(family), torch.ones(2, 50).tril(44)
        config, state = model.config, model(random_ids(2, 50), attention_mask=mask, use_cache=True).past_key_values
        for token in random_ids(2, 20, seed=1).split(1, dim=1):
            model(token, past_key_values=state)
        layers = [layer for layer in state.layers if isinstance(layer, AttentionStateLayer)]
        assert [layer.keys.shape[2] for layer in layers] == expected
        assert sum(layer.recurrent_states.numel() for layer in state.layers if layer not in layers) == 2 * config.state_size
        held = [layer.keys.numel() + layer.values.numel() for layer in layers]
        assert held == [2 * columns * config.cache_size_per_token // len(layers) for columns in expected]
        card = " ".join(model_card(model, "my-hybrid").text.split())
        assert f"{4 * config.state_size:,} bytes" in card
        if family == "hybrid":
            assert f"{config.cache_size_per_token:,} values" in card


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["hybrid", "sinks"])
def test_blocks_of_a_window_change_nothing(monkeypatch, family, padded):
    """Nor do they see more columns than they need, and so are linear in the length of the text."""
    model, ids = small_model(family), random_ids(2, 61)
    mask = mask_without({0: (3, 9), 1: (20, 31)}, 2, 61) if padded else mask_without({}, 2, 61)
    whole = model(ids, attention_mask=mask)
    continued = model(ids[:, :23], attention_mask=mask[:, :23], use_cache=True).past_key_values
    monkeypatch.setattr("retnet_hf.hybrid.softmax_attention.QUERIES_ON_CPU", 7)
    in_blocks = model(ids, attention_mask=mask)
    close(in_blocks.logits[mask == 1], whole.logits[mask == 1])
    same_state(in_blocks.past_key_values, whole.past_key_values)
    later = model(ids[:, 23:], attention_mask=mask, past_key_values=continued).logits
    close(later[mask[:, 23:] == 1], whole.logits[:, 23:][mask[:, 23:] == 1])
    blocks = blocks_of(model.config, batch=2, length=61, attention_mask=mask)
    assert [(block.queries.start, block.queries.stop) for block in blocks] == [(n, min(n + 7, 61)) for n in range(0, 61, 7)]
    most = 7 + 5 + 2 * model.config.attention_sinks + (11 if padded else 0)
    assert all(len(torch.arange(61)[block.keys]) <= most for block in blocks)


def test_blocks_see_the_sinks_of_their_documents_alone(monkeypatch):
    model, ids, documents = small_model("sinks"), random_ids(1, 40), torch.tensor([[0] * 11 + [1] * 13 + [2] * 16])
    expected = torch.cat([model(part).logits for part in ids.split([11, 13, 16], dim=1)], dim=1)
    close(model(ids, seq_idx=documents).logits, expected)
    monkeypatch.setattr("retnet_hf.hybrid.softmax_attention.QUERIES_ON_CPU", 4)
    close(model(ids, seq_idx=documents).logits, expected)
    blocks = blocks_of(model.config, length=40, seq_idx=documents)
    assert torch.arange(40)[blocks[-1].keys].tolist() == [24, 25, *range(31, 40)]


@pytest.mark.parametrize("fields", [{}, {"attention_head_dim": 12, "attention_log_base": 50.0}], ids=["plain", "own heads"])
@pytest.mark.parametrize("distance", [6, 9])
def test_sinks_are_seen_as_if_they_stood_at_their_distance(fields, distance):
    """A text whose sinks do stand there, with nothing between them and the window, ends in the same logits."""
    options = {"layer_types": ["sliding_attention"], "sliding_window": 4, "num_hidden_layers": 1, "attention_sinks": 3}
    options |= {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}} | fields
    near, ids = small_model(**options, attention_sink_distance=distance), random_ids(2, 30)
    plain = small_model(**options)
    plain.load_state_dict(near.state_dict())
    logits = near(ids).logits
    close(logits[:, : distance + 1], plain(ids[:, : distance + 1]).logits)
    for last in range(7, 30):
        first = max(0, last - distance)
        read = torch.cat([ids[:, :3], ids[:, last - 3 : last + 1]], dim=1)
        position = torch.tensor([[first, first + 1, first + 2, *range(last - 3, last + 1)]])
        close(logits[:, last], plain(read, position_ids=position).logits[:, -1])
    assert (logits[:, -1] - plain(ids).logits[:, -1]).abs().max() > 1e-3
    if not fields:  # distances count, not positions
        close(near(ids, position_ids=torch.arange(100, 130)[None]).logits, logits)


def test_a_window_that_does_not_rotate_has_no_distances():
    kinds, ids = ["sliding_attention"] * 2, random_ids(2, 30)
    fields = {"layer_types": kinds, "rotary_layers": "linear_attention", "attention_sinks": 2, "sliding_window": 4}
    bounded, plain = small_model(**fields, attention_sink_distance=5), small_model(**fields)
    plain.load_state_dict(bounded.state_dict())
    close(bounded(ids).logits, plain(ids).logits)


@pytest.mark.parametrize("sinks", [0, 2])
def test_a_window_of_one_token_does_not_forget_where_it_was(sinks):
    kinds = ["sliding_attention", "linear_attention"]
    model, ids = small_model(layer_types=kinds, sliding_window=1, attention_sinks=sinks), random_ids(2, 9)
    state = model(ids[:, :4], use_cache=True).past_key_values
    state.activate_past_recording()
    model(random_ids(2, 3, seed=1), past_key_values=state)
    state.crop(-3)
    close(model(ids[:, 4:], past_key_values=state).logits, model(ids).logits[:, 4:])


@pytest.mark.parametrize("family", ["hybrid", "sinks", *FAMILIES])
def test_rows_are_cloned_selected_repeated_and_joined(family):
    model, more = small_model(family), random_ids(1, 6, seed=9)
    states = [model(random_ids(1, length, seed=length), use_cache=True).past_key_values for length in (4, 17)]
    alone = torch.cat([model(more, past_key_values=state.clone()).logits for state in states])
    joint = RetNetState.concatenate(states)
    close(model(more.expand(3, -1), past_key_values=joint.select([1, 0, 1])).logits, alone[[1, 0, 1]])
    close(model(more.expand(4, -1), past_key_values=joint.repeat(2)).logits, alone[[0, 0, 1, 1]])
    close(model(more.expand(2, -1), past_key_values=joint).logits, alone)


def test_flash_attention_is_refused_where_documents_share_a_row():
    config, sinks = small_config("hybrid"), small_config("sinks")
    config._attn_implementation = sinks._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="sdpa or eager for several documents in one row, got 'flash_attention_2'"):
        blocks_of(config, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))
    with pytest.raises(ValueError, match="sdpa or eager for attention_sinks, got 'flash_attention_2'"):
        blocks_of(sinks)
    [block] = blocks_of(config, "full_attention", attention_mask=mask_without({0: (0, 2)}, 1, 6))
    assert block.mask.tolist() == [[False, False, True, True, True, True]]


LATENT = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
KINDS = {"layer_types": ["linear_attention", "full_attention"] * 2, "sliding_window": None}
REFUSED = [
    ({"layer_types": ["full_attention"]}, r"layer_types must be a list of num_hidden_layers \(4\) names, each one of"),
    ({"layer_types": ["chunked_attention"] * 4}, "layer_types must be a list of"),
    ({"sliding_window": None}, "sliding_window must be a positive number of tokens.*, got None"),
    ({"attention_sinks": -1}, "attention_sinks must be 0, or a positive number of tokens if .*, got -1"),
    ({"attention_sinks": 4, "layer_types": None, "sliding_window": None}, "0, or a positive .* sliding_attention, got"),
    ({"attention_sinks": 3, "attention_sink_distance": 7}, r"be 8 \(sliding_window \+ .*\) or more, or None, got 7"),
    ({"attention_sink_distance": 9}, "attention_sink_distance must be None if attention_sinks is 0, got 9"),
    ({"bidirectional": True}, "layer_types must be all linear_attention in an encoder"),
    (LATENT, "layer_types must be without sliding_attention"),
    (LATENT | KINDS | {"attention_gate_act": "sigmoid"}, "attention_gate_act must be None if kv_lora_rank is given"),
    (LATENT | KINDS | {"v_head_dim": None}, "v_head_dim must be a number if kv_lora_rank is given"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_errors_of_the_configuration(fields, sentence):
    with pytest.raises(StrictDataclassError, match=sentence):
        small_config("hybrid", **fields)


def test_the_fingerprint_has_the_epsilon_of_norms_that_softmax_layers_alone_have():
    marks = {small_config("hybrid", attention_use_qk_norm=True, qk_norm_eps=eps).state_fingerprint for eps in (1e-6, 0.5)}
    assert len(marks) == 2


def test_a_model_of_retention_alone_says_nothing_of_layer_types():
    config = small_config()
    assert config.layer_types == ["linear_attention"] * 2
    assert "layer_types" not in config.to_dict()
    config.num_hidden_layers = 3
    assert config.layer_types == ["linear_attention"] * 3
    assert not config.has_softmax_attention
    hybrid = small_config("hybrid")
    assert RetNetHybridConfig.from_dict(hybrid.to_dict()).layer_types == hybrid.layer_types


def test_a_model_takes_the_configuration_of_its_kind_alone():
    with pytest.raises(ValueError, match="config must be a RetNetConfig for RetNetModel, got a RetNetHybridConfig"):
        RetNetModel(small_config("hybrid"))
    with pytest.raises(ValueError, match="config must be a RetNetHybridConfig for RetNetHybridModel, got a RetNetConfig"):
        RetNetHybridModel(small_config())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("change", ["padded", "pauses", "reset_rows", "crop"])
def test_a_window_holds_its_last_tokens_and_sinks_whatever_the_rows_of_a_batch_read(change, compiled):
    model = small_model("sinks")
    call = torch.compile(model, backend="eager", dynamic=False) if compiled else model
    state, ids = RetNetState(model.config), random_ids(2, 30)
    mask = mask_without({1: (0, 25 if change == "padded" else 0)}, 2, 30)
    texts = [list(row[real]) for row, real in zip(ids, mask == 1)]
    model(ids, attention_mask=mask, past_key_values=state)
    if change == "reset_rows":
        state.reset_rows(torch.tensor([True, False]))
        texts[0] = []
    elif change == "crop":
        state.activate_past_recording()
        model(random_ids(2, 3, seed=2), past_key_values=state)
        state.crop(-3)
        for layer in state.layers:
            layer.record(False)
    for step in range(12):
        token, pause = random_ids(2, 1, seed=step + 3), bool(change == "pauses" and step % 4)
        present = torch.tensor([[1], [int(not pause)]])
        logits = call(token, attention_mask=present, past_key_values=state, use_cache=True).logits
        for row in range(2 - pause):
            texts[row].append(token[row, 0])
            close(logits[row, -1], model(torch.stack(texts[row])[None]).logits[0, -1])
    assert state.layers[1].keys.shape[2] <= 4 + 2
