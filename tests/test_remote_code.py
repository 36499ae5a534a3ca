# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Folders that carry their code, loaded in a process that cannot import retnet_hf."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_models import PACKAGE_ABSENT, close, detailed, greedy, left_padded, random_ids, small_model
from small_vision_models import VISION_FAMILIES

import retnet_hf
from retnet_hf import (
    RetNetConfig,
    RetNetForCausalLM,
    RetNetForSequenceClassification,
    RetNetModel,
    ViRConfig,
    ViRForImageClassification,
)


WITHOUT_THE_PACKAGE = (
    PACKAGE_ABSENT
    + """
folder, out = sys.argv[1:]

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline
from safetensors.torch import save_file

def load(auto_class, name, **kwargs):
    model = auto_class.from_pretrained(f"{folder}/{name}", trust_remote_code=True, **kwargs)
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    return model.eval()

ids = torch.load(f"{folder}/ids.pt")
answers = {}
"""
)


def run(script: str, folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Runs the script in a fresh process without the package, the network, or this process's modules."""
    environment = os.environ | {
        "HF_HOME": str(out / "hf_home"),
        "HF_MODULES_CACHE": str(out / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONPATH", None)
    finish = 'save_file({k: v.contiguous() for k, v in answers.items()}, f"{out}/answers.safetensors")\n'
    source = WITHOUT_THE_PACKAGE + script + finish
    done = subprocess.run(
        [sys.executable, "-c", source, str(folder), str(out)], env=environment, cwd=out, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(out / "answers.safetensors")


@pytest.fixture
def registered(monkeypatch):
    """What `register_for_auto_class` does, undone afterwards."""
    classes = {
        RetNetConfig: "AutoConfig",
        RetNetModel: "AutoModel",
        RetNetForCausalLM: "AutoModelForCausalLM",
        RetNetForSequenceClassification: "AutoModelForSequenceClassification",
    }
    for registered_class in classes:
        monkeypatch.setattr(registered_class, "_auto_class", None)
    for registered_class, auto_class in classes.items():
        registered_class.register_for_auto_class(auto_class)


def test_trust_remote_code(tmp_path, tmp_path_factory, tokenizer, registered):
    """The language model, the base model and the classifier; pipelines; state, beams and drafts; saving it again."""
    causal = small_model("torchscale", num_key_value_heads=1, tie_word_embeddings=True)
    base, classifier = small_model(model_class=RetNetModel), small_model(model_class=RetNetForSequenceClassification)
    for name, model in {"causal": causal, "base": base, "classifier": classifier}.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    ids, mask = left_padded([random_ids(1, 21), random_ids(1, 6, seed=1)])
    torch.save(ids, tmp_path / "ids.pt")

    answers = run(
        """
model = load(AutoModelForCausalLM, "causal")
mask = (ids != 0).long()
with torch.no_grad():
    answers["logits"] = model(ids, attention_mask=mask).logits
answers["log_decay"] = model.model.decay.log_decay
answers["greedy"] = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
answers["beams"] = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, num_beams=3)
answers["draft"] = model.generate(ids[:1], max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=2)
first = model.generate(ids[:1], max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
answers["continued"] = model.generate(
    first.sequences, past_key_values=first.past_key_values, max_new_tokens=15, do_sample=False
)
model(ids, labels=ids).loss.backward()
answers["gradient"] = model.model.layers[0].retention.q_proj.weight.grad

answers["bfloat16"] = load(AutoModelForCausalLM, "causal", dtype=torch.bfloat16, device_map="auto").model.decay.log_decay
with torch.no_grad():
    answers["base"] = load(AutoModel, "base")(ids).last_hidden_state
    answers["classifier"] = load(AutoModelForSequenceClassification, "classifier")(ids, attention_mask=mask).logits

generator = pipeline("text-generation", model=f"{folder}/causal", trust_remote_code=True)
texts = ["w5 w6 w7", "w8 w9 w10 w11 w12"]
batch = generator(texts, batch_size=2, max_new_tokens=6, do_sample=False)
assert batch == [generator(text, max_new_tokens=6, do_sample=False) for text in texts]
[tokens] = generator(texts[1], max_new_tokens=6, do_sample=False, return_tensors=True)
answers["pipeline"] = torch.tensor(tokens["generated_token_ids"])
labels = pipeline("text-classification", model=f"{folder}/classifier", trust_remote_code=True)(texts, batch_size=2)
assert {label["label"] for label in labels} <= {"LABEL_0", "LABEL_1"}
features = pipeline("feature-extraction", model=f"{folder}/base", trust_remote_code=True)(["w5 w6"] * 2, batch_size=2)
assert features[0] == features[1] and len(features[0][0]) == 2

model.save_pretrained(f"{out}/again")
AutoTokenizer.from_pretrained(f"{folder}/causal").save_pretrained(f"{out}/again")
import pathlib
assert pathlib.Path(f"{out}/again/modeling_retnet.py").is_file()
again = AutoModelForCausalLM.from_pretrained(f"{out}/again", trust_remote_code=True)
with torch.no_grad():
    answers["again"] = again.eval()(ids, attention_mask=mask).logits
""",
        tmp_path,
        tmp_path_factory.mktemp("out"),
    )
    with torch.no_grad():
        expected = causal(ids, attention_mask=mask).logits
        for name in ("logits", "again"):
            close(answers[name][mask.bool()], expected[mask.bool()])
        close(answers["base"], base(ids).last_hidden_state)
        close(answers["classifier"], classifier(ids, attention_mask=mask).logits)
    assert answers["log_decay"].equal(causal.model.decay.log_decay)
    assert answers["bfloat16"].equal(causal.model.decay.log_decay)
    assert answers["greedy"].equal(greedy(causal, ids, 20, attention_mask=mask))
    assert answers["beams"].equal(greedy(causal, ids, 20, attention_mask=mask, num_beams=3))
    assert answers["draft"].equal(greedy(causal, ids[:1], 20))
    assert answers["continued"].equal(greedy(causal, ids[:1], 20))
    assert answers["pipeline"].equal(greedy(causal, torch.tensor([[8, 9, 10, 11, 12]]), 6)[0])
    causal(ids, labels=ids).loss.backward()
    close(answers["gradient"], causal.model.layers[0].retention.q_proj.weight.grad)


LANGUAGE_MODEL = {
    "call_arguments.py",
    "cards.py",
    "config.json",
    "computed_buffers.py",
    "configuration_checks.py",
    "configuration_dialects.py",
    "configuration_retnet.py",
    "cuda_graphs.py",
    "decay_schedules.py",
    "dialects.py",
    "generation_config.json",
    "generation_retnet.py",
    "gradients.py",
    "head_decay.py",
    "initial_weights.py",
    "integer_angles.py",
    "kernels.py",
    "loading.py",
    "model.safetensors",
    "modeling_retnet.py",
    "pieces.py",
    "plan.py",
    "retention_forms.py",
    "retention_packed.py",
    "retention_split.py",
    "retention_state.py",
    "state_file.py",
    "state_fingerprint.py",
    "weight_changes.py",
}
VIR = {
    "call_arguments.py",
    "cards.py",
    "computed_buffers.py",
    "config.json",
    "configuration_checks.py",
    "configuration_stages.py",
    "configuration_vir.py",
    "decay_schedules.py",
    "gradients.py",
    "head_decay.py",
    "kernels.py",
    "model.safetensors",
    "modeling_vir.py",
    "plan.py",
    "retention_forms.py",
    "vision_blocks.py",
}


def imports(file: Path) -> tuple[set[str], set[str]]:
    """The packages that a file imports, and the files beside it."""
    packages, beside = set(), set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            beside.add(f"{node.module}.py")
        elif isinstance(node, ast.ImportFrom):
            packages.add(node.module.split(".")[0])
    return packages, beside


@pytest.mark.parametrize("kind", ["language model", "ViR"])
def test_trust_remote_code_folder_holds_exactly_what_the_model_imports(kind, tmp_path, registered, monkeypatch):
    """The files that travel with a model are these and no others, as they are in the package."""
    if kind == "language model":
        small_model().save_pretrained(tmp_path)
        expected = LANGUAGE_MODEL
    else:
        for vision_class, auto_class in (
            (ViRConfig, "AutoConfig"),
            (ViRForImageClassification, "AutoModelForImageClassification"),
        ):
            monkeypatch.setattr(vision_class, "_auto_class", auto_class)
        VISION_FAMILIES["vir"].model().save_pretrained(tmp_path)
        expected = VIR
    assert {path.name for path in tmp_path.iterdir()} == expected
    home = Path(retnet_hf.__file__).parent
    for file in tmp_path.glob("*.py"):
        assert file.read_text() == (home / file.name).read_text()
        packages, beside = imports(file)
        assert "retnet_hf" not in packages, file.name
        assert beside <= expected, file.name


def test_trust_remote_code_names_the_classes_in_the_configuration(tmp_path, registered):
    small_model().save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map == {
        "AutoConfig": "configuration_retnet.RetNetConfig",
        "AutoModelForCausalLM": "modeling_retnet.RetNetForCausalLM",
    }


def test_trust_remote_code_is_not_needed_where_the_package_is(tmp_path, registered):
    """A folder with code in it is an ordinary one to whoever has the package: nothing of it is run."""
    from transformers import AutoModelForCausalLM

    model = small_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "modeling_retnet.py").write_text("raise RuntimeError('code of a folder was run')\n")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is RetNetForCausalLM
    assert loaded(random_ids(1, 5)).logits.equal(model(random_ids(1, 5)).logits)


def test_folders_carry_no_code_unasked(tmp_path):
    small_model().save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())


def test_continuing_a_state_of_another_process(fla_model):
    """A state that generate() returned belongs to whatever model has the same weights."""
    first = detailed(fla_model, random_ids(1, 7), 5)
    twin = small_model("fla")
    continued = greedy(twin, first.sequences, 10, past_key_values=first.past_key_values)
    assert continued.equal(greedy(fla_model, random_ids(1, 7), 15))
