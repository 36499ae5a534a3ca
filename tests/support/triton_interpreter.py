# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The Triton kernels under Triton's interpreter, or on a GPU, against the recurrence in float64.

A process of its own, since triton reads the variable of the interpreter when it is imported. Reads cases as JSON, prints
the largest error of every result in units of what it may be; with `cuda`, of `test_retention_triton.py`; `cuda 0 4`: a part.
"""

import collections
import json
import math
import os
import sys
from pathlib import Path
from unittest import mock


os.environ["TRITON_INTERPRET"] = "0" if sys.argv[1:2] == ["cuda"] else "1"
sys.path.extend([str(Path(__file__).parent), str(Path(__file__).parents[2] / "tests_around" / "triton")])

import numpy as np
import torch
import triton.language as tl
from small_models import random_ids, small_model
from small_vision_models import small_metaformer, small_vir, stage_images, vir_images
from torch.autograd import forward_ad
from torchrun import join_alone
from triton.runtime import interpreter

from retnet_hf import RetNetState, context_parallel
from retnet_hf.gpu import cross_entropy_triton, gates_triton, packed_and_split_triton, retention_triton, rotation_triton
from retnet_hf.gpu.kernel_check import difference
from retnet_hf.modules.layers import RetNetRMSNorm
from retnet_hf.ops import gradients
from retnet_hf.ops.kernels import load_kernels
from retnet_hf.ops.retention_forms import bidirectional_retention, recurrent_retention, recurrent_step_, step_decay
from retnet_hf.ops.retention_packed import packed_documents, packed_step_, retention_of_documents
from retnet_hf.ops.retention_split import Context, SplitPlan, split_layout


DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


def multiply_bfloat16_as_a_device_does() -> None:
    """The interpreter keeps bfloat16 as 16 bits, which it computes with as integers, and cuts off what it rounds."""
    builder = interpreter.InterpreterBuilder
    dot, cast, binary = builder.create_dot, builder.cast_impl, builder.binary_op

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def rounded(numbers):
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    def create_dot(self, left, right, *rest):
        return dot(self, widened(left), widened(right), *rest)

    def cast_impl(self, source, target):
        if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
            return interpreter.TensorHandle(rounded(source.data), tl.bfloat16)
        return cast(self, source, target)

    def binary_op(self, left, right, operation):
        if left.dtype.scalar != tl.bfloat16:
            return binary(self, left, right, operation)
        return interpreter.TensorHandle(rounded(binary(self, widened(left), widened(right), operation).data), tl.bfloat16)

    builder.create_dot, builder.cast_impl, builder.binary_op = create_dot, cast_impl, binary_op


launched: collections.Counter[str] = collections.Counter()  # by the name of the kernel


def counted(kernel, *arguments, launch=retention_triton.launch, **options):
    launched[kernel.fn.__name__] += 1
    launch(kernel, *arguments, **options)


for module in (retention_triton, rotation_triton, gates_triton, cross_entropy_triton):
    module.launch = counted


class Case:
    """Random operands of one size, and weights of all results, whose gradients are compared."""

    def __init__(
        self, length=37, key_dim=16, value_dim=24, batch=1, heads=2, groups=None, decays=None, dtype="float32", scale=1.0,
        weight_scale=1.0, initial=True, mask=False, reset=False, tokens_first=False,
    ):  # fmt: skip
        generator = torch.Generator().manual_seed(length + key_dim)
        groups, decays = groups or heads, decays or heads
        self.dtype = getattr(torch, dtype)

        def normal(heads, *sizes, dtype=self.dtype, scale=scale):
            shape = (batch, sizes[0], heads, sizes[1]) if tokens_first else (batch, heads, *sizes)
            drawn = torch.randn(shape, generator=generator) * scale
            return (drawn.transpose(1, 2) if tokens_first else drawn).to(DEVICE, dtype)  # heads may be a view, as in models

        self.operands = [normal(heads, length, key_dim), normal(groups, length, key_dim), normal(groups, length, value_dim)]
        self.operands += [normal(decays, key_dim, value_dim, dtype=torch.float32).contiguous()] if initial else []
        self.log_decay = torch.log(0.3 + 0.7 * torch.rand(decays, generator=generator)).to(DEVICE)
        self.mask = (torch.rand(batch, length, generator=generator) < 0.6).to(DEVICE) if mask else None
        self.reset = (torch.rand(batch, length, generator=generator) < 0.2).to(DEVICE) if reset else None
        sizes = (heads, length, value_dim), (decays, key_dim, value_dim)
        self.weights = [normal(*each, dtype=torch.float32, scale=weight_scale) for each in sizes]
        if mask:  # outputs at absent tokens have no meaning
            self.weights[0] = self.weights[0] * self.mask[:, None, :, None]

    def results(self, function, dtype=None, change=lambda tensor: tensor) -> dict[str, torch.Tensor]:
        leaves = [change(operand.to(dtype or operand.dtype)).detach().requires_grad_() for operand in self.operands]
        state = leaves[3] if len(leaves) > 3 else None
        found = function(*leaves[:3], self.log_decay.to(dtype or torch.float32), state, self.mask, self.reset)
        weights = [change(weight.to(found[0].dtype)) for weight in self.weights[: len(found)]]
        gradients = torch.autograd.grad(found, leaves, weights)
        output = found[0] if self.mask is None else found[0] * self.mask[:, None, :, None]
        named = dict(zip(["output", "final state"], [output, *found[1:]]))
        return named | dict(zip(["query gradient", "key gradient", "value gradient", "initial state gradient"], gradients))

    def errors_of(self, kernel, reference) -> dict[str, float]:
        actual, expected = self.results(kernel), self.results(reference, torch.float64)
        # Results are sums of products, whose sizes without their signs bound what rounding does to them: of operands that
        # are sums themselves or have been decayed, three in a row at most, and of a gradient at its end; and in float32 of
        # every addend.
        sizes = self.results(reference, torch.float64, torch.abs)
        addends = sum(self.operands[0].shape[-2:]) + self.operands[2].shape[-1] + 32
        relative = 4 * ROUNDING[self.dtype] + addends * ROUNDING[torch.float32]  # also of an output in bfloat16
        return {name: worst(actual[name], expected[name], relative * sizes[name] + 1e-7) for name in expected}


def chunkwise(chunk_size=16, segments=None, largest_chunk=64, small_tiles=False, bidirectional=False, **sizes) -> dict:
    def computed(*operands):
        options = {"chunk_size": chunk_size, "bidirectional": bidirectional}
        found = retention_triton.chunkwise_retention_triton(*operands, **options)
        return found[:1] if bidirectional else found

    def both_ways(query, key, value, log_decay, _, *marks):
        return [bidirectional_retention(query, key, value, log_decay, *marks)]

    changes = {"largest_chunk": lambda *_: largest_chunk} | ({"segments_of": lambda *_: segments} if segments else {})
    if small_tiles:
        tiles = retention_triton.Tiles(chunk_size, 16, 16, 4, 1)
        changes |= dict.fromkeys(("read_tiles", "state_tiles"), lambda *_: tiles)
    with mock.patch.multiple(retention_triton, **changes):
        return Case(**sizes).errors_of(computed, both_ways if bidirectional else recurrent_retention)


def worst(actual, expected, allowed) -> float:
    """The largest error in units of what is allowed; a number that is none counts as one that is not."""
    error = ((actual.double() - expected).abs() / allowed).max().item()
    return error if error == error else float("inf")


def apart(actual: dict, expected: dict) -> dict[str, float]:
    return {name: worst(actual[name], right.double(), 1e-4 * right.abs().max()) for name, right in expected.items()}


def steps(heads=2, groups=None, decays=None, dtype="float32", mask=False, reset=False, key_dim=20, value_dim=24) -> dict:
    case = Case(4, key_dim, value_dim, 2, heads, groups, decays, dtype, mask=mask, reset=reset)
    state, outputs = case.operands[3].clone(), []
    expected_state, pointer = state.double(), state.data_ptr()
    for n in range(4):
        marks = [None if marks is None else marks[:, n : n + 1] for marks in (case.mask, case.reset)]
        token = [operand[:, :, n : n + 1] for operand in case.operands[:3]]
        output, _ = retention_triton.recurrent_step_triton_(*token, state, step_decay(case.log_decay, *marks))
        exact = step_decay(case.log_decay.double(), *marks)
        outputs.append((output, recurrent_step_(*(operand.double() for operand in token), expected_state, exact)[0]))
    assert state.data_ptr() == pointer
    return {"output": max(worst(*pair, 1e-5 * key_dim) for pair in outputs), "state": worst(state, expected_state, 1e-5)}


def split(decay=None, autocast=False, **sizes) -> dict[str, float]:
    case = Case(**{"length": 38} | sizes)
    if decay is not None:
        case.log_decay.fill_(math.log(decay))
    if case.reset is not None:
        case.reset[:, 0] = False  # the first document continues from the state
        case.reset &= case.mask  # absent tokens belong to no document
    documents = None if case.reset is None else case.reset.cumsum(1)
    (batch, _, length, _), context = case.operands[0].shape, Context(join_alone(), "head_to_tail")
    layout = split_layout(context, (batch, length), torch.device(DEVICE), case.mask, None, documents)

    def segments(query, key, value, log_decay, state, *_):
        plan = SplitPlan(layout, None, 1.0, [log_decay], "chunkwise", 16, kernels=load_kernels("triton"))
        return plan.compute(0, query, key, value, state)[:2]

    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        return case.errors_of(segments, recurrent_retention)


def packed(lengths, initial=True, **sizes) -> dict[str, float]:
    case, documents = Case(length=sum(lengths), **sizes), len(lengths)
    states = torch.randn(documents, *case.operands[3].shape[1:]).to(DEVICE) if initial else None
    parts = packed_documents([sum(lengths[:number]) for number in range(documents + 1)], 16, torch.device(DEVICE))

    def results(dtype=None, change=lambda tensor: tensor, **options) -> tuple[torch.Tensor, torch.Tensor]:
        operands = [change(operand.to(dtype or operand.dtype)) for operand in case.operands[:3]]
        before = None if states is None else change(states.to(dtype or torch.float32))
        return retention_of_documents(*operands, case.log_decay.to(dtype or torch.float32), parts, before, **options)

    every = results(kernels=load_kernels("triton")), results(torch.float64), results(torch.float64, torch.abs)
    allowed = 4 * ROUNDING[case.dtype] + 100 * ROUNDING[torch.float32]
    names = ("output", "states")
    return {name: worst(own, exact, allowed * size + 1e-7) for name, own, exact, size in zip(names, *every)}


def packed_steps(groups=None, begins=False, rows=True, dtype="float32") -> dict[str, float]:
    case = Case(3, 20, 24, heads=4, groups=groups, dtype=dtype)
    states = torch.randn(5 if rows else 3, *case.operands[3].shape[1:]).to(DEVICE)
    places = torch.tensor([[4, 1], [0, 3], [2, 1]], device=DEVICE)[:, 0] if rows else None  # a column of a table
    starts = torch.tensor([True, False, True], device=DEVICE) if begins else None
    if begins:
        states[4 if rows else 0, 0, 0, 0] = math.inf  # of another text
    exact, operands = states.double(), case.operands[:3]
    options = {"rows": places, "begins": starts}
    of_decay = step_decay(case.log_decay), step_decay(case.log_decay.double())
    output = packed_and_split_triton.packed_step_triton_(*operands, of_decay[0], states, **options)
    expected = packed_step_(*(operand.double() for operand in operands), of_decay[1], exact, **options)
    found = {"output": worst(output, expected, 20 * 1e-5), "states": worst(states, exact, 1e-5)}
    if rows:
        before, beyond = states.clone(), torch.tensor([1, 5, -1], device=DEVICE)
        nothing = packed_and_split_triton.packed_step_triton_(*operands, of_decay[0], states, beyond)[0, :, :, 0].isnan()
        found["rows that do not exist"] = float(nothing.any(0).tolist() != [False, True, True])
        found["other rows"] = float(not torch.equal(states[[0, 2, 3, 4]], before[[0, 2, 3, 4]]))
    return found


def rotation(length=37, size=24, angles=1, dtype="float32", tokens_first=True, strided=False, expanded=False) -> dict:
    """Rotated vectors, their gradient and its gradient in float64. `strided`: not dense. `expanded`: from one number."""
    generator, dtype = torch.Generator().manual_seed(length), getattr(torch, dtype)
    shape = (2, length, 3, size) if tokens_first else (2, 3, length, size)
    vectors, upstream, twice = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for _ in range(3))
    vectors, upstream, twice = (each.transpose(1, 2) if tokens_first else each for each in (vectors, upstream, twice))
    upstream = upstream[:1, :1, :1, :1].expand(upstream.shape) if expanded else upstream
    angle = (100 * torch.rand(angles, 1, length, size // 2, generator=generator)).to(DEVICE)

    def results(function, dtype: torch.dtype, angles_dtype: torch.dtype) -> list[torch.Tensor]:
        columns = (lambda tensor: tensor.mT.contiguous().mT) if strided else lambda tensor: tensor
        leaf, weight = columns(vectors.to(dtype)).detach().requires_grad_(), upstream.to(dtype).detach().requires_grad_()
        turns = columns(angle.cos().to(angles_dtype)), angle.sin().to(angles_dtype)
        halved = turns[0] / 2, turns[1] / 2
        rotated, of_keys = function(leaf, leaf[:, :2], turns, halved)
        assert torch.equal(rotated, function(leaf.detach(), leaf[:, :2].detach(), turns, halved)[0])
        torch.testing.assert_close(2 * of_keys, rotated[:, :2])
        (gradient,) = torch.autograd.grad(rotated, leaf, weight, create_graph=True)
        (second,) = torch.autograd.grad(gradient, weight, twice.to(dtype))
        assert strided or rotated.stride() == leaf.stride()
        return [rotated, gradient, second]

    actual = results(rotation_triton.rotate_triton, dtype, torch.float32)
    exact = results(gradients.rotate_both, torch.float64, torch.float64)
    # two products and their sum in float32, and one rounding to the type of the vectors
    relative = 4 * ROUNDING[torch.float32] + (0 if dtype == torch.float32 else ROUNDING[dtype])
    names = ("rotated", "gradient", "gradient of the gradient")
    return {name: worst(*pair, relative * pair[1].abs().max()) for name, pair in zip(names, zip(actual, exact))}


def gates(
    length=5, size=24, batch=2, heads=3, dtype="float32", tokens_first=True, weight=True, normed=True, values_dtype=None
) -> dict[str, float]:
    """Gated values, with or without a norm, their gradients and a gradient of these, against the same in float64."""
    generator, dtype = torch.Generator().manual_seed(length), getattr(torch, dtype)
    values_dtype = getattr(torch, values_dtype) if values_dtype else dtype
    shape = (batch, length, heads, size) if tokens_first else (batch, heads, length, size)
    values = torch.randn(shape, generator=generator).to(DEVICE, values_dtype)
    values = values.transpose(1, 2) if tokens_first else values
    gate, upstream = (torch.randn(batch, length, heads * size, generator=generator).to(DEVICE, dtype) for _ in range(2))
    values = values if normed else values.transpose(1, 2).flatten(2)
    affine = torch.randn(size, generator=generator).to(DEVICE, dtype)
    names = ["output", "values gradient", "gate gradient", *["weight gradient"] * (weight and normed), "second gradient"]

    def results(gated, normed_gate, dtypes) -> list[torch.Tensor]:
        operands = [tensor.to(dtype).detach().requires_grad_() for tensor, dtype in zip((values, gate), dtypes)]
        weights = torch.nn.Parameter(affine.to(dtypes[1])) if weight and normed else None
        if normed:
            norm = RetNetRMSNorm(size, 1e-6, elementwise_affine=weight)
            norm.weight = weights
            output = normed_gate(operands[0], norm, operands[1], torch.nn.SiLU())
        else:
            output = gated(*operands, torch.nn.SiLU())
        operands += [] if weights is None else [weights]
        upwards = upstream.to(output.dtype)
        first = torch.autograd.grad(output, operands, upwards, retain_graph=True)
        again = torch.autograd.grad(output, operands, upwards, create_graph=True)
        total = sum((gradient * gradient).sum() for gradient in again)
        return [output, *first, torch.autograd.grad(total, operands[1])[0]]

    actual = results(gates_triton.gated_triton, gates_triton.normed_gate_triton, (values_dtype, dtype))
    expected = results(gradients.gated, gradients.normed_gate, (torch.float64, torch.float64))
    # sums of a row and of the rows in float32, a few operations, and one rounding
    relative = (size + batch * length * heads + 16) * ROUNDING[torch.float32]
    relative += 0 if dtype == torch.float32 else 2 * ROUNDING[dtype]
    found = {name: worst(own, exact, relative * exact.abs().max()) for name, own, exact in zip(names, actual, expected)}
    # PyTorch computes the second gradient from rounded numbers
    found["second gradient"] /= 1 if dtype == torch.float32 else 16
    return found


def cross_entropy(rows=5, columns=23, dtype="float32", in_place=False) -> dict[str, float]:
    generator, dtype = torch.Generator().manual_seed(rows), getattr(torch, dtype)
    logits = (4 * torch.randn(rows, columns, generator=generator)).to(DEVICE, dtype)
    labels = torch.randint(columns, (rows, 1), generator=generator).to(DEVICE)
    labels[1] = -100
    exact = torch.empty_like(logits, dtype=torch.float64)
    expected = gradients.cross_entropy_and_gradient_(logits.double(), labels, -100, torch.float64, exact)
    gradient = logits if in_place else torch.empty_like(logits)
    loss = cross_entropy_triton.cross_entropy_triton_(logits, labels, -100, torch.float32, gradient)
    wild = torch.full_like(logits, float("-inf"))
    wild[:, -3:] = 1.0
    more = -100, torch.float32, torch.empty_like(wild)
    certain = cross_entropy_triton.cross_entropy_triton_(wild, torch.full_like(labels, columns - 1), *more)
    labels[0] = columns
    unknown = cross_entropy_triton.cross_entropy_triton_(wild, labels, *more)
    rounding = 0 if dtype == torch.float32 else ROUNDING[dtype]
    return {
        "loss": worst(loss, expected, (columns + rows) * ROUNDING[torch.float32] * expected),
        "gradient": worst(gradient, exact, rounding * exact.abs() + columns * ROUNDING[torch.float32]),
        "a label that is none": 0.0 if unknown.isnan() else math.inf,
        "many logits of -inf": abs(certain.item() - rows * math.log(3)) / 1e-4,
    }


def left_to_pytorch() -> dict:
    case = Case(9, 4, 5)

    def results(function, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        leaves = [operand.to(dtype).detach().requires_grad_() for operand in case.operands]
        log_decay = case.log_decay.to(dtype)
        output, final = function(*leaves[:3], log_decay, leaves[3])
        first = torch.autograd.grad(output.square().sum() + final.sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(gradient.square().sum() for gradient in first), leaves)
        of_decay = torch.autograd.grad(function(*leaves[:3], log_decay.requires_grad_(), leaves[3])[0].sum(), log_decay)
        return dict(zip(("query", "key", "value", "state", "log_decay"), [*second, *of_decay]))

    actual = results(retention_triton.chunkwise_retention_triton, torch.float32)
    return apart(actual, results(recurrent_retention, torch.float64))


def all_gradients(model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


class Pair:
    """A small model with kernels and the same one without, and what tells whether they are one function."""

    def __init__(self, **options) -> None:
        sizes = {"num_attention_heads": 2, "chunk_size": 16, "value_expansion": 1.0, "intermediate_size": 32} | options
        self.plain, self.with_kernels = (small_model(kernels=name, **sizes).to(DEVICE) for name in ("torch", "triton"))
        self.ids = random_ids(2, 37).to(DEVICE)
        self.mask = torch.ones_like(self.ids)
        self.mask[0, :5] = 0

    def unchecked(self) -> None:
        for module in self.with_kernels.modules():
            if hasattr(module, "kernels"):
                module.kernels = module.kernels._replace(checked=False)

    def trained(self, model, call=None) -> dict[str, torch.Tensor]:
        model.zero_grad()
        labels = self.ids.masked_fill(self.mask == 0, -100)
        call = model if call is None else call
        output = call(input_ids=self.ids, attention_mask=self.mask, labels=labels, use_cache=False)
        output.loss.backward()
        logits = output.logits[self.mask.bool()].detach()
        return {"logits": logits, "loss": output.loss.detach(), "gradients": all_gradients(model)}

    def generated(self, model) -> torch.Tensor:
        ids = self.ids[:, :20]
        options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "output_logits": True}
        options["disable_compile"] = True  # a captured step would call kernels unseen
        options |= {"attention_mask": self.mask[:, :20], "pad_token_id": 0, "return_dict_in_generate": True}
        return torch.stack(model.generate(ids, **options).logits)

    def errors(self) -> dict[str, float]:
        self.unchecked()
        found = apart(self.trained(self.with_kernels), self.trained(self.plain))
        found |= apart(*({"logits of decoding": self.generated(model)} for model in (self.with_kernels, self.plain)))
        layers = self.plain.config.layer_types.count("linear_attention")
        # passes of training and of generation; a prompt and a sequence of training are chunkwise
        least = {"read_kernel": 2, "rotation_kernel": 10, "gate_kernel": 9, "normed_gate_kernel": 9}
        return found | {name: 0.0 if launched[name] >= least[name] * layers else math.inf for name in least}

    def errors_compiled(self) -> dict[str, float]:
        compiled = torch.compile(self.with_kernels, backend="aot_eager", fullgraph=True)
        return apart(self.trained(self.with_kernels, compiled), self.trained(self.plain))

    def errors_in_parts(self) -> dict[str, float]:
        self.with_kernels.train().gradient_checkpointing_enable()
        self.unchecked()
        ids, found = self.ids[:, :36], []
        for model in (self.plain, self.with_kernels):
            slots, logits = RetNetState.zeros(model.config, 4, device=DEVICE), []
            for bounds, rows in (([0, 7, 20], [2, 0]), ([0, 1, 2], [0, 3])):
                packing = {"cu_seq_lens_q": bounds, "state_rows": torch.tensor(rows, device=DEVICE)}
                with torch.no_grad():
                    logits.append(model(ids[:1, : bounds[-1]], past_key_values=slots, **packing).logits)
            context_parallel(model, join_alone(), "head_to_tail")
            output = model(ids, labels=ids, shift_labels=ids, use_cache=False)
            output.loss.backward()
            context_parallel(model, None)
            documents = {"documents": torch.cat(logits, dim=1)}
            found.append(documents | {"logits": output.logits.detach(), "gradients": all_gradients(model)})
        # scans of documents of two sizes, and of the segments in two forward passes and a backward pass
        layers, calls = self.plain.config.num_hidden_layers, (launched["states_kernel"], launched["step_kernel"])
        return apart(*reversed(found)) | {"launches": 0.0 if calls == (7 * layers, layers) else math.inf}

    def errors_checkpointed(self) -> dict[str, float]:
        expected = self.trained(self.plain.train())
        self.with_kernels.train().gradient_checkpointing_enable()
        return apart(self.trained(self.with_kernels), expected)


def pictures(family: str, **options) -> dict[str, float]:
    """Logits and gradients of a vision model with kernels, against the same without."""
    make, shown = (small_vir, vir_images()) if family == "vir" else (small_metaformer, stage_images())
    shown, found = shown.to(DEVICE), []
    for kernels in ("triton", "torch"):
        model = make(**options).to(DEVICE)
        for part in model.modules():
            if hasattr(part, "kernels"):
                part.kernels = load_kernels(kernels)._replace(checked=False)
        output = model(shown, labels=torch.zeros(len(shown), dtype=torch.long, device=DEVICE))
        output.loss.backward()
        found.append({"logits": output.logits.detach(), "gradients": all_gradients(model)})
    return apart(*found)


def operators() -> dict[str, float]:
    """What PyTorch asks of operators: schema, results known without running, gradients, compilation with open sizes."""
    quick = ("test_schema", "test_faketensor")
    grouped = {"heads": 4, "groups": 2}
    for sizes in ({}, grouped, grouped | {"decays": 2, "tokens_first": True}):
        case = Case(**({"length": 5, "key_dim": 16, "value_dim": 24, "batch": 2, "mask": True} | sizes))
        leaves = [operand.requires_grad_() for operand in case.operands]
        operands = (*leaves[:3], case.log_decay, leaves[3], case.mask, None, 16)
        torch.library.opcheck(retention_triton.chunkwise_operator, operands, **({"test_utils": quick} if sizes else {}))
        forgot = [operand.detach() if isinstance(operand, torch.Tensor) else operand for operand in operands]
        backward = retention_triton.chunkwise_backward_operator, (*case.weights, *forgot)
        torch.library.opcheck(*backward, test_utils=quick)
    nothing_else = (*leaves[:3], case.log_decay, None, None, None, None)
    torch.library.opcheck(retention_triton.chunkwise_operator, nothing_else, test_utils=quick)
    token, step = [operand[:, :, 0:1] for operand in forgot[:3]], step_decay(case.log_decay)
    torch.library.opcheck(retention_triton.recurrent_step_operator, (*token, step.decay, step.write_mask, forgot[4]))
    return {}


def check_of_the_kernels() -> dict[str, float]:
    """The comparison that comes before their first use: 1 for right kernels that it refuses, or wrong ones that it takes."""
    kernels, read_states, found = load_kernels("triton"), retention_triton.read_states, {}

    def of_the_chunk_before(scan, query, key, value, states, *rest, **options):
        return read_states(scan, query, key, value, states.roll(1, 2), *rest, **options)

    for dtype in ROUNDING:
        for part, both_ways in (("output", False), ("gradients", False), ("step", False), ("gradients", True)):
            use = torch.device(DEVICE), dtype, (4, 2, 2, 20, 24, 16, both_ways)
            found[f"{part}, {dtype}, {both_ways}"] = float(difference(kernels, *use, (part,)) is not None)
        use = *use[:2], (*use[2][:-1], False)
        with mock.patch.object(retention_triton, "read_states", of_the_chunk_before):
            found[f"states of another chunk, {dtype}"] = float(difference(kernels, *use, ("output",)) is None)
    return found


def refused() -> dict[str, float]:
    """Operands that do not belong together: 1 for what was not refused."""
    case = Case(20, 16, 24, batch=2, heads=4, groups=2)
    query, key, value, state = case.operands
    vectors, angles = torch.zeros(2, 3, 5, 16, device=DEVICE), torch.zeros(2, 1, 5, 8, device=DEVICE)
    odd = vectors[..., :15]

    def retention(key=key, value=value, state=state, mask=None):
        retention_triton.chunkwise_operator(query, key, value, case.log_decay, state, mask, None, 16)

    def rotated(query=vectors, key=vectors, cos=angles, sin=angles):
        rotation_triton.rotate_once(query, key, (cos, sin), (cos, sin), False)

    def forwards():  # PyTorch's rotation refuses it, since it writes into given tensors
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(vectors, vectors)
            rotation_triton.rotate_triton(dual, dual, (angles, angles), (angles, angles))

    wrong = {
        "keys of another size": (retention, {"key": key[..., :8]}),
        "values of fewer tokens": (retention, {"value": value[:, :, :9]}),
        "a state of one sequence": (retention, {"state": state[:1]}),
        "a state of other heads": (retention, {"state": state[:, :2]}),
        "a state turned around": (retention, {"state": state.mT}),
        "a mask of other tokens": (retention, {"mask": torch.ones(2, 10, dtype=torch.bool, device=DEVICE)}),
        "angles of fewer tokens": (rotated, {"cos": angles[:, :, :3], "sin": angles[:, :, :3]}),
        "angles of another size": (rotated, {"cos": angles[..., :4], "sin": angles[..., :4]}),
        "angles of more rows": (rotated, {"query": vectors[:1], "key": vectors[:1]}),
        "sines of fewer rows": (rotated, {"sin": angles[:1]}),
        "an odd size": (rotated, {"query": odd, "key": odd, "cos": angles[..., :7], "sin": angles[..., :7]}),
        "keys of fewer tokens": (rotated, {"key": vectors[:, :, :4]}),
        "a derivative forwards": (forwards, {}),
    }
    found = {}
    for name, (call, operands) in wrong.items():
        try:
            call(**operands)
            found[name] = 1.0
        except RuntimeError:
            found[name] = 0.0
    return found


def left_out() -> dict[str, float]:
    """Gates that a kernel would compute wrongly: 1 for those that a kernel computes."""
    plain, hooked, watched, gaps = (RetNetRMSNorm(8, 1e-6).to(DEVICE) for _ in range(4))
    hooked.register_forward_hook(lambda *_: None)
    watched.register_full_backward_hook(lambda *_: None)
    gaps.weight = torch.nn.Parameter(torch.randn(16, device=DEVICE)[::2])
    values, gate, silu = torch.randn(2, 2, 3, 8, device=DEVICE), torch.randn(2, 3, 16, device=DEVICE), torch.nn.SiLU()
    cases = {"none": (values, plain, gate, silu), "a gate for all rows": (values, plain, gate[:1], silu)}
    cases |= {"a weight with gaps": (values, gaps, gate, silu), "a hook": (values, hooked, gate, silu)}
    cases |= {"a hook of the gradient": (values, watched, gate, silu)}
    cases |= {"another activation": (values, plain, gate, torch.nn.GELU())}
    found = {}
    for name, operands in cases.items():
        launched.clear()
        result = gates_triton.normed_gate_triton(*operands)
        found[name] = float(launched.total() != (name == "none"))
        found[f"{name}, values"] = worst(result, gradients.normed_gate(*operands).double(), 1e-5)
    return found


FUNCTIONS = {"chunkwise": chunkwise, "steps": steps, "rotations": rotation, "gates": gates, "losses": cross_entropy}
FUNCTIONS |= {"split": split, "packed": packed, "packed steps": packed_steps, "pictures": pictures}
FUNCTIONS |= {"models": lambda way="errors", **options: getattr(Pair(**options), way)()}
LEAST = {"rotations": 2, "gates": 2, "losses": 2, "split": 6}  # kernels that each of these cases launches
OTHERS = {"wrong shapes": refused, "left out": left_out, "operators": operators, "left to PyTorch": left_to_pytorch}
OTHERS |= {"check of the kernels": check_of_the_kernels}


def errors(kind: str, case: dict) -> dict[str, float]:
    """The errors of a case, and whether it launched at least so many kernels."""
    launched.clear()
    return FUNCTIONS[kind](**case) | {"launches": 0.0 if launched.total() >= LEAST.get(kind, 1) else math.inf}


if __name__ == "__main__":
    torch.set_num_threads(1)
    if DEVICE == "cpu":
        multiply_bfloat16_as_a_device_does()
        kinds = json.loads(sys.stdin.read())
    else:
        from test_retention_triton import CASES as kinds
    work = [(name, errors, (kind, case)) for kind, cases in kinds.items() for name, case in cases.items()]
    work += [(name, function, ()) for name, function in OTHERS.items()]
    part, parts = map(int, sys.argv[2:4] or (0, 1))
    found = {name: function(*operands) for name, function, operands in work[part::parts]}
    print(json.dumps(found))
    if DEVICE != "cpu":
        too_large = [name for name, errors in found.items() if any(error > 1 for error in errors.values())]
        sys.exit(f"errors are larger than rounding explains: {', '.join(too_large)}" if too_large else 0)
