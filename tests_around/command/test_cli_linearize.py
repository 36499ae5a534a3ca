# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf linearize`, as a user meets it: what it makes, how it goes on after an interruption, what it refuses."""

import functools
import json
import os
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from unittest import mock

import command_answers
import datasets
import pytest
import torch
from command_answers import SIZES, TEXT, at_step, done, make_source, press_ctrl_c, refused, same_weights, tree
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, MixtralConfig, pipeline

import retnet_hf.cli.linearizing.pipeline as pipeline_module
import retnet_hf.cli.training.run as run
from retnet_hf import RetNetForCausalLM
from retnet_hf.cli.errors import InputError
from retnet_hf.cli.linearizing.pipeline import StageRun
from retnet_hf.cli.linearizing.recipe import KeptLayers, Recipe
from retnet_hf.cli.linearizing.sources import source_digest
from retnet_hf.cli.main import main
from retnet_hf.cli.text.corpus import encode, hold_out, read_documents, read_enough, train_tokenizer
from retnet_hf.cli.training.run import Supervisor
from retnet_hf.linearization import costliest_layers
from retnet_hf.linearization.measures import losses_of, score
from retnet_hf.linearization.what_was_kept import measured_part


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")

LINEARIZE = ["linearize", "llama", "book.txt", "--output", "model", "--block-size", 32, "--batch-size", 4, "--threads", 1]
LINEARIZE += ["--align-steps", 6, "--distill-steps", 6, "--eval-every", 3]


@pytest.fixture(scope="module", autouse=True)
def little_is_measured():
    """The clock is read for a moment: what it says is in no test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retnet_hf.linearization.what_was_kept.DECODED", 1)
        yield


@pytest.mark.parametrize(("place", "left"), [("linearizing.pipeline", ""), ("training.run", "continuing after step 6")])
def test_a_crash_before_a_folder_is_in_its_place_is_made_good_by_resuming(retnet_hf, workplace, linearized, place, left):
    """The folder of the model, when all stages are done, or of a finished stage."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"retnet_hf.cli.{place}.publish", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            retnet_hf(*LINEARIZE)
    assert not Path("model").exists()
    answer = done(retnet_hf(*LINEARIZE, "--resume"))
    assert left in answer.out if left else "stage" not in answer.out
    same_weights(Path("model"), linearized)
    assert not Path("model.partial").exists()


