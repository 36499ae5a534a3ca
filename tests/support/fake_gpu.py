# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A device whose tensors have no values: prints for each case how often the host waited for it, or the end of the traceback.

A process of its own, since PyTorch keeps a device that was registered.
"""

import json
import os
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from small_models import DIALECTS, small_config
from small_vision_models import VISION_FAMILIES
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationMixin

from retnet_hf import RetNetForCausalLM, RetNetForMaskedLM, RetNetHybridForCausalLM, RetNetState
from retnet_hf.ops import kernels


DEVICE, KEY = "fakegpu", "PrivateUse1"


class FakeGpu(backend_registration._DummyBackendModule):
    """What PyTorch asks of a device beside its operators."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def get_rng_state(self, *_) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, *_) -> None:
        pass


def register() -> list[torch.library.Library]:
    """Makes the device known; it lasts as long as what is returned is held."""
    fake_tensor.CONSTANT_NUMEL_LIMIT = -1  # small tensors of known values would be computed with, for which nothing is here
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, backend_module=FakeGpu())

    def empty(sizes, dtype=None):
        return torch._C._acc.create_empty_tensor(sizes, dtype or torch.get_default_dtype())

    operators, fallbacks = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    operators.impl("empty.memory_format", lambda sizes, dtype=None, **_: empty(sizes, dtype), KEY)
    operators.impl("empty_strided", lambda sizes, strides, dtype=None, **_: empty(sizes, dtype), KEY)
    operators.impl("_copy_from", lambda source, target, non_blocking=False: target, KEY)
    operators.impl("as_strided", lambda tensor, sizes, strides, offset=None: empty(sizes, tensor.dtype), KEY)
    fallbacks.fallback(torch.library.fallthrough_kernel, f"Autocast{KEY}")
    return [operators, fallbacks]


class Waits(TorchDispatchMode):
    """Counts what makes the host wait: values that it reads, tensors that are copied from the device or, as no graph may
    capture, to it. `truth` is any truth value that is read: False of a mask that is asked whether all tokens are there."""

    def __init__(self) -> None:
        super().__init__()
        self.counts, self.truth = Counter(), False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.aten._local_scalar_dense.default:
            self.counts["values"] += args[0].device.type == DEVICE
            return self.truth if args[0].dtype == torch.bool else 1
        source = args[1] if function is torch.ops.aten.copy_.default else args[0] if args else None
        result = function(*args, **kwargs)
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            self.counts["copies"] += source.device.type == DEVICE and result.device.type == "cpu"
            self.counts["sent"] += source.device.type == "cpu" and result.device.type == DEVICE
        return result


def trained(model: torch.nn.Module, **inputs) -> None:
    model.train()(**inputs).loss.backward()
    torch.optim.AdamW(model.parameters()).step()


def ids(tokens: int, batch: int = 2) -> torch.Tensor:
    return torch.zeros(batch, tokens, dtype=torch.long, device=DEVICE)


def model_of(dialect: str, model_class: type = RetNetForCausalLM, dtype=torch.float32, **options) -> torch.nn.Module:
    config = small_config(dialect, **options)
    model_class = RetNetHybridForCausalLM if config.is_hybrid else model_class
    with torch.device(DEVICE):
        return model_class._from_config(config, dtype=dtype).eval()


def training(dialect: str, tokens: int = 40) -> None:
    mask = torch.ones_like(ids(tokens))
    trained(model_of(dialect), input_ids=ids(tokens), attention_mask=mask, labels=ids(tokens), use_cache=False)


def packed() -> None:
    position, model = torch.arange(40, device=DEVICE)[None], model_of("grouped")
    COUNTED.truth = True  # there is a token that begins a document
    trained(model, input_ids=ids(40, 1), position_ids=position, labels=ids(40, 1), use_cache=False)


def half(dialect: str) -> None:
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = model_of(dialect)(ids(40), labels=ids(40), use_cache=False).loss
    loss.backward()
    trained(model_of(dialect, dtype=torch.bfloat16), input_ids=ids(40), labels=ids(40), use_cache=False)


def checkpointed(dialect: str) -> None:
    (model := model_of(dialect)).gradient_checkpointing_enable()
    trained(model, input_ids=ids(40), labels=ids(40), use_cache=False)


