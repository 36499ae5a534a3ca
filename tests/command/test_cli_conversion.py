# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf convert` and `inspect`: the folder that is made, and every kind of checkpoint that is refused."""

import argparse
import json
import math
import os
import pickle
import re
import runpy
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from command_answers import done, refused, tree, weights
from foreign_folders import foreign, fused, to_poolformer, write_folder
from huggingface_hub import ModelCard
from places import ROOT
from safetensors.torch import save_file
from small_models import same_tensors, small_llama, small_model, word_tokenizer
from small_vision_models import small_metaformer, small_rmt
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageClassification, GenerationConfig, pipeline

from retnet_hf import MetaFormerImageProcessorPil, RMTBackbone, RMTModel
from retnet_hf.conversion.converted_folder import how_to_load
from retnet_hf.conversion.fla import to_fla
from retnet_hf.conversion.formats import FORMATS
from retnet_hf.conversion.replaced_folder import replace, whole, write_whole
from retnet_hf.conversion.torchscale import to_torchscale


pytestmark = pytest.mark.usefixtures("heard_again", "interruptible", "in_an_empty_folder")


@pytest.fixture
def source(tmp_path) -> Path:
    _, state_dict, config = foreign("fla")
    folder = write_folder(tmp_path / "source", state_dict, config)
    word_tokenizer().save_pretrained(folder)
    GenerationConfig(max_new_tokens=7, do_sample=False, pad_token_id=0).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: mit\n---\n\n# Somebody's model\n")
    return folder


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_each_format_has_a_script(name, source, monkeypatch, capsys):
    script = ROOT / "conversion" / f"convert_{name}_to_hf.py"
    monkeypatch.setattr(sys, "argv", [str(script), "source", "made"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    if name == "fla":
        assert not ended.value.code
        assert AutoModelForCausalLM.from_pretrained("made").config.model_type == "retnet"
    else:
        assert ended.value.code == 2
        assert "source looks like the format fla, not " + name in capsys.readouterr().err


def test_a_folder_becomes_one_that_loads_generates_and_says_where_it_is_from(retnet_hf, source):
    answer = done(retnet_hf("convert", "source", "made"))
    assert "each used once" in answer.out
    assert "AutoModelForCausalLM.from_pretrained('made')" in answer.out
    model = AutoModelForCausalLM.from_pretrained("made")
    same_tensors(model.state_dict(), small_model().state_dict())
    assert model.generation_config.max_new_tokens == 7
    assert transformers.AutoTokenizer.from_pretrained("made").get_vocab() == word_tokenizer().get_vocab()
    card = ModelCard.load("made/README.md")
    assert card.data.license == "mit"
    assert "`source`" in card.text
    assert "flash-linear-attention" in card.text
    assert str(source.parent) not in card.text
    assert len(pipeline("text-generation", model="made")("the")[0]["generated_text"].split()) > 1
    assert sorted(path.name for path in source.parent.iterdir()) == ["made", "source"]


def test_fairseq_checkpoints_carry_their_own_configuration(retnet_hf):
    model = small_model("torchscale", decay_schedule="power_of_two", residual_multiplier=4**0.25)
    state_dict, config = to_torchscale(model)
    arguments = argparse.Namespace(**config | {"lr": [0.1], "vocab_size": -1})
    held = {"args": arguments, "model": {f"decoder.{name}": value for name, value in state_dict.items()}, "optimizer": {}}
    torch.save(held, "checkpoint_last.pt")
    done(retnet_hf("convert", "checkpoint_last.pt", "made", "--license", "apache-2.0"))
    made = AutoModelForCausalLM.from_pretrained("made")
    assert torch.equal(made(torch.arange(5)[None]).logits, model(torch.arange(5)[None]).logits)
    assert ModelCard.load("made/README.md").data.license == "apache-2.0"


@pytest.mark.parametrize("layout", ["sharded", "bin"])
def test_shards_and_pickles_of_either_layout_are_read(retnet_hf, tmp_path, layout):
    model, state_dict, config = foreign("fla of 2024")
    write_folder(tmp_path / "source", state_dict, config, layout)
    done(retnet_hf("convert", "source", "made", "--from", "fla"))
    made = AutoModelForCausalLM.from_pretrained("made").state_dict()
    assert all(torch.equal(made[name], value) for name, value in model.state_dict().items())


class Malicious:
    """Unpickling it writes a file."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def changed(folder: Path, name: str, value: torch.Tensor) -> None:
    save_file(weights(folder) | {name: value}, folder / WEIGHTS)


def pickled(folder: Path, held: object, pickles=torch.save) -> None:
    (folder / "model.safetensors").unlink()
    with open(folder / "pytorch_model.bin", "wb") as stream:
        pickles(held, stream)


def configured(folder: Path, **fields) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def other_model(folder: Path, model_type: str) -> None:
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.ones(2, 2)}, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))


def index_of(folder: Path, index: object) -> None:
    (folder / "model.safetensors").rename(folder / "other")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def two_homes(folder: Path) -> None:
    save_file({"lm_head.weight": torch.ones(2)}, folder / "second.safetensors")
    index_of(folder, dict.fromkeys(weights(folder), "other.safetensors") | {"lm_head.weight": "second.safetensors"})
    (folder / "other").rename(folder / "other.safetensors")


def scalar_embedding(folder: Path) -> None:
    _, state_dict, config = foreign("syncdoth")
    write_folder(folder, state_dict | {"model.embed_tokens.weight": torch.tensor(1.0)}, config | {"vocab_size": -1})


DEEP = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 136304\n"
NO_FIT = "the configuration of .*source does not fit the format "
SURPLUS = "model.layers.1.attn.surplus.weight"
CODE = "run code in it, and is therefore refused"
WEIGHTS = "model.safetensors"


def written(name: str, content: str):
    return lambda folder: (folder / name).write_text(content)


def pickled_tensors(change):
    return lambda folder: pickled(folder, {name: change(value) for name, value in weights(folder).items()})


def cut_pickle(folder: Path) -> None:
    pickled(folder, weights(folder))
    os.truncate(folder / "pytorch_model.bin", 20_000)


CONFIG, NO_VALUES = "config.json", "pytorch_model.bin is on the device meta, and has no values"
BROKEN = [
    ("generation_config.json cannot be used", written("generation_config.json", '{"compile_config": [1]}')),
    ("cut off within its header", lambda f: (f / WEIGHTS).write_bytes(struct.pack("<Q", 2**60) + b"{}")),
    ("cut off within its header", lambda f: os.truncate(f / WEIGHTS, 100)),
    ("tensor .* is incomplete: .* ends .* bytes before its end", lambda f: os.truncate(f / WEIGHTS, 20_000)),
    ("pytorch_model.bin (is damaged|holds more)", cut_pickle),
    (f"tensor {SURPLUS} has no place", lambda f: changed(f, SURPLUS, torch.ones(2))),
    (r"has shape \(96, 32\), but .* it is \(50, 32\)", lambda f: configured(f, vocab_size=50)),
    (CODE, lambda f: pickled(f, {"model": Malicious()}, pickle.dump)),
    (CODE, lambda f: pickled(f, {"model": {"a": torch.ones(2, 2)}, "extra": Malicious()})),
    ("holds no weights", lambda f: [path.unlink() for path in f.iterdir()]),
    ("'llama'.* has none of .*: `retnet-hf linearize` makes a RetNet from a llama", lambda f: other_model(f, "llama")),
    ("'gpt2'.* has none of .* first tensor is model.layers.0.self_attn.q_proj", lambda f: other_model(f, "gpt2")),
    ("is a nested tensor, which cannot be a parameter", pickled_tensors(lambda v: torch.nested.nested_tensor([v, v]))),
    (NO_VALUES, pickled_tensors(lambda value: value.to("meta"))),
    ("first tensor is model", lambda f: pickled(f, {"model": torch.ones(3)})),
    (f"{NO_FIT}fla|1000000000000, 32", lambda f: configured(f, vocab_size=10**12)),
    ("of 1000000000, but at most 65536 is allowed", lambda f: configured(f, num_hidden_layers=10**9)),
    (f"{CONFIG} cannot be read as JSON: (RecursionError|maximum recursion)", written(CONFIG, DEEP)),
    (r"tensor model\.layers\.0\.\\x1b\[31mred", lambda f: changed(f, "model.layers.0.\x1b[31mred", torch.ones(2))),
    (r"index.json places tensor .* outside of its folder, in \.\./", lambda f: index_of(f, {"a": "../other.safetensors"})),
    ("index.json places tensor .* outside of its folder, in /", lambda f: index_of(f, {"a": f"{f.resolve()}/other"})),
    (f"{NO_FIT}fla: .*expansion must be", lambda f: configured(f, num_heads=5)),
    ("the format fla needs a config.json", lambda f: (f / CONFIG).unlink()),
    ("tensor .* is missing: the file model-1.safetensors", lambda f: index_of(f, {"lm_head.weight": "model-1.safetensors"})),
    ("is a pointer of git-lfs, not the weights: run 'git lfs pull'", written(WEIGHTS, POINTER)),
    ("index.json has no weight_map from tensors to files", lambda f: index_of(f, {"lm_head.weight": 1})),
    ("tensor lm_head.weight is in more than one file; the second one is second.safetensors", two_homes),
    (f"{NO_FIT}syncdoth", scalar_embedding),
]


@pytest.mark.parametrize(("said", "breaks"), BROKEN)
def test_a_broken_checkpoint_ends_in_one_sentence_and_nothing_is_written(retnet_hf, source, breaks, said):
    breaks(source)
    answer = retnet_hf("convert", "source", "made")
    refused(answer)
    assert re.search(said, answer.err), answer.err
    assert [path.name for path in source.parent.iterdir()] == ["source"], "nothing is written, no code is run"
    answer = retnet_hf("inspect", "source")
    assert answer.code in (0, 2)
    assert answer.err.count("\n") == answer.code // 2
    assert "\x1b" not in answer.out + answer.err
    if SURPLUS in said:
        assert f"convertible no: tensor {SURPLUS} has no place" in " ".join(answer.out.split())


@pytest.mark.parametrize("content", [b"hello", b"\x80\x02" + b"junk" * 9, pickle.dumps(object()), bytes(range(256))])
def test_no_error_advises_to_run_the_code_in_a_file(retnet_hf, source, content):
    """As torch's own do, which say how to load what `weights_only=True` refuses."""
    small_model().save_pretrained("ours")
    os.remove("ours/model.safetensors")
    for file in ("junk.bin", "ours/pytorch_model.bin"):
        Path(file).write_bytes(content)
    for arguments in (["inspect", "junk.bin"], ["convert", "junk.bin", "made"], ["generate", "ours", "And"]):
        refused(answer := retnet_hf(*arguments))
        assert "weights_only" not in answer.err
        assert "damaged" in answer.err or "does not hold a model" in answer.err


def test_a_result_is_never_lost(retnet_hf, source):
    done(retnet_hf("convert", "source", "made"))
    before = tree(Path("made"))
    os.rename("made", ".made.replaced")  # a crash between the renames is made good
    refused(retnet_hf("convert", "source", "made"), "--overwrite")
    save_file(to_fla(small_model(seed=1))[0], source / WEIGHTS)
    with mock.patch.object(ModelCard, "save", side_effect=KeyboardInterrupt):
        answer = retnet_hf("convert", "source", "made", "--overwrite")
    assert (answer.code, answer.err) == (130, "retnet-hf: interrupted\n")
    up = "model.layers.0.mlp.up_proj.weight"
    changed(source, up, weights(source)[up] * math.nan)
    assert (retnet_hf("convert", "source", "made", "--overwrite").code, tree(Path("made"))) == (2, before)
    assert sorted(path.name for path in source.parent.iterdir()) == ["made", "source"]
    save_file(to_fla(small_model(seed=1))[0], source / WEIGHTS)
    done(retnet_hf("convert", "source", "made", "--overwrite"))
    assert tree(Path("made")) != before


def test_an_earlier_folder_with_other_files_is_kept_aside(tmp_path, capsys):
    for number, others in enumerate(([], ["notes.txt"], ["deep/notes.txt"], [])):
        for name in ("config.json", "model.safetensors", *others):
            (tmp_path / "made" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "made" / name).write_text(f"earlier {number}")
        (tmp_path / "new").mkdir()
        for name in ("config.json", "model.safetensors", "README.md"):
            (tmp_path / "new" / name).write_text(f"new {number}")
        replace(tmp_path / "made", tmp_path / "new")
        assert (tmp_path / "made" / "config.json").read_text() == f"new {number}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "made.old", "made.old1"]
    assert (tmp_path / "made.old" / "notes.txt").read_text() == "earlier 1"
    assert (tmp_path / "made.old1" / "deep" / "notes.txt").read_text() == "earlier 2"
    assert capsys.readouterr().err.count("the earlier made had other files, too, and is kept: ") == 2


def test_files_are_whole_however_many_write_them_at_once(tmp_path):
    file, texts = tmp_path / "run.json", [str(number) * 10**6 for number in range(4)]

    def write(text: str) -> None:
        for _ in range(10):
            write_whole(file, text)
            assert file.read_text() in texts

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, texts))
    with pytest.raises(OSError, match="4"), whole(file) as partial:
        raise OSError(partial.write_text("half"))
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_text() in texts


