# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""torch.compile with the default backend, which writes C++: one graph, the same numbers, and steps that compile once."""

import pytest
import torch
from plain_programs import PROMPT, decoded, read, same
from small_models import close, greedy, random_ids, same_state, small_model
from small_vision_models import VISION_FAMILIES, random_images
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import retnet_hf.cpu
from retnet_hf import RetNetState
from retnet_hf.cpu import number_of_programs
from retnet_hf.cpu import programs as cpu_programs
from retnet_hf.cpu.programs import AfterOperator, BeforeOperator
from retnet_hf.retnet.modeling_retnet import RetNetDecoderLayer


pytestmark = pytest.mark.usefixtures("fresh_compiler", "no_gradients")


@pytest.fixture(scope="module")
def one_layer():
    return small_model(num_hidden_layers=1)


def test_compiled_forward(one_layer):
    """Of 21 tokens, which make three chunks; then steps on a state, whose memory stays where it is."""
    ids, compiled = random_ids(2, 21), torch.compile(one_layer, fullgraph=True)
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
    close(compiled(images).logits, model(images).logits)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", ["hybrid", "sinks"])
def test_a_compiled_decode_step_is_compiled_while_windows_fill_and_not_again(padded, family):
    """Not at every token (D4): Llama takes two programs, before its cache's length is taken for a variable."""
    model, ids, mask = small_model(family), random_ids(2, 40), torch.ones(2, 9, dtype=torch.int64)
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
    model, tokens, mask = small_model().double(), torch.randint(0, 50, (2, 12)), torch.ones(2, 16, dtype=torch.long)
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


compiled = retnet_hf.cpu.compile


def test_compiled_programs_compute_what_the_layers_do_and_are_kept(tmp_path, monkeypatch):
    """A program is compiled once for all layers that are alike, then loaded. A broken file is made again."""
    make, model = cpu_programs.make, small_model(num_hidden_layers=3)
    expected, text = decoded(model), greedy(model, PROMPT)
    with monkeypatch.context() as patches:  # sums without a trial
        patches.setattr(cpu_programs, "make", lambda path, steps, inputs: make(path, steps[:1], inputs))
        fast = compiled(model, tmp_path / "programs")
    assert number_of_programs(fast) == 3
    files = list((tmp_path / "programs").iterdir())
    assert len(files) == 2  # of layers, and of the head
    same(decoded(fast), expected)
    assert greedy(fast, PROMPT).equal(text)
    monkeypatch.setattr(cpu_programs.LayerProgram, "decay", lambda *arguments: None)
    same(decoded(fast), expected)
    monkeypatch.undo()

    other = small_model(seed=1)  # of other weights, and fewer layers
    expected = decoded(other)
    with monkeypatch.context() as patches:
        patches.setattr(torch._inductor, "aoti_compile_and_package", None)  # nothing is compiled any more
        fast = compiled(other, tmp_path / "programs")
        assert number_of_programs(fast) == 2
        same(decoded(fast), expected)
    for path in files:
        path.write_bytes(b"no program")
    monkeypatch.setattr(cpu_programs, "make", lambda path, steps, inputs: make(path, steps[1:], inputs))  # the kernels
    same(decoded(compiled(other, tmp_path / "programs")), expected)


def test_the_program_that_a_trial_finds_clearly_faster_is_kept(tmp_path, monkeypatch):
    """Of two that compute the same; the second one without a clear gain."""
    step, inputs = nn.Tanh(), [(torch.ones(3),)] * 2
    other, path, asked = nn.Sigmoid(), tmp_path / "kept.pt2", []
    step.any_length = other.any_length = False
    for faster, expected in ((True, step), (False, other)):

        def is_clearly_faster(one, another, faster=faster):
            asked.append([[float(result[0][0]) for result in runs()] for runs in (one, another)])
            return faster

        monkeypatch.setattr(cpu_programs, "is_clearly_faster", is_clearly_faster)
        cpu_programs.make(path, [step, other], inputs)
        close(cpu_programs.load(path)([torch.full((3,), 0.5)])[0], expected(torch.full((3,), 0.5)))
    first, second = float(torch.tensor(1.0).tanh()), float(torch.tensor(1.0).sigmoid())
    for found in asked:
        assert found == [pytest.approx([first] * 2), pytest.approx([second] * 2)]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_two_programs_serve_every_length_and_are_kept(tmp_path, monkeypatch):
    make, load, shapes = cpu_programs.make, cpu_programs.load, ((1, 2), (1, 130), (3, 7))

    def make_of_prompts(path, steps, inputs):  # those of steps have tests of their own, and are not compiled
        make(path, steps, inputs) if isinstance(steps[0], (BeforeOperator, AfterOperator)) else path.touch()

    monkeypatch.setattr(cpu_programs, "make", make_of_prompts)
    monkeypatch.setattr(cpu_programs, "load", lambda path: load(path) if path.stat().st_size else None)
    model, other = (small_model(num_key_value_heads=2, seed=seed) for seed in (0, 1))
    expected = [[read(each, random_ids(*shape)) for shape in shapes] for each in (model, other)]
    copies, files = [compiled(model, tmp_path, prompts=True)], len(list(tmp_path.iterdir()))
    assert files == 4  # of prompts, of steps, and of the head
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", None)  # nothing is compiled any more
    copies.append(compiled(other, tmp_path, prompts=True))
    assert len(list(tmp_path.iterdir())) == files
    monkeypatch.setattr(RetNetDecoderLayer, "forward", None)  # no layer computes by itself
    for fast, own in zip(copies, expected):
        for shape, result in zip(shapes, own):
            same(read(fast, random_ids(*shape)), result)