@pytest.fixture
def workplace(tmp_path, in_an_empty_folder) -> Path:
    make_source(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def linearized(tmp_path_factory, heard_again, little_is_measured) -> Path:
    """The folder of an uninterrupted run, which is not to be changed."""
    folder = tmp_path_factory.mktemp("linearized")
    make_source(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main([str(argument) for argument in LINEARIZE]) == 0
    return folder / "model"


def report_of(folder: Path = Path("model")) -> dict:
    return json.loads((folder / "linearization.json").read_text(encoding="utf-8"))


def both() -> list:
    """What was made, and its source."""
    return [AutoModelForCausalLM.from_pretrained(name) for name in ("model", "llama")]


def test_linearize_ends_in_a_folder_with_everything_that_belongs_to_its_source(linearized):
    files = "README.md align.png config.json distill.png generation_config.json linearization.json model.safetensors"
    files += " tokenizer.json tokenizer_config.json"
    assert {path.name for path in linearized.iterdir()} - {"chat_template.jinja"} == set(files.split())
    assert not linearized.with_name("model.partial").exists()
    model = AutoModelForCausalLM.from_pretrained(linearized)
    assert type(model) is RetNetForCausalLM
    assert (model.config.use_cache, model.config.output_gate_act) == (True, "silu")
    assert model.generation_config.temperature == 0.5
    chat = pipeline("text-generation", model=str(linearized))
    assert chat.tokenizer.apply_chat_template([{"role": "user", "content": "So"}], tokenize=False) == "So"
    assert chat([{"role": "user", "content": "And God"}], max_new_tokens=3)[0]["generated_text"][1]["role"] == "assistant"


def test_report_and_card_set_the_model_beside_its_source(linearized):
    report, card = report_of(linearized), (linearized / "README.md").read_text(encoding="utf-8")
    assert "license: mit\n" in card.split("---")[1]
    options = "--block-size 32 --batch-size 4 --align-steps 6 --distill-steps 6"
    assert f"Linearized from `llama` with `retnet-hf linearize {options}" in card
    assert f"on the first {report['read']:,} tokens of `book.txt`" in card
    source, own = report["teacher"]["perplexity"]["64"], report["student"]["perplexity"]["64"]
    assert f"| perplexity, blocks of 64 tokens | {source:.2f} | {own:.2f} |" in card
    assert [stage["name"] for stage in report["trainings"]] == ["align", "distill"]
    assert all(stage["after"] < stage["before"] for stage in report["trainings"])
    assert report["trainings"][0]["tokens"] == 6 * 4 * 32
    assert str(linearized.parent) not in card
    stream = torch.from_numpy(encode(hold_out([TEXT], 0.05)[1], AutoTokenizer.from_pretrained(linearized))).long()
    for folder, name in ((linearized, "student"), (linearized.parent / "llama", "teacher")):
        model = AutoModelForCausalLM.from_pretrained(folder)
        found = score(functools.partial(losses_of, model), measured_part(stream, 32), 32).perplexity
        assert report[name]["perplexity"]["32"] == pytest.approx(found, rel=1e-4)


@pytest.mark.parametrize(("stage", "ctrl_c"), [("align", press_ctrl_c), ("distill", command_answers.press_ctrl_c_twice)])
def test_interrupted_and_resumed_equals_uninterrupted(retnet_hf, workplace, linearized, stage, ctrl_c):
    on_step_end, said = Supervisor.on_step_end, []

    def patched(self, args, state, control, **kwargs):
        on_step_end(self, args, state, control, **kwargs)
        if args.output_dir.endswith(f"{stage}.partial") and state.global_step == 4:
            ctrl_c()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Supervisor, "on_step_end", patched)
        answer = retnet_hf(*LINEARIZE)
    refused(answer, "interrupted", code=130, silent=False)
    said.append(answer.out)
    assert not Path("model").exists()
    answer = done(retnet_hf(*LINEARIZE, "--resume"))
    said.append(answer.out)
    assert "continuing after step" in answer.out
    assert ("stage 1 of 2" in answer.out) == (stage == "align")
    same_weights(Path("model"), linearized)
    assert not Path("model.partial").exists()
    assert said[0].startswith("read 1 file (.txt)\n")
    for words in ("error of a layer", "divergence"):  # progress by stage
        shown = re.findall(rf"step +(\d+) of 6   {words} ([\d.]+)", "".join(said))
        assert {int(step) for step, _ in shown} == {0, 3, 6}
        assert float(shown[-1][1]) < float(shown[0][1])


def crash(*_):
    raise RuntimeError("power cut")


@pytest.mark.parametrize("options", [[], ["--lora-rank", 2]], ids=["all weights", "lora"])
def test_a_crash_between_the_last_checkpoint_and_the_end_of_a_stage(retnet_hf, workplace, monkeypatch, options):
    command = [*LINEARIZE, "--align-steps", 0, *options]
    done(retnet_hf(*command))
    model, source = both()
    if options:  # neither adapters nor what they do not adapt
        assert model.model.embed_tokens.weight.equal(source.model.embed_tokens.weight)
        change = model.model.layers[0].mlp.up_proj.weight - source.model.layers[0].mlp.up_proj.weight
        assert 0 < torch.linalg.matrix_rank(change, atol=1e-6) <= 2
    os.rename("model", "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retnet_hf.cli.linearizing.pipeline.StageRun.finish", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            retnet_hf(*command)
    assert [path.name for path in Path("model.partial/distill.partial").glob("checkpoint-*")] == ["checkpoint-6"]
    monkeypatch.setattr("retnet_hf.cli.linearizing.pipeline.mean_divergence", None)  # its rate is not measured again
    done(retnet_hf(*command, "--resume"))
    same_weights(Path("model"), Path("whole"))


def test_ctrl_c_after_the_last_step_of_a_stage_does_not_begin_the_next(retnet_hf, workplace, linearized):
    finish = StageRun.finish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageRun, "finish", lambda *arguments: press_ctrl_c() or finish(*arguments))
        answer = retnet_hf(*LINEARIZE)
    refused(answer, "interrupted at the end of the stage align", code=130, silent=False)
    assert "stage 2 of 2" not in answer.out
    assert {path.name for path in Path("model.partial").iterdir()} == {"align", "training_run.json"}
    assert not list(Path("model.partial/align").glob("checkpoint-*"))
    done(retnet_hf(*LINEARIZE, "--resume"))
    same_weights(Path("model"), linearized)
    refused(retnet_hf(*LINEARIZE, "--resume"), "is finished")
    refused(answer := retnet_hf(*LINEARIZE), "is not empty", "--overwrite")
    assert "--resume" not in answer.err
    same_weights(Path("model"), linearized)


def test_what_a_run_writes_is_not_its_text(retnet_hf, workplace):
    """Output and source lie in the folder that is read, with model cards that are Markdown."""
    options = ["linearize", "llama", ".", *LINEARIZE[3:], "--lora-rank", 2, "--align-steps", 0]
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 4, press_ctrl_c)
        assert retnet_hf(*options).code == 130
    assert list(Path("model.partial").rglob("*.md"))
    answer = done(retnet_hf(*options, "--resume"))
    assert "read 1 file (.txt), skipped " in answer.out
    again = retnet_hf(*options, "--overwrite")
    blocks = [re.search(r"[\d,]+ blocks of 32 tokens", out)[0] for out in (answer.out, again.out)]
    assert blocks[0] == blocks[1]


