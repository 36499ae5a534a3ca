# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The `retnet-hf` command, as a user meets it: what it makes, what it says, what it refuses, and what it never destroys."""

import copy
import errno
import io
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path
from unittest import mock

import datasets
import pytest
import torch
from command_answers import TEXT, at_step, done, press_ctrl_c, press_ctrl_c_twice, refused, same_weights, tree, weights
from huggingface_hub import ModelCard
from rich.console import Console
from small_models import small_llama, small_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerControl, TrainerState, get_scheduler, pipeline

from retnet_hf import RetNetForCausalLM, cpu
from retnet_hf.cli.commands.demo import free_name
from retnet_hf.cli.commands.generate import invite
from retnet_hf.cli.errors import InputError
from retnet_hf.cli.main import main
from retnet_hf.cli.text.corpus import SAMPLE_TEXT, hold_out, read_documents, text_files
from retnet_hf.cli.training import run
from retnet_hf.cli.training.run import Course, Supervisor
from retnet_hf.cli.training.run_folder import TrainingFolder


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")

# 12 steps in 2 epochs, evaluated and saved at every fourth
TRAIN = ["train", "book.txt", "--config", "config.json", "--vocab-size", 300, "--block-size", 64, "--batch-size", 16]
TRAIN += ["--steps", 12, "--eval-every", 4, "--lr", 0.01, "--threads", 1]
TINY = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TINY["hidden_dropout"] = 0.1  # so that resuming exactly needs the random numbers too


def furnished(folder: Path, monkeypatch) -> Path:
    (folder / "book.txt").write_text(TEXT, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    return furnished(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, heard_again) -> Path:
    """The folder of an uninterrupted run of TRAIN, which tests copy before they change it."""
    publish = run.publish
    with pytest.MonkeyPatch.context() as patch:
        folder = furnished(tmp_path_factory.mktemp("trained"), patch)
        patch.setattr(run, "publish", lambda *folders: (shutil.copytree("model.partial", "unfinished"), publish(*folders)))
        assert main([str(argument) for argument in [*TRAIN, "--output", "model"]]) == 0
    return folder / "model"


@pytest.fixture(scope="module")
def unfinished(trained) -> Path:
    return trained.with_name("unfinished")


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_the_commands_and_help_of_each_has_examples(retnet_hf, arguments):
    answer = done(retnet_hf(*arguments))
    for command in ("train", "generate", "demo", "linearize"):
        assert command in answer.out
        helped = done(retnet_hf(command, "--help"))
        assert "Examples" in helped.out
        assert helped.out.count(f"retnet-hf {command}") >= 2


def test_train_ends_in_a_folder_with_everything_that_loads_and_generates(trained, monkeypatch):
    files = {"README.md", "config.json", "generation_config.json", "loss_curve.png", "model.safetensors"}
    assert {path.name for path in trained.iterdir()} == files | {"tokenizer.json", "tokenizer_config.json"}
    assert (trained / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    assert not trained.with_name("model.partial").exists()
    card = (trained / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlibrary_name: transformers\npipeline_tag: text-generation\n")
    assert "`book.txt`" in card
    monkeypatch.chdir(trained.parent)
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1], {})
    writer, text = pipeline("text-generation", model=str(trained)), "In the beginning 💡 God\n\ncreated\tthe heaven."
    model, tokenizer = writer.model, writer.tokenizer
    assert isinstance(model, RetNetForCausalLM)
    assert model.config.vocab_size == len(tokenizer) == 300
    assert (model.config.use_cache, model.config.retention_form) == (True, "auto")
    assert model.generation_config.eos_token_id == model.generation_config.bos_token_id == tokenizer.eos_token_id == 0
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id == 1
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert writer("And God", max_new_tokens=5)[0]["generated_text"].startswith("And God")


def test_train_shows_perplexity_and_a_sample_at_every_evaluation_and_takes_a_tokenizer(retnet_hf, workplace, trained):
    answer = done(retnet_hf(*TRAIN, "--output", "model"))
    assert answer.err == ""
    assert answer.out.startswith("read 1 file (.txt)\n")
    rows = re.findall(r"step +(\d+) of 12   perplexity ([\d,.]+)\n    (\S.*)", answer.out)
    assert [int(step) for step, *_ in rows] == [0, 4, 8, 12]
    perplexities = [float(perplexity.replace(",", "")) for _, perplexity, *_ in rows]
    assert 200 < perplexities[0] < 450  # about the size of the vocabulary
    assert perplexities[-1] < 0.7 * perplexities[0]
    held_out = hold_out(read_documents(["book.txt"]), 0.05)[1][0]
    assert all(sample.startswith(" ".join(held_out.split()[:7])) for *_, sample in rows)
    unchanged = "--steps", 1, "--lr", 0, "--vocab-size", 999, "--tokenizer", trained, "--output", "other"
    answer = retnet_hf(*TRAIN, *unchanged)  # with the tokenizer of another model
    assert re.search(r"held-out text: ([\d.]+) before training, \1\d* after, no lower: try more steps", answer.out)
    assert len(AutoTokenizer.from_pretrained("other")) == 300


def test_the_form_is_that_of_training_alone_and_changes_nothing(retnet_hf, workplace):
    Path("config.json").write_text(json.dumps(TINY | {"hidden_dropout": 0.0, "chunk_size": 16}), encoding="utf-8")
    perplexities, forward = [], RetNetForCausalLM.forward
    for form in ("parallel", "chunkwise"):
        with mock.patch.object(RetNetForCausalLM, "forward", autospec=True, side_effect=forward) as spy:
            answer = retnet_hf(*TRAIN, "--steps", 4, "--form", form, "--output", form)
        assert sum(call.kwargs.get("retention_form") == form for call in spy.call_args_list) >= 4
        assert json.loads(Path(form, "config.json").read_text())["retention_form"] == "auto"
        perplexities.append(float(re.search(r"([\d.]+) after", answer.out)[1]))
    assert perplexities[0] == pytest.approx(perplexities[1], abs=0.02)


@pytest.mark.parametrize(("ctrl_c", "checkpoint"), [(press_ctrl_c, 7), (press_ctrl_c_twice, 4)])
def test_interrupted_and_resumed_equals_uninterrupted(retnet_hf, workplace, trained, ctrl_c, checkpoint):
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 6, ctrl_c)
        answer = retnet_hf(*TRAIN, "--output", "model")
    refused(answer, "interrupted", code=130, silent=False)
    assert not Path("model").exists()
    assert [path.name for path in Path("model.partial").glob("checkpoint-*")] == [f"checkpoint-{checkpoint}"]

    threads, unsaid = [], {"--steps", 12, "--threads", 1}
    options = [argument for argument in TRAIN if argument not in unsaid]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "set_num_threads", threads.append)
        answer = done(retnet_hf(*options, "--output", "model", "--resume"))
    assert (threads, re.findall(r"step +(\d+) of 12", answer.out)) == ([1], ["8", "12"])
    assert f"continuing after step {checkpoint}\n" in answer.out
    same_weights(Path("model"), trained)
    assert not Path("model.partial").exists()


