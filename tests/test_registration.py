"""The Auto classes find our models, whoever else uses their model_types: each case in a process of its own."""

import json
import os
import subprocess
import sys

import pytest


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
OTHER = """
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

class OtherConfig(PreTrainedConfig):
    model_type = "retnet"

class OtherModel(PreTrainedModel):
    config_class = OtherConfig

AutoConfig.register("retnet", OtherConfig, exist_ok=True)
AutoModelForCausalLM.register(OtherConfig, OtherModel, exist_ok=True)
"""
OURS = """
import retnet_hf
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


def run(script: str, folder) -> tuple[list[str], str]:
    """What is found, and what is said meanwhile."""
    paths = [*(path for path in sys.path if path), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.parametrize("before", ["", UPSTREAM, OTHER], ids=["alone", "transformers", "a library before"])
def test_our_models_are_found_by_whatever_was_registered_before(before, tmp_path):
    found, said = run(before + OURS + USE, tmp_path)
    assert sorted(found) == sorted(FOUND)
    warned = [line for line in said.splitlines() if "was registered with AutoConfig for" in line]
    expected = {"": [], UPSTREAM: ["retnet", "metaformer", "rmt", "vir"], OTHER: ["retnet"]}[before]
    assert [line.split("model_type '")[1].split("'")[0] for line in warned] == expected
    if before == OTHER:
        assert "for __main__.OtherConfig. It is registered for retnet_hf.configuration_retnet.RetNetConfig" in warned[0]


def test_a_model_of_ours_made_after_another_library_took_its_name_has_it_again_with_a_warning(tmp_path):
    found, said = run(OURS + OTHER + USE, tmp_path)
    assert sorted(found) == sorted(FOUND)
    assert said.count("The model_type 'retnet' was registered with AutoConfig for __main__.OtherConfig") == 1


def test_the_other_library_keeps_its_models_by_their_own_configuration(tmp_path):
    look = """
import json
retnet_hf.RetNetConfig()
found = [type(AutoConfig.for_model("retnet")), AutoModelForCausalLM._model_mapping[OtherConfig]]
print(json.dumps([one.__name__ for one in found]))
"""
    found, _ = run(OURS + OTHER + look, tmp_path)
    assert found == ["RetNetConfig", "OtherModel"]