def test_what_needs_no_conversion_and_what_is_unknown_is_said(retnet_hf, source):
    small_model().save_pretrained("ours")
    assert "ours is already a model of retnet_hf: from_pretrained loads it" in retnet_hf("convert", "ours", "made").err
    assert "must be one of vir_official" in retnet_hf("convert", "source", "made", "--from", "bla").err
    assert "ours is a model of retnet_hf" in retnet_hf("convert", "ours", "other", "--from", "syncdoth").err
    assert "does not exist" in retnet_hf("convert", "./nothing", "made").err
    Path("notes.txt").write_text("no weights")
    assert "is not a weights file" in retnet_hf("convert", "notes.txt", "made").err


def test_inspect_says_what_a_checkpoint_is(retnet_hf, source):
    save_file({name: value.bfloat16() for name, value in fused(weights(source)).items()}, source / WEIGHTS)
    text, model = " ".join(done(retnet_hf("inspect", "source")).out.split()), small_model()
    assert "fla: flash-linear-attention" in text
    assert f"parameters {model.num_parameters():,}" in text
    assert "dtype bfloat16" in text
    with torch.no_grad():
        state_bytes = model(torch.tensor([[3]])).past_key_values.nbytes
    assert f"state {state_bytes:,} bytes per sequence" in text
    assert "0.96875" in text
    assert f"{math.log(0.5) / math.log(1 - 2**-5):,.1f}" in text  # half-life of the first head


