# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`examples/convretnet.py`: streams of samples in pieces of any length, many sessions at once, and training that learns."""

import sys

import numpy as np
import pytest
import torch
from places import ROOT

from retnet_hf import StreamState


if not (ROOT / "examples").is_dir():
    pytest.skip("a source distribution has no examples", allow_module_level=True)
sys.path.append(str(ROOT / "examples"))
import convretnet  # noqa: E402


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return convretnet.ConvRetNet(size=32, heads=2, layers=2).eval().requires_grad_(False)


def sound(seed: int = 0, digits: str = "0123456789") -> np.ndarray:
    return convretnet.dial(digits, np.random.default_rng(seed))


def logits_in_pieces(model, samples: torch.Tensor, length: int) -> torch.Tensor:
    state, kept, found = StreamState(model), torch.zeros(0), []
    for piece in samples.split(length):
        kept = torch.cat([kept, piece])
        if len(kept) >= convretnet.WINDOW + convretnet.STEP - convretnet.HOP:
            features = convretnet.log_mel(kept)
            kept = kept[len(features) * convretnet.STEP :]
            found.append(model(features[None], state)[0])
    return torch.cat(found)


@pytest.mark.parametrize("length", [1, 99, 440, 5000])
def test_pieces_of_any_length_give_the_logits_of_the_whole(model, length):
    samples = torch.from_numpy(sound())[:6000]
    whole = model(convretnet.log_mel(samples)[None])[0]
    pieces = logits_in_pieces(model, samples, length)
    assert pieces.shape == whole.shape
    assert (pieces - whole).abs().max() <= 1e-4 * whole.abs().max()
    assert pieces.argmax(-1).equal(whole.argmax(-1))


def test_sessions_that_begin_and_end_at_any_time_hear_what_they_hear_alone(model):
    sounds = [sound(seed, "12345") for seed in range(4)]
    alone = [convretnet.Listener(model, 1).hear([each])[0] for each in sounds]
    assert len(set(alone)) > 1
    listener, heard, generator = convretnet.Listener(model, 3), [""] * 4, np.random.default_rng(0)
    session_of, place = [0, 1, 2], [0] * 4
    while session_of != [None] * 3:
        pieces = [np.zeros(0, np.float32)] * 3
        for row, session in enumerate(session_of):
            if session is not None:
                start, place[session] = place[session], place[session] + int(generator.integers(0, 2000))
                pieces[row] = sounds[session][start : place[session]]
        for row, (session, digits) in enumerate(zip(list(session_of), listener.hear(pieces))):
            if session is not None:
                heard[session] += digits
            if session is not None and place[session] >= len(sounds[session]):
                session_of[row] = 3 if place[3] == 0 and 3 not in session_of else None
                listener.begin(row)
    assert heard == alone


def test_it_learns_and_is_saved(tmp_path):
    torch.manual_seed(0)
    model = convretnet.ConvRetNet(size=32, heads=2, layers=1)
    losses = convretnet.train(model, minutes=5, steps=40)
    assert len(losses) == 40
    assert np.mean(losses[-5:]) < losses[0] / 2
    model.save_pretrained(tmp_path)
    again = convretnet.ConvRetNet.from_pretrained(tmp_path)
    features = convretnet.log_mel(torch.from_numpy(sound()))[None]
    assert torch.equal(again(features), model(features))


def test_a_stream_of_silence_and_one_that_has_not_begun_say_nothing(model):
    listener = convretnet.Listener(model, 2)
    assert listener.hear([np.zeros(0, np.float32), np.zeros(100, np.float32)]) == ["", ""]
    assert len(listener.samples[1]) == 100
