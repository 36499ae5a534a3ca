# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Padding, wherever it stands: for the other tokens and for the state it was never there."""

import pytest
import torch
from small_models import (
    close,
    greedy,
    left_padded,
    of_every_model,
    random_ids,
    remembered,
    same_state,
)
from torch import Tensor

from retnet_hf import RetNetState


FORMS = ("auto", "parallel", "chunkwise", "recurrent")
MASK_TYPES = (torch.int64, torch.bool, torch.float32, torch.int32)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


def prompts() -> list[Tensor]:
    return [random_ids(1, length, seed) for seed, length in enumerate((21, 9, 1, 14))]


def spread(prompts: list[Tensor], kept: Tensor) -> Tensor:
    """Ids (B, T) with the tokens of each prompt where kept (B, T) is True, and rubbish elsewhere."""
    ids = random_ids(*kept.shape, seed=99)
    for row, prompt in enumerate(prompts):
        ids[row, kept[row]] = prompt[0]
    return ids


def right_padded(prompts: list[Tensor]) -> tuple[Tensor, Tensor]:
    longest = max(prompt.shape[1] for prompt in prompts)
    kept = torch.arange(longest) < torch.tensor([[prompt.shape[1]] for prompt in prompts])
    return spread(prompts, kept), kept.long()


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


def test_attention_mask_of_ones_is_none_in_generate(model):
    ids = random_ids(2, 11)
    assert greedy(model, ids, attention_mask=torch.ones_like(ids)).equal(greedy(model, ids))


@of_every_model
@pytest.mark.parametrize("form", FORMS)
def test_left_padded_logits(model, form):
    """With the positions that transformers makes, with those of torch.arange, and of every type of mask."""
    expected = [model(prompt).logits for prompt in prompts()]
    ids, mask = left_padded(prompts())
    counted = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    choices = [counted, counted.masked_fill(mask == 0, 0)]
    if getattr(model.config, "attention_log_base", None) is None:  # else positions count, and not their distances alone
        choices += [torch.arange(21)[None], torch.arange(21).expand(4, 21)]
    for position_ids in choices:
        out = model(ids, attention_mask=mask, position_ids=position_ids, retention_form=form)
        assert out.logits.isfinite().all()
        rows_match(out.logits, mask, expected)


@pytest.mark.parametrize("form", FORMS)
def test_left_padded_logits_without_positions(model, form):
    expected = [model(prompt).logits for prompt in prompts()]
    ids, mask = left_padded(prompts())
    for dtype in MASK_TYPES:
        rows_match(model(ids, attention_mask=mask.to(dtype), retention_form=form).logits, mask, expected)


@of_every_model
def test_left_padded_batch_tokens(model):
    ids, mask = left_padded(prompts())
    together = greedy(model, ids, 40, attention_mask=mask)[:, 21:]
    alone = torch.cat([greedy(model, prompt, 40)[:, prompt.shape[1] :] for prompt in prompts()])
    assert together.equal(alone)
    assert greedy(model, ids, 40, attention_mask=mask.bool())[:, 21:].equal(alone)
    assert greedy(model, ids, 40, attention_mask=mask, use_cache=False)[:, 21:].equal(alone)
    # the pad token is 0, which stands in no prompt: transformers infers the mask
    assert greedy(model, ids, 40)[:, 21:].equal(alone)


@of_every_model
def test_left_padded_beams(model):
    def beams(ids, **kwargs):
        out = model.generate(
            ids, max_new_tokens=20, num_beams=4, num_return_sequences=2, return_dict_in_generate=True,
            output_scores=True, **kwargs
        )  # fmt: skip
        return out.sequences[:, ids.shape[1] :], out.sequences_scores

    ids, mask = left_padded(prompts())
    tokens, scores = beams(ids, attention_mask=mask)
    alone = [beams(prompt) for prompt in prompts()]
    assert tokens.equal(torch.cat([row for row, _ in alone]))
    close(scores, torch.cat([score for _, score in alone]))


@pytest.mark.parametrize("form", FORMS)
def test_right_padded_logits(model, form):
    expected = [model(prompt).logits for prompt in prompts()]
    ids, mask = right_padded(prompts())
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    for position_ids in (None, counted, torch.arange(21)[None]):
        out = model(ids, attention_mask=mask, position_ids=position_ids, retention_form=form)
        assert out.logits.isfinite().all()
        rows_match(out.logits, mask, expected)
    assert torch.allclose(model(ids).logits[3, :14], expected[3], atol=1e-4)  # a causal model needs no mask for that


