# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The races, at a toy size and without a clock: who runs, what is counted, and what is made of the times."""

import argparse
import ast
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import re
import time

import pytest
import torch
import transformers

import retnet_hf_cpu
from benchmarks import (
    command_line,
    decoding,
    generation,
    gpu,
    gpu_rows,
    gpu_table,
    manhattan_retention,
    measuring,
    mixed_batches,
    mutations,
    prefill,
    race,
    training,
    vision_resolution,
    vision_resolution_report,
)
from benchmarks.measuring import Failure, Spread, Turn, attempt, in_its_own_process, in_turns
from benchmarks.peers import CONTENDERS, SIZES, build, missing
from benchmarks.quality.write_tables import filled
from benchmarks.race import Conditions, Entrant, Heat, Result, Work, heat_times, least_seconds, results_of
from benchmarks.serving import write_tables as serving_report


RACES = {module.RACE.name: module.RACE for module in (training, prefill, decoding, generation)}
CONDITIONS = Conditions(size="toy", rounds=2, turn_seconds=0.0, new_tokens=3)
HERE = [name for name, contender in CONTENDERS.items() if missing(name, "cpu") is None]
EAGER = [name for name in HERE if not CONTENDERS[name].is_compiled]


@pytest.fixture(autouse=True)
def quiet():
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(verbosity)


@pytest.fixture
def in_this_process(monkeypatch):
    """Measurements are made where they are asked for, where nothing more than the tests before took is a peak."""

    def directly(function, *arguments, time_limit=None, memory_limit=None):
        return attempt(function, *arguments)

    for module in (race, mixed_batches, vision_resolution):
        monkeypatch.setattr(module, "in_its_own_process", directly)
    monkeypatch.setattr(measuring.PeakMemory, "nbytes", 2**30)


def result(seconds: list[float], model: str = "ours", **fields) -> Result:
    given = {"race": "training", "length": 2048, "batch": 1, "checkpointed": False, "reference": Entrant("llama", 2048)}
    return Result(model=model, seconds=seconds, **(given | fields))


# Models


@pytest.mark.parametrize("size", SIZES)
def test_all_models_are_of_one_size(size):
    with torch.device("meta"):
        counts = {name: build(name, SIZES[size]).parameters for name in EAGER}
    least, most = min(counts.values()), max(counts.values())
    assert most / least < 1.02, counts
    if size == "33M":
        assert 33e6 < least < most < 34.5e6


@pytest.mark.parametrize("name", EAGER)
def test_a_loss_is_that_of_a_model_that_knows_nothing_and_reaches_every_weight(name):
    peer = build(name, SIZES["toy"])
    loss = peer.loss(CONDITIONS.ids(2, 24))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(SIZES["toy"].vocabulary), abs=1.5)
    assert [n for n, parameter in peer.module.named_parameters() if parameter.grad is None] == []


@torch.no_grad()
@pytest.mark.parametrize("name", EAGER)
def test_generation_continues_the_prompt_as_the_whole_sequence_would(name):
    peer = build(name, SIZES["toy"])
    peer.module.eval()
    ids = CONDITIONS.ids(1, 12)
    generated = peer.generate(ids, 3)
    assert generated.shape == (1, 15)
    assert torch.equal(generated[:, :12], ids)
    read = peer.prefill(generated[:, :-1])
    logits = read[0] if isinstance(read, tuple) else read
    assert logits.shape == (1, 1, SIZES["toy"].vocabulary)
    assert logits.argmax() == generated[0, -1]


