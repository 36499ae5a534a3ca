# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Private names of transformers and PyTorch that this project uses still exist, or a test names the file that uses one."""

import inspect
import re

import pytest
import torch
import torch._dynamo
import torch._inductor
import transformers
from small_models import small_model
from transformers import AutoModelForCausalLM, TrainingArguments
from transformers.image_processing_backends import PilBackend


CACHE, MASK = (f"GenerationMixin._prepare_{what}_for_generation" for what in ("cache", "attention_mask"))
METHODS = {  # with arguments that we name or pass by place, and what for
    "PreTrainedModel._load_pretrained_model(model, state_dict, checkpoint_files, load_config)": "hub/loading.py maps names",
    "PreTrainedModel.maybe_distribute_model(model, distributed_config, mesh_manager)": "hub/loading.py places heads",
    "PreTrainedModel._init_weights(self, module)": "the models derive from it to draw weights and fill buffers",
    "PreTrainedModel._upload_modified_files(self, working_dir, repo_id)": "hub/saving.py uploads a card of its own",
    "PreTrainedModel._get_files_timestamps(self, working_dir)": "hub/saving.py uploads code",
    "PreTrainedModel.should_save_on_this_rank(self, is_main_process)": "hub/saving.py asks it",
    "PreTrainedModel.is_remote_code()": "hub/travelling_code.py answers it while a model is saved",
    f"{CACHE}(self, generation_config, model_kwargs, generation_mode)": "retnet/generation_retnet.py gives a RetNetState",
    f"{MASK}(self, inputs_tensor, generation_config, model_kwargs)": "retnet/generation_retnet.py wraps it for a state",
    "GenerationMixin._sample(self, input_ids)": "retnet/generation_retnet.py captures decode steps",
    "GenerationMixin._beam_search(self, input_ids)": "retnet/generation_retnet.py captures decode steps",
    "PilBackend._standardize_kwargs(self)": "vision/image_processing_retention.py reads sizes",
    "PilBackend._preprocess(self, images)": "vision/image_processing_retention.py resizes",
}


@pytest.mark.parametrize("signature", METHODS)
def test_a_wrapped_method_has_the_arguments_that_are_passed(signature):
    owner, name, arguments = re.fullmatch(r"(\w+)\.(\w+)\((.*)\)", signature).groups()
    method = inspect.getattr_static(PilBackend if owner == "PilBackend" else getattr(transformers, owner), name, None)
    assert method is not None, f"retnet_hf/{METHODS[signature]}, and {owner} no longer has {name}"
    method = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
    found = ", ".join(parameter for parameter in inspect.signature(method).parameters if parameter != "cls")
    assert found.startswith(arguments), f"retnet_hf/{METHODS[signature]}, and its arguments are now {found}"


def test_transformers_keeps_conversions_of_weights_where_dialect_loading_removes_its_own(tmp_path):
    small_model().save_pretrained(tmp_path)
    assert hasattr(AutoModelForCausalLM.from_pretrained(tmp_path), "_weight_conversions")


def test_training_arguments_read_the_number_of_gpus_that_the_command_sets_to_1():
    """Otherwise a process with several GPUs would multiply the batch of a run."""
    arguments = TrainingArguments("unused", use_cpu=True)
    found = arguments.n_gpu
    arguments._n_gpu = found + 3
    assert arguments.n_gpu == found + 3


NAMES = {  # and the file that uses them
    "_weight_int8pack_mm": (torch.ops.aten, "cpu/products.py"),
    "_weight_int4pack_mm_for_cpu": (torch.ops.aten, "cpu/products.py"),
    "_convert_weight_to_int4pack_for_cpu": (torch.ops.aten, "cpu/products.py"),
    "mark_static_address": (torch._dynamo, "state/retention_state.py"),
    "aoti_compile_and_package": (torch._inductor, "cpu/programs.py"),
    "aoti_load_package": (torch._inductor, "cpu/programs.py"),
}


@pytest.mark.parametrize("name", NAMES)
def test_pytorch_has_what_the_package_calls(name):
    owner, file = NAMES[name]
    assert hasattr(owner, name), f"retnet_hf/{file} uses {name}, which is gone"