def test_a_run_that_was_interrupted_is_neither_begun_anew_nor_resumed_otherwise(retnet_hf, workplace):
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 4, press_ctrl_c)
        retnet_hf(*LINEARIZE)
    before = tree(workplace)
    refused(retnet_hf(*LINEARIZE), "model.partial holds an interrupted run", "--resume continues it")
    refused(retnet_hf(*LINEARIZE, "--resume", "--window", 8), "this run began without --window, not 8")
    refused(retnet_hf(*LINEARIZE, "--resume", "--block-size", 16), "this run began with --block-size 32, not 16")
    Path("book.txt").write_text(TEXT + "And more.", encoding="utf-8")
    refused(retnet_hf(*LINEARIZE, "--resume"), "the source or the text is not what this run began with")
    Path("book.txt").write_text(TEXT, encoding="utf-8")
    refused(retnet_hf("train", "book.txt", "--output", "model", "--resume"), "holds a run of retnet-hf linearize")
    assert tree(workplace) == before
    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained("llama")
    refused(retnet_hf(*LINEARIZE, "--resume"), "the source or the text is not what this run began with")


def test_the_layers_that_the_model_needs_most_are_kept(retnet_hf, workplace):
    answer = done(retnet_hf(*LINEARIZE, "--keep-attention", "auto:50%", "--distill-steps", 0))
    report, (model, source) = report_of(), both()
    kept = [layer for layer, kind in enumerate(model.config.layer_types) if kind == "full_attention"]
    costs = {int(layer): cost for layer, cost in report["layer_costs"].items()}
    assert (len(kept), kept) == (2, costliest_layers(costs, 0.5))
    for layer in kept:
        assert model.model.layers[layer].attention.q_proj.weight.equal(source.model.layers[layer].self_attn.q_proj.weight)
    assert f"softmax attention stays in layers {kept[0]}, {kept[1]}" in answer.out


def test_what_the_source_says_may_be_stored(retnet_hf, workplace, linearized):
    done(retnet_hf(*LINEARIZE, "--top-logits", 300))
    stored, asked = (report_of(folder)["trainings"][1] for folder in (Path("model"), linearized))
    assert stored["before"] == pytest.approx(asked["before"], rel=1e-2)  # all tokens are stored, in half precision
    assert stored["after"] == pytest.approx(asked["after"], rel=0.1)
    assert not list(Path("model").glob("teacher*"))