def test_a_finished_run_is_not_resumed_but_its_model_trained_further(retnet_hf, workplace, trained):
    refused(retnet_hf(*TRAIN, "--output", trained, "--resume"), "nothing to resume", "its run is finished")
    Path("more.csv").write_text("body,other\n" + "".join(f'"{line}",1\n' for line in TEXT.split("\n") if '"' not in line))
    command = ["train", "more.csv", "--field", "body", "--from", trained, "--block-size", 64, "--threads", 1]
    command += ["--output", "further"]
    answer = done(retnet_hf(*command, "--steps", 4))
    assert answer.out.startswith("read 1 file (.csv)\n")
    before = float(re.search(r"([\d.]+) before training", answer.out)[1])
    assert before < 150  # it is no new model, whose perplexity is the size of the vocabulary
    assert "other" not in Path("further/README.md").read_text()
    assert "| trained from | `model` |" in ModelCard.load("further/README.md").text
    assert AutoTokenizer.from_pretrained("further").get_vocab() == AutoTokenizer.from_pretrained(trained).get_vocab()
    assert not torch.equal(weights(Path("further"))["lm_head.weight"], weights(trained)["lm_head.weight"])
    done(retnet_hf("train", "more.csv", "--field", "body", "--from", trained, "--lr", 0, "--steps", 1, "--output", "same"))
    same_weights(Path("same"), trained)
    refused(retnet_hf(*command, "--preset", "tiny", "--overwrite"), "--from, --preset and --config exclude each other")
    small_llama().config.save_pretrained("llama")
    refused(retnet_hf(*command, "--from", "llama", "--overwrite"), "--from takes a RetNet", "`retnet-hf linearize`")


