# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The Auto classes find our models, whoever else uses their model_types: each case in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_models import PACKAGE_ABSENT
from transformers.utils import is_torchvision_available

import retnet_hf


OURS = "import retnet_hf\n"
OTHER = """
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

class OtherConfig(PreTrainedConfig):
    model_type = "retnet"

class OtherModel(PreTrainedModel):
    config_class = OtherConfig

AutoConfig.register("retnet", OtherConfig, exist_ok=True)
AutoModelForCausalLM.register(OtherConfig, OtherModel, exist_ok=True)
"""
# transformers, or a library registered before or after ours, has the names too
UPSTREAM = """
from transformers.models.auto import modeling_auto
from transformers.models.auto.auto_factory import _LazyAutoMapping
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

for model_type, name in (("retnet", "RetNet"), ("vir", "ViR"), ("rmt", "RMT"), ("metaformer", "MetaFormer")):
    CONFIG_MAPPING_NAMES[model_type] = f"{name}Config"
    for mapping in (modeling_auto.MODEL_MAPPING, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        mapping._reverse_config_mapping[f"{name}Config"] = model_type
        mapping._model_mapping[model_type] = f"{name}Model"
"""
USE = """
import transformers
from small_models import small_model
from small_vision_models import VISION_FAMILIES

model = small_model()
model.save_pretrained("language")
found = [type(transformers.AutoModelForCausalLM.from_pretrained("language"))]
found.append(type(transformers.AutoModelForCausalLM.from_config(model.config)))
found.append(type(transformers.AutoModel.from_pretrained("language")))
for name, family in VISION_FAMILIES.items():
    family.model().save_pretrained(name)
    found.append(type(transformers.AutoModelForImageClassification.from_pretrained(name)))
found = [f"{one.__module__.split('.')[0]}.{one.__name__}" for one in found]
"""
FOUND = ["RetNetForCausalLM", "RetNetForCausalLM", "RetNetModel"]
FOUND += [f"{family}ForImageClassification" for family in ("ViR", "RMT", "MetaFormer")]


def run(script: str, folder: Path) -> tuple[list[str], str]:
    paths = [*(path for path in sys.path if path), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", f"import json, sys\nfound = []\n{script}\nprint(json.dumps(found))"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("before", ["", UPSTREAM, OTHER], ids=["alone", "transformers", "a library before"])
def test_our_models_are_found_by_whatever_was_registered_before(before, tmp_path):
    found, said = run(before + OURS + USE, tmp_path)
    assert sorted(found) == sorted(f"retnet_hf.{name}" for name in FOUND)
    warned = [line for line in said.splitlines() if "was registered with AutoConfig for" in line]
    expected = {"": [], UPSTREAM: ["retnet", "metaformer", "rmt", "vir"], OTHER: ["retnet"]}[before]
    assert [line.split("model_type '")[1].split("'")[0] for line in warned] == expected
    if before == OTHER:
        registered = "It is registered for retnet_hf.retnet.configuration_retnet.RetNetConfig"
        assert f"for __main__.OtherConfig. {registered}" in warned[0]


def test_the_library_that_is_imported_last_has_the_name(tmp_path):
    """The other one keeps its models by their own configuration."""
    look = """
found = [type(AutoConfig.for_model("retnet")).__name__, AutoModelForCausalLM._model_mapping[OtherConfig].__name__]
"""
    assert run(OURS + OTHER + look, tmp_path)[0] == ["OtherConfig", "OtherModel"]
    assert run(OTHER + OURS + look, tmp_path)[0] == ["RetNetConfig", "OtherModel"]


def test_language_models_need_no_other_package_of_the_house(tmp_path):
    """As on a machine with a bare checkout: `python -m benchmarks.gpu`."""
    script = PACKAGE_ABSENT.replace('== "retnet_hf"', '== "retnet_hf.conversion"')
    assert run(script + "import retnet_hf; found = retnet_hf.RetNetConfig.model_type", tmp_path)[0] == "retnet"


@pytest.mark.parametrize("module", ["fla", "minimax", "dialect"])
def test_a_module_of_conversion_may_be_imported_first(module, tmp_path):
    run(f"import retnet_hf.conversion.{module}", tmp_path)


TORCHVISION = """
class Names(type):
    __getattr__ = lambda cls, name: name
class InterpolationMode(metaclass=Names): pass
pil_to_tensor = None
"""


def test_importing_the_package_imports_nothing_that_it_can_do_without(tmp_path):
    """Whatever is installed, and however broken it is."""
    for name in ("peft", "trl", "vllm", "datasets", "matplotlib"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('an installation that does not work')")
    (tmp_path / "torchvision" / "transforms").mkdir(parents=True)  # without what image processors need
    for name in ("__init__", "io", "transforms/__init__", "transforms/functional"):
        (tmp_path / "torchvision" / f"{name}.py").write_text(TORCHVISION)
    look = """
import retnet_hf
heavy = ["peft", "trl", "vllm", "datasets", "matplotlib", "typer", "fla", "onnx", "rich.console"]
found = [name for name in heavy if name in sys.modules]
try:
    retnet_hf.ViRImageProcessor
except ImportError as error:
    found.append(str(error))
sys.modules["peft"] = None
listed = set(dir(retnet_hf)) >= set(retnet_hf.__all__)
from retnet_hf import *
here = all(name in globals() for name in retnet_hf.__all__)
try:
    retnet_hf.unheard_of
except AttributeError as error:
    said = str(error)
found = [found, listed, here, said]
"""
    found, _ = run(look, tmp_path)
    broken = "ViRImageProcessor cannot be imported: No module named 'torchvision.transforms.v2'"
    assert found == [[broken], True, True, "module 'retnet_hf' has no attribute 'unheard_of'"]


def test_language_models_need_no_extra_and_image_processors_name_theirs(tmp_path):
    look = """
for name in ("PIL", "PIL.Image", "datasets", "matplotlib", "psutil", "rich", "typer"):
    sys.modules[name] = None
import retnet_hf
from transformers import AutoModelForCausalLM
from transformers.models.auto.image_processing_auto import AutoImageProcessor

model = AutoModelForCausalLM.from_config(retnet_hf.RetNetConfig.from_preset("tiny", num_hidden_layers=1, vocab_size=9))
try:
    retnet_hf.ViRImageProcessor
except ImportError as error:
    said = str(error)
found = [type(model).__name__, said]
"""
    said = "ViRImageProcessor needs Pillow, which is not installed: pip install Pillow"
    assert run(look, tmp_path)[0] == ["RetNetForCausalLM", said]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_image_processors_are_known_whether_their_auto_class_was_imported_before_or_after(before, tmp_path):
    retnet_hf.ViRImageProcessorPil().save_pretrained(tmp_path / "vir")
    auto = "from transformers.models.auto.image_processing_auto import AutoImageProcessor\n"
    look = 'found = type(AutoImageProcessor.from_pretrained("vir", backend="pil")).__name__'
    found, _ = run((auto + OURS if before else OURS + auto) + look, tmp_path)
    assert found == f"ViRImageProcessor{'Pil' if is_torchvision_available() else ''}"