@pytest.mark.parametrize("form", FORMS)
def test_right_padding_leaves_state_alone(model, form):
    ids, mask = right_padded(prompts())
    following = random_ids(4, 3, seed=7)
    counted = (mask.cumsum(-1) - 1).clamp(min=0)
    next_positions = mask.sum(-1, keepdim=True) + torch.arange(3)
    full_mask = torch.cat([mask, torch.ones(4, 3, dtype=torch.int64)], dim=1)

    alone = [model(torch.cat([prompt, following[row : row + 1]], dim=1)) for row, prompt in enumerate(prompts())]
    for later in (
        {},
        {"attention_mask": full_mask},
        {"attention_mask": torch.ones_like(following)},
        {"attention_mask": full_mask, "position_ids": next_positions},
        {"position_ids": next_positions},
    ):
        for position_ids in (None, counted):
            state = model(ids, attention_mask=mask, position_ids=position_ids, retention_form=form).past_key_values
            out = model(following, past_key_values=state, **later)
            rows_match(out.logits, torch.ones_like(following), [row.logits[:, -3:] for row in alone])
    for row, expected in enumerate(alone):
        for mine, theirs in zip(out.past_key_values.layers, expected.past_key_values.layers):
            for one, other in zip(remembered(mine, row), remembered(theirs, 0)):
                close(one, other)


def test_right_padding_leaves_state_alone_token_by_token(model):
    """After a right-padded prompt, 12 single steps with the growing full mask are those of each row alone."""
    ids, mask = right_padded(prompts())
    following = random_ids(4, 12, seed=7)
    state = model(ids, attention_mask=mask).past_key_values
    logits = []
    for n in range(12):
        mask = torch.cat([mask, torch.ones(4, 1, dtype=torch.int64)], dim=1)
        logits.append(model(following[:, n : n + 1], attention_mask=mask, past_key_values=state).logits)
    expected = [model(torch.cat([p, following[r : r + 1]], dim=1)).logits[:, -12:] for r, p in enumerate(prompts())]
    rows_match(torch.cat(logits, dim=1), torch.ones_like(following), expected)


def later_turn(mask_rows: list[list[int]]) -> Tensor:
    return torch.tensor(mask_rows)


LATER_TURNS = {
    "left": [[1] * 9 + [0, 0, 0, 1, 1, 1, 1], [1] * 9 + [1] * 7, [0, 0] + [1] * 7 + [0, 1, 1, 1, 1, 1, 1]],
    "right": [[1] * 9 + [1, 1, 1, 0, 0, 0, 0], [1] * 9 + [1] * 7, [1] * 6 + [0] * 3 + [1, 0, 0, 0, 0, 0, 0]],
    "middle": [[1] * 9 + [1, 0, 0, 1, 0, 1, 1], [1] * 9 + [1] * 7, [1, 0] * 8],
    "absent": [[1] * 9 + [0] * 7, [0] * 9 + [1] * 7, [1] * 16],
}


@pytest.mark.parametrize("kind", LATER_TURNS)
@pytest.mark.parametrize("whole_mask", [True, False], ids=["full_mask", "mask_of_the_piece"])
def test_padding_in_a_later_turn_split(model, kind, whole_mask):
    mask = torch.tensor(LATER_TURNS[kind])
    ids = random_ids(3, 16)
    at_once = model(ids, attention_mask=mask)
    first = model(ids[:, :9], attention_mask=mask[:, :9])
    second = model(ids[:, 9:], attention_mask=mask if whole_mask else mask[:, 9:], past_key_values=first.past_key_values)
    logits = torch.cat([first.logits, second.logits], dim=1)
    close(logits[mask.bool()], at_once.logits[mask.bool()])
    same_state(second.past_key_values, at_once.past_key_values)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", LATER_TURNS)
def test_padding_in_a_later_turn_exact(model, kind, form):
    mask = torch.tensor(LATER_TURNS[kind])
    ids = random_ids(3, 16)
    out = model(ids, attention_mask=mask, retention_form=form)
    assert out.logits.isfinite().all()
    following = random_ids(3, 2, seed=5)
    later = model(following, past_key_values=out.past_key_values).logits
    for row, there in enumerate(mask.bool()):
        alone = model(ids[row : row + 1, there])
        close(out.logits[row, there], alone.logits[0])
        close(later[row], model(following[row : row + 1], past_key_values=alone.past_key_values).logits[0])


def test_padding_in_a_later_turn_split_token_by_token(model):
    mask = torch.tensor(LATER_TURNS["middle"])
    ids = random_ids(3, 16)
    at_once = model(ids, attention_mask=mask)
    state, logits = None, []
    for n in range(16):
        out = model(ids[:, n : n + 1], attention_mask=mask[:, : n + 1], past_key_values=state)
        state = out.past_key_values
        logits.append(out.logits)
    close(torch.cat(logits, dim=1)[mask.bool()], at_once.logits[mask.bool()])
    same_state(state, at_once.past_key_values)


