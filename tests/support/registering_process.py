# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A process that registers models in some order, and what it prints."""

import json
import os
import subprocess
import sys


OTHER = """
from transformers.utils import is_torchvision_available
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


def run(script: str, folder) -> tuple[list[str], str]:
    """What is found, and what is said meanwhile."""
    paths = [*(path for path in sys.path if path), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]), done.stderr
