# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The races, at a toy size and without a clock: who runs, what is measured, and what is made of the times."""

import ast
import json
import math

import pytest
import torch
import transformers
from transformers.models.rwkv import modeling_rwkv

from benchmarks import decoding, gpu, mutations, prefill, race, serving, state_tuning, training, vision_resolution
from benchmarks.command_line import main
from benchmarks.linearization import PAGE, WAYS, of_source
from benchmarks.measuring import PeakMemory, attempt
from benchmarks.peers import CONTENDERS, SIZES, build, missing
from benchmarks.peers.peer import TransformersPeer
from benchmarks.quality import images, statistics, tables, write_tables
from benchmarks.quality.mixers import DiagonalStateSpace, ShiftStateSpace, long_convolution
from benchmarks.quality.rivals import RIVALS, of_equal_size
from benchmarks.quality.rwkv_sums import weighted_sum
from benchmarks.quality.settings import SETTINGS, Setting
from benchmarks.quality.state import state_numbers
from benchmarks.quality.studies import COMPARISON, IMAGES, Plan
from benchmarks.quality.write_tables import filled
from benchmarks.race import Conditions, Heat


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
    monkeypatch.setattr(PeakMemory, "nbytes", 2**30)


@pytest.mark.parametrize("size", SIZES)
def test_all_models_are_of_one_size(size):
    with torch.device("meta"):
        counts = {name: build(name, SIZES[size]).parameters for name in EAGER}
    least, most = min(counts.values()), max(counts.values())
    assert most / least < 1.02, counts
    if size == "33M":
        assert 33e6 < least < most < 34.5e6


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