def test_padding_in_a_later_turn_of_generate(model):
    """Two chats, the second turn of one shorter than that of the other."""
    first, second = random_ids(2, 9), random_ids(2, 5, seed=1)
    mask = torch.ones(2, 14, dtype=torch.int64)
    mask[0, 9:12] = 0
    state = model(first).past_key_values
    together = greedy(model, torch.cat([first, second], dim=1), 20, attention_mask=mask, past_key_values=state)[:, 14:]
    alone = [torch.cat([first[:1], second[:1, 3:]], dim=1), torch.cat([first[1:], second[1:]], dim=1)]
    assert together.equal(torch.cat([greedy(model, ids, 20)[:, ids.shape[1] :] for ids in alone]))


@pytest.mark.parametrize("form", FORMS)
def test_batch_equals_rows(model, form):
    ids = random_ids(4, 21)
    together = model(ids, retention_form=form)
    for row in range(4):
        close(together.logits[row], model(ids[row : row + 1], retention_form=form).logits[0])
    ids, mask = left_padded(prompts())
    padded = model(ids, attention_mask=mask, retention_form=form).logits
    for row in range(4):
        alone = model(ids[row : row + 1], attention_mask=mask[row : row + 1], retention_form=form).logits
        close(padded[row, mask[row].bool()], alone[0, mask[row].bool()])


SPLITS = ([1] * 30, [30], [1, 29], [29, 1], [8, 8, 8, 6], [3, 14, 1, 2, 10], [16, 14])


@of_every_model
@pytest.mark.parametrize("form", FORMS)
def test_chunked_forward_any_split(model, form):
    ids = random_ids(2, 30)
    at_once = model(ids, retention_form=form)
    for split in SPLITS:
        state, logits = None, []
        for piece in ids.split(split, dim=1):
            out = model(piece, past_key_values=state, retention_form=form)
            state = out.past_key_values
            logits.append(out.logits)
        close(torch.cat(logits, dim=1), at_once.logits)
        same_state(state, at_once.past_key_values)
        assert state.get_seq_length() == 30


def test_chunked_forward_any_split_with_positions(model):
    """As generate() calls it: every piece comes with its own positions."""
    ids = random_ids(2, 30)
    at_once = model(ids)
    for split in SPLITS:
        state, logits = None, []
        for piece, positions in zip(ids.split(split, dim=1), torch.arange(30)[None].split(split, dim=1)):
            out = model(piece, past_key_values=state, position_ids=positions)
            state = out.past_key_values
            logits.append(out.logits)
        close(torch.cat(logits, dim=1), at_once.logits)
        same_state(state, at_once.past_key_values)


@pytest.mark.parametrize("reading", ["up_to_the_piece", "whole_sequence", "of_the_piece"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_chunks_with_mask(model, reading, dtype):
    """The full mask is that of all columns so far, or of all columns that there will ever be; pieces may be all padding."""
    texts = [random_ids(1, length, seed) for seed, length in enumerate((30, 17, 4))]
    ids, mask = left_padded(texts)
    mask = mask.to(dtype)
    at_once = model(ids, attention_mask=mask)
    for split in SPLITS:
        state, logits, end = None, [], 0
        for piece in ids.split(split, dim=1):
            end += piece.shape[1]
            columns = {
                "up_to_the_piece": mask[:, :end],
                "whole_sequence": mask,
                "of_the_piece": mask[:, end - piece.shape[1] : end],
            }[reading]
            out = model(piece, attention_mask=columns, past_key_values=state)
            state = out.past_key_values
            logits.append(out.logits)
        logits = torch.cat(logits, dim=1)
        rows_match(logits, mask, [model(text).logits for text in texts])
        same_state(state, at_once.past_key_values)


def test_long_sequence_step_by_step(model):
    ids = random_ids(2, 300)
    at_once = model(ids)
    state = RetNetState(model.config)
    for n in range(300):
        logits = model(ids[:, n : n + 1], past_key_values=state, use_cache=True).logits
    close(logits[:, 0], at_once.logits[:, -1])
    same_state(state, at_once.past_key_values, 1e-4)


def test_a_mask_of_another_shape_is_refused(model):
    with pytest.raises(ValueError, match="attention_mask must be"):
        model(random_ids(2, 5), attention_mask=torch.ones(2, 4))
    with pytest.raises(ValueError, match="attention_mask must be"):
        model(random_ids(2, 5), attention_mask=torch.ones(2, 1, 5, 5))
    with pytest.raises(ValueError, match="position_ids must be"):
        model(random_ids(2, 5), position_ids=torch.arange(4))
