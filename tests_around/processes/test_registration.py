# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The Auto classes find our models, whoever else uses their model_types: each case in a process of its own."""

import pytest
from registering_process import OTHER, OURS, run
from small_models import PACKAGE_ABSENT
from transformers.utils import is_torchvision_available

import retnet_hf


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
import json
import sys
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
print(json.dumps([f"{one.__module__.split('.')[0]}.{one.__name__}" for one in found]))
"""
FOUND = [
    *("retnet_hf.RetNetForCausalLM", "retnet_hf.RetNetForCausalLM", "retnet_hf.RetNetModel"),
    *("retnet_hf.ViRForImageClassification", "retnet_hf.RMTForImageClassification"),
    "retnet_hf.MetaFormerForImageClassification",
]


@pytest.mark.parametrize("before", ["", UPSTREAM, OTHER], ids=["alone", "transformers", "a library before"])
def test_our_models_are_found_by_whatever_was_registered_before(before, tmp_path):
    found, said = run(before + OURS + USE, tmp_path)
    assert sorted(found) == sorted(FOUND)
    warned = [line for line in said.splitlines() if "was registered with AutoConfig for" in line]
    expected = {"": [], UPSTREAM: ["retnet", "metaformer", "rmt", "vir"], OTHER: ["retnet"]}[before]
    assert [line.split("model_type '")[1].split("'")[0] for line in warned] == expected
    if before == OTHER:
        assert (
            "for __main__.OtherConfig. It is registered for retnet_hf.retnet.configuration_retnet.RetNetConfig" in warned[0]
        )


def test_the_other_library_keeps_its_models_by_their_own_configuration(tmp_path):
    look = """
import json
found = [retnet_hf.RetNetConfig, AutoModelForCausalLM._model_mapping[OtherConfig]]
print(json.dumps([one.__name__ for one in found]))
"""
    found, _ = run(OURS + OTHER + look, tmp_path)
    assert found == ["RetNetConfig", "OtherModel"]


def test_the_library_that_is_imported_last_has_the_name(tmp_path):
    look = """
import json
from transformers import AutoConfig
print(json.dumps([type(AutoConfig.for_model("retnet")).__name__]))
"""
    assert run(OURS + OTHER + look, tmp_path)[0] == ["OtherConfig"]
    assert run(OTHER + OURS + look, tmp_path)[0] == ["RetNetConfig"]


def test_language_models_need_no_other_package_of_the_house(tmp_path):
    """As on a machine with a bare checkout: `python -m benchmarks.gpu`."""
    script = PACKAGE_ABSENT.replace('== "retnet_hf"', '== "retnet_hf.conversion"')
    script += "import json, retnet_hf; print(json.dumps([retnet_hf.RetNetConfig.model_type]))"
    assert run(script, tmp_path)[0] == ["retnet"]


@pytest.mark.parametrize("module", ["fla", "minimax", "dialect"])
def test_a_module_of_conversion_may_be_imported_first(module, tmp_path):
    run(f"import json, retnet_hf.conversion.{module}; print(json.dumps([]))", tmp_path)


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
import json
import sys
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
print(json.dumps([found, listed, here, said]))
"""
    found, _ = run(look, tmp_path)
    broken = "ViRImageProcessor cannot be imported: No module named 'torchvision.transforms.v2'"
    assert found == [[broken], True, True, "module 'retnet_hf' has no attribute 'unheard_of'"]


def test_language_models_need_no_extra_and_image_processors_name_theirs(tmp_path):
    look = """
import json
import sys
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
print(json.dumps([type(model).__name__, said]))
"""
    found, _ = run(look, tmp_path)
    said = "ViRImageProcessor needs Pillow, which is not installed: pip install Pillow"
    assert found == ["RetNetForCausalLM", said]


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_image_processors_are_known_whether_their_auto_class_was_imported_before_or_after(before, tmp_path):
    retnet_hf.ViRImageProcessorPil().save_pretrained(tmp_path / "vir")
    auto = "from transformers.models.auto.image_processing_auto import AutoImageProcessor\n"
    look = """
import json
print(json.dumps([type(AutoImageProcessor.from_pretrained("vir", backend="pil")).__name__]))
"""
    found, _ = run((auto + OURS if before else OURS + auto) + look, tmp_path)
    assert found == [f"ViRImageProcessor{'Pil' if is_torchvision_available() else ''}"], (
        "AutoImageProcessor does not know our image processors"
    )
