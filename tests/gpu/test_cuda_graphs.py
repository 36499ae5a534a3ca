# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Decode steps that are captured and replayed: the same tokens as without, with stand-ins on a CPU, and graphs on a GPU."""

import copy
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from small_models import PAD, detailed, greedy, left_padded, random_ids, small_llama, small_model
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, StaticCache
from transformers.generation import LogitsProcessor
from transformers.generation.streamers import BaseStreamer

from retnet_hf import RetNetForCausalLM, RetNetState
from retnet_hf.gpu import cuda_graphs
from retnet_hf.retnet import generation_retnet


def tensors_of(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recorder(TorchDispatchMode):
    """Records operations with their operands, and raises RuntimeError where a value is read, as a GPU that captures."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.made, self.before = [], set(), []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        given = tensors_of((args, kwargs))
        if function._schema.is_mutable:
            self.before += [(tensor, tensor.clone()) for tensor in given if memory_of(tensor) not in self.made]
        results, places = function(*args, **kwargs), {memory_of(tensor) for tensor in given}
        fresh = [memory_of(tensor) not in places for tensor in tensors_of(results)]  # no views, nothing in place
        self.made |= {memory_of(tensor) for tensor, new in zip(tensors_of(results), fresh) if new}
        self.operations.append((function, args, kwargs, tensors_of(results), fresh))
        return results


class RecordedGraph:
    """Stands in for `CudaGraph`."""

    def __init__(self, device: torch.device) -> None:
        self.recorder = Recorder()

    def warm_up(self, call: Callable[[], Tensor]) -> Tensor:
        return call()

    def capture(self, call: Callable[[], Tensor]) -> Tensor:
        try:
            with self.recorder:
                result = call()
        finally:
            for tensor, value in reversed(self.recorder.before):
                tensor.copy_(value)
        self.overwrite()  # since it is not computed yet
        return result

    def overwrite(self) -> None:
        for *_, results, fresh in self.recorder.operations:
            for tensor, new in zip(results, fresh):
                if new:
                    tensor.fill_(float("nan") if tensor.is_floating_point() else 1)

    def replay(self) -> None:
        for function, args, kwargs, results, fresh in self.recorder.operations:
            for old, value, new in zip(results, tensors_of(function(*args, **kwargs)), fresh):
                if new:
                    old.copy_(value)

    def release(self) -> None:
        self.overwrite()  # as the next graph does
        self.recorder = None


CAPTURED = ["fla", "grouped", "from scratch", "torchscale", "transnormer"]  # without softmax attention and experts


class Place:
    """A device, and the graphs that are captured there, of which captures and replays are counted."""

    def __init__(self, device: str, graph: type, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.kernels, self.spies = device, kernels, []
        for name in ("capture", "replay"):
            self.spies.append(mock.create_autospec(getattr(graph, name), side_effect=getattr(graph, name)))
            monkeypatch.setattr(graph, name, self.spies[-1])

    def model(self, dialect: str = "fla", **options) -> RetNetForCausalLM:
        return small_model(dialect, kernels=self.kernels, **options).to(self.device)

    def ids(self, batch: int = 2, length: int = 7, seed: int = 0) -> Tensor:
        return random_ids(batch, length, seed).to(self.device)

    def take(self) -> tuple[int, int]:
        """Captures and replays since the last look."""
        taken = tuple(spy.call_count for spy in self.spies)
        for spy in self.spies:
            spy.reset_mock()
        return taken

    def check(self, call: Callable[[], Tensor], counts: tuple[int, int] | None) -> Tensor:
        """The result of a call without graphs, which it has with them, too, after so many captures and replays."""
        expected = without(call)
        self.take()
        assert call().equal(expected)
        assert self.take() == counts or counts is None
        return expected


def without(call: Callable[[], object]) -> object:
    """What the call returns without graphs."""
    with mock.patch.dict(os.environ, {cuda_graphs.GRAPHS_VARIABLE: "0"}):
        return call()


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PLACES = ["cpu", *(pytest.param(f"cuda, {kernels}", marks=on_a_gpu) for kernels in ("torch", "triton"))]


@pytest.fixture(params=PLACES)
def place(request, monkeypatch) -> Iterator[Place]:
    device, _, kernels = request.param.partition(", ")
    graph = cuda_graphs.CudaGraph if device == "cuda" else RecordedGraph
    monkeypatch.setitem(cuda_graphs.GRAPHS, device, graph)
    monkeypatch.setattr(generation_retnet, "DEVICES", {device})
    yield Place(device, graph, kernels or "torch", monkeypatch)
    assert not generation_retnet.STEPS  # no call is left behind


@pytest.mark.parametrize("dialect", CAPTURED)
def test_greedy_tokens_and_scores_are_the_same(place, dialect):
    """The first step after the prompt warms up, the second is captured, and it and all later ones are replayed."""
    model = place.model(dialect)
    expected = without(lambda: detailed(model, place.ids(), 60))
    assert place.take() == (0, 0)
    found = detailed(model, place.ids(), 60)
    assert place.take() == (1, 58)
    assert found.sequences.equal(expected.sequences)
    torch.testing.assert_close(found.scores, expected.scores, rtol=1e-5, atol=1e-4)


USES = {
    "sampling": {"do_sample": True, "temperature": 0.9, "top_k": 20},
    "several samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "beam sampling": {"do_sample": True, "num_beams": 3},
    "guidance": {"do_sample": False, "guidance_scale": 1.5},
    "a prompt in pieces": {"do_sample": False, "prefill_chunk_size": 3},
    "pieces of one token": {"do_sample": False, "prefill_chunk_size": 1},
    "repetition penalty": {"do_sample": False, "repetition_penalty": 1.3},
}


@pytest.mark.parametrize("use", [*USES, "inference mode", "embeddings", "finished rows"])
def test_uses(place, use):
    model, options, inputs = place.model(), {"do_sample": False} | USES.get(use, {}), {"input_ids": place.ids()}
    if use == "embeddings":
        inputs = {"inputs_embeds": model.get_input_embeddings()(place.ids()).detach()}
    elif use == "finished rows":
        options |= {"eos_token_id": int(without(lambda: greedy(model, place.ids(), 24))[0, 20]), "pad_token_id": PAD}

    def call() -> Tensor:
        torch.manual_seed(3)
        with torch.inference_mode(use == "inference mode"):
            return model.generate(**inputs, max_new_tokens=24, **options)

    counts = {"a prompt in pieces": (1, 23), "pieces of one token": (1, 28), "finished rows": None}
    place.check(call, counts.get(use, (1, 22)))


@pytest.mark.parametrize("beams", [1, 3])
def test_left_padding(place, beams):
    model = place.model()
    ids, mask = (tensor.to(place.device) for tensor in left_padded([random_ids(1, 4), random_ids(1, 9, 1)]))
    options = {"attention_mask": mask, "num_beams": beams, "pad_token_id": PAD}
    expected = place.check(lambda: greedy(model, ids, 24, **options), (1, 22))
    rows = [greedy(model, row.to(place.device), 24, num_beams=beams) for row in (random_ids(1, 4), random_ids(1, 9, 1))]
    assert [row[0, -24:].tolist() for row in rows] == expected[:, -24:].tolist()


def test_a_state_continues_after_its_call(place):
    model, ids = place.model(), place.ids()
    whole, first = without(lambda: greedy(model, ids, 40)), detailed(model, ids, 20)
    state, kept = first.past_key_values, copy.deepcopy(first.past_key_values)
    other = detailed(model, place.ids(seed=5), 20).past_key_values
    for layer, copied, foreign in zip(state.layers, kept.layers, other.layers):
        assert layer.recurrent_states.equal(copied.recurrent_states)
        assert layer.recurrent_states.data_ptr() != foreign.recurrent_states.data_ptr()
    assert state.get_seq_length() == 26  # all but the last token of 27
    place.take()
    assert greedy(model, first.sequences, 20, past_key_values=state).equal(whole)
    assert (place.take(), state.get_seq_length()) == ((1, 19), 46)
    state.require_read(whole)  # the last token that was read is known, and is this text's
    last = whole[:, -2:-1].flip(0) + 1
    with pytest.raises(ValueError, match="must begin with the 46 tokens"):
        state.require_read(torch.cat([whole[:, :45], last, last], dim=1))


def test_a_state_by_hand_is_not_captured(place):
    model, ids = place.model(), place.ids()
    whole, found = without(lambda: greedy(model, ids, 40)), detailed(model, ids, 20)
    place.take()
    token, tokens = found.sequences[:, -1:], []
    with torch.no_grad():
        for _ in range(20):
            token = model(token, past_key_values=found.past_key_values).logits[:, -1:].argmax(-1)
            tokens.append(token)
    assert place.take() == (0, 0)
    assert torch.cat(tokens, dim=1).equal(whole[:, -20:])


def test_a_state_that_records_is_not_captured(place):
    model = place.model()
    state = RetNetState(model.config)
    state.activate_past_recording()
    found = greedy(model, place.ids(), 20, past_key_values=state)
    assert place.take() == (0, 0)
    state.crop(-10)
    assert state.get_seq_length() == 16
    assert greedy(model, found[:, :17], 10, past_key_values=state.clone()).equal(found)


class Streamer(BaseStreamer):
    """Keeps what it gets, and does something at the sixth piece."""

    def __init__(self, at_sixth: Callable[[], object]) -> None:
        self.at_sixth, self.tokens = at_sixth, []

    def put(self, value: Tensor) -> None:
        self.tokens.append(value.flatten().tolist())
        if len(self.tokens) == 6:
            self.found = self.at_sixth()

    def end(self) -> None:
        self.tokens.append("end")


def test_streaming_with_a_call_in_between(place):
    model, ids, others = place.model(), place.ids(1), place.ids(1, seed=4)
    expected, inner = without(lambda: [greedy(model, each, 20) for each in (ids, others)])
    streamer = Streamer(lambda: greedy(model, others, 20))
    assert greedy(model, ids, 20, streamer=streamer).equal(expected)
    assert streamer.found.equal(inner)
    assert streamer.tokens == [ids[0].tolist(), *([token] for token in expected[0, 7:].tolist()), "end"]
    assert place.take() == (2, 36)


CHANGES = {
    "in place": lambda model: model.lm_head.weight.data.mul_(-1.5),
    "replaced": lambda model: setattr(model.lm_head, "weight", nn.Parameter(-model.lm_head.weight.detach())),
    "another option": lambda model: setattr(model.model.layers[0], "mlp_multiplier", -3.0),
    "another type": lambda model: model.to(torch.float64),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model(place, change):
    model, ids = place.model(tie_word_embeddings=False), place.ids()
    before = greedy(model, ids, 20)
    CHANGES[change](model)
    expected = place.check(lambda: greedy(model, ids, 20), (1, 18))
    assert change == "another type" or not expected.equal(before)


def test_adapters(place):
    peft, model, ids = pytest.importorskip("peft"), place.model(), place.ids()
    plain = without(lambda: greedy(model, ids, 20))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)).eval()
    expected = place.check(lambda: adapted.generate(input_ids=ids, max_new_tokens=20, do_sample=False), (1, 18))
    assert not expected.equal(plain)
    with adapted.disable_adapter():
        assert adapted.generate(input_ids=ids, max_new_tokens=20, do_sample=False).equal(plain)
    assert place.take() == (1, 18)


class OwnFeedForward(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


class Quantised(nn.Parameter):
    """Of another type."""


def patched(model: nn.Module) -> None:
    forward = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda *args: forward(*args)


REASONS = {
    "hooked": lambda model: model.model.layers[0].register_forward_hook(lambda module, args, output: output),
    "patched": patched,
    "own module": lambda model: setattr(model.model.layers[1], "mlp", OwnFeedForward()),
    "training": lambda model: model.model.layers[1].train(),
    "compiled layer": lambda model: model.model.layers[0].compile(backend="eager"),
    "hidden states": lambda model: setattr(model.config, "output_hidden_states", True),
    "another type of weight": lambda model: setattr(model.lm_head, "weight", Quantised(model.lm_head.weight.detach())),
}


def test_hidden_states_leave_nothing_that_prevents_it_nor_do_batches_of_other_sizes(place):
    """Transformers leaves the hooks that record hidden states in place, where they do nothing."""
    model = place.model()
    for batch in (2, 3, 1):
        place.check(lambda batch=batch: greedy(model, place.ids(batch), 20), (1, 18))
    greedy(model, place.ids(), 20, output_hidden_states=True, return_dict_in_generate=True)
    greedy(model, place.ids(), 20)
    assert place.take() == (1, 18)


OPTIONS = {  # of calls that are not captured
    "no cache": {"use_cache": False},
    "no compilation": {"disable_compile": True},
    "few tokens": {"max_new_tokens": 7},
    "attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "hidden states of a call": {"output_hidden_states": True, "return_dict_in_generate": True},
    "positions": {"position_ids": torch.arange(7)[None]},
}


@pytest.mark.parametrize("reason", [*REASONS, *OPTIONS, "hybrid", "ring", "autocast", "variable"])
def test_what_is_not_captured(place, reason, monkeypatch):
    model = place.model(reason if reason in ("hybrid", "ring") else "fla")
    REASONS.get(reason, lambda _: None)(model)
    options = {"max_new_tokens": 20, "do_sample": False} | OPTIONS.get(reason, {})
    options = {name: value.to(place.device) if isinstance(value, Tensor) else value for name, value in options.items()}
    if reason == "variable":
        monkeypatch.setenv("RETNET_HF_CUDA_GRAPHS", "0")
    with torch.autocast(place.device, torch.bfloat16, enabled=reason == "autocast"):
        model.generate(place.ids(), **options)
    assert place.take() == (0, 0)


LEFT_ALONE = {  # caches of transformers; drafts, of which several tokens a step may be taken back
    "dynamic": lambda place, config: {"past_key_values": DynamicCache(config=config), "disable_compile": True},
    "static": lambda place, config: {"past_key_values": StaticCache(config, max_cache_len=40), "disable_compile": True},
    "static implementation": lambda place, config: {"cache_implementation": "static"},
    "another model": lambda place, config: {"assistant_model": place.model("fla", seed=3)},
    "prompt lookup": lambda place, config: {"prompt_lookup_num_tokens": 3},
    "a Llama": lambda place, config: {"assistant_model": small_llama().to(place.device)},
}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_caches_of_transformers_and_drafts_are_left_alone_and_change_no_token(place, kind):
    model, ids = place.model(), place.ids(1)
    expected, options = without(lambda: greedy(model, ids, 30)), LEFT_ALONE[kind](place, model.config)
    with mock.patch.object(type(model), "get_compiled_call", lambda self, config: self.__call__):
        assert greedy(model, ids, 30, **options).equal(expected)
    assert place.take() == (0, 0)


class Meddling(LogitsProcessor):
    """Does something with the state between two steps, after seven tokens of a prompt and nine others."""

    def __init__(self, meddle: Callable[[RetNetState], object], state: RetNetState) -> None:
        self.meddle, self.state = meddle, state

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == 16:
            self.meddle(self.state)
        return scores


def for_layers(change: Callable[[object], object]) -> Callable[[RetNetState], None]:
    return lambda state: [change(layer) for layer in state.layers]


MEDDLING = {  # and how often the graph is replayed
    "turned": (lambda state: state.reorder_cache(torch.tensor([1, 0], device=state.layers[0].device)), 22),
    "elsewhere": (for_layers(lambda layer: setattr(layer, "recurrent_states", layer.recurrent_states.clone())), 22),
    "copied": (lambda state: state.clone().layers[0].recurrent_states.fill_(float("nan")), 22),
    "memory": (for_layers(lambda layer: setattr(layer.recurrent_states, "data", layer.recurrent_states.clone())), 8),
    "recording": (lambda state: state.activate_past_recording(), 8),
}


@pytest.mark.parametrize("meddle", MEDDLING)
def test_a_state_that_changes_between_steps(place, meddle):
    """A graph reads and writes the state wherever it is, or is not used any more."""
    model, ids, (change, replays) = place.model(), place.ids(), MEDDLING[meddle]

    def call() -> Tensor:
        state = RetNetState(model.config)
        return greedy(model, ids, 24, past_key_values=state, logits_processor=[Meddling(change, state)])

    place.check(call, (1, replays))


def test_absent_tokens_between_steps(place):
    model, (ids, mask) = place.model(), (each.to(place.device) for each in left_padded([random_ids(1, 4), random_ids(1, 7)]))

    def call() -> Tensor:
        update, calls = model._update_model_kwargs_for_generation, []

        def with_hole(self, *args, **kwargs):
            kwargs = update(*args, **kwargs)
            calls.append(1)
            if len(calls) == 8:
                kwargs["attention_mask"] = kwargs["attention_mask"].clone()
                kwargs["attention_mask"][0, -1] = 0
            return kwargs

        with mock.patch.object(type(model), "_update_model_kwargs_for_generation", with_hole):
            found = detailed(model, ids, 20, attention_mask=mask)
        return torch.cat([found.sequences.flatten(), found.past_key_values.layers[0].next_position])

    assert place.check(call, (2, 17))[-2:].tolist() == [22, 26]


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_capture_that_fails(place, error, monkeypatch):
    """The model computes all steps. None is captured in this process from then on, unless memory alone was missing."""
    model, ids = place.model(), place.ids()
    expected, read = without(lambda: detailed(model, ids, 20)), type(model.model).read

    def failing(self, *args, **kwargs) -> Tensor:
        read(self, *args, **kwargs)
        raise error("during the capture")

    capture = cuda_graphs.GRAPHS[place.device].capture

    def failing_capture(self, call: Callable[[], Tensor]) -> Tensor:
        with mock.patch.object(type(model.model), "read", failing):
            return capture(self, call)

    monkeypatch.setattr(cuda_graphs.GRAPHS[place.device], "capture", failing_capture)
    found = detailed(model, ids, 20)
    assert found.sequences.equal(expected.sequences)
    for one, other in zip(found.past_key_values.layers, expected.past_key_values.layers):
        torch.testing.assert_close(one.recurrent_states, other.recurrent_states)
    assert (place.take(), place.device in cuda_graphs.GRAPHS) == ((1, 0), error is torch.OutOfMemoryError)


def test_a_call_that_fails_leaves_nothing(place):
    model, ids = place.model(), place.ids()
    state, failing = RetNetState(model.config), mock.Mock(side_effect=KeyError("between two steps"))
    with pytest.raises(KeyError, match="between two steps"):
        greedy(model, ids, 24, past_key_values=state, logits_processor=[Meddling(failing, state)])
    assert not generation_retnet.STEPS


@on_a_gpu
def test_graphs_use_the_memory_of_earlier_ones():
    model, ids = small_model().cuda(), random_ids(2, 7).cuda()
    greedy(model, ids, 20)
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(20):
        greedy(model, ids, 20)
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_no_step_is_captured_while_another_thread_generates(place):
    """Its draws of random numbers would fail."""
    model, begun, ended = place.model(), threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        ended.wait(60)

    options = {"max_new_tokens": 10, "do_sample": True, "streamer": Streamer(wait)}
    other = threading.Thread(target=model.generate, args=(place.ids()[:1],), kwargs=options)
    other.start()
    begun.wait(60)
    expected = without(lambda: greedy(model, place.ids(), 20))
    place.take()
    assert greedy(model, place.ids(), 20).equal(expected)
    assert place.take() == (0, 0)
    ended.set()
    other.join()
    place.take()
    assert greedy(model, place.ids(), 20).equal(expected)
    assert place.take()[0] == 1


@on_a_gpu
def test_threads_that_sample_at_once_do_not_disturb_each_other():
    model, ids = small_model().cuda(), random_ids(2, 7).cuda()
    with ThreadPoolExecutor(4) as pool:  # which raises what a call raises
        list(pool.map(lambda _: model.generate(ids, max_new_tokens=10, do_sample=True), range(40)))


@on_a_gpu
def test_a_failed_capture_leaves_random_numbers_usable(monkeypatch):
    """A value that is read during a capture makes it invalid."""
    monkeypatch.setitem(cuda_graphs.GRAPHS, "cuda", cuda_graphs.CudaGraph)
    model, ids = small_model().cuda(), random_ids(2, 7).cuda()
    expected, read = without(lambda: greedy(model, ids, 20)), type(model.model).read

    def reading(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        hidden_states.sum().item()
        return read(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(type(model.model), "read", reading)
    assert greedy(model, ids, 20).equal(expected)
    assert "cuda" not in cuda_graphs.GRAPHS
    assert model.generate(ids, max_new_tokens=20, do_sample=True).shape == (2, 27)


def test_without_a_gpu_nothing_is_captured():
    model = small_model()
    with mock.patch.object(RecordedGraph, "capture", side_effect=AssertionError):
        greedy(model, random_ids(1, 7), 20)
    assert not cuda_graphs.can_be_captured(model, RetNetState(model.config))