def test_inspect_reads_our_own_folders_and_single_files(retnet_hf, source):
    small_model("torchscale").save_pretrained("ours")
    ours = done(retnet_hf("inspect", "ours"))
    assert "retnet_hf's own" in ours.out
    assert f"{1 - 1 / 32:.5g}" in ours.out
    assert "fla" in retnet_hf("inspect", "source/model.safetensors").out
    small_model(decay_schedule="none").save_pretrained("ours")  # whose heads forget nothing
    assert retnet_hf("inspect", "ours").out.count("never") == 8  # two columns of four heads
    config = json.loads(Path("ours/config.json").read_text())
    Path("ours/config.json").write_text(json.dumps(config | {"intermediate_size": 8}))
    refused(retnet_hf("inspect", "ours"), "the weights in ours do not fit its config.json:")


WRAPPERS = {
    "beside a tensor": lambda held: {"model": held, "epoch": torch.tensor(3)},
    "beside a measured loss": lambda held: {"model": held, "best_loss": np.float64(2.5)},
    "with an empty average": lambda held: {"model": held, "model_ema": {}},
    "of which the average counts": lambda held: {"model": {name: 0 * held[name] for name in held}, "model_ema": held},
    "in two wrappers": lambda held: {"state_dict": {"model": held}},
    "of a compiled and distributed model": lambda held: {f"_orig_mod.module.{name}": held[name] for name in held},
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_weights_are_found_in_what_training_scripts_save(retnet_hf, source, wrapper):
    pickled(source, WRAPPERS[wrapper](weights(source)))
    done(retnet_hf("convert", "source", "made"))
    made = weights(Path("made"))
    assert all(torch.equal(made[name], value) for name, value in small_model().state_dict().items())


def test_of_several_files_the_one_that_from_pretrained_reads_is_converted(retnet_hf, source):
    other = {name: 0 * value for name, value in weights(source).items()}
    torch.save(other, source / "pytorch_model-00001-of-00001.bin")
    index = {"weight_map": dict.fromkeys(other, "pytorch_model-00001-of-00001.bin")}
    (source / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    done(retnet_hf("convert", "source", "made"))
    assert torch.equal(weights(Path("made"))["lm_head.weight"], small_model().lm_head.weight)


@pytest.mark.parametrize("dialect", ["fla", "fla of 2024", "syncdoth"])
def test_a_base_model_saved_by_itself_becomes_one(retnet_hf, tmp_path, dialect):
    model, state_dict, config = foreign(dialect)
    base = {name.removeprefix("model."): value for name, value in state_dict.items() if name.startswith("model.")}
    write_folder(tmp_path / "source", base, config)
    assert "AutoModel.from_pretrained('made')" in done(retnet_hf("convert", "source", "made")).out
    made, report = AutoModel.from_pretrained("made", output_loading_info=True)
    assert not any(report.values())
    assert all(torch.equal(made.state_dict()[name], value) for name, value in model.model.state_dict().items())


def test_a_tied_tensor_may_be_there_under_either_of_its_names(retnet_hf, tmp_path):
    model, state_dict, config = foreign("fla", tie_word_embeddings=True)
    for lost in ("lm_head.weight", "model.embeddings.weight"):
        write_folder(tmp_path / "source", {name: value for name, value in state_dict.items() if name != lost}, config)
        done(retnet_hf("convert", "source", "made", "--overwrite"))
        assert torch.equal(AutoModelForCausalLM.from_pretrained("made").lm_head.weight, model.lm_head.weight)


def test_what_is_beside_the_weights_is_kept(retnet_hf, source):
    """A licence of its own; how to generate, where older versions of transformers had it; types; names with brackets."""
    (source / "README.md").write_text("---\nlicense: other\nlicense_name: calm\nlicense_link: LICENSE\n---\n")
    (source / "generation_config.json").unlink()
    configured(source, do_sample=True, temperature=0.7)
    narrowed = {name: value.bfloat16() if value.dim() > 1 else value for name, value in weights(source).items()}
    save_file(narrowed, source / WEIGHTS)
    Path("source[").mkdir()
    source.rename("source[/b]")
    assert "parameters in made[v2]" in " ".join(done(retnet_hf("convert", "source[/b]", "made[v2]")).out.split())
    assert "source[/b]" in retnet_hf("inspect", "source[/b]").out
    card = ModelCard.load("made[v2]/README.md")
    assert (card.data.license, card.data.license_name, card.data.license_link) == ("other", "calm", "LICENSE")
    assert "Licence of the source: calm." in card.text
    kept = GenerationConfig.from_pretrained("made[v2]")
    assert (kept.do_sample, kept.temperature) == (True, 0.7)
    assert not hasattr(kept, "num_heads"), "the rest of the configuration has no place there"
    assert json.loads(Path("made[v2]/config.json").read_text())["dtype"] == "bfloat16"  # the most frequent one
    assert weights(Path("made[v2]"))["model.norm.weight"].dtype == torch.float32, "what is written is what was read"


def test_an_image_model_comes_with_its_processor_and_card(retnet_hf, tmp_path):
    model = small_metaformer("pooling")
    state_dict, config = to_poolformer(model)
    write_folder(tmp_path / "source", state_dict, config)
    assert "AutoModelForImageClassification.from_pretrained('made')" in done(retnet_hf("convert", "source", "made")).out
    made = AutoModelForImageClassification.from_pretrained("made")
    assert all(torch.equal(made.state_dict()[name], value) for name, value in model.state_dict().items())
    processor = MetaFormerImageProcessorPil.from_pretrained("made")
    assert (processor.size, processor.crop_pct) == ({"height": 224, "width": 224}, 0.9)
    card = ModelCard.load("made/README.md")
    assert card.data.pipeline_tag == "image-classification"
    assert 'pipeline("image-classification", model="made")' in card.text
    wide = small_metaformer("pooling", hidden_sizes=[8, 8, 8, 768], depths=[1, 1, 1, 1])  # as M36 and M48 are
    write_folder(tmp_path / "source", *to_poolformer(wide))
    done(retnet_hf("convert", "source", "made", "--overwrite"))
    assert MetaFormerImageProcessorPil.from_pretrained("made").crop_pct == 0.95


def test_the_line_that_loads_a_backbone_loads_it(retnet_hf):
    assert how_to_load(small_rmt(RMTModel), "made").endswith("import AutoModel; AutoModel.from_pretrained('made')")
    backbone = small_rmt(RMTBackbone)
    backbone.save_pretrained("made")
    scope = {}
    exec(how_to_load(backbone, "made").replace("; RMT", "; loaded = RMT"), scope)
    assert type(scope["loaded"]) is RMTBackbone


@pytest.mark.parametrize("target", ["fla", "torchscale", "syncdoth"])
def test_a_model_is_written_as_a_folder_in_another_format(retnet_hf, target):
    options = {"decay_schedule": "power_of_two", "residual_multiplier": 4**0.25} if target != "fla" else {}
    model = small_model("fla" if target == "fla" else "torchscale", **options)
    model.generation_config.max_new_tokens = 7
    model.save_pretrained("mine")
    word_tokenizer().save_pretrained("mine")
    done(retnet_hf("convert", "mine", "theirs", "--to", target, "--license", "mit"))
    names = {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert names <= {path.name for path in Path("theirs").iterdir()}
    assert f"to the format {target}" in ModelCard.load("theirs/README.md").text
    assert ModelCard.load("theirs/README.md").data.license == "mit"
    done(retnet_hf("convert", "theirs", "again", "--from", target))
    again = AutoModelForCausalLM.from_pretrained("again")
    assert again.generation_config.max_new_tokens == 7
    same_tensors(again.state_dict(), model.state_dict())
    refused(retnet_hf("convert", "mine", "theirs", "--to", target), "not empty")
    refused(retnet_hf("convert", "mine", "other", "--to", "rmt"), "formats fla, torchscale", "not in rmt")
    small_llama().save_pretrained("llama")
    refused(retnet_hf("convert", "llama", "other", "--to", target), "not a RetNet: `retnet-hf linearize` makes")
    small_model(decay_schedule="geometric").save_pretrained("new")
    refused(retnet_hf("convert", "new", "other", "--to", target), "cannot express 'geometric'")
    assert not Path("other").exists()