def test_the_third_stage_is_of_longer_sequences(retnet_hf, workplace):
    answer = done(retnet_hf(*LINEARIZE, "--distill-steps", 0, "--long-steps", 4, "--long-block-size", 128))
    report = report_of()
    assert [(stage["name"], stage["tokens"]) for stage in report["trainings"]] == [("align", 6 * 128), ("long", 4 * 512)]
    assert "stage 2 of 2, long" in answer.out
    assert re.search(r"step +4 of 4   perplexity [\d,.]+", answer.out)


def test_windows_alone_by_name_and_texts_are_told_apart_in_the_report(retnet_hf, workplace):
    Path("other.txt").write_text(TEXT[::-1], encoding="utf-8")
    Path("third.txt").write_text(TEXT.upper(), encoding="utf-8")
    position = LINEARIZE.index("book.txt") + 1
    options = ["--unseen", "third.txt", "--window", 8, "--keep-attention", "1"]
    done(retnet_hf(*LINEARIZE[:position], "other.txt", *LINEARIZE[position:], *options))
    config, report = AutoModelForCausalLM.from_pretrained("model").config, report_of()
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    assert (config.sliding_window, config.attention_sinks, config.attention_sink_distance) == (8, 4, 31)
    assert report["options"].startswith("--keep-attention 1 --window 8")
    card = " ".join(Path("model/README.md").read_text(encoding="utf-8").split())
    assert "without retention. Layers with a window keep the last 8 tokens and the first 4, other layers all tokens" in card
    assert "retnet_hf's own" in " ".join(retnet_hf("inspect", "model").out.split())
    for name in ("teacher", "student"):
        assert [text.split("/")[-1] for text in report[name]["by_text"]] == ["book.txt", "other.txt", "third.txt"]
    assert report["unseen"] == [list(report["teacher"]["by_text"])[-1]]
    assert report["texts"] == ["book.txt", "other.txt"]
    stream = torch.from_numpy(encode([TEXT.upper()], AutoTokenizer.from_pretrained("llama"))).long()
    found = score(functools.partial(losses_of, AutoModelForCausalLM.from_pretrained("llama")), stream, 128).perplexity
    assert report["teacher"]["by_text"][report["unseen"][0]] == pytest.approx(found, rel=1e-4)
    assert report["answers"][0][0] == "Why is the sky blue?"


def test_half_precision_is_trained_in_float32_and_saved_as_it_was_and_few_steps_are_evaluated_less(retnet_hf, workplace):
    AutoModelForCausalLM.from_pretrained("llama", dtype=torch.bfloat16).save_pretrained("llama")
    options = [option for option in LINEARIZE if option not in ("--eval-every", 3)]
    answer = done(retnet_hf(*options, "--align-steps", 0, "--distill-steps", 40, "--keep-attention", "auto"))
    assert re.findall(r"step +(\d+) of 40", answer.out) == ["0", "32", "40"]
    model = AutoModelForCausalLM.from_pretrained("model", dtype="auto")
    assert (model.dtype, model.config.layer_types.count("full_attention")) == (torch.bfloat16, 1)


def test_a_run_of_some_minutes_ends_by_the_clock_in_small_steps_and_a_short_report(retnet_hf, workplace):
    options = [option for option in LINEARIZE if option not in ("--align-steps", "--distill-steps", "--batch-size", 4, 6)]
    done(retnet_hf(*options, "--minutes", 0.1))
    report = report_of()
    assert [stage["name"] for stage in report["trainings"]] == ["align", "distill"]
    for stage, most in zip(report["trainings"], (500, 1500)):
        assert 1 <= stage["steps"] < most
        assert 0.8 * stage["steps"] * 2 * 32 <= stage["tokens"] <= stage["steps"] * 2 * 32
    assert report["extent"]["tokens"] == 8192
    assert "--batch-size 2" in report["options"]
    refused(retnet_hf(*options, "--minutes", 1, "--top-logits", 3, "--overwrite"), "also give --distill-steps")


def test_layers_to_keep_are_named_in_four_ways():
    assert KeptLayers.parse("0, 4,8") == KeptLayers(layers=(0, 4, 8))
    assert KeptLayers.parse("25%") == KeptLayers(share=0.25)
    assert KeptLayers.parse("auto") == KeptLayers(share=0.25, costliest=True)
    assert KeptLayers.parse("auto:12.5%") == KeptLayers(share=0.125, costliest=True)
    for text in ("", "0,", "some", "200%", "0%", "auto:", "-1", "auto 4"):
        with pytest.raises(InputError, match="--keep-attention takes layers such as 0,4,8, a share such as 25%"):
            KeptLayers.parse(text)


