# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The races, at a toy size and without a clock: who runs, what is measured, and what is made of the times."""

import argparse
import ast
import importlib.util
import json
import math
import os
import time

import pytest
import torch
import transformers

import retnet_hf.cpu
from benchmarks import (
    command_line,
    decoding,
    gpu,
    measuring,
    mutations,
    prefill,
    race,
    serving,
    training,
    vision_resolution,
)
from benchmarks.measuring import Failure, Spread, Turn, attempt, in_its_own_process, in_turns
from benchmarks.peers import CONTENDERS, SIZES, build, missing
from benchmarks.peers.peer import TransformersPeer
from benchmarks.quality.write_tables import filled
from benchmarks.race import Conditions, Heat, Timing, heat_times, results_of


RACES = {module.RACE.name: module.RACE for module in (training, prefill, decoding)}
CONDITIONS = Conditions(size="toy", rounds=2, turn_seconds=0.0)
EAGER = [name for name, contender in CONTENDERS.items() if missing(name) is None and not contender.is_compiled]


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

    for module in (race, vision_resolution):
        monkeypatch.setattr(module, "in_its_own_process", directly)
    monkeypatch.setattr(measuring.PeakMemory, "nbytes", 2**30)


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
    loss = peer.loss(CONDITIONS.ids(Heat(24, 2, ())))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(SIZES["toy"].vocabulary), abs=1.5)
    assert [n for n, parameter in peer.module.named_parameters() if parameter.grad is None] == []


@torch.no_grad()
@pytest.mark.parametrize("name", EAGER)
def test_decoding_continues_a_prompt_as_the_whole_sequence_would(name):
    peer = build(name, SIZES["toy"])
    peer.module.eval()
    ids = CONDITIONS.ids(Heat(12, 1, ()))
    ids[0, 0] = 1
    whole = peer.prefill(ids)
    logits = whole[0] if isinstance(whole, tuple) else whole
    assert logits.shape == (1, 1, SIZES["toy"].vocabulary)
    if isinstance(peer, TransformersPeer):
        decoded = peer.decode(ids[:, -1:], peer.prefill(ids[:, :-1])[1]).logits
    else:  # reads token by token, after a first token of 1
        state = peer.state_after(1, 1, room=12)
        decoded = [peer.decode(token, state) for token in ids[:, 1:].split(1, dim=1)][-1]
    torch.testing.assert_close(decoded.flatten(), logits.flatten(), rtol=1e-4, atol=1e-4)


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


def test_who_is_missing_is_said_and_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    assert missing("yet-another") == "yet-another-retnet is not installed: pip install yet-another-retnet"


@pytest.mark.parametrize(("name", "bits"), [("ours-int8", 8), ("ours-int4", 4), ("ours-programs", 32)])
def test_programs_race_with_weights_of_few_bits(name, bits, monkeypatch):
    compiled = []

    def compile(model, **options):
        assert options == {"prompts": True}
        compiled.append(model)
        return model

    monkeypatch.setattr(retnet_hf.cpu, "compile", compile)
    peer = Conditions(size="toy", dtype="float32" if bits == 32 else "bfloat16").peer(name)
    assert compiled == [peer.module]
    weight = peer.module.model.layers[0].mlp.up_proj.weight
    assert (type(weight) is torch.nn.Parameter) == (bits == 32)
    group = (weight if bits == 32 else weight.dequantize())[0, :32]
    assert (len(group.unique()) <= 2**4) == (bits == 4)


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


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory"), "out of memory"),
        (ValueError("shapes do not fit"), "ValueError"),
    ],
)
def test_who_fails_leaves_the_others_to_their_turns(error, reason, capfd):
    def fail():
        raise error

    times = in_turns({"a": Turn(fail), "b": Turn(lambda: None)}, rounds=2, turn_seconds=0.0)
    assert times["a"] == Failure(reason)
    assert ("shapes do not fit" in capfd.readouterr().err) == (reason == "ValueError")
    assert len(times["b"]) == 2


