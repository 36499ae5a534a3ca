# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What models compute on a GPU is what they compute on a CPU: `python -m tests.on_a_card`.

Small models of every family, with each way to compute retention, are compared number by number, and kernels alone with the
recurrence. Ends with status 1 and the names of what is wrong or took too long; with status 0 and a reason without a GPU.
"""

import argparse
import concurrent.futures
import functools
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch


sys.path.insert(0, str(Path(__file__).parent / "support"))

from small_models import DIALECTS, FAMILIES, left_padded, random_ids, small_model  # noqa: E402
from small_vision_models import small_metaformer, small_rmt, small_vir, stage_images, vir_images  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torchrun import join_alone  # noqa: E402

from retnet_hf import RetNetForCausalLM, RetNetForMaskedLM, RetNetState, context_parallel  # noqa: E402
from retnet_hf.ops.kernels import KERNELS_VARIABLE  # noqa: E402


Results = dict[str, Tensor]
TOLERANCE = 2e-3  # of the largest value: sums in another order, of models whose logits every token sways
HALF_TOLERANCE = 0.3  # of the root mean square, in bfloat16, in which experts of some tokens change
LENGTH = 70  # several chunks, the last of which is not full


def padded(device: str) -> tuple[Tensor, Tensor]:
    ids, mask = left_padded([random_ids(1, LENGTH), random_ids(1, LENGTH - 9, seed=1)])
    return ids.to(device), mask.to(device)


def trained(model: nn.Module, call: Callable | None = None, kind="", tokens: Tensor | None = None, **batch) -> Results:
    """Loss, logits of some tokens, and gradients of a step of training; `kind` begins the names of what is half as exact."""
    output = (model if call is None else call)(**batch)
    output.loss.backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    logits = output.logits if tokens is None else output.logits[tokens]
    return {f"{kind}loss": output.loss, f"{kind}logits": logits, f"{kind}gradients": gradients}


def training(dialect: str, device: str, checkpointed: bool = False, model_class=RetNetForCausalLM, **options) -> Results:
    model = small_model(dialect, model_class, **options).train().to(device)
    if checkpointed:
        model.gradient_checkpointing_enable()
    ids, mask = padded(device)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return trained(model, tokens=mask.bool(), **batch, **({} if options else {"use_cache": False}))


def packed(dialect: str, device: str) -> Results:
    model, ids = small_model(dialect).to(device), random_ids(1, LENGTH).to(device)
    position = torch.cat([torch.arange(30), torch.arange(LENGTH - 30)])[None].to(device)
    return trained(model, input_ids=ids, position_ids=position, labels=ids, use_cache=False)


@torch.no_grad()
def generation(dialect: str, device: str, **options) -> Results:
    model, (ids, mask) = small_model(dialect).to(device), padded(device)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0} | options
    found = model.generate(ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **options)
    return {"logits": torch.stack(found.logits), "tokens": found.sequences}


@torch.no_grad()
def states(dialect: str, device: str) -> Results:
    """A prompt in pieces, a cropped state, rows that are selected, joined and repeated, and a state that was moved."""
    model = small_model(dialect).to(device)
    ids = random_ids(2, LENGTH).to(device)
    state = model(ids[:, :40], use_cache=True).past_key_values
    state.activate_past_recording()
    model(ids[:, 40:50], past_key_values=state, use_cache=True)
    state.crop(-4)
    both = RetNetState.concatenate([state.select([1]), state.clone().to("cpu").to(device).repeat(2)])
    both.reorder_cache(torch.arange(both.layers[0].batch_size, device=device).flip(0))
    rows = ids[:1].expand(both.layers[0].batch_size, -1)
    found = [model(rows[:, 46:60], past_key_values=both, use_cache=True).logits]
    found += [model(rows[:, n : n + 1], past_key_values=both, use_cache=True).logits for n in range(60, 64)]
    return {"logits": torch.cat(found, dim=1)}


@torch.no_grad()
def documents(device: str) -> Results:
    model, found = small_model("grouped").to(device), []
    slots = RetNetState.zeros(model.config, 4, device=device)
    for bounds, rows in (([0, 7, 20], [2, 0]), ([0, 1, 2, 9], [0, 2, 3])):
        options = {"cu_seq_lens_q": bounds, "state_rows": torch.tensor(rows, device=device), "use_cache": True}
        found.append(model(random_ids(1, bounds[-1]).to(device), past_key_values=slots, **options).logits)
    return {"logits": torch.cat(found, dim=1)}


def segments(device: str) -> Results:
    """The two segments of one rank, each of which is a part of a text that continues from a state."""
    model, ids = small_model("grouped").to(device), random_ids(2, LENGTH).to(device)
    context_parallel(model, join_alone(), "head_to_tail")
    state = model(ids, use_cache=True).past_key_values
    return trained(model, input_ids=ids, shift_labels=ids, labels=ids, past_key_values=state)


@torch.no_grad()
def half(dialect: str, device: str) -> Results:
    model = small_model(dialect).to(device, torch.float32 if device == "cpu" else torch.bfloat16)
    return {"half": model(random_ids(2, LENGTH).to(device), use_cache=False).logits}


def autocast(dialect: str, device: str) -> Results:
    model, ids = small_model(dialect).to(device), random_ids(2, LENGTH).to(device)
    call = torch.autocast(device.partition(":")[0], torch.bfloat16, enabled=device != "cpu")(model)
    return trained(model, call, "half ", input_ids=ids, labels=ids, use_cache=False)


def compiled(dialect: str, device: str) -> Results:
    """As one graph, with its gradients, on the GPU alone."""
    model, ids = small_model(dialect).to(device), random_ids(2, LENGTH).to(device)
    call = model if device == "cpu" else torch.compile(model, fullgraph=True)
    return trained(model, call, input_ids=ids, labels=ids, use_cache=False)


def pictures(family: str, device: str, **options) -> Results:
    model = {"vir": small_vir, "rmt": small_rmt, "metaformer": small_metaformer}[family](**options).to(device)
    shown = (vir_images() if family == "vir" else stage_images()).to(device)
    return trained(model, pixel_values=shown, labels=torch.zeros(len(shown), dtype=torch.long, device=device))


def cases() -> dict[str, Callable[[str], Results]]:
    part, found = functools.partial, {}
    for dialect in DIALECTS | FAMILIES:
        found[f"training, {dialect}"] = part(training, dialect)
        found[f"generation, {dialect}"] = part(generation, dialect)
        found[f"half, {dialect}"] = part(half, dialect)
    for dialect in DIALECTS:
        found[f"gradient checkpointing, {dialect}"] = part(training, dialect, checkpointed=True)
        found[f"packed, {dialect}"] = part(packed, dialect)
        found[f"states, {dialect}"] = part(states, dialect)
        found[f"autocast, {dialect}"] = part(autocast, dialect)
    found |= {f"beams, {dialect}": part(generation, dialect, num_beams=3) for dialect in ("fla", "hybrid")}
    found |= {"documents": documents, "segments": segments, "compiled": part(compiled, "fla")}
    found["encoder"] = part(training, "fla", model_class=RetNetForMaskedLM, bidirectional=True)
    for recipe in ("authors", "pulfer", "mean", "bidirectional", "mirrored"):
        found[f"pictures, vir, {recipe}"] = part(pictures, "vir", recipe=recipe)
    found |= {f"pictures, {family}": part(pictures, family) for family in ("rmt", "metaformer")}
    return found


def errors_of(name: str, kernels: str, device: str) -> list[str]:
    case, found = cases()[name], []
    with mock.patch.dict(os.environ, {KERNELS_VARIABLE: kernels} if kernels else {}):
        try:
            expected, actual = case("cpu"), case(device)
        except Exception:
            return [traceback.format_exc(limit=-3)]
    for what, right in expected.items():
        right, own = right.detach().double(), actual[what].detach().double().cpu()
        if not own.isfinite().all() or own.shape != right.shape:
            found.append(f"{what} has numbers that are not finite, or the shape {tuple(own.shape)}")
        elif what.startswith("half"):
            error = (own - right).square().mean().sqrt() / right.square().mean().sqrt()
            found += [] if error <= HALF_TOLERANCE else [f"{what} differs by {error:.3f} of its size"]
        else:
            error = (own - right).abs().max() / max(1.0, right.abs().max())
            found += [] if error <= TOLERANCE else [f"{what} differs by {error:.2e} of its largest value"]
    return found


def work(name: str, kernels: str, device: str) -> list[str]:
    torch.set_num_threads(1)
    torch.backends.cudnn.allow_tf32 = False  # convolutions of pictures would differ by 1 %
    return errors_of(name, kernels, device)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda", help='"cpu" tries the script without a GPU')
    add("--kernels", nargs="*", default=["", "triton", "torch"], help="values of RETNET_HF_KERNELS; empty is the default")
    add("--cases", default="", help="beginning of the names of cases")
    add("--seconds", type=float, default=170.0)
    add("--processes", type=int, default=10)
    arguments = parser.parse_args(words)
    on_gpu = arguments.device != "cpu"
    if on_gpu and not torch.cuda.is_available():
        print("skipped: PyTorch sees no GPU here; --device cpu tries the script")
        return
    begun, parts = time.monotonic(), 4
    alone = [sys.executable, "-m", "tests.support.triton_interpreter", "cuda"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": Path(__file__).parent.parent}
    kernels_alone = [subprocess.Popen([*alone, str(part), str(parts)], **options) for part in range(parts if on_gpu else 0)]

    pool = concurrent.futures.ProcessPoolExecutor(arguments.processes, multiprocessing.get_context("spawn"))
    names = [name for name in cases() if name.startswith(arguments.cases)]
    jobs = {
        pool.submit(work, name, kernels, arguments.device): f"{name}, kernels {kernels or 'by default'}"
        for name in sorted(names, key=lambda name: not name.startswith("compiled"))  # the longest goes first
        for kernels in arguments.kernels
    }
    failed = {}
    done, late = concurrent.futures.wait(jobs, timeout=arguments.seconds - (time.monotonic() - begun))
    for job in done:
        found = [f"the process ended: {job.exception()}"] if job.exception() else job.result()
        if found:
            failed[jobs[job]] = found
    failed |= {jobs[job]: ["no time left"] for job in late}
    for number, process in enumerate(kernels_alone):
        try:
            text, _ = process.communicate(timeout=max(1.0, arguments.seconds - (time.monotonic() - begun)))
        except subprocess.TimeoutExpired:
            process.kill()
            text = "no time left"
        if process.returncode != 0:
            failed[f"kernels alone, part {number}"] = [text[-2000:]]
    for process in (pool._processes or {}).values() if late else ():
        process.kill()
    pool.shutdown(wait=not late, cancel_futures=True)
    for name, found in failed.items():
        print(f"WRONG {name}: {'; '.join(found)}")
    seconds = time.monotonic() - begun
    right = len(jobs) + len(kernels_alone) - len(failed)
    print(f"{right} right, {len(failed)} wrong, {seconds:.0f} s on {arguments.device}")
    sys.exit(1 if failed or not jobs else 0)


if __name__ == "__main__":
    main()