def test_learning_rates_fall_with_the_hidden_size_and_for_a_model_that_is_nearly_right():
    zero = Recipe("a", align_lr=0.0, distill_lr=0.0, long_lr=0.0)
    assert {zero.rate(stage, 128, 1.0) for stage in ("align", "distill", "long")} == {0.0}
    recipe = Recipe("a", block_size=512)
    assert (recipe.rate("align", 128), recipe.rate("distill", 128), recipe.rate("long", 128)) == (3e-3, 1e-3, 1e-3 / 3)
    assert (recipe.rate("align", 2048), recipe.rate("distill", 2048)) == pytest.approx((7.5e-4, 6.25e-5))
    windowed = Recipe("a", window=64, batch_size=1, block_size=512)
    assert (windowed.rate("align", 512), windowed.rate("distill", 512)) == pytest.approx((3e-4, 1e-3 / 4 / 2 / 3))
    rates = [recipe.rate("distill", 128, nats) for nats in (2.0, 0.1, 0.01, 0.001, 0.0, -1e-9)]
    assert rates == pytest.approx([1e-3, 1e-3, 1e-3 / 10**0.5, 1e-4, 1e-4, 1e-4])
    assert recipe.rate("long", 128, 0.001) == pytest.approx(1e-4 / 3)
    assert Recipe("a", distill_lr=3e-5).rate("distill", 2048, 1e-4) == 3e-5


@pytest.mark.parametrize(
    ("window", "positions", "size", "batch"),
    [(None, 2048, 512, 8), (128, 8192, 1024, 4), (256, None, 2048, 2), (4096, None, 2048, 2), (64, 256, 256, 8)],
)
def test_sequences_reach_beyond_the_window(window, positions, size, batch):
    recipe = Recipe("a", window=window)
    assert recipe.with_block_size(positions) == replace(recipe, block_size=size)
    fewer = recipe.with_block_size(positions, keeps_batch=False)
    assert fewer == replace(recipe, block_size=size, batch_size=batch)
    assert ("--block-size" in fewer.options) == (size == 256)  # as no window asks for
    given = replace(recipe, block_size=100)
    assert given.with_block_size(positions, keeps_batch=False) == given


def test_a_card_names_the_repository_of_its_source_and_its_licence(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("---\nlicense: llama3.2\n---\nA Llama.\n", encoding="utf-8")
    monkeypatch.setattr(run, "hf_hub_download", lambda name, file, revision: str(tmp_path / file))
    assert pipeline_module.source_metadata("meta/llama") == {"base_model": "meta/llama", "license": "llama3.2"}
    monkeypatch.setattr(run, "hf_hub_download", mock.Mock(side_effect=OSError("no network")))
    assert pipeline_module.source_metadata("meta/llama") == {"base_model": "meta/llama"}


def test_a_source_that_cannot_be_used_is_refused(retnet_hf, workplace):
    refused(retnet_hf("linearize", "nowhere", "book.txt"), "no such folder: nowhere")
    refused(retnet_hf("linearize", "llama", "nowhere.txt"), "no such file or folder: nowhere.txt")
    shutil.copytree("llama", "small")
    LlamaForCausalLM(LlamaConfig(**SIZES | {"vocab_size": 100})).save_pretrained("small")
    answer = retnet_hf("linearize", "small", "book.txt", "--block-size", 32, "--batch-size", 4)
    refused(answer, "the tokenizer of the source has a token", "its model knows 100 tokens")
    MixtralConfig().save_pretrained("mixtral")
    refused(retnet_hf("linearize", "mixtral", "book.txt"), "model_type 'mixtral' cannot be linearized. Supported are llama")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--block-size", 2048], ["too short to fill a block of 2048 tokens", "--block-size"]),
        (["--block-size", 8192], ["--block-size 8192 is beyond the limit of 2048 positions of the source"]),
        (["--long-steps", 1], ["too short to fill a block of 2048 tokens", "--long-block-size"]),
        (["--keep-attention", "0,9"], ["layer 9 cannot be kept: the model has layers 0 to 3"]),
        (["--keep-attention", "0,1,2,3"], ["--keep-attention keeps every layer"]),
        (["--keep-attention", "0,1,2,3", "--window", 8], ["every layer"]),
        (["--keep-attention", "few"], ["--keep-attention takes layers"]),
        (["--window", 8, "--gate", "sigmoid"], ["are options of retention, which --window replaces"]),
        (["--unseen", "."], ["--unseen . is also used in training"]),
        (["--decays", "fast"], ["--decays must be one of power_of_two, log_linear"]),
    ],
)
def test_what_cannot_be_done_is_refused(retnet_hf, workplace, options, words):
    before = tree(workplace)
    refused(retnet_hf(*LINEARIZE, *options), *words)
    assert tree(workplace) == before