@pytest.mark.parametrize(
    ("function", "arguments", "limits", "answer"),
    [
        (math.hypot, (3, 4), {"time_limit": 60}, 5),
        (time.sleep, (60,), {"time_limit": 0.2}, Failure("over 0 s")),
        (bytearray, (2**40,), {"time_limit": 60, "memory_limit": 2**33}, Failure("out of memory")),
        (math.sqrt, (-1,), {}, Failure("ValueError")),
        (os._exit, (3,), {}, Failure("exit status 3")),
    ],
)
def test_a_process_answers_or_its_failure_is_a_result(function, arguments, limits, answer, monkeypatch, capfd):
    context = measuring.multiprocessing.get_context("fork")  # begins at once, because nothing has to be imported
    monkeypatch.setattr(measuring, "_context", lambda: context)
    assert in_its_own_process(function, *arguments, **limits) == answer
    assert ("math domain error" in capfd.readouterr().err) == (function is math.sqrt)


# Races


@pytest.mark.parametrize("name", RACES)
def test_everyone_finishes(name):
    heat = Heat(20, 2, tuple(model for model in RACES[name].models if model in EAGER))
    times = heat_times(RACES[name].prepare, heat, CONDITIONS)
    assert tuple(times) == heat.models
    assert all(len(timing.seconds) == 2 and min(timing.seconds) > 0 for timing in times.values())
    assert {timing.tokens for timing in times.values()} == {{"training": 40, "prefill": 40, "decoding": 2}[name]}


def test_ratios_are_those_of_the_rounds():
    times = {"ours": Timing([1.0, 1.0, 2.0], 10, 7), "llama": Timing([2.0, 4.0, 2.0], 10, 8)}
    memory = {"ours": 30, "llama": 60, "mamba2": Failure("over 5 s")}
    first, second, third = results_of("training", Heat(8, 1, ("ours", "llama", "mamba2")), times, memory)
    assert first.rate == (10, 5, 10)
    assert first.ratio == (2, 1, 4)
    assert (first.memory, first.memory_ratio, first.parameters) == (30, 0.5, 7)
    assert second.ratio == (1, 1, 1)
    assert third.failure == "over 5 s"
    assert third.ratio is None


def test_heats_leave_out_who_is_too_slow_for_their_length():
    heats = training.RACE.heats(argparse.Namespace(models=["ours", "mamba2"], lengths=[512, 1024], batches=[1, 2]))
    assert heats == [Heat(n, b, models) for b in (1, 2) for n, models in ((512, ("ours", "mamba2")), (1024, ("ours",)))]