@torch.no_grad()
@pytest.mark.parametrize("name", EAGER)
def test_a_state_takes_as_many_bytes_as_its_context_makes_necessary(name):
    peer, size = build(name, SIZES["toy"]), SIZES["toy"]
    short, long = (peer.state_bytes(peer.state_after(context, 2, room=0)) for context in (8, 600))
    if name.startswith("llama"):
        assert (short, long) == tuple(2 * 2 * size.layers * size.hidden_size * 4 * context for context in (8, 600))
    else:
        assert 0 < short == long
    if name == "ours":
        recurrent = 4 * 2 * size.layers * 2 * size.hidden_size**2 // size.heads
        assert recurrent <= long < recurrent + 1000  # and positions


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in EAGER if name.startswith("llama")])
def test_a_cache_that_has_grown_is_cut_to_its_context(name):
    peer = build(name, SIZES["toy"])
    state, token = peer.state_after(20, 2, room=4), torch.ones(2, 1, dtype=torch.long)
    before = peer.decode(token, state).logits
    peer.decode(token, state)
    assert int(state.get_seq_length()) == 22
    peer.rewind(state, 20)
    assert int(state.get_seq_length()) == 20
    torch.testing.assert_close(peer.decode(token, state).logits, before)


def test_operations_are_counted_by_hand():
    size = SIZES["toy"]
    ours, llama = build("ours", size), build("llama", size)
    d, layers, heads, vocabulary = size.hidden_size, size.layers, size.heads, size.vocabulary
    body = layers * 12 * d**2  # exactly, where the hidden size is a multiple of 3 x 16
    assert ours.matmul_parameters == llama.matmul_parameters == body + vocabulary * d
    assert ours.decode_flops(500) == 2 * (body + vocabulary * d) + layers * 4 * d * 2 * d / heads
    assert llama.decode_flops(500) == 2 * (body + vocabulary * d) + layers * 4 * 500 * d
    assert llama.forward_flops(100, all_logits=True) == 100 * (2 * (body + vocabulary * d) + layers * 4 * 50 * d)
    assert llama.forward_flops(100, all_logits=False) == 100 * (2 * body + layers * 4 * 50 * d) + 2 * vocabulary * d
    norms = (2 * layers + 1) * d
    assert llama.weight_bytes == 4 * (body + vocabulary * d + norms)


def test_who_is_missing_is_said_and_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    assert missing("yet-another", "cpu") == ("yet-another-retnet is not installed: pip install yet-another-retnet")
    assert missing("ours-programs", "cuda") == "retnet_hf, programs runs on a CPU only."
    assert missing("fla", "cpu") == "flash-linear-attention runs on CUDA only."
    assert "pip install flash-linear-attention" in missing("fla", "cuda")


# Measuring