TURNS = [{"role": "user", "content": "Who <|endoftext|> began?"}, {"role": "assistant", "content": "God."}]


@pytest.mark.parametrize("rows", ["messages", "prompt and completion"])
def test_conversations_are_trained_on_their_answers_and_become_a_chat_model(retnet_hf, workplace, trained, rows):
    pair = {"prompt": TURNS[0]["content"], "completion": TURNS[1]["content"]}
    row = {"messages": TURNS * 2} if rows == "messages" else pair
    Path("chats.jsonl").write_text(json.dumps(row) + "\n" + "\n".join([json.dumps(row)] * 19), encoding="utf-8")
    command = ["train", "chats.jsonl", "--from", trained, "--steps", 24, "--lr", 0.03, "--threads", 1, "--output", "chat"]
    answer = done(retnet_hf(*command))
    assert "turns are written as User: … and Assistant: …" in answer.out
    assert "try it: retnet-hf chat chat" in answer.out.replace(sys.argv[0], "retnet-hf")
    tokenizer, model = AutoTokenizer.from_pretrained("chat"), AutoModelForCausalLM.from_pretrained("chat")
    turns = row.get("messages", TURNS)
    ids, labels = run.chat_example(turns, tokenizer, 1000)
    text = "\n".join(f"{turn['role'].capitalize()}: {turn['content']}" for turn in turns)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert ids.eq(tokenizer.eos_token_id).sum() == len(turns) // 2  # after the answers alone
    assert tokenizer.decode(labels[labels >= 0]) == " God.<|endoftext|>" * (len(turns) // 2)
    written = model.generate(ids[None, : int(labels.ge(0).nonzero()[0])], max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(written[0], skip_special_tokens=True).startswith(text.split("\nUser")[0])
    echoed = [turn | {"content": " " + turn["content"]} for turn in turns]  # as clients send an answer back
    assert run.chat_example(echoed, tokenizer)[0].equal(ids)
    figures = json.loads(done(retnet_hf("evaluate", "chat", "chats.jsonl", "--json")).out)
    with torch.no_grad():
        loss = model(ids[None], labels=labels[None]).loss.item()
    assert figures["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    assert (figures["tokens"], figures["bytes"]) == (20 * int(labels.ge(0).sum()), 20 * 4 * len(turns) // 2)
    unanswered = {"messages": [TURNS[0]]}
    parts = {"messages": [{"role": "user", "content": [{"text": "a"}]}, TURNS[1]]}
    said = {"no conversation with an answer": unanswered, "a message whose role or content is not text": parts}
    for words, bad in (said | {"conversations and other texts": {"text": "a"}}).items():
        Path("chats.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(bad)}\n", encoding="utf-8")
        refused(retnet_hf(*command, "--overwrite"), words)


def test_evaluate_compares_models_on_a_text(retnet_hf, workplace, trained):
    Path("new.txt").write_text(TEXT[:3000], encoding="utf-8")
    small_llama().save_pretrained("llama")
    AutoTokenizer.from_pretrained(trained).save_pretrained("llama")
    answer = done(retnet_hf("evaluate", trained, "new.txt", "--json", "--threads", 1))
    figures = json.loads(answer.out)
    tokenizer, model = AutoTokenizer.from_pretrained(trained), AutoModelForCausalLM.from_pretrained(trained)
    ids = torch.tensor([[tokenizer.eos_token_id, *tokenizer(TEXT[:3000])["input_ids"]]])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert figures["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
    bits = loss * (ids.shape[1] - 1) / len(TEXT[:3000].encode()) / math.log(2)
    assert figures["bits_per_byte"] == pytest.approx(bits, rel=1e-4)
    answer = done(retnet_hf("evaluate", trained, "new.txt", "--compare", trained))
    assert answer.out.count(f"{figures['perplexity']:.2f}") == 2
    refused(retnet_hf("evaluate", "llama", "new.txt"), "llama holds no causal RetNet")


RECORD = "training_run.json"
NO_RECORD = '{"command": "train", "steps": 1, "recipe": 5}'


def forget_the_optimizer() -> None:
    """As earlier versions did, whose only optimizer was AdamW."""
    record = json.loads((path := Path("model.partial", RECORD)).read_text())
    assert record["recipe"].pop("optimizer") == "muon"
    path.write_text(json.dumps(record))


NOT_RESUMED = {  # what there is, more options, and what is said
    "lr": (None, ["--lr", 0.5], ["--lr", ", not 0.5;"]),
    "seed": (None, ["--seed", 1], ["--seed", ", not 1;"]),
    "size": (None, ["--block-size", 32], ["--block-size", ", not 32;"]),
    "form": (None, ["--form", "chunkwise"], ["--form", ", not chunkwise;"]),
    "optimizer": (None, ["--optimizer", "adamw"], ["--optimizer muon, not adamw;"]),
    "earlier version": (forget_the_optimizer, [], ["--optimizer adamw, not muon;"]),
    "text": (lambda: Path("book.txt").write_text(TEXT + "And more.", encoding="utf-8"), [], ["the text"]),
    "nothing": (lambda: shutil.rmtree("model.partial"), [], ["nothing to resume"]),
    "record": (lambda: Path("model.partial", RECORD).write_text(NO_RECORD), [], [RECORD, "cannot be read"]),
}


@pytest.mark.parametrize("case", NOT_RESUMED)
def test_a_run_is_resumed_with_what_it_began_with_alone(retnet_hf, workplace, unfinished, case):
    change, options, words = NOT_RESUMED[case]
    shutil.copytree(unfinished, "model.partial")
    refused(retnet_hf(*TRAIN, "--output", "model"), "interrupted run", "--overwrite")  # nor thrown away unasked
    if change is not None:
        change()
    refused(retnet_hf(*TRAIN, "--output", "model", "--resume", *options), *words)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"global_step": 11}', None])
def test_an_unfinished_checkpoint_is_passed_over_and_without_another_one_refused(retnet_hf, workplace, unfinished, content):
    shutil.copytree(unfinished, "model.partial")
    file, folder = Path("model.partial/checkpoint-12/trainer_state.json"), TrainingFolder(Path("model"), "train")
    file.unlink() if content is None else file.write_bytes(content)
    before = tree(workplace)
    refused(retnet_hf(*TRAIN, "--output", "model", "--resume"), "no checkpoint", "can be read")
    assert tree(workplace) == before
    state = Path(shutil.copytree(unfinished / "checkpoint-12", "model.partial/checkpoint-8"), "trainer_state.json")
    state.write_text(json.dumps(json.loads(state.read_text()) | {"global_step": 8}))
    assert folder.to_resume()[0].name == "checkpoint-8"
    shutil.copytree(unfinished / "checkpoint-12", "model.partial/checkpoint-12", dirs_exist_ok=True)
    assert folder.to_resume()[0].name == "checkpoint-12"  # the last one that is whole


@pytest.mark.parametrize("name", ["checkpoint-12-backup", "checkpoint-", "old-checkpoint-12"])
def test_a_copy_of_a_checkpoint_is_neither_resumed_from_nor_deleted(retnet_hf, workplace, unfinished, name):
    shutil.copytree(unfinished, "model.partial")
    shutil.copytree(unfinished / "checkpoint-12", Path("model.partial", name))
    assert TrainingFolder(Path("model"), "train").to_resume()[0].name == "checkpoint-12"
    done(retnet_hf(*TRAIN, "--output", "model", "--resume"))
    assert Path("model", name, "trainer_state.json").exists()


def test_an_earlier_result_is_replaced_only_when_asked_and_only_when_finished(retnet_hf, workplace, trained):
    shutil.copytree(trained, "model")
    refused(retnet_hf(*TRAIN, "--output", "model"), "not empty", "--overwrite")
    for ctrl_c in (press_ctrl_c, press_ctrl_c_twice):
        with pytest.MonkeyPatch.context() as patch:
            at_step(patch, 6, ctrl_c)
            assert retnet_hf(*TRAIN, "--output", "model", "--overwrite", "--seed", 1).code == 130
        assert tree(Path("model")) == tree(trained)
    done(retnet_hf(*TRAIN, "--output", "model", "--overwrite", "--seed", 1))
    assert not torch.equal(weights(Path("model"))["lm_head.weight"], weights(trained)["lm_head.weight"])
    assert {path.name for path in workplace.iterdir()} == {"book.txt", "config.json", "model"}


def test_a_failure_while_publishing_puts_the_earlier_result_back(retnet_hf, workplace, trained, monkeypatch):
    shutil.copytree(trained, "model")
    replace = os.replace

    def fail(source, target):
        if str(source).endswith(".partial"):
            raise OSError(errno.EIO, "Input/output error", str(source))
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    answer = retnet_hf(*TRAIN, "--steps", 1, "--output", "model", "--overwrite")
    refused(answer, "Input/output error", code=1, silent=False)
    assert tree(Path("model")) == tree(trained)


def test_folders_beside_the_output_are_left_alone(retnet_hf, workplace):
    for name in ("model.old", "model.partial"):
        Path(name).mkdir()
        Path(name, "diary.txt").write_text("mine")
    for flag in ([], ["--overwrite"], ["--resume"]):
        refused(retnet_hf(*TRAIN, "--output", "model", *flag), "model.partial", "something else")
    shutil.rmtree("model.partial")
    done(retnet_hf(*TRAIN, "--steps", 1, "--output", "model"))
    assert Path("model.old/diary.txt").read_text() == "mine"
    refused(retnet_hf(*TRAIN, "--output", "model.old", "--overwrite"), "model.old")
    assert Path("model.old/diary.txt").read_text() == "mine"


def test_resuming_is_not_offered_for_what_is_no_run(retnet_hf, tmp_path):
    small_model().save_pretrained(tmp_path / "model")
    said = retnet_hf("train", SAMPLE_TEXT, "--output", tmp_path / "model", "--minutes", 0.01).err
    assert "--overwrite" in said
    assert "--resume" not in said


def test_failing_before_the_first_checkpoint_leaves_nothing(retnet_hf, workplace):
    before, answer = tree(workplace), retnet_hf(*TRAIN, "--output", "model", "--lr", 1e30)
    refused(answer, "no longer a finite number", silent=False)
    assert tree(workplace) == before
    assert not Path("model.partial").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train"], ["TEXT"]),
        (["train", "missing.txt"], ["no such file", "missing.txt"]),
        (["train", "no_such_data"], ["no_such_data", "Couldn't reach"]),
        (["train", "blank.txt"], ["no text", "blank.txt"]),
        (["train", "hollow"], ["empty"]),
        (["train", "latin1.txt"], ["not UTF-8", "latin1.txt", "0xe9", "3"]),
        (["train", "short.txt"], ["too short", "--block-size"]),
        (["train", "bad.jsonl"], ["bad.jsonl", "line 2", "not JSON"]),
        (["train", "good.jsonl", "--field", "body"], ['"body"', "text, title", "--field"]),
        (["train", "half.jsonl"], ["half.jsonl", "line 1", "not Unicode"]),
        (["train", "list.jsonl"], ["list.jsonl", "line 1", '"text"', "list"]),
        (["train", "book.txt", "--preset", "huge"], ["got 'huge'", "tiny", "6.7B"]),
        (["train", "book.txt", "--config", "missing.json"], ["--config", "'missing.json' does not exist"]),
        (["train", "book.txt", "--config", "bad.json"], ["bad.json", "JSON"]),
        (["train", "book.txt", "--config", "list.json"], ["list.json", "object"]),
        (["train", "book.txt", "--config", "llama.json"], ["llama"]),
        (["train", "book.txt", "--config", "wrong.json"], ["num_attention_heads"]),
        (["train", "book.txt", "--config", "typed.json"], ["hidden_size"]),
        (["train", "book.txt", "--config", "config.json", "--preset", "tiny"], ["--preset", "--config"]),
        (["train", "book.txt", "--tokenizer", "./missing"], ["no such folder"]),
        (["train", "book.txt", "--tokenizer", "hollow"], ["no tokenizer", "hollow"]),
        (["train", "book.txt", "--output", "book.txt", "--overwrite"], ["is a file"]),
        (["train", "book.txt", "--resume", "--overwrite", "--output", "config.json"], ["exclude"]),
        (["train", "table.csv"], ["table.csv", '"text"', "title", "--field"]),
        (["train", "numbers.csv", "--field", "n"], ["numbers.csv", "int", "not text"]),
        (["train", "book.txt", "--batch-size", "many"], ["--batch-size", "integer"]),
        (["train", "book.txt", "--optimizer", "muon"], ["--optimizer", "PyTorch 2.9"]),
        (["train", "book.txt", "--form", "round"], ["--form", "'round' is not one of 'auto', 'parallel', 'chunkwise'"]),
        (["generate", "hollow", os.fsdecode(b"caf\xe9")], ["the prompt is not UTF-8", "0xe9"]),
        (["generate", "missing", "And"], ["no such folder", "missing"]),
        (["generate", "hollow", "And"], ["hollow", "config.json"]),
        (["generate", "book.txt", "And"], ["book.txt", "is a file"]),
        (["generate", "hollow", "And", "--temperature", "-1"], ["--temperature"]),
        (["demo", "--output", "full"], ["not empty"]),
        (["bogus"], ["bogus"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_bad_input_gets_one_line(retnet_hf, workplace, arguments, words, monkeypatch):
    monkeypatch.setattr("retnet_hf.cli.training.run.OF_NEW_MODELS", "adamw")  # before PyTorch 2.9
    if "no_such_data" in arguments:
        unreachable = ConnectionError("Couldn't reach 'no_such_data' on the Hub\nand much more")
        monkeypatch.setattr(datasets, "load_dataset", mock.Mock(side_effect=unreachable))
    files = {"blank.txt": b" \n\n\t", "latin1.txt": "café".encode("latin-1"), "short.txt": b"In the beginning"}
    files |= {"bad.jsonl": b'{"text": "fine"}\n{"text": ', "good.jsonl": b'{"text": "fine", "title": "x"}\n'}
    files |= {"list.jsonl": b'["fine"]\n', "table.csv": b"title,body\na,b\n", "numbers.csv": b"n\n1\n"}
    files |= {"half.jsonl": b'{"text": "\\ud800"}\n', "bad.json": b"{ hidden_size", "list.json": b"[1, 2]"}
    files |= {"llama.json": b'{"model_type": "llama"}'}
    files |= {"wrong.json": b'{"hidden_size": 32, "num_attention_heads": 5}'}
    files |= {"typed.json": b'{"hidden_size": "large"}', "full/config.json": b"{}"}
    Path("hollow").mkdir()
    Path("full").mkdir()
    for name, content in files.items():
        Path(name).write_bytes(content)
    before = tree(workplace)
    refused(retnet_hf(*arguments), *words)
    assert tree(workplace) == before
    assert not list(workplace.glob("*.partial"))


def test_too_little_memory_is_one_line_and_a_bug_is_not_hidden_nor_called_a_full_disk(retnet_hf, workplace, monkeypatch):
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")):
        with monkeypatch.context() as patch:
            at_step(patch, 2, mock.Mock(side_effect=error))
            answer = retnet_hf(*TRAIN, "--output", "model")
        assert (answer.code, answer.err) == (2, "retnet-hf: out of memory; try a smaller --batch-size or --block-size\n")
    usage = shutil.disk_usage(".")._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    at_step(monkeypatch, 2, mock.Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        retnet_hf(*TRAIN, "--output", "model")


def test_generate_from_argument_and_stdin(retnet_hf, trained):
    options = ["-n", 20, "--seed", 3, "--threads", 1]
    answer = done(retnet_hf("generate", trained, "And God said", *options))
    assert answer.out.startswith("And God said")
    assert len(answer.out) > len("And God said") + 20
    assert re.fullmatch(r"\d+ tokens, [\d,.]+ tokens/s; the state takes [\d,]+ bytes, whatever the length\n", answer.err)
    for arguments in ([], ["-"]):
        assert retnet_hf("generate", trained, *arguments, *options, stdin=b"And God said\n").out == answer.out
    assert "And God said" + retnet_hf("generate", trained, "And God said", *options, "--no-echo").out == answer.out
    assert retnet_hf("generate", trained, "And God said", *options, "--seed", 4).out != answer.out
    model, tokenizer = AutoModelForCausalLM.from_pretrained(trained), AutoTokenizer.from_pretrained(trained)
    ids = model.generate(**tokenizer("And God", return_tensors="pt"), max_new_tokens=30, do_sample=False)
    answer = retnet_hf("generate", trained, "And God", "-n", 30, "--temperature", 0)
    assert answer.out == tokenizer.decode(ids[0], skip_special_tokens=True) + "\n"


def test_generate_compiles_steps_on_request(retnet_hf, trained, monkeypatch):
    """Before a word is written; what else writes must be a RetNet, and an error is one line."""
    options = ["generate", trained, "And God", "-n", 20, "--temperature", 0, "--threads", 1, "--compile"]
    expected = retnet_hf(*options[:-1]).out

    def compile_quickly(model):
        fast = copy.deepcopy(model)
        fast.lm_head.__class__ = type("Fast", (torch.nn.Linear,), {})
        return fast

    with mock.patch.object(cpu, "compile", side_effect=compile_quickly) as compiled:
        assert retnet_hf(*options).out == expected
    compiled.assert_called_once()
    with mock.patch.object(cpu, "compile", side_effect=RuntimeError("no compiler\nand more")):
        assert retnet_hf(*options).err == "retnet-hf: no compiler\n"
    for name in ("layer_programs", "product_programs"):  # as where all layers are adapted
        monkeypatch.setattr(cpu, name, lambda *arguments: {})
    refused(retnet_hf(*options), "no layer of this model can be compiled")
    monkeypatch.setattr("retnet_hf.cli.text.generation.load_model", lambda name: (small_llama(), None))
    refused(retnet_hf(*options), "--compile is for a RetNet, and this is a model of type llama")


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_small_model_takes_one_thread_unless_asked(retnet_hf, trained, command, monkeypatch):
    taken = []
    monkeypatch.setattr(torch, "set_num_threads", taken.append)
    monkeypatch.setattr(sys, "stdin", io.StringIO("And God\n/exit\n"))
    prompt = ["And God"] if command == "generate" else []
    done(retnet_hf(command, trained, *prompt, "-n", 1))
    assert taken == [1]


def test_what_comes_next_is_named_as_it_was_typed(monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", [".venv/bin/retnet-hf"])
    for found, typed in ((None, ".venv/bin/retnet-hf"), ("/bin/retnet-hf", "retnet-hf")):
        monkeypatch.setattr(shutil, "which", lambda name, found=found: found)
        invite(Path("model"), "And God", Console())
        assert capfd.readouterr().out == f"try it: {typed} generate model 'And God'\n"


def test_the_prompt_of_stdin(retnet_hf, trained, monkeypatch):
    refused(retnet_hf("generate", trained, stdin=b"caf\xe9"), "stdin is not UTF-8", "0xe9")
    assert retnet_hf("generate", trained, stdin=b"").out.strip()
    monkeypatch.setattr(sys, "stdin", None)
    refused(retnet_hf("generate", trained), "give a prompt")


def test_folders_are_read_in_order_and_without_what_a_user_does_not_see(workplace):
    """Which the user is told. A file is read once, whatever leads to it."""
    of_lines = b'{"body": "3"}\n\n{"more": [1], "body": "4"}\n'
    texts = {"a.txt": b"\xef\xbb\xbffirst\r\nline", "B.MD": b"second", "deep/c[1].Jsonl": of_lines}
    others = ".ipynb_checkpoints/a-checkpoint.txt .git/a.txt .a.txt a.txt~ old~/a.txt .~lock.a.txt# ~$a.txt ._a.txt "
    others += "#a.txt# a.txt.bak picture.png none own/a.txt"
    for name, content in (texts | dict.fromkeys(others.split(), b"no")).items():
        Path("shelf", name).parent.mkdir(parents=True, exist_ok=True)
        Path("shelf", name).write_bytes(content)
    for link, target in (("loop", "."), ("round", "round"), ("gone.txt", "nowhere"), ("e.txt", "a.txt"), ("f", "deep")):
        Path("shelf", link).symlink_to(target)
    Path("shelf/g.txt").hardlink_to("shelf/a.txt")
    sources, own = ["shelf", "shelf/a.txt", "shelf/deep"], [Path("shelf/own").resolve()]
    assert read_documents(sources, "body", apart_from=own) == ["second", "first\nline", "3", "4"]
    said = "read 3 files (.jsonl, .md, .txt), skipped 21 (.bak, .png, .txt#, hidden, links, no ending, …)"
    assert text_files(sources, own)[1] == said
    assert read_documents(["shelf/.git", "shelf/.a.txt"]) == ["no", "no"]  # which are asked for


def test_data_sets_are_read(workplace, monkeypatch):
    rows = datasets.Dataset.from_dict({"body": ["one", "two", None, " "]})
    rows.save_to_disk("saved")
    Path("tables").mkdir()
    rows.to_parquet("tables/train.parquet")
    assert read_documents(["saved"], field="body") == ["one", "two"]
    assert read_documents(["tables"], field="body") == ["one", "two"]
    datasets.DatasetDict({"train": rows.select([0]), "test": rows.select([1])}).save_to_disk("parts")
    assert read_documents(["parts"], field="body", split="test") == ["two"]
    with pytest.raises(InputError, match="validation"):
        read_documents(["parts"], field="body", split="validation")
    with pytest.raises(InputError, match='no field "text".*body'):
        read_documents(["saved"])

    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or rows)
    assert read_documents(["user/data"], "body", "validation", "small") == ["one", "two"]
    assert asked == [(("user/data", "small"), {"split": "validation", "streaming": False})]


@pytest.mark.parametrize("count", [1, 3, 500])
def test_held_out_text_is_never_trained_on(count):
    words = [f"word{index}" for index in range(2000)]
    size = len(words) // count
    documents = [" ".join(words[index * size : (index + 1) * size]) for index in range(count)]
    training, evaluation = hold_out(documents, 0.1, seed=0)
    training, evaluation = " ".join(training).split(), " ".join(evaluation).split()
    assert sorted(training + evaluation) == sorted(words[: count * size])
    assert 0.05 < len(evaluation) / len(words) < 0.15


def test_the_learning_rate_falls_by_the_clock_but_rises_by_steps():
    """So that a run whose time is up has annealed, and one of a few steps an hour still warms up."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    kwargs = {"num_warmup_steps": 100, "num_training_steps": 10_000, "scheduler_specific_kwargs": {"min_lr_rate": 0.1}}
    scheduler = get_scheduler("cosine_warmup_with_min_lr", optimizer, **kwargs)

    def rate(step: int, step_by_clock: float) -> float:
        course = Course(steps=10_000, minutes=1.0, started=time.monotonic() - 60 * step_by_clock / 10_000)
        state, control = TrainerState(global_step=step), TrainerControl()
        Supervisor(course).on_step_end(None, state, control, optimizer=optimizer, lr_scheduler=scheduler)
        return optimizer.param_groups[0]["lr"]

    assert (rate(49, 5000), rate(200, 5050)) == (pytest.approx(2.0 * 0.5), pytest.approx(2.0 * 0.55, rel=1e-3))
    assert rate(200, 9999) == pytest.approx(2.0 * 0.1, rel=1e-3)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(2.0 * 0.02)  # of step 1: nothing of the clock is left


def test_a_run_whose_minutes_end_it_has_annealed(retnet_hf, workplace, monkeypatch):
    rates, on_step_end = [], Supervisor.on_step_end

    def patched(self, args, state, control, optimizer=None, **kwargs):
        on_step_end(self, args, state, control, optimizer=optimizer, **kwargs)
        rates.append(optimizer.param_groups[0]["lr"])

    monkeypatch.setattr(Supervisor, "on_step_end", patched)
    clock = itertools.count(step=0.015)  # which goes on at every look, however fast this machine is
    monkeypatch.setattr(Course, "seconds", lambda self: next(clock))
    answer = done(retnet_hf(*TRAIN, "--steps", 100_000, "--eval-every", 100_000, "--minutes", 0.05))
    assert "when its time was up" in answer.out
    assert "of 100,000" in answer.out
    assert Path("retnet-model/config.json").is_file()
    assert max(rates) > 3 * rates[-2]  # which the last step was made with


def test_demo(retnet_hf, workplace):
    Path("book.txt").write_text(SAMPLE_TEXT.read_text(encoding="utf-8")[:60_000], encoding="utf-8")
    answer = done(retnet_hf("demo", "--text", "book.txt", "--minutes", 0.08, "--threads", 1))
    assert answer.err == ""
    before, after = re.search(r"held-out text: ([\d,.]+) before training, ([\d,.]+) after", answer.out).groups()
    assert float(after.replace(",", "")) < float(before.replace(",", ""))
    assert "reloaded with AutoModelForCausalLM" in answer.out
    said = " ".join(answer.out.split())
    # keys and values of four layers of 128 numbers in float32
    assert re.search("its state takes 0.26 MB, and after 16,384 tokens 0.26 MB; the KV cache .* take 67 MB", said)
    assert "next: retnet-hf chat retnet-demo" in said
    assert AutoModelForCausalLM.from_pretrained("retnet-demo").config.hidden_size == 128
    assert free_name("retnet-demo") == Path("retnet-demo-2")


def test_an_interrupted_demo_leaves_nothing(retnet_hf, workplace, monkeypatch):
    at_step(monkeypatch, 1, press_ctrl_c)
    refused(retnet_hf("demo", "--threads", 1), "interrupted", code=130, silent=False)
    assert {path.name for path in workplace.iterdir()} == {"book.txt", "config.json"}


def test_a_demo_that_cannot_begin_leaves_an_interrupted_run_alone(retnet_hf, workplace, unfinished):
    shutil.copytree(unfinished, "model.partial")
    refused(retnet_hf("demo", "--text", "missing.txt", "--output", "model", "--overwrite"), "missing.txt")
    assert tree(Path("model.partial")) == tree(unfinished)