@pytest.mark.usefixtures("in_this_process")
def test_the_command_prints_tables_and_writes_json_and_plots(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(CONTENDERS, "torchscale", CONTENDERS["torchscale"]._replace(needs="a_package_that_no_one_has"))
    words = "--size toy --models ours llama torchscale --lengths 16 --contexts 16 32 --context-batches 1 "
    words += "--batch-context 16 --batches 1 2 --rounds 2 --seconds 0 --threads 1"
    folder, file = tmp_path / "plots", tmp_path / "results.json"
    command_line.main(list(RACES.values()), "", [*words.split(), "--json", str(file), "--plots", str(folder)])
    text = capsys.readouterr().out
    assert all(f"\n{discipline.title}\n" in text for discipline in RACES.values())
    assert "left out: torchscale is not installed: pip install --no-deps torchscale==0.3.0" in text
    assert text.count("left out") == 1
    assert "parameters: ours 0.53 M, llama 0.53 M" in text
    content = json.loads(file.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert content["conditions"]["size"] == "toy"
    heats = {(r["race"], r["model"], r["length"], r["batch"]) for r in content["results"]}
    assert {("training", "ours", 16, 1), ("decoding", "llama", 16, 2), ("decoding", "ours", 32, 1)} <= heats
    assert all(len(record["seconds"]) == 2 for record in content["results"])
    assert all(set(record["ratio"]) == {"median", "low", "high"} for record in content["results"])
    plots = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(plots) == {
        "training.png",
        *(f"decoding_{name}.png" for name in ("memory", "throughput", "context", "latency")),
    }
    assert all(content.startswith(b"\x89PNG") for content in plots.values())


@pytest.mark.usefixtures("in_this_process")
def test_a_failure_is_shown_in_its_row(capsys):
    def prepare(peer, heat, conditions):
        if isinstance(peer.module, transformers.LlamaForCausalLM):
            raise torch.OutOfMemoryError
        return prefill.prepare(peer, heat, conditions)

    discipline = race.Race("prefill", "prefill", ("ours", "llama"), prepare, race.lengths_and_batches)
    words = "--size toy --models ours llama --lengths 16 --rounds 1 --seconds 0 --threads 1"
    ours, llama = command_line.main([discipline], "", words.split())
    assert (ours.failure, ours.ratio) == (None, None)
    assert llama.failure == "out of memory"
    assert "out of memory" in capsys.readouterr().out


# A GPU, without one


def test_all_rows_of_a_gpu_are_measured(tmp_path, capfd):
    file = tmp_path / "gpu.json"
    words = f"--device cpu --dtype float32 --size toy --rounds 2 --json {file}"
    gpu.main(words.split())
    rows = {row["name"]: row for row in json.loads(file.read_text("utf-8"), parse_constant=pytest.fail)["rows"]}
    assert list(rows) == [row[0] for row in gpu.rows_of(gpu.SCALES["toy"])]
    for row in rows.values():
        assert "error" not in row, row
        assert not any("error" in record for record in row["contenders"].values()), row
    training = rows["training, 1 x 48"]["contenders"]
    assert list(training) == ["default", gpu.other_kernels(), "Llama"]
    assert [len(record["seconds"]) for record in training.values()] == [2, 2, 2]
    ratios = [theirs / own for own, theirs in zip(training["default"]["seconds"], training["Llama"]["seconds"])]
    assert training["default"]["times Llama"]["median"] == pytest.approx(sum(ratios) / 2)
    generated = rows["generate, 4 tokens after 16, batch 1"]["contenders"]["default"]
    assert generated["ms_a_token"] == pytest.approx(generated["median_ms"] / 4)
    assert "training, 1 x 48" in capfd.readouterr().out


def test_bytes_of_the_kernels_are_those_of_the_paper_s_shape():
    assert gpu.bytes_of_kernels(65536, 8, 256, 512, itemsize=2) == pytest.approx(18.5e9, rel=0.01)


# Pages and files


@pytest.mark.usefixtures("in_this_process")
def test_the_resolution_study_writes_what_it_found(tmp_path, capsys):
    words = "--quick --models vit vir-chunkwise vir-bands --threads 1"
    vision_resolution.main([*words.split(), "--json", str(tmp_path / "resolution.json")])
    assert "ViR, chunkwise" in capsys.readouterr().out
    found = json.loads((tmp_path / "resolution.json").read_text(encoding="utf-8"))["results"]
    of_64 = [(record["model"], record["mode"]) for record in found if record["pixels"] == 64]
    forward = [(name, "forward") for name in ("vit", "vir-chunkwise", "vir-bands")]
    assert of_64 == [*forward, ("vit", "training"), ("vir-chunkwise", "training")]
    assert all(len(record["repetitions"]) == 1 and record["images_per_second"] > 0 for record in found)
    entries = vision_resolution.summaries(vision_resolution.read(tmp_path / "resolution.json"))
    vision_resolution.draw(entries, tmp_path / "resolution.png")
    assert (tmp_path / "resolution.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("study", "names"),
    [(vision_resolution, ["forward_speed", "training_speed"]), (serving, ["serving"]), (gpu, ["h200"])],
)
def test_the_tables_of_guides_are_those_of_the_committed_figures(study, names):
    page = study.PAGE.read_text(encoding="utf-8")
    if study is vision_resolution:
        built = study.tables(study.summaries(study.read(study.RESULTS)))
    elif study is serving:
        built = {"serving": study.measured(json.loads(study.RESULTS.read_text(encoding="utf-8")))}
    else:
        built = study.tables()
    assert (
        list(built) == {vision_resolution: ["forward_speed", "training_speed"], serving: ["serving"], gpu: ["h200"]}[study]
    )
    assert all(text in page for text in built.values())
    assert filled(page, built) == page


def test_models_that_are_served_have_equal_parameters():
    parameters = json.loads(serving.RESULTS.read_text(encoding="utf-8"))["parameters"]
    assert {name: make().num_parameters() for name, make in serving.MODELS.items()} == parameters
    assert abs(parameters["retnet"] / parameters["llama"] - 1) < 0.03


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
