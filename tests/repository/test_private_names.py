# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Private names of transformers and PyTorch that this project uses: each still exists, with the arguments that are used.

A new version of either may change them. The test that fails then names the file that uses the name, and what for.
"""

import inspect
import tempfile
from collections.abc import Callable

import pytest
import torch
import torch._dynamo
import torch._inductor
from small_models import small_model
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from transformers import AutoModelForCausalLM, GenerationMixin, PreTrainedModel, TrainingArguments
from transformers.image_processing_backends import PilBackend
from transformers.utils import output_capturing

from retnet_hf.modules.layers import RECORDER


# The owner, the private name, arguments that we name or pass by place, and the sentence that a failure begins with.
METHODS: list[tuple[type, str, tuple[str, ...], str]] = [
    (
        PreTrainedModel,
        "_load_pretrained_model",
        ("model", "state_dict", "checkpoint_files", "load_config"),
        "retnet_hf/hub/loading.py wraps it to map the names of foreign weights",
    ),
    (
        PreTrainedModel,
        "maybe_distribute_model",
        ("model", "distributed_config", "mesh_manager"),
        "retnet_hf/hub/loading.py wraps it to tell modules which heads a rank holds",
    ),
    (PreTrainedModel, "_init_weights", ("self", "module"), "the models derive from it to draw weights and fill buffers"),
    (
        PreTrainedModel,
        "_upload_modified_files",
        ("self", "working_dir", "repo_id"),
        "retnet_hf/hub/saving.py wraps it to upload a card of its own",
    ),
    (
        PreTrainedModel,
        "_get_files_timestamps",
        ("self", "working_dir"),
        "retnet_hf/hub/saving.py wraps it to upload code",
    ),
    (PreTrainedModel, "should_save_on_this_rank", ("self", "is_main_process"), "retnet_hf/hub/saving.py asks it"),
    (PreTrainedModel, "is_remote_code", (), "retnet_hf/hub/travelling_code.py answers it while a model is saved"),
    (
        GenerationMixin,
        "_prepare_cache_for_generation",
        ("self", "generation_config", "model_kwargs", "generation_mode"),
        "retnet_hf/retnet/generation_retnet.py wraps it to give generate() a RetNetState",
    ),
    (
        GenerationMixin,
        "_prepare_attention_mask_for_generation",
        ("self", "inputs_tensor", "generation_config", "model_kwargs"),
        "retnet_hf/retnet/generation_retnet.py wraps it where a state has read the tokens before",
    ),
    *(
        (
            GenerationMixin,
            loop,
            ("self", "input_ids"),
            "retnet_hf/retnet/generation_retnet.py wraps it to capture decode steps",
        )
        for loop in ("_sample", "_beam_search")
    ),
    (PilBackend, "_standardize_kwargs", ("self",), "retnet_hf/vision/image_processing_retention.py wraps it to read sizes"),
    (PilBackend, "_preprocess", ("self", "images"), "retnet_hf/vision/image_processing_retention.py wraps it to resize"),
]


@pytest.mark.parametrize(("owner", "name", "arguments", "use"), METHODS, ids=[name for _, name, _, _ in METHODS])
def test_a_wrapped_method_has_the_arguments_that_are_passed(owner, name, arguments, use):
    method = inspect.getattr_static(owner, name, None)
    assert method is not None, f"{use}, and {owner.__name__} no longer has it."
    method = method.__func__ if isinstance(method, (staticmethod, classmethod)) else method
    found = list(inspect.signature(method).parameters)
    found = found[1:] if found[0] == "cls" else found
    assert tuple(found[: len(arguments)]) == arguments, f"{use}, and its arguments are now {', '.join(found)}."


def conversions_are_kept() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        small_model().save_pretrained(folder)
        return hasattr(AutoModelForCausalLM.from_pretrained(folder), "_weight_conversions")


def implementation_is_kept() -> bool:
    model = small_model("hybrid")
    model.set_attn_implementation("eager")
    return model.config._attn_implementation == "eager"


def initialised_parameters_are_left_alone() -> bool:
    model = small_model()
    weight = model.lm_head.weight
    weight._is_hf_initialized = True
    before = weight.detach().clone()
    model.init_weights()
    return torch.equal(weight, before)


def recorders_are_known_by_their_module() -> bool:
    return output_capturing.__name__ == RECORDER


def hooks_are_listed() -> bool:
    module, calls = nn.Identity(), []
    module.register_forward_hook(lambda *arguments: calls.append(arguments))
    module.register_forward_pre_hook(lambda *arguments: calls.append(arguments))
    return len(module._forward_hooks) == len(module._forward_pre_hooks) == 1 and not module._backward_hooks


def compiled_modules_are_noticed() -> bool:
    module = nn.Identity()
    before = module._compiled_call_impl
    module.compile()
    return before is None and module._compiled_call_impl is not None


def hooks_of_all_modules_are_listed() -> bool:
    lists = torch.nn.modules.module._global_forward_hooks, torch.nn.modules.module._global_forward_pre_hooks
    register = torch.nn.modules.module.register_module_forward_hook, torch.nn.modules.module.register_module_forward_pre_hook
    handles = [each(lambda *arguments: None) for each in register]
    found = [len(hooks) for hooks in lists]
    for handle in handles:
        handle.remove()
    return found == [1, 1]


def transforms_are_noticed() -> bool:
    inside = []
    torch.func.vmap(lambda x: inside.append(torch._C._are_functorch_transforms_active()) or x)(torch.ones(2))
    return inside == [True] and not torch._C._are_functorch_transforms_active()


def the_number_of_gpus_can_be_set() -> bool:
    arguments = TrainingArguments("unused", use_cpu=True)
    found = arguments.n_gpu
    arguments._n_gpu = found + 3
    return arguments.n_gpu == found + 3


def modes_are_noticed() -> bool:
    with FakeTensorMode():
        return torch._C._len_torch_dispatch_stack() == 1


def forward_derivatives_are_noticed() -> bool:
    before = forward_ad._current_level
    with forward_ad.dual_level():
        return before < 0 <= forward_ad._current_level


BEHAVIOURS: list[tuple[Callable[[], bool], str]] = [
    (
        conversions_are_kept,
        "transformers keeps conversions of weights elsewhere, and retnet_hf/conversion/dialect_loading.py removes its own",
    ),
    (implementation_is_kept, "`set_attn_implementation` no longer sets `config._attn_implementation`, which plans read"),
    (
        initialised_parameters_are_left_alone,
        "parameters with `_is_hf_initialized` are drawn again, and linearization/transfer.py marks copied ones",
    ),
    (
        recorders_are_known_by_their_module,
        "hooks that record outputs come from another module: retnet_hf/modules/layers.py skips them",
    ),
    (hooks_are_listed, "modules keep hooks elsewhere, and retnet_hf/modules/layers.py looks for them"),
    (
        compiled_modules_are_noticed,
        "compiled modules are not noticed, whose steps cuda_graphs.py leaves alone",
    ),
    (
        hooks_of_all_modules_are_listed,
        "hooks of all modules are kept elsewhere, and retnet_hf/gpu/cuda_graphs.py looks for them",
    ),
    (transforms_are_noticed, "transforms of torch.func are not noticed, for which retention_forms.needs_autograd asks"),
    (modes_are_noticed, "modes of PyTorch are not noticed, for which retention_triton.launches_at_once asks"),
    (forward_derivatives_are_noticed, "forward derivatives are not noticed, for which launches_at_once asks"),
    (the_number_of_gpus_can_be_set, "TrainingArguments no longer reads `_n_gpu`, which retnet_hf.cli sets to 1"),
]


@pytest.mark.parametrize(("holds", "sentence"), BEHAVIOURS, ids=[holds.__name__ for holds, _ in BEHAVIOURS])
def test_a_private_name_still_means_what_it_is_used_for(holds, sentence):
    assert holds(), sentence


@pytest.mark.parametrize(
    "name", ["_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu", "_convert_weight_to_int4pack_for_cpu"]
)
def test_pytorch_has_the_products_of_packed_weights(name):
    assert hasattr(torch.ops.aten, name), f"retnet_hf/cpu/products.py multiplies by torch.ops.aten.{name}, which is gone."


def test_a_compiled_step_finds_its_state_at_one_address():
    assert hasattr(torch._dynamo, "mark_static_address"), "retnet_hf/state/retention_state.py marks new states with it."


def test_the_compiler_packages_programs():
    for name in ("aoti_compile_and_package", "aoti_load_package"):
        assert hasattr(torch._inductor, name), f"retnet_hf/cpu/programs.py keeps programs by {name}, which is gone."