def test_a_spread_leaves_out_a_tenth_on_either_side():
    assert Spread.of(range(21)) == (10, 2, 18)
    assert Spread.of([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0)
    assert str(Spread.of([1.0, 2.0])) == "1.50 (1.00..2.00)"


def test_turns_are_taken_in_rounds_and_the_first_do_not_count():
    log = []
    turns = {name: Turn(lambda name=name: log.append(name), lambda name=name: log.append(name.upper())) for name in "ab"}
    times = in_turns(turns, rounds=3, turn_seconds=0.0)
    assert {name: len(seconds) for name, seconds in times.items()} == {"a": 3, "b": 3}
    assert "".join(log) == "AaBb" * 4


def test_a_turn_has_no_more_calls_than_it_may():
    calls = []
    in_turns({"a": Turn(lambda: calls.append(None), lambda: calls.append("turn"), most_calls=7)}, 1, turn_seconds=60.0)
    assert [len(turn.split()) for turn in " ".join(c or "." for c in calls).split("turn")[1:]] == [1, 1, 7]


def test_who_runs_out_of_memory_leaves_the_others_to_their_turns():
    def fail():
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory")

    times = in_turns({"a": Turn(fail), "b": Turn(lambda: None)}, rounds=2, turn_seconds=0.0)
    assert times["a"] == Failure("out of memory")
    assert len(times["b"]) == 2


def test_an_error_is_named_and_printed(capfd):
    def fail():
        raise ValueError("shapes do not fit")

    times = in_turns({"a": Turn(fail), "b": Turn(lambda: None)}, rounds=1, turn_seconds=0.0)
    assert times["a"] == Failure("ValueError")
    assert "shapes do not fit" in capfd.readouterr().err
    assert len(times["b"]) == 1


# The processes begin at once where nothing has to be imported first.


@pytest.fixture
def bare_processes(monkeypatch):
    context = measuring.multiprocessing.get_context("fork")
    monkeypatch.setattr(measuring, "_context", lambda: context)


def test_a_process_answers(bare_processes):
    assert in_its_own_process(math.hypot, 3, 4, time_limit=60) == 5


def test_a_process_that_takes_too_long_is_a_result(bare_processes):
    assert in_its_own_process(time.sleep, 60, time_limit=0.2) == Failure("over 0 s")


def test_a_process_that_needs_too_much_memory_is_a_result(bare_processes):
    assert in_its_own_process(bytearray, 2**40, time_limit=60, memory_limit=2**33) == Failure("out of memory")


def test_a_process_that_fails_otherwise_is_a_result(bare_processes, capfd):
    assert in_its_own_process(math.sqrt, -1) == Failure("ValueError")
    assert in_its_own_process(os._exit, 3) == Failure("exit status 3")
    assert "math domain error" in capfd.readouterr().err


# Races


def test_the_least_time_of_a_step_is_that_of_what_takes_longer():
    work = [Work(flops=100, nbytes=10), Work(flops=10, nbytes=100, times=3)]
    assert least_seconds(work, speed=10, bandwidth=10) == 10 + 3 * 10


@pytest.mark.parametrize("name", RACES)
def test_everyone_finishes(name):
    entrants = [Entrant(model, 20, 2) for model in RACES[name].models if model in EAGER]
    times = heat_times(RACES[name].prepare, entrants, CONDITIONS)
    assert list(times.entrants) == entrants
    assert all(len(timing.seconds) == 2 and min(timing.seconds) > 0 for timing in times.entrants.values())
    tokens = {"training": 40, "prefill": 40, "decoding": 2, "generation": 6}[name]
    assert {timing.tokens for timing in times.entrants.values()} == {tokens}
    assert times.matmul_speed > 0
    assert times.bandwidth > 0


@pytest.mark.parametrize(("name", "bits"), [("ours-int8", 8), ("ours-int4", 4), ("ours-programs", 32)])
def test_programs_race_with_weights_of_few_bits(name, bits, monkeypatch):
    compiled = []

    def compile(model, **options):
        assert options == {"prompts": True}
        compiled.append(model)
        return model

    monkeypatch.setattr(retnet_hf_cpu, "compile", compile)
    conditions = Conditions(size="toy", dtype="float32" if bits == 32 else "bfloat16")
    peer, plain = conditions.peer(name), conditions.peer("ours")
    assert compiled == [peer.module]
    head = peer.head.weight.nbytes
    share = (peer.weight_bytes - head) / (plain.weight_bytes - head)
    assert share == pytest.approx(bits / (8 * plain.head.weight.itemsize), rel=0.01)


def test_a_step_of_training_can_include_the_optimizer_and_recompute_layers():
    conditions = Conditions(size="toy", optimizer=True)
    peer = conditions.peer("ours")
    before = peer.head.weight.clone()
    training.prepare(peer, Entrant("ours", 16, 1, checkpointed=True), conditions).turn.step()
    assert peer.module.is_gradient_checkpointing
    assert not torch.equal(peer.head.weight, before)


def test_ratios_are_those_of_the_rounds():
    ours, llama, slow = Entrant("ours", 8), Entrant("llama", 8), Entrant("mamba2", 8)
    heat = Heat((ours, llama, slow), llama)
    timings = {
        ours: race._Timing([1.0, 1.0, 2.0], 10, [Work(50)], 7, 3),
        llama: race._Timing([2.0, 4.0, 2.0], 10, [Work(50)], 8, None),
    }
    memory = {ours: 30, llama: 60, slow: Failure("over 5 s")}
    first, second, third = results_of("training", heat, race._HeatTimes(timings, 100.0, 1.0), memory)
    assert first.rate == (10, 5, 10)
    assert first.ratio == (2, 1, 4)
    assert (first.memory, first.memory_ratio) == (30, 0.5)
    assert (first.bound, first.of_bound) == (0.5, 0.5)
    assert (first.parameters, first.state_bytes) == (7, 3)
    assert second.ratio == (1, 1, 1)
    assert third.failure == "over 5 s"
    assert third.ratio is None


@pytest.mark.usefixtures("in_this_process")
def test_after_the_deadline_no_heat_begins():
    settings = argparse.Namespace(models=["ours"], lengths=[8], batches=[1])
    late = dataclasses.replace(CONDITIONS, deadline=time.monotonic() - 1)
    ((results, limits),) = race.run(race.Race("prefill", "", (), prefill.prepare, prefill.heats), settings, late)
    assert [result.failure for result in results] == ["no time left"]
    assert limits is None


def test_heats_leave_out_who_is_too_slow_for_their_length():
    heats = race.shared_heats(["ours", "mamba2"], [512, 1024], [1, 2], "training")
    assert [[entrant.model for entrant in heat.entrants] for heat in heats] == [["ours", "mamba2"], ["ours"]] * 2
    assert [heat.reference for heat in heats][-1] == Entrant("llama", 1024, 2)


# The command


@pytest.mark.usefixtures("in_this_process")
def test_the_command_prints_tables_and_writes_json_and_plots(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(CONTENDERS, "torchscale", CONTENDERS["torchscale"]._replace(needs="a_package_that_no_one_has"))
    words = "--size toy --models ours llama torchscale --lengths 16 --long 16 32 --contexts 16 32 --context-batches 1 "
    words += "--batch-context 16 --batches 1 2 --prompt 8 --new-tokens 2 --rounds 2 --seconds 0 --threads 1"
    folder, file = tmp_path / "plots", tmp_path / "results.json"
    command_line.main(list(RACES.values()), "", [*words.split(), "--json", str(file), "--plots", str(folder)])

    text = capsys.readouterr().out
    for title in ("training step; limits: ", "prefill; limits: ", "decoding; limits: ", "generate; limits: "):
        assert title in text
    assert "left out: torchscale is not installed: pip install --no-deps torchscale==0.3.0" in text
    assert text.count("left out") == 1
    assert "parameters: ours 0.53 M, llama 0.53 M" in text

    content = json.loads(file.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert set(content["limits"]) == set(RACES)
    assert content["conditions"]["size"] == "toy"
    heats = {(r["race"], r["model"], r["length"], r["batch"], r["reference"]["model"]) for r in content["results"]}
    assert {("training", "ours", 32, 1, "ours"), ("decoding", "llama", 16, 2, "llama")} <= heats
    assert ("decoding", "ours", 128, 1, "ours") in heats
    assert all(len(record["seconds"]) == 2 for record in content["results"])
    assert all(set(record["ratio"]) == {"median", "low", "high"} for record in content["results"])

    plots = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(plots) == {"memory.png", "throughput.png", "context.png", "latency.png", "training.png"}
    assert all(content.startswith(b"\x89PNG") for content in plots.values())


@pytest.mark.usefixtures("in_this_process")
def test_a_failure_is_shown_in_its_row(capsys, monkeypatch):
    def prepare(peer, entrant, conditions):
        if entrant.model == "llama":
            raise torch.OutOfMemoryError
        return prefill.prepare(peer, entrant, conditions)

    discipline = race.Race("prefill", "prefill", ("ours", "llama"), prepare, prefill.heats)
    words = "--size toy --models ours llama --lengths 16 --rounds 1 --seconds 0 --threads 1"
    ours, llama = command_line.main([discipline], "", words.split())
    assert (ours.failure, ours.ratio) == (None, None)
    assert llama.failure == "out of memory"
    assert "out of memory" in capsys.readouterr().out


def test_quick_runs_the_same_races_with_less():
    for discipline in RACES.values():
        full, quick = (
            command_line.settings_of(discipline, command_line.parser("").parse_args(words), [])
            for words in ([], ["--quick"])
        )
        assert set(quick.models) < set(full.models)
        assert {"ours", "llama"} <= set(quick.models)
        assert len(discipline.heats(quick)) <= len(discipline.heats(full))
        assert (full.size, quick.size) == ("33M", "5M")
    assert command_line.settings_of(RACES["decoding"], command_line.parser("").parse_args([]), []).batches == [1, 4, 16, 64]


# A GPU, without one

TOY = "--device cpu --dtype float32 --size toy --rounds 2"


@pytest.fixture
def table(tmp_path):
    """Measures rows as on a GPU, and returns the file that they were written to."""

    def measure(words: str) -> dict:
        gpu.main([*f"{TOY} {words}".split(), "--json", str(tmp_path / "gpu.json")])
        return json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)

    return measure


def test_all_rows_of_a_gpu_are_measured(table, capfd):
    content = table("--profile")
    rows = {row["name"]: row for row in content["rows"]}
    assert list(rows) == [row.name for row in gpu_rows.rows_of(gpu_rows.SCALES["toy"], profiled=True)]
    for row in rows.values():
        assert "error" not in row, row
        assert not any("error" in record for record in row["contenders"].values()), row
    training = rows["training, 1 x 48"]["contenders"]
    assert list(training) == ["default", gpu_rows.other_kernels(), "Llama"]
    assert [len(record["seconds"]) for record in training.values()] == [2, 2, 2]
    ratios = [theirs / own for own, theirs in zip(training["default"]["seconds"], training["Llama"]["seconds"])]
    assert training["default"]["times Llama"]["median"] == pytest.approx(sum(ratios) / 2)
    generated = rows["generate, 4 tokens after 16, batch 1"]["contenders"]["default"]
    assert generated["ms_a_token"] == pytest.approx(generated["median_ms"] / 4)
    assert rows["profile of a step of decoding"]["contenders"]["default"]["kernels"][0]["launches"] > 0
    assert "training, 1 x 48: default" in capfd.readouterr().out


def test_a_row_of_a_gpu_that_there_is_no_time_for_is_named(table):
    (row,) = table("--rows operator --minutes 0")["rows"]
    assert row["error"] == "no time left"


def test_a_row_of_a_gpu_that_does_not_end_is_ended_and_the_next_one_is_measured(monkeypatch, tmp_path):
    rows = [gpu_rows.Row("prompt, 16", "", None, 0, 0.0), gpu_rows.Row("prompt, 48", "", None, 0, 60)]
    monkeypatch.setattr(gpu, "rows_of", lambda *_: rows)
    gpu.main([*TOY.split(), "--json", str(tmp_path / "gpu.json")])
    first, second = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"]
    assert first["error"] == "over 0 s"
    assert second["contenders"]["Llama"]["seconds"]


def test_who_fails_alone_leaves_the_other_contenders_to_their_turns(capfd):
    def broken():
        raise RuntimeError("no kernel image")

    bench = gpu_rows.Bench(gpu_rows.SCALES["toy"], "cpu", torch.float32, rounds=2)
    found = gpu_rows.in_rounds(bench, {"own": broken, "other": lambda: None}, "other")
    assert found["own"]["error"] == "RuntimeError: no kernel image"
    assert len(found["other"]["seconds"]) == 2
    with pytest.raises(RuntimeError, match="illegal"):
        gpu_rows.in_rounds(bench, {"own": lost, "other": lambda: None}, "other")


def lost():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_bytes_of_the_kernels_are_those_of_the_paper_s_shape():
    assert gpu_rows.bytes_of_kernels(65536, 8, 256, 512, itemsize=2) == pytest.approx(18.5e9, rel=0.01)


class Graph:
    """Plays again what was recorded, like a CUDA graph, by calling it."""

    recorded: list = []

    def replay(self):
        self.recorded[-1]()


def held(layer) -> dict[str, torch.Tensor]:
    """The tensors of a layer's state, without the last token read, which only `generate` asks for."""
    return {key: value for key, value in vars(layer).items() if isinstance(value, torch.Tensor) and key != "last_ids"}


@torch.no_grad()
@pytest.mark.parametrize("name", ["ours", "llama-static", "mamba2"])
def test_a_recorded_step_goes_on_from_the_same_state(name, monkeypatch):
    """With a stand-in for CUDA, whose streams have nothing to wait for."""
    contender, plain = CONTENDERS[name], build(name, SIZES["toy"])
    monkeypatch.setitem(CONTENDERS, "graphed", contender._replace(options=contender.options | {"graphed": True}))
    graphed = build("graphed", SIZES["toy"])
    graphed.module.load_state_dict(plain.module.state_dict())
    calls = []
    call = graphed.call
    graphed.call = lambda *operands, **options: (calls.append(operands), call(*operands, **options))[1]
    stream = type("Stream", (), {"wait_stream": lambda self, other: None})
    replaced = {"Stream": stream, "current_stream": stream, "stream": contextlib.nullcontext, "CUDAGraph": Graph}
    for attribute, stand_in in replaced.items():
        monkeypatch.setattr(torch.cuda, attribute, stand_in)

    @contextlib.contextmanager
    def recording(graph):
        yield
        operands = calls[-1]
        graph.recorded.append(lambda: call(*operands, cache=state, use_cache=True))

    monkeypatch.setattr(torch.cuda, "graph", recording)
    token = torch.ones(1, 1, dtype=torch.long)
    state, expected = (peer.state_after(12, 1, room=8) for peer in (graphed, plain))
    for layer, other in zip(state.layers, expected.layers):  # random where they are
        vars(layer).update({key: value.clone() for key, value in held(other).items()})
    places = [value.data_ptr() for layer in state.layers for value in held(layer).values()]
    graphed.decode(token, state)  # three to warm up, one recorded, one played
    graphed.decode(token, state)
    for _ in range(6):
        plain.decode(token, expected)
    assert len(calls) == 4
    now = [value.data_ptr() for layer in state.layers for value in held(layer).values()]
    assert now == places  # which a graph writes to
    for layer, other in zip(state.layers, expected.layers):
        for key, value in held(other).items():
            torch.testing.assert_close(getattr(layer, key), value)


# The studies of one model's own forms


@pytest.mark.usefixtures("in_this_process")
def test_padding_and_packing_are_compared_with_plain_batches(capsys, monkeypatch):
    words = "mixed_batches --preset tiny --batch 2 --length 10 --rounds 2"
    monkeypatch.setattr("sys.argv", words.split())
    mixed_batches.main()
    text = capsys.readouterr().out
    assert [text.count(word) for word in ("forward, tiny", "training, tiny", "padded", "packed")] == [1, 1, 2, 2]
    assert re.findall(r"│ +plain │[^│]+│ +([^│]+?) │", text) == 2 * ["1.00 (1.00..1.00)"]


@pytest.mark.parametrize("training", [False, True])
def test_forms_of_manhattan_retention_take_turns(training):
    times = manhattan_retention.race(["chunkwise", "SDPA"], side=4, heads=2, size=8, training=training, rounds=2)
    assert list(times) == ["chunkwise", "SDPA"]
    assert min(times.values()) > 0


@pytest.mark.usefixtures("in_this_process")
def test_the_resolution_study_writes_what_it_found(tmp_path, capsys):
    words = "--quick --models vit vir-chunkwise --pixels 32 --seconds 0 --threads 1 --repeats 2"
    file, plot = tmp_path / "resolution.json", tmp_path / "resolution.png"
    vision_resolution.main([*words.split(), "--json", str(file), "--plot", str(plot)])
    assert "vir-chunkwise" in capsys.readouterr().out
    found = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert [(record["model"], record["mode"]) for record in found] == [
        ("vit", "forward"),
        ("vir-chunkwise", "forward"),
        ("vit", "training"),
        ("vir-chunkwise", "training"),
    ]
    assert all(len(record["repetitions"]) == 2 and record["images_per_second"] > 0 for record in found)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("in_this_process")
def test_an_interrupted_resolution_study_goes_on_where_it_ended(tmp_path, monkeypatch):
    file = tmp_path / "resolution.json"
    words = "--quick --models vit vir-chunkwise --pixels 32 --modes forward --seconds 0 --threads 1 --repeats 2"
    words = [*words.split(), "--json", str(file)]
    measured = []

    def measure(job):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(job.model)
        return vision_resolution.Result(seconds=len(measured), memory=1.0)

    monkeypatch.setattr(vision_resolution, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        vision_resolution.main(words)
    kept = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert {record["model"]: len(record["repetitions"]) for record in kept} == {"vit": 2, "vir-chunkwise": 1}

    monkeypatch.setattr(vision_resolution, "measure", lambda job: vision_resolution.Result(seconds=8.0, memory=1.0))
    vision_resolution.main(words)
    vit, ours = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert [result["seconds"] for result in vit["repetitions"]] == [1, 3]
    assert [result["seconds"] for result in ours["repetitions"]] == [2, 8]
    ratios = [ours[name] for name in ("least_speed_ratio", "speed_ratio", "greatest_speed_ratio")]
    assert ratios == [3 / 8, pytest.approx((3 / 8 + 1 / 2) / 2), 1 / 2]

    before = file.read_bytes()
    with pytest.raises(SystemExit, match="measured under other conditions: batch was 1, is 2"):
        vision_resolution.main([*words, "--batch", "2"])
    assert file.read_bytes() == before

    other = tmp_path / "other.json"
    for text in ("nonsense", "[]", "{}"):
        other.write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit, match="holds no results of this study"):
            vision_resolution.main([*words[:-1], str(other)])
        assert other.read_text(encoding="utf-8") == text


def test_the_tables_of_resolution_are_those_of_the_committed_figures():
    _, results = vision_resolution.read(vision_resolution_report.RESULTS)
    page = vision_resolution_report.PAGE.read_text(encoding="utf-8")
    built = vision_resolution_report.tables(vision_resolution.summaries(results))
    assert len(built) == 2
    assert all(text in page for text in built.values())
    assert filled(page, built) == page


def test_the_table_of_serving_is_that_of_the_committed_figures():
    measured = json.loads(serving_report.RESULTS.read_text(encoding="utf-8"))
    page = serving_report.PAGE.read_text(encoding="utf-8")
    assert filled(page, {"serving": serving_report.measured(measured)}) == page
    assert {entry["model"] for entry in measured["points"]} == {"retnet", "llama"}
    ours, llama = (measured["parameters"][model] for model in ("retnet", "llama"))
    assert abs(ours / llama - 1) < 0.03


def test_the_tables_of_gpus_are_those_of_the_committed_figures():
    page, built = gpu_table.PAGE.read_text(encoding="utf-8"), gpu_table.tables()
    assert list(built) == ["h200"]
    assert all(text in page for text in built.values())
    assert filled(page, built) == page


def test_a_table_of_a_gpu_has_a_row_for_each_comparison_that_was_measured():
    ratio = {"median": 1.5, "low": 1.25, "high": 1.75}
    compared = {"default": {"median_ms": 8.0, "times Llama": ratio}, "torch": {"error": ""}, "Llama": {"median_ms": 1234.5}}
    generated = {"default": {"median_ms": 80.0, "ms_a_token": 20.0, "times Llama": ratio}, "Llama": {"median_ms": 99.5}}
    operator = {"PyTorch": {"median_ms": 2.0, "times copy": ratio}, "copy": {"median_ms": 3.0}}
    rows = [{"name": "prompt, 64", "contenders": compared}, {"name": "late", "error": "no time left"}]
    rows += [{"name": "generate", "contenders": generated}, {"name": "operator", "contenders": operator}]
    rows.append({"name": "profile", "contenders": {"default": {"wall_ms": 1.0}}})
    _, _, *lines = gpu_table.measured({"rows": rows}).splitlines()
    assert lines == [
        "| prompt, 64 | Llama 1,234 ms | 8.00 ms (1.50, 1.25..1.75) | |",
        "| generate | Llama 99.5 ms | 20.0 ms (1.50, 1.25..1.75) | |",
        "| operator | copy 3.00 ms | | 2.00 ms (1.50, 1.25..1.75) |",
    ]


def test_mutants_are_changes_of_code_that_has_tests():
    """And remain Python: a mutant that does not compile would be counted as killed."""
    found = mutations.mutants(60)
    assert found == mutations.mutants(60)
    assert len(set(found)) == 60
    for file, place in found:
        source = (mutations.ROOT / file).read_text(encoding="utf-8")
        text, change = mutations.changed(source, place)
        compile(text, file, "exec")
        assert text != ast.unparse(ast.parse(source)), change
        assert mutations.files_of_tests(file)