def test_a_source_on_the_hub_is_known_by_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repository, digests = tmp_path / "models--someone--llama", []
    for commit in ("a" * 40, "b" * 40):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / "main").write_text(commit)
        (repository / "snapshots" / commit).mkdir(parents=True)
        (repository / "snapshots" / commit / "config.json").write_text("{}")
        digests.append(source_digest("someone/llama"))
    assert digests == ["a" * 40, "b" * 40]


def test_what_stages_leave_is_freed(retnet_hf, workplace, monkeypatch):
    """No model, gradient or moment of a stage is there when the next one begins, and no source that is not asked."""
    seen, references, prepare = [], [], pipeline_module.Linearization._prepare

    def watched(self, stage, *arguments):
        seen.append([kind for reference, kind in references if reference() is not None])
        run = prepare(self, stage, *arguments)
        references.append((weakref.ref(run.model), "student"))
        if run.teacher is not None:
            references.append((weakref.ref(run.teacher), "source"))
        elif "teacher" in vars(self):
            seen.append(["a source that is not asked"])
        return run

    monkeypatch.setattr(pipeline_module.Linearization, "_prepare", watched)
    done(retnet_hf(*LINEARIZE, "--top-logits", 4, "--long-steps", 2, "--long-block-size", 64))
    assert seen == [[], ["source"], []]  # which is asked before the second stage


def test_no_more_is_read_than_is_needed(tmp_path):
    file = tmp_path / "many.jsonl"
    file.write_text("\n".join([json.dumps({"text": TEXT[:200]})] * 300), encoding="utf-8")
    tokenizer = train_tokenizer([TEXT], 300)
    each = len(tokenizer(TEXT[:200])["input_ids"])
    documents, _ = read_enough([str(file)], tokenizer, 20 * each)
    assert 18 <= len(documents) <= 23
    assert read_enough([str(file)], tokenizer, 10**9)[0] == read_documents([str(file)])
    other = tmp_path / "other.txt"
    other.write_text(TEXT, encoding="utf-8")
    both, origins = read_enough([str(file), str(other)], tokenizer, 20 * each)  # in turns, the last one cut
    assert (both[0], origins) == (TEXT[:200], [str(file), str(other)])
    assert TEXT.startswith(both[1])
    assert sum(len(tokenizer(document)["input_ids"]) for document in both) == pytest.approx(20 * each, rel=0.2)


def test_a_data_set_is_streamed(tmp_path):
    datasets.Dataset.from_dict({"words": [TEXT[:200]] * 50, "other": [1] * 50}).to_parquet(tmp_path / "train.parquet")
    tokenizer = train_tokenizer([TEXT], 300)
    each = len(tokenizer(TEXT[:200])["input_ids"])
    with mock.patch.object(datasets, "load_dataset", side_effect=datasets.load_dataset) as load:
        documents, _ = read_enough([str(tmp_path)], tokenizer, 5 * each, field="words")
    assert load.call_args.kwargs["streaming"]
    assert 4 <= len(documents) <= 7
    with pytest.raises(InputError, match='has no field "text" \\(it has: words, other\\)'):
        read_enough([str(tmp_path)], tokenizer, 5)
