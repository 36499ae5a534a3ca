# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Folders that carry their code, loaded in a process that cannot import retnet_hf."""

import ast
import concurrent.futures
import importlib
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from small_models import PACKAGE_ABSENT, close, greedy, left_padded, random_ids, small_config, small_model
from small_vision_models import VISION_FAMILIES
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.dynamic_module_utils import get_imports, get_relative_imports
from transformers.models.auto import modeling_auto

import retnet_hf
from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetForSequenceClassification, RetNetModel


WITHOUT_THE_PACKAGE = f"""{PACKAGE_ABSENT}
folder, out = sys.argv[1:]

import pathlib, torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline
from safetensors.torch import save_file

def load(auto_class, name, **kwargs):
    model = auto_class.from_pretrained(f"{{folder}}/{{name}}", trust_remote_code=True, **kwargs)
    assert type(model).__module__.startswith("transformers_modules."), type(model).__module__
    return model.eval()

ids = torch.load(f"{{folder}}/ids.pt")
answers = {{}}
"""


def run(script: str, folder: Path, out: Path) -> dict[str, torch.Tensor]:
    """Runs the script in a fresh process without the package, the network, or this process's modules."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HOME": str(out / "hf_home"), "HF_MODULES_CACHE": str(out / "modules")}
    environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    finish = 'save_file({k: v.contiguous() for k, v in answers.items()}, f"{out}/answers.safetensors")\n'
    command = [sys.executable, "-c", WITHOUT_THE_PACKAGE + script + finish, str(folder), str(out)]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(out / "answers.safetensors")


@pytest.fixture
def registered(monkeypatch):
    """What `register_for_auto_class` does, undone afterwards."""
    for model_class, task in ((RetNetModel, ""), (RetNetForCausalLM, "ForCausalLM")):
        monkeypatch.setattr(model_class, "_auto_class", None)
        model_class.register_for_auto_class(f"AutoModel{task}")
    monkeypatch.setattr(RetNetForSequenceClassification, "_auto_class", "AutoModelForSequenceClassification")
    monkeypatch.setattr(retnet_hf.RetNetHybridForCausalLM, "_auto_class", "AutoModelForCausalLM")
    for config_class in (RetNetConfig, retnet_hf.RetNetHybridConfig):
        monkeypatch.setattr(config_class, "_auto_class", "AutoConfig")


REMOTE = """
model = load(AutoModelForCausalLM, "causal")
mask = (ids != 0).long()
answers["log_decay"] = model.model.decay.log_decay
answers["greedy"] = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
answers["beams"] = model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, num_beams=3)
answers["draft"] = model.generate(ids[:1], max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=2)
first = model.generate(ids[:1], max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
state = first.past_key_values
answers["continued"] = model.generate(first.sequences, past_key_values=state, max_new_tokens=15, do_sample=False)
model(ids, labels=ids).loss.backward()
answers["gradient"] = model.model.layers[0].retention.q_proj.weight.grad
answers["bfloat16"] = load(AutoModelForCausalLM, "causal", dtype=torch.bfloat16, device_map="auto").model.decay.log_decay

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
assert pathlib.Path(f"{out}/again/modeling_retnet.py").is_file()
again = AutoModelForCausalLM.from_pretrained(f"{out}/again", trust_remote_code=True)
with torch.no_grad():
    answers["logits"] = model(ids, attention_mask=mask).logits
    answers["again"] = again.eval()(ids, attention_mask=mask).logits
    answers["base"] = load(AutoModel, "base")(ids).last_hidden_state
    answers["hybrid"] = load(AutoModelForCausalLM, "hybrid")(ids, attention_mask=mask).logits
    answers["classifier"] = load(AutoModelForSequenceClassification, "classifier")(ids, attention_mask=mask).logits
"""


def test_trust_remote_code(tmp_path, tmp_path_factory, tokenizer, registered):
    causal, hybrid = small_model("torchscale", num_key_value_heads=1, tie_word_embeddings=True), small_model("hybrid")
    base, classifier = small_model(model_class=RetNetModel), small_model(model_class=RetNetForSequenceClassification)
    for name, model in {"causal": causal, "base": base, "classifier": classifier, "hybrid": hybrid}.items():
        model.save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    ids, mask = left_padded([random_ids(1, 21), random_ids(1, 6, seed=1)])
    torch.save(ids, tmp_path / "ids.pt")
    answers = run(REMOTE, tmp_path, tmp_path_factory.mktemp("out"))
    with torch.no_grad():
        expected = causal(ids, attention_mask=mask).logits
        for name in ("logits", "again"):
            close(answers[name][mask.bool()], expected[mask.bool()])
        close(answers["hybrid"][mask.bool()], hybrid(ids, attention_mask=mask).logits[mask.bool()])
        close(answers["base"], base(ids).last_hidden_state)
        close(answers["classifier"], classifier(ids, attention_mask=mask).logits)
    for name in ("log_decay", "bfloat16"):
        assert answers[name].equal(causal.model.decay.log_decay)
    assert answers["greedy"].equal(greedy(causal, ids, 20, attention_mask=mask))
    assert answers["beams"].equal(greedy(causal, ids, 20, attention_mask=mask, num_beams=3))
    for name in ("draft", "continued"):
        assert answers[name].equal(greedy(causal, ids[:1], 20))
    assert answers["pipeline"].equal(greedy(causal, torch.tensor([[8, 9, 10, 11, 12]]), 6)[0])
    causal(ids, labels=ids).loss.backward()
    close(answers["gradient"], causal.model.layers[0].retention.q_proj.weight.grad)


FAMILIES = {"retnet": (small_model, "RetNet"), "hybrid": (lambda: small_model("hybrid"), "RetNetHybrid")}
FAMILIES |= {name.lower(): (VISION_FAMILIES[name.lower()].model, name) for name in ("ViR", "RMT", "MetaFormer")}


@pytest.fixture
def saved_with_code(tmp_path, monkeypatch):
    """Of a family: its model, and the folder that it was saved to with its code."""

    def save(name: str):
        make, prefix = FAMILIES[name]
        model = make()
        task = type(model).__name__.removeprefix(prefix)
        monkeypatch.setattr(getattr(retnet_hf, f"{prefix}Config"), "_auto_class", "AutoConfig")
        monkeypatch.setattr(type(model), "_auto_class", f"AutoModel{task}")
        model.save_pretrained(tmp_path / name)
        return model, tmp_path / name

    return save


def top_level_names(file: Path) -> list[str]:
    """Everything that the statements of a file bind, except loggers, which are all alike."""
    bound = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound.append(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            bound += [target.id for target in targets if isinstance(target, ast.Name)]
    return [name for name in bound if name != "logger"]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_files_travel_with_a_model(family, saved_with_code):
    """No name is bound twice, no file hides a package, and nothing but the standard library and requirements is imported."""
    _, folder = saved_with_code(family)
    travelling = {path.name for path in folder.glob("*.py")}
    assert travelling - {"retnet_gpu.py"} == {f"configuration_{family}.py", f"modeling_{family}.py"}
    model_code = (folder / f"modeling_{family}.py").read_text(encoding="utf-8")
    assert ("from .retnet_gpu import" in model_code) == ("retnet_gpu.py" in travelling)
    allowed = {"torch", "transformers", "huggingface_hub", "safetensors", "numpy", *sys.stdlib_module_names}
    for path in folder.glob("*.py"):
        names = top_level_names(path)
        assert sorted(name for name in set(names) if names.count(name) > 1) == [], path.name
        assert importlib.util.find_spec(path.stem) is None, f"{path.name} would hide a package in a clone"
        assert set(get_imports(path)) <= allowed
        assert {f"{name}.py" for name in get_relative_imports(path)} <= travelling


OWN = """
from retnet_hf import RetNetConfig, RetNetForCausalLM


class OwnConfig(RetNetConfig):
    model_type = "own_retnet"


class OwnModel(RetNetForCausalLM):
    config_class = OwnConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 2.0 * output.logits
        return output
"""


def test_a_derived_class_is_saved_with_its_own_module_and_needs_the_package(tmp_path, monkeypatch):
    (tmp_path / "own_retnet.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    own = importlib.import_module("own_retnet")
    own.OwnConfig.register_for_auto_class()
    own.OwnModel.register_for_auto_class("AutoModelForCausalLM")
    plain, ids = small_model(), random_ids(1, 9)
    model = own.OwnModel(own.OwnConfig(**plain.config.to_diff_dict() | {"model_type": "own_retnet"})).eval()
    model.load_state_dict(plain.state_dict())
    model.save_pretrained(tmp_path / "saved")
    assert [path.name for path in (tmp_path / "saved").glob("*.py")] == ["own_retnet.py"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert type(loaded).__module__.startswith("transformers_modules.")
    close(loaded(ids).logits, 2 * plain(ids).logits)


@pytest.mark.parametrize(("arguments", "options"), [((False,), {}), ((), {"is_main_process": False})])
def test_another_process_writes_no_code(arguments, options, tmp_path, registered):
    small_model().save_pretrained(tmp_path, *arguments, **options)
    assert not list(tmp_path.glob("*.py"))


def test_a_folder_that_is_saved_without_code_names_none(tmp_path, registered, monkeypatch):
    small_model().save_pretrained(tmp_path / "with code")
    for each in (RetNetConfig, RetNetForCausalLM):
        monkeypatch.setattr(each, "_auto_class", None)
    RetNetForCausalLM.from_pretrained(tmp_path / "with code").save_pretrained(tmp_path / "without")
    assert "auto_map" not in json.loads((tmp_path / "without" / "config.json").read_text())


def test_threads_save_at_once(tmp_path, registered):
    models = [small_model() for _ in range(4)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: models[number].save_pretrained(tmp_path / str(number)), range(4)))
    auto_map = {"AutoConfig": "configuration_retnet.RetNetConfig"}
    auto_map["AutoModelForCausalLM"] = "modeling_retnet.RetNetForCausalLM"
    for number in range(4):
        assert json.loads((tmp_path / str(number) / "config.json").read_text())["auto_map"] == auto_map
        assert (tmp_path / str(number) / "modeling_retnet.py").is_file()
    assert RetNetForCausalLM._auto_class == "AutoModelForCausalLM"


def test_trust_remote_code_is_not_needed_where_the_package_is(tmp_path, registered):
    """A folder with code in it is an ordinary one to whoever has the package: nothing of it is run."""
    model = small_model()
    model.save_pretrained(tmp_path)
    (tmp_path / "modeling_retnet.py").write_text("raise RuntimeError('code of a folder was run')\n")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is RetNetForCausalLM
    assert loaded(random_ids(1, 5)).logits.equal(model(random_ids(1, 5)).logits)


CLASSES = {name: getattr(retnet_hf, name) for name in retnet_hf.__all__ if re.search("[a-zTR]For[A-Z]", name)}


def settings(folder, **options) -> TrainingArguments:
    quiet = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(folder, max_steps=1, logging_steps=1, **quiet, **options)


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_stands_in_the_table_of_its_task(name):
    task = re.search("(?<=[a-zTR])For[A-Z].*", name)[0].replace("LM", "Lm")
    table = "MODEL" + re.sub("(?=[A-Z])", "_", task).upper()
    tables = table, table.replace("_FOR_MASKED", "_MASKED")
    names = [getattr(modeling_auto, f"{each}_MAPPING_NAMES", {}) for each in tables]
    assert name in [each.get(CLASSES[name].config_class.model_type) for each in names]


def test_heads_take_what_a_user_registers_and_register_nothing():
    """A derived configuration may have no model of its own, as a copy in saved code."""

    class OwnModel(retnet_hf.RetNetModel):
        pass

    class OwnConfig(retnet_hf.RetNetConfig):
        model_type = "own_of_a_user"

    class ModelOfOwnConfig(retnet_hf.RetNetModel):
        config_class = OwnConfig

    names = [name for name in dir(modeling_auto) if re.fullmatch("MODEL.*MAPPING", name)]
    tables = [getattr(modeling_auto, name)._extra_content for name in names]
    before = [dict(table) for table in tables]
    for config_class, registered in ((OwnConfig, None), (retnet_hf.RetNetConfig, OwnModel), (OwnConfig, ModelOfOwnConfig)):
        if registered:
            AutoModel.register(config_class, registered, exist_ok=True)
        now = [dict(table) for table in tables]
        for cls in CLASSES.values():
            if cls.config_class is retnet_hf.RetNetConfig and not cls.__name__.endswith("LM"):
                model = cls(config_class(**small_config().to_diff_dict()))
                assert type(model.model) is (registered or retnet_hf.RetNetModel)
        assert [dict(table) for table in tables] == now
    for table, content in zip(tables, before):
        table.clear()
        table.update(content)


class Derived(retnet_hf.RetNetForCausalLM):
    """Derived by a user, and not registered."""


TRAINED = {
    "a model": small_model,
    "a derived class": lambda: small_model(model_class=Derived),
    "a hybrid": lambda: small_model("hybrid"),
    "adapters": lambda: get_peft_model(small_model(), LoraConfig(target_modules=["q_proj"])),
    "a state": lambda: retnet_hf.StateTuning(small_model()),
}


@pytest.mark.parametrize("trained", TRAINED)
def test_label_smoothing_shifts_labels(trained, tmp_path):
    ids, model = random_ids(4, 12), TRAINED[trained]()
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, ids[:, 1:].flatten(), label_smoothing=0.1).item()
    trainer = Trainer(model, settings(tmp_path, label_smoothing_factor=0.1))
    assert trainer.compute_loss(model, {"input_ids": ids, "labels": ids}).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("model_class", [retnet_hf.RetNetForSequenceClassification, retnet_hf.RetNetForTokenClassification])
def test_losses_of_classifiers_do_not_grow_with_the_steps_of_gradient_accumulation(model_class, tmp_path):
    of_tokens, logged = model_class is retnet_hf.RetNetForTokenClassification, []
    rows = [{"input_ids": ids, "labels": ids % 3 if of_tokens else ids[0] % 3} for ids in random_ids(8, 6)]
    for steps in (1, 4):
        arguments = settings(tmp_path, per_device_train_batch_size=8 // steps, gradient_accumulation_steps=steps)
        trainer = Trainer(small_model(model_class=model_class, num_labels=3), arguments, train_dataset=rows)
        trainer.train()
        logged.append([trainer.state.log_history[0][name] for name in ("loss", "grad_norm")])
    assert logged[1] == pytest.approx(logged[0], rel=1e-4)


@pytest.mark.parametrize("name", CLASSES)
def test_the_signature_of_a_head_names_what_its_base_model_takes(name):
    base = retnet_hf.RetNetModel if name.startswith("RetNet") else retnet_hf.ViRModel if name.startswith("ViR") else None
    taken = inspect.signature(CLASSES[name].forward).parameters
    wanted = {"pixel_values"} if base is None else set(inspect.signature(base.forward).parameters)
    if name in ("RetNetForMaskedLM", "RetNetHybridForMaskedLM"):  # an encoder has no state
        wanted -= {"past_key_values", "cache", "use_cache"}
    assert wanted <= set(taken)
    assert list(taken)[-1] == "kwargs"


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_a_classifier_takes_positional_arguments_as_before(family):
    model, pixels, labels = VISION_FAMILIES[family].model(), torch.rand(2, 3, 32, 32), torch.tensor([0, 1])
    assert torch.equal(model(pixels, labels).loss, model(pixel_values=pixels, labels=labels).loss)


def test_a_length_that_was_not_given_is_no_attribute(tmp_path):
    """sentence-transformers takes the smaller of the tokenizer's length and this attribute, if there is one."""
    small_config().save_pretrained(tmp_path)
    without = [small_config(), retnet_hf.RetNetConfig(max_position_embeddings=None)]
    without.append(retnet_hf.RetNetConfig.from_pretrained(tmp_path, max_position_embeddings=None))
    assert not any(hasattr(config, "max_position_embeddings") for config in without)
    assert retnet_hf.RetNetConfig.from_dict(small_config(max_position_embeddings=77).to_dict()).max_position_embeddings == 77
    for reads in (retnet_hf.RetNetConfig, AutoConfig):
        assert reads.from_pretrained(tmp_path, max_position_embeddings=77).max_position_embeddings == 77


def test_the_hooks_of_accelerate_leave_the_state_where_it_is():
    """By whatever name it is given: accelerate moves every other argument to the device of a module."""
    assert {"past_key_values", "cache", "state"} <= set(small_model()._skip_keys_device_placement)


@pytest.mark.parametrize("layers", [2, 3])
def test_fewer_layers_of_a_preset_are_saved_and_read_back(layers, tmp_path):
    kinds, ids = ["linear_attention", "full_attention"] * 2, random_ids(1, 9) % 40
    config = retnet_hf.RetNetHybridConfig.from_preset("tiny", vocab_size=40, num_hidden_layers=4, layer_types=kinds)
    retnet_hf.RetNetHybridForCausalLM(config).save_pretrained(tmp_path / "whole")
    fewer = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", num_hidden_layers=layers)
    fewer.save_pretrained(tmp_path / "fewer")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "fewer")
    assert again.config.layer_types == kinds[:layers]
    assert torch.equal(again(ids).logits, fewer(ids).logits)


@pytest.mark.parametrize("dialect", ["fla", "hybrid", "from scratch"])
def test_drafts_by_early_exit_change_no_token_and_leave_the_configuration(dialect):
    model, ids = small_model(dialect), random_ids(1, 6)
    stated = model.config.to_dict()
    assert torch.equal(greedy(model, ids, 8, assistant_early_exit=1), greedy(model, ids, 8))
    assert model.config.to_dict() == stated