def generation(dialect: str) -> None:
    model, options = model_of(dialect), {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with mock.patch.object(GenerationMixin, "_has_unfinished_sequences", side_effect=[True] * 5 + [False]):
        model.generate(ids(20), attention_mask=torch.ones_like(ids(20)), **options)


@torch.no_grad()
def decoding(dialect: str) -> None:
    model = model_of(dialect)
    state = model(ids(20), use_cache=True).past_key_values
    COUNTED.counts.clear()
    model(ids(1), past_key_values=state, use_cache=True)


@torch.no_grad()
def state_algebra(dialect: str) -> None:
    model = model_of(dialect)
    state = model(ids(20), use_cache=True).past_key_values
    state.activate_past_recording()
    model(ids(5), past_key_values=state, use_cache=True)
    state.crop(-2)
    copy = state.clone()
    both = RetNetState.concatenate([copy.select([0]), state.repeat(2)])
    both.reorder_cache(torch.arange(both.layers[0].batch_size, device=DEVICE))
    model(ids(3, batch=both.layers[0].batch_size), past_key_values=both, use_cache=True)
    assert {layer.saved()[0].device.type for layer in both.layers} == {DEVICE}
    counts = COUNTED.counts.copy()
    assert {layer.saved()[0].device.type for layer in copy.to("cpu").layers} == {"cpu"}
    COUNTED.counts = counts


@torch.no_grad()
def packed_states() -> None:
    """Boundaries are the host's, as in an engine, which made them."""
    model = model_of("grouped")
    slots = RetNetState.zeros(model.config, 4, device=DEVICE)
    for bounds, rows in (([0, 7, 20], [2, 0]), ([0, 1, 2, 9], [0, 2, 3])):
        packing = {"cu_seq_lens_q": bounds, "state_rows": torch.tensor(rows, device=DEVICE)}
        model(ids(bounds[-1], 1), past_key_values=slots, use_cache=True, **packing)


def encoder() -> None:
    model = model_of("fla", RetNetForMaskedLM, bidirectional=True)
    trained(model, input_ids=ids(40), attention_mask=torch.ones_like(ids(40)), labels=ids(40))


def pictures(family: str) -> None:
    with torch.device(DEVICE):
        model = VISION_FAMILIES[family].fresh()
    COUNTED.counts.clear()  # of initialisations, which reject what is too large
    pixels = torch.zeros(2, 3, 32, 32, device=DEVICE)
    trained(model, pixel_values=pixels, labels=torch.zeros(2, dtype=torch.long, device=DEVICE))
    with torch.no_grad():
        model.eval()(pixel_values=pixels, output_hidden_states=True)


def with_kernels(case: Callable[[str], None], dialect: str) -> None:
    """The case on a device that has kernels by default, which a mode without values trusts."""
    has = {"AUTO": kernels.AUTO._replace(runs_on=lambda device: True), "_by_default": (calls := [])}
    with mock.patch.multiple(kernels, **has), mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1"}):
        case(dialect)
    assert calls[0].checked  # were chosen


WITH_KERNELS = {"training": training, "half precision": half, "generation": generation, "a step": decoding}
OF_DIALECTS = WITH_KERNELS | {"short training": partial(training, tokens=10), "gradient checkpointing": checkpointed}
OF_DIALECTS |= {"state": state_algebra}
OF_DIALECTS |= {f"kernels, {name}": partial(with_kernels, case) for name, case in WITH_KERNELS.items()}
CASES = {f"{name}, {dialect}": partial(case, dialect) for name, case in OF_DIALECTS.items() for dialect in DIALECTS}
CASES |= {"packed": packed, "packed states": packed_states, "encoder": encoder}
CASES |= {f"pictures, {family}": partial(pictures, family) for family in VISION_FAMILIES}
COUNTED = Waits()


if __name__ == "__main__":
    held, found = register(), {}
    for name, case in CASES.items():
        COUNTED.counts.clear()
        COUNTED.truth = False
        try:
            with FakeTensorMode(), COUNTED:
                case()
            found[name] = {kind: COUNTED.counts[kind] for kind in ("values", "copies", "sent")}
        except Exception:
            found[name] = traceback.format_exc(limit=-4)
    print(json.dumps(found))
