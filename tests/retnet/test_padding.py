# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Padding, wherever it stands: for the other tokens and for the state it was never there. Pieces are the whole."""

import pytest
import torch
from small_models import FORMS, close, greedy, left_padded, of_every_form, of_every_model, random_ids, remembered, same_state
from torch import Tensor

from retnet_hf import RetNetState


pytestmark = pytest.mark.usefixtures("no_gradients")
MASK_TYPES = (torch.int64, torch.bool, torch.float32, torch.int32)
MASKS = {
    "left": [[0] * (21 - length) + [1] * length for length in (21, 9, 1, 14)],
    "right": [[1] * length + [0] * (21 - length) for length in (21, 9, 1, 14)],
    "middle": [[1] * 9 + [1, 0, 0, 1, 0, 1, 1], [1] * 9 + [1] * 7, [1, 0] * 8],
    "absent": [[1] * 9 + [0] * 7, [0] * 9 + [1] * 7, [1] * 16],
}
SPLITS = ([1] * 30, [30], [1, 29], [29, 1], [8, 8, 8, 6], [3, 14, 1, 2, 10], [16, 14])


def prompts() -> list[Tensor]:
    return [random_ids(1, length, seed) for seed, length in enumerate((21, 9, 1, 14))]


def rows_match(logits: Tensor, mask: Tensor, expected: list[Tensor]) -> None:
    for row, row_mask, alone in zip(logits, mask.bool(), expected):
        close(row[row_mask], alone[0])


@pytest.mark.parametrize("form", FORMS)
def test_attention_mask_of_ones_is_none(model, form):
    ids = random_ids(2, 21)
    expected = model(ids, retention_form=form)
    for dtype in MASK_TYPES:
        out = model(ids, attention_mask=torch.ones(2, 21, dtype=dtype), retention_form=form)
        assert out.logits.equal(expected.logits)
        same_state(out.past_key_values, expected.past_key_values, 0)
    assert greedy(model, ids, attention_mask=torch.ones_like(ids)).equal(greedy(model, ids))


@of_every_form
@pytest.mark.parametrize("kind", MASKS)
def test_padding_changes_no_row_and_no_state(model, kind, form):
    """With every type of mask, with the positions that transformers makes, with those of torch.arange, and without."""
    mask, following = torch.tensor(MASKS[kind]), random_ids(len(MASKS[kind]), 3, seed=5)
    ids = random_ids(*mask.shape, seed=99)
    alone = [model(ids[row : row + 1, kept]) for row, kept in enumerate(mask.bool())]
    counted = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    choices = [(dtype, None) for dtype in MASK_TYPES] + [(torch.int64, counted), (torch.bool, counted * mask)]
    if kind in ("left", "right") and getattr(model.config, "attention_log_base", None) is None:
        choices.append((torch.int64, torch.arange(mask.shape[1])[None]))  # no absolute position counts
    for dtype, position_ids in choices:
        out = model(ids, attention_mask=mask.to(dtype), position_ids=position_ids, retention_form=form)
        assert out.logits.isfinite().all()
        rows_match(out.logits, mask, [row.logits for row in alone])
    state = model(ids, attention_mask=mask, retention_form=form).past_key_values
    for row, expected in enumerate(alone):
        for mine, theirs in zip(state.layers, expected.past_key_values.layers):
            close(remembered(mine, row), remembered(theirs, 0))
    whole, after = torch.cat([mask, torch.ones_like(following)], dim=1), mask.sum(-1, keepdim=True) + torch.arange(3)
    expected = [model(following[row : row + 1], past_key_values=one.past_key_values).logits for row, one in enumerate(alone)]
    for later in ({}, {"attention_mask": whole}, {"attention_mask": torch.ones_like(following), "position_ids": after}):
        out = model(following, past_key_values=state.clone(), **later)
        rows_match(out.logits, torch.ones_like(following), expected)


@of_every_form
def test_pieces_are_the_whole(model, form):
    """With positions, as `generate()` calls it, and without."""
    ids = random_ids(2, 30)
    at_once = model(ids, retention_form=form)
    for split in SPLITS:
        for with_positions in (False, True):
            state, logits = RetNetState(model.config), []
            for place in torch.arange(30).split(split):
                own = {"position_ids": place[None]} if with_positions else {}
                logits.append(model(ids[:, place], past_key_values=state, retention_form=form, **own).logits)
            close(torch.cat(logits, dim=1), at_once.logits)
            same_state(state, at_once.past_key_values)
            assert state.get_seq_length() == 30


@pytest.mark.parametrize("reading", ["up_to_the_piece", "whole_sequence", "of_the_piece"])
@pytest.mark.parametrize("kind", ["left", "middle", "absent"])
def test_pieces_with_padding_are_the_whole(model, reading, kind):
    """The full mask is that of all columns so far, or of all columns that there will ever be; pieces may be all padding."""
    mask = torch.tensor(MASKS[kind])
    ids, length = random_ids(*mask.shape, seed=99), mask.shape[1]
    at_once = model(ids, attention_mask=mask)
    for split in ([1] * length, [length], [9, length - 9], [3, 5, 1, length - 9]):
        state, logits, end = RetNetState(model.config), [], 0
        for piece in ids.split(split, dim=1):
            start, end = end, end + piece.shape[1]
            columns = {"up_to_the_piece": slice(end), "whole_sequence": slice(None), "of_the_piece": slice(start, end)}
            logits.append(model(piece, attention_mask=mask[:, columns[reading]], past_key_values=state).logits)
        close(torch.cat(logits, dim=1)[mask.bool()], at_once.logits[mask.bool()])
        same_state(state, at_once.past_key_values)


def test_long_sequence_step_by_step(model):
    ids, state = random_ids(2, 300), RetNetState(model.config)
    at_once = model(ids)
    for token in ids.split(1, dim=1):
        logits = model(token, past_key_values=state, use_cache=True).logits
    close(logits[:, 0], at_once.logits[:, -1])
    same_state(state, at_once.past_key_values, 1e-4)


@of_every_model
def test_left_padded_batches_generate_the_tokens_of_their_rows(model):
    def beams(ids, **kwargs):
        options = {"num_beams": 4, "num_return_sequences": 2, "return_dict_in_generate": True, "output_scores": True}
        out = greedy(model, ids, 20, **options, **kwargs)
        return out.sequences[:, ids.shape[1] :], out.sequences_scores

    ids, mask = left_padded(prompts())
    alone = torch.cat([greedy(model, prompt, 40)[:, prompt.shape[1] :] for prompt in prompts()])
    # transformers infers a mask from the pad token 0, which stands in no prompt
    for options in ({"attention_mask": mask}, {"attention_mask": mask.bool(), "use_cache": False}, {}):
        assert greedy(model, ids, 40, **options)[:, 21:].equal(alone)
    tokens, scores = beams(ids, attention_mask=mask)
    expected, expected_scores = zip(*(beams(prompt) for prompt in prompts()))
    assert tokens.equal(torch.cat(expected))
    close(scores, torch.cat(expected_scores))
