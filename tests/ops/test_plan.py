# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The plan of a call: moved between devices, and made once."""

import pkgutil

import torch
from small_models import random_ids, small_model

import retnet_hf
from retnet_hf.ops.kernels import TORCH
from retnet_hf.ops.layout import layout_of
from retnet_hf.ops.plan import Plan


def test_no_public_name_hides_a_module():
    """`import retnet_hf.retention as R` would give the function of that name."""
    modules = {module.name for module in pkgutil.iter_modules(retnet_hf.__path__)}
    assert modules.isdisjoint(retnet_hf.__all__)
    assert dir(retnet_hf) == sorted(retnet_hf.__all__)


def plan_of(model, length: int = 20, **kwargs) -> Plan:
    inputs = model.model.embed_tokens(random_ids(2, length))
    return model.model.plan(inputs, **kwargs)[0]


def test_a_plan_moves_with_all_its_tensors_and_what_layers_share_stays_shared():
    plan = plan_of(small_model(), attention_mask=torch.arange(20)[None] >= torch.tensor([[3], [0]]))
    assert plan.decays(plan.log_decays[0]).inner.device.type == "cpu"
    moved = plan.to("meta")
    assert moved.log_decays[0] is moved.log_decays[1]
    tensors = [moved.decays(moved.log_decays[1]).inner, moved.layout.ages.age, moved.layout.present]
    tensors += [*moved.rotate.query_angles, *moved.rotate.key_angles]
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert plan.layout.present.device.type == "cpu"


def test_softmax_layers_keep_their_keys_in_the_dtype_of_the_model():
    """Their rotation computes in float32, and returns the dtype that it was given."""
    model = small_model("hybrid").to(torch.bfloat16)
    with torch.no_grad():
        layer = model(random_ids(1, 5), use_cache=True).past_key_values.layers[1]
    assert layer.keys.dtype == layer.values.dtype == torch.bfloat16


def test_what_a_kernel_computes_for_absent_tokens_is_dropped():
    """Kernels leave numbers without a meaning there."""
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, :3] = 0
    layout = layout_of((2, 6), torch.device("cpu"), mask)
    kernels = TORCH._replace(chunkwise=lambda query, *others, **options: (torch.ones_like(query), None))
    plan = Plan(layout, None, 1.0, [torch.zeros(4)], "auto", 4, kernels=kernels)
    output, *_ = plan.compute(0, *[torch.zeros(2, 4, 6, 8)] * 3)
    assert output.movedim(2, 1)[mask == 1].eq(1).all()
    assert not output.movedim(2, 1)[mask == 0].any()