@pytest.mark.usefixtures("in_this_process")
def test_the_command_prints_tables_and_writes_json_and_plots(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(CONTENDERS, "torchscale", CONTENDERS["torchscale"]._replace(needs="a_package_that_no_one_has"))
    words = "--size toy --models ours llama torchscale --lengths 16 --contexts 16 32 --context-batches 1 "
    words += "--batch-context 16 --batches 1 2 --rounds 2 --seconds 0 --threads 1"
    folder, file = tmp_path / "plots", tmp_path / "results.json"
    main(list(RACES.values()), "", [*words.split(), "--json", str(file), "--plots", str(folder)])
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
    plots = "decoding_context.png decoding_latency.png decoding_memory.png decoding_throughput.png training.png"
    assert sorted(path.name for path in folder.iterdir()) == plots.split()
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


@pytest.mark.usefixtures("in_this_process")
def test_a_failure_is_shown_in_its_row(capsys):
    def prepare(peer, heat, conditions):
        if isinstance(peer.module, transformers.LlamaForCausalLM):
            raise torch.OutOfMemoryError
        return prefill.prepare(peer, heat, conditions)

    discipline = race.Race("prefill", "prefill", ("ours", "llama"), prepare, race.lengths_and_batches)
    words = "--size toy --models ours llama --lengths 16 --rounds 1 --seconds 0 --threads 1"
    ours, llama = main([discipline], "", words.split())
    assert (ours.failure, ours.ratio, llama.failure) == (None, None, "out of memory")
    assert "out of memory" in capsys.readouterr().out


def test_all_rows_of_a_gpu_are_measured(tmp_path, capfd):
    file = tmp_path / "gpu.json"
    gpu.main(f"--device cpu --dtype float32 --size toy --rounds 2 --json {file}".split())
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


@pytest.mark.usefixtures("in_this_process")
def test_the_resolution_study_writes_what_it_found(tmp_path, capsys):
    words = "--quick --models vit vir-chunkwise vir-bands --threads 1"
    vision_resolution.main([*words.split(), "--json", str(tmp_path / "resolution.json")])
    assert "ViR, chunkwise" in capsys.readouterr().out
    found = json.loads((tmp_path / "resolution.json").read_text(encoding="utf-8"))["results"]
    of_64 = [f"{record['model']} {record['mode']}" for record in found if record["pixels"] == 64]
    assert of_64[:3] == ["vit forward", "vir-chunkwise forward", "vir-bands forward"]
    assert of_64[3:] == ["vit training", "vir-chunkwise training"]
    assert all(len(record["repetitions"]) == 1 and record["images_per_second"] > 0 for record in found)
    entries = vision_resolution.summaries(vision_resolution.read(tmp_path / "resolution.json"))
    vision_resolution.draw(entries, tmp_path / "resolution.png")
    assert (tmp_path / "resolution.png").read_bytes().startswith(b"\x89PNG")


TABLES = {  # of guides
    vision_resolution: lambda study: study.tables(study.summaries(study.read(study.RESULTS))),
    serving: lambda study: {"serving": study.measured(json.loads(study.RESULTS.read_text(encoding="utf-8")))},
    gpu: lambda study: study.tables(),
    state_tuning: lambda study: study.tables(json.loads(study.RESULTS.read_text(encoding="utf-8"))),
}


@pytest.mark.parametrize("study", TABLES)
def test_the_tables_of_guides_are_those_of_the_committed_figures(study):
    page, built = study.PAGE.read_text(encoding="utf-8"), TABLES[study](study)
    names = {vision_resolution: ["forward_speed", "training_speed"], serving: ["serving"], gpu: ["h200"]}
    assert list(built) == names.get(study, list(built)) != []
    assert all(text in page for text in built.values())
    assert filled(page, built) == page


def test_the_best_rate_of_state_tuning_is_chosen_by_the_texts_for_choosing():
    runs = [
        {"rate": rate, "seed": seed, "parameters": 7, "choosing": [10 * rate + seed], "reporting": [rate]}
        for rate in (1.0, 2.0)
        for seed in (0, 1)
    ]
    assert state_tuning.best_of(runs) == runs[:2]


def test_mutants_are_changes_of_code_that_has_tests():
    """And remain Python: a mutant that does not compile would be counted as killed."""
    found = mutations.mutants(60)
    assert (found, len(set(found))) == (mutations.mutants(60), 60)
    for file, place in found:
        source = (mutations.ROOT / file).read_text(encoding="utf-8")
        text, change = mutations.changed(source, place)
        compile(text, file, "exec")
        assert text != ast.unparse(ast.parse(source)), change
        assert mutations.files_of_tests(file)


SMALL = Setting(hidden_size=16, layers=2, heads=2, vocabulary=32, block=32, batch=2)


def test_a_long_convolution_is_the_sum_that_it_stands_for():
    signal, filters = torch.randn(2, 3, 17, dtype=torch.float64), torch.randn(3, 17, dtype=torch.float64)
    expected = torch.zeros_like(signal)
    for place in range(17):
        for before in range(place + 1):
            expected[..., place] += filters[:, place - before] * signal[..., before]
    torch.testing.assert_close(long_convolution(signal, filters), expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("continues", [False, True])
def test_the_sums_of_rwkv_are_those_of_transformers(continues):
    decay, first = torch.linspace(-5, 3, 6).requires_grad_(), torch.randn(6, requires_grad=True)
    key, value = (3 * torch.randn(2, 40, 6)).requires_grad_(), torch.randn(2, 40, 6, requires_grad=True)
    state = (torch.randn(2, 6), 1 + torch.rand(2, 6), 9 * torch.randn(2, 6)) if continues else None
    inputs = (decay, first, key, value)
    output, last = weighted_sum(*inputs, state, return_state=True)
    expected, expected_last = modeling_rwkv.rwkv_linear_attention_cpu(*inputs, state, return_state=True)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last[0] / last[1], expected_last[0] / expected_last[1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last[1].log() + last[2], expected_last[1].log() + expected_last[2], rtol=1e-4, atol=1e-4)
    weights = torch.randn_like(output)
    gradients, expected = (torch.autograd.grad(sums, inputs, weights) for sums in (output, expected))
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)


def test_the_state_spaces_of_h3_are_recurrences():
    signal, diagonal = torch.randn(2, 3, 23, dtype=torch.float64), DiagonalStateSpace(3, states=4).double()
    exponent, step = diagonal.transition()
    state, outputs = torch.zeros(2, 3, 4, dtype=torch.complex128), []
    for token in signal.unbind(-1):
        state = exponent.exp() * state + step * token[..., None]
        outputs.append(2 * (torch.view_as_complex(diagonal.readout) * state).sum(-1).real + diagonal.skip * token)
    torch.testing.assert_close(diagonal(signal), torch.stack(outputs, dim=-1), rtol=1e-10, atol=1e-10)
    shift, state, outputs = ShiftStateSpace(3, states=5).double(), torch.zeros(2, 3, 5, dtype=torch.float64), []
    for token in signal.unbind(-1):
        state = torch.cat([token[..., None], state[..., :-1]], dim=-1)
        outputs.append((state * shift.readout).sum(-1) + shift.skip * token)
    torch.testing.assert_close(shift(signal), torch.stack(outputs, dim=-1), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("row", [*COMPARISON, *IMAGES], ids=lambda row: row.title)
def test_rows_have_equal_parameters(row):
    if row in IMAGES:
        model = images.equalised(lambda width: images.MODELS[row.model](width, **row.options), images.PARAMETERS)
        assert model(pixel_values=torch.randn(2, 1, 28, 28)).logits.shape == (2, 10)
    else:
        with torch.device("meta"):
            model = of_equal_size(row.model, row.options, SETTINGS["laptop"])
    wanted = pytest.approx(*((images.PARAMETERS, 0.02) if row in IMAGES else (SETTINGS["laptop"].parameters, 0.01)))
    assert sum(parameter.numel() for parameter in model.parameters()) == wanted


STATES = {  # numbers after 8 and after 20 tokens: of 2 layers and 2 heads; of the shift and complex states; of convolutions
    "retnet": (2 * 2 * 8 * 16, 2 * 2 * 8 * 16),
    "llama": (2 * 2 * 16 * 8, 2 * 2 * 16 * 20),
    "h3": (2 * (16 * 64 + 16 * 8 * 64 * 2), 2 * (16 * 64 + 16 * 8 * 64 * 2)),
    "mamba2": (3 * (32 * 16 + (32 + 2 * 16) * 4), 3 * (32 * 16 + (32 + 2 * 16) * 4)),
}


@pytest.mark.parametrize("model", RIVALS)
def test_a_rival_sees_what_is_before_a_token_and_nothing_after(model):
    torch.manual_seed(0)
    network, ids = RIVALS[model](SMALL, 16).eval(), torch.randint(32, (1, 24))
    changed = ids.clone()
    changed[:, 15] = (ids[:, 15] + 1) % 32
    with torch.no_grad():
        before, after = (network(tokens, use_cache=False).logits for tokens in (ids, changed))
    torch.testing.assert_close(after[:, :15], before[:, :15], rtol=1e-4, atol=1e-5)
    assert (after[:, 15] - before[:, 15]).abs().max() > 1e-4
    sizes = tuple(state_numbers(network, length) for length in (8, 20))
    assert STATES.get(model, sizes) == sizes
    assert model != "hyena" or sizes[1] - sizes[0] == 2 * 12 * 16


def test_differences_are_of_pairs_and_within_two_errors_none():
    estimate = statistics.paired([1.0, 2.0, 3.3], [0.9, 1.8, 3.0])
    assert (estimate.mean, estimate.error) == (pytest.approx(0.2), pytest.approx(0.1 / math.sqrt(3)))
    assert estimate.verdict == "weak"  # 3.5 errors, and Student's t of two degrees of freedom asks for 4.3
    assert statistics.paired([1.0, 2.0], [1.1, 1.8]).verdict == "none"
    assert statistics.paired([1.0, 2.0, 3.0], [0.5, 1.5, 2.501]).verdict == "clear"


def test_the_tables_of_the_pages_are_those_of_the_committed_cells():
    report = tables.Report(Plan("laptop", write_tables.RESULTS))
    report.require_one_text()
    of_sources = {learned: of_source(learned) for learned in WAYS}
    for paths, built in ((write_tables.PAGES, report.tables()), ([PAGE], of_sources)):
        pages, missing = [path.read_text(encoding="utf-8") for path in paths], dict(built)
        for page in pages:
            assert write_tables.filled(page, built) == page
            missing = {name: table for name, table in missing.items() if table not in page}
        assert not missing
