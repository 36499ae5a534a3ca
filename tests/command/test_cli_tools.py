# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What users bring along: tokenizers of other models, adapters, a Llama, files named in capitals, full disks."""

import errno
import json
import math
import resource
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from command_answers import done, refused, tree
from foreign_folders import foreign, write_folder
from peft import LoraConfig, inject_adapter_in_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from small_models import VOCAB_SIZE, small_model, word_tokenizer
from tokenizers.processors import TemplateProcessing
from torch.nn.utils.parametrizations import weight_norm
from torchrun import free_port
from transformers import AutoTokenizer

from retnet_hf.cli.commands import serve
from retnet_hf.cli.text.corpus import END_OF_TEXT, encode, load_tokenizer, train_tokenizer
from retnet_hf.cli.text.generation import encode_prompt
from retnet_hf.export import ExportError, export_mlx


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible")

TRAIN = ("train", "book.txt", "--config", "small.json", "--block-size", 8, "--steps", 1, "-o", "made")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Path:
    """A working directory with a text, a model whose tokenizer has no eos token, and a foreign checkpoint."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("w5 w6 w7 w8 " * 500, encoding="utf-8")
    Path("small.json").write_text(json.dumps(SIZES), encoding="utf-8")
    small_model("fla", num_hidden_layers=1).save_pretrained("model")
    tokenizer = word_tokenizer()
    tokenizer.eos_token = tokenizer.bos_token = None
    tokenizer.save_pretrained("model")
    _, state_dict, config = foreign("fla")
    write_folder(tmp_path / "foreign", state_dict, config)
    return tmp_path


def test_a_tokenizer_without_eos_is_enough_to_write_and_to_export_and_cannot_separate_documents(retnet_hf, workplace):
    for arguments in (("generate", "model", "-n", 2), ("chat", "model", "-n", 2), ("export", "model", "mlx", "--to", "mlx")):
        done(retnet_hf(*arguments, stdin=b"w5 w6\n"))
    refused(retnet_hf(*TRAIN, "--tokenizer", "model"), "the tokenizer model has no eos token, which is needed to separate")
    assert not Path("made").exists()
    refused(retnet_hf("generate", "model", ""), "has neither a bos nor an eos token to begin an empty text with")


@pytest.mark.parametrize("single", ["$A", "$A w92", "w91 $A", "w91 $A w92", "w92 $A", "w92 $A w92", "w91 w93 $A w92"])
def test_prompts_begin_as_texts_do_in_training_and_end_without_eos(workplace, single):
    """Also of the tokenizer that the commands save, and other programs load."""
    begin = [int(name[1:]) for name in single.split("$A")[0].split()]
    tokenizer = word_tokenizer()
    tokenizer.eos_token = "w92"
    special = [(f"w{number}", number) for number in (91, 92, 93)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    tokenizer.save_pretrained("model")
    load_tokenizer("model").save_pretrained("again")
    for ids in (encode_prompt(tokenizer, "w5 w6"), AutoTokenizer.from_pretrained("again")("w5 w6")["input_ids"]):
        assert ids == [*begin, 5, 6]
    between = [92] if begin == [92] else [92, *begin]
    assert encode(["w5 w6", "w7"], tokenizer).tolist() == [*(begin or [92]), 5, 6, *between, 7, 92]


def test_a_special_token_that_a_text_spells_out_is_text(workplace):
    text = f"a{END_OF_TEXT}b"
    tokenizer = train_tokenizer([text], 300)
    assert encode([text, text], tokenizer).tolist().count(tokenizer.eos_token_id) == 3
    assert tokenizer.eos_token_id not in (ids := encode_prompt(tokenizer, text))
    assert tokenizer.decode(ids) == text


UNUSABLE = [  # files of a model, and what is said about them
    ("generation_config.json", '{"eos_token_id": "x"}', "the model cannot continue this text: new()"),
    ("generation_config.json", '{"bad_words_ids": [[1, "a"]]}', "the model cannot continue this text: Each list in"),
    ("generation_config.json", '{"num_beams": 3}', "2 tokens"),
    ("tokenizer_config.json", '{"a":' + "[" * 100_000, "does not hold a tokenizer that can be loaded: maximum"),
    ("tokenizer.json", "{}", "does not hold a tokenizer that can be loaded: KeyError"),
    ("config.json", {"vocab_size": VOCAB_SIZE + 1}, "do not fit its config.json: 2 are missing or of"),
    ("config.json", {"vocab_size": 10**12}, "does not hold a model that can be loaded"),
    ("config.json", "{ broken", "does not hold a model that can be loaded"),
    ("model.safetensors", "cut", "does not hold a model that can be loaded"),
    ("model.safetensors", math.nan, "its logits are not finite numbers: the weights are damaged"),
    ("model.safetensors", math.inf, "its logits are not finite numbers: the weights are damaged"),
]
GOES_ON = ("cannot continue", "not finite")  # a conversation does


@pytest.mark.parametrize(("name", "content", "said"), UNUSABLE)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_what_cannot_be_used_in_a_folder_is_one_line(retnet_hf, workplace, command, name, content, said):
    file = Path("model", name)
    if isinstance(content, float):
        save_file(load_file(file) | {"lm_head.weight": torch.full((VOCAB_SIZE, 32), content)}, file, {"format": "pt"})
    else:
        file.write_text(content if isinstance(content, str) else json.dumps(json.loads(file.read_text()) | content))
    for temperature in (0, 0.8):
        answer = retnet_hf(command, "model", "-n", 2, "--temperature", temperature, stdin=b"w5\n")
        goes_on = said == "2 tokens" or (command == "chat" and any(words in said for words in GOES_ON))
        assert answer.code == (0 if goes_on else 2)
        assert len([line for line in answer.err.splitlines() if "/help" not in line]) == 1
        assert said in answer.err


def test_a_chat_template_that_writes_nothing_is_named(retnet_hf, workplace):
    Path("model/chat_template.jinja").write_text("{# nothing #}")
    answer = done(retnet_hf("chat", "model", "-n", 2, stdin=b"w5\n"))
    assert "there is no text to continue: the chat template wrote nothing" in answer.err


CHANGED = {  # models with other tensors than mlx-lm expects
    "injected": lambda model: inject_adapter_in_model(LoraConfig(target_modules=["q_proj"]), model),
    "normed": lambda model: weight_norm(model.lm_head) and model,
    "biased": lambda model: setattr(model, "lm_head", torch.nn.Linear(32, VOCAB_SIZE)) or model,
    "shorter": lambda model: model.model.layers.pop(-1) and model,
}


@pytest.mark.parametrize("change", CHANGED.values(), ids=CHANGED)
def test_what_mlx_lm_cannot_load_is_not_exported(tmp_path, change):
    said = r"mlx-lm loads only the tensors of a plain RetNet, and (model|lm_head)\..*: merge adap"
    with pytest.raises(ExportError, match=said):
        export_mlx(change(small_model("fla")), tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_tokenizer_that_is_larger_than_the_vocabulary_is_named(retnet_hf, workplace):
    tokenizer = word_tokenizer()
    tokenizer.add_tokens("surplus")
    tokenizer.save_pretrained("model")
    said = f"the tokenizer has a token {VOCAB_SIZE}, and the model knows {VOCAB_SIZE} tokens: copy the tokenizer that"
    refused(retnet_hf("generate", "model", "surplus", "--no-echo"), said)
    answer = done(retnet_hf("chat", "model", "-n", 2, stdin=b"surplus\nw5\n"))
    assert said in answer.err
    assert "2 tokens" in answer.err
    assert retnet_hf("generate", "model", "w5", "-n", 2).code == 0  # what it knows, it reads


@pytest.mark.parametrize("command", ["generate", "chat", "export", "convert", "inspect", "serve", "linearize"])
def test_an_adapter_is_told_from_a_model_and_how_to_merge_it(retnet_hf, workplace, monkeypatch, command):
    Path("lora").mkdir()
    Path("lora/adapter_config.json").write_text('{"peft_type": "LORA"}')
    torch.save({}, "lora/training_args.bin")
    monkeypatch.setattr(serve, "ENGINES", {"transformers": ()})
    output = {"export": ["made"], "convert": ["made"], "serve": ["--port", free_port()]}.get(command, [])
    answer = retnet_hf(command, "lora", *output, stdin=b"w5")
    refused(answer, "lora holds an adapter of PEFT, not a model", "merge_and_unload()")


def test_a_server_of_a_model_without_a_template_says_what_it_answers(retnet_hf, workplace, monkeypatch):
    monkeypatch.setattr(serve, "ENGINES", {"transformers": ()})
    monkeypatch.setattr(serve, "become", lambda command: None)
    answer = done(retnet_hf("serve", "model", "--engine", "transformers", "--port", free_port()))
    assert "no chat template: /v1/completions answers, /v1/chat/completions does not" in answer.err


def test_endings_mean_the_same_in_capitals(retnet_hf, workplace):
    Path("foreign/model.safetensors").rename("foreign/WEIGHTS.SAFETENSORS")
    done(retnet_hf("convert", "foreign", "made"))
    torch.save(dict(small_model("fla").state_dict()), "WEIGHTS.PT")
    done(retnet_hf("inspect", "WEIGHTS.PT"))
    refused(retnet_hf("inspect", "/dev/null"), "/dev/null is neither a file nor a folder")


EXPORT, FEW = ("export", "model", "made", "--to", "mlx"), (*TRAIN, "--vocab-size", 258)


@pytest.mark.parametrize("command", [("convert", "foreign", "made"), EXPORT, FEW], ids=["convert", "export", "train"])
def test_a_full_disk_is_one_line_and_leaves_everything_as_it_was(retnet_hf, workplace, command):
    shutil.copytree("model", "made")
    before, limit = tree(workplace), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))  # no file of more bytes can be written
        refused(retnet_hf(*command, "--overwrite"), code=1, silent=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert tree(workplace) == before


ERRORS = (
    OSError(errno.EDQUOT, "Disk quota exceeded", "made/model.safetensors"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    RuntimeError("[enforce fail at inline_container.cc] . PytorchStreamWriter failed writing file data/0"),
    MemoryError(),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_full_disk_is_one_line_however_libraries_say_it(retnet_hf, workplace, monkeypatch, error):
    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", mock.Mock(side_effect=error))
    before = tree(workplace)
    words = "out of memory" if isinstance(error, MemoryError) else ""
    refused(retnet_hf("convert", "foreign", "made"), words, code=1)
    assert tree(workplace) == before
