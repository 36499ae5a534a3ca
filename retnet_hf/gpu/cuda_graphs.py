# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Decode steps of `generate()` as CUDA graphs, without a compiler.

On a GPU, Python takes longer to launch the operations of a step than the device takes to compute them. A retention state
keeps its address and its size, so that one captured step can be replayed for all further tokens. In each call of
`generate()`, the first step of one token warms up, the second is captured, and the graph is replayed until the call ends. A
graph never outlives a call, since weights, adapters and options may change between calls. Steps that are not known to be
safe are computed as usual: see `can_be_captured` and `CapturedStep`.
"""

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.generation import GenerationConfig
from transformers.modeling_outputs import ModelOutput
from transformers.utils import logging

from ..hub.saving import TRAVELS
from ..modules.layers import has_hooks
from ..ops.layout import new_columns
from ..ops.retention_forms import is_traced
from ..state.retention_state import RetNetState, RetNetStateLayer, first_in_use


logger = logging.get_logger(__name__)

GRAPHS_VARIABLE = "RETNET_HF_CUDA_GRAPHS"  # environment variable; "0" disables graphs
FEWEST_TOKENS = 8  # a capture takes about as long as two steps
# Modules of these packages run the same operations in each step, and do not wait for the device. Other modules are not
# captured, because a failed capture disturbs the process.
OURS = RetNetState.__module__ if TRAVELS else "retnet_hf"  # code saved with a model is a single module
PACKAGES = ("torch.nn.modules.", "transformers.activations.", "peft.tuners.lora.layer.", f"{OURS}.")
# Arguments of `forward` in a plain decode step.
ARGUMENTS = frozenset(("input_ids", "attention_mask", "past_key_values", "cache", "use_cache", "logits_to_keep"))


class CudaGraph:
    """The GPU operations of a call, captured once and replayed on the same memory."""

    lock: ClassVar[threading.Lock] = threading.Lock()  # operations of other threads on the stream would also be captured
    streams: ClassVar[dict[torch.device, torch.cuda.Stream]] = {}  # one per device, since each stream has workspaces
    idle: ClassVar[dict[torch.device, list[torch.cuda.CUDAGraph]]] = {}  # graphs of ended calls, to reuse their memory
    broken: ClassVar[list[torch.cuda.CUDAGraph]] = []  # graphs of failed captures: the allocator may still refer to them

    def __init__(self, device: torch.device) -> None:
        self.device, self.graph = device, None

    @contextmanager
    def on_side_stream(self) -> Iterator[torch.cuda.Stream]:
        """Runs the block on the stream for captures, in order with the current stream, and yields the current stream."""
        with self.lock, torch.cuda.device(self.device):
            if self.device not in self.streams:
                self.streams[self.device] = torch.cuda.Stream(self.device)
            stream, current = self.streams[self.device], torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                yield current
            current.wait_stream(stream)

    def warm_up(self, call: Callable[[], Tensor]) -> Tensor:
        """Returns the result of the call, which creates kernels, handles and workspaces for later calls."""
        with self.on_side_stream() as current:
            result = call()
            result.record_stream(current)
        return result

    def capture(self, call: Callable[[], Tensor]) -> Tensor:
        """Captures the call, and returns its result tensor, which has no values before `replay`."""
        with self.on_side_stream():
            idle, graph = self.idle.setdefault(self.device, []), torch.cuda.CUDAGraph()
            before = idle.pop() if idle else None
            generator = torch.cuda.default_generators[self.device.index]
            drawn = generator.graphsafe_get_state()
            generator.graphsafe_set_state(torch.Generator(self.device))  # so that other threads may draw during a capture
            try:
                # `torch.cuda.graph` would also empty the allocator's cache, and slow down the next prompt.
                graph.capture_begin(*(() if before is None else (before.pool(),)), capture_error_mode="thread_local")
            finally:
                generator.graphsafe_set_state(drawn)
            self.broken.append(graph)
            try:
                result = call()
            finally:
                graph.capture_end()
            self.broken.remove(graph)
        self.graph = graph
        return result

    def replay(self) -> None:
        self.graph.replay()

    def release(self) -> None:
        """Hands the memory to the next graph. Call it when nothing refers to the result any more."""
        if self.graph is not None:
            torch.cuda.current_stream(self.device).synchronize()
            with self.lock:
                self.idle[self.device].append(self.graph)


CAPTURE_LOCK = threading.Lock()  # held during a capture, so that no other call begins
RUNNING: Counter[int] = Counter()  # calls of `generate()` on GPUs, by thread
GRAPHS: dict[str, type[CudaGraph]] = {"cuda": CudaGraph}  # by device type


class CapturedStep:
    """The decode steps of one call of `generate()`, for one state."""

    def __init__(self, model: nn.Module, state: RetNetState, graph: CudaGraph) -> None:
        self.model, self.state, self.graph = model, state, graph
        self.ids: Tensor | None = None  # (B, 1), read by a replayed step
        self.mask: Tensor | None = None  # (B, 1) bool, likewise; None until a row has an absent token
        self.logits: Tensor | None = None  # (B, 1, vocabulary), written by a replayed step
        self.outputs: ModelOutput | None = None
        self.memory: list[tuple[RetNetStateLayer, str, Tensor, int]] = []  # tensors of the captured step, with addresses
        self.given_up = False

    def __call__(self, model: nn.Module, forward: Callable[..., ModelOutput], inputs: dict[str, Any]) -> ModelOutput | None:
        """Returns the outputs of `forward`, or None unless the call asks only for the logits of one new token per row."""
        input_ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        plain = model is self.model and type(input_ids) is Tensor and type(mask) in (Tensor, type(None))
        plain = plain and all(value is None or value is False or name in ARGUMENTS for name, value in inputs.items())
        plain = plain and inputs.get("use_cache") is True and isinstance(inputs.get("logits_to_keep", 0), int)
        plain = plain and not (torch.is_grad_enabled() or torch.is_autocast_enabled(input_ids.device.type))
        if not plain or self.given_up or input_ids.shape[1] != 1 or not self.finds_memory():
            return None
        past = first_in_use(self.state.layers)
        mask = None if mask is None else new_columns(input_ids.shape, mask, past)
        if self.mask is not None:
            self.mask.copy_(torch.ones_like(self.mask) if mask is None else mask)
        elif mask is not None and not bool(mask.all()):  # rows that have ended: another graph, which reads the mask
            self.release()
            self.ids, self.memory, self.mask = None, [], mask.clone()
            self.graph = GRAPHS[input_ids.device.type](self.model.device)
        if self.ids is not None and (self.ids.shape, self.ids.dtype) != (input_ids.shape, input_ids.dtype):
            return None

        def compute() -> Tensor:
            inputs = {"input_ids": self.ids, "attention_mask": self.mask, "cache": self.state}
            self.outputs = forward(self.model, **inputs, use_cache=True)
            return self.outputs.logits

        if self.ids is None:
            self.ids = input_ids.clone()
            logits = self.graph.warm_up(compute)
        else:
            self.ids.copy_(input_ids)
            if self.logits is None:
                with CAPTURE_LOCK:  # drawing random numbers in another thread that generates would fail
                    if len(RUNNING) > 1 or not self.capture(compute):
                        return None
            self.graph.replay()
            past.last_ids = input_ids[:, -1].clone()
            logits = self.logits.clone()
        return type(self.outputs)(**{**self.outputs, "logits": logits})

    def capture(self, compute: Callable[[], Tensor]) -> bool:
        """Captures a step without computing it or changing the state. Returns whether that was possible."""
        held = [(layer, name, getattr(layer, name)) for layer in self.state.layers for name in layer.SAVED]
        try:
            self.logits = self.graph.capture(compute)
            in_place = all(getattr(layer, name) is tensor for layer, name, tensor in held)
        except Exception as error:  # after any error, nothing has been computed, and the model computes the step
            in_place = False
            if not isinstance(error, torch.OutOfMemoryError):
                kind = self.ids.device.type
                logger.warning_once(f"A decode step could not be captured as a {kind} graph. Graphs are off now: {error}")
                GRAPHS.pop(kind, None)
        if in_place:
            self.memory = [(*place, place[-1].data_ptr()) for place in held]
        else:
            self.given_up = True
            for place in held:
                setattr(*place)
        return in_place

    def finds_memory(self) -> bool:
        """Returns whether the state may be overwritten, and is at the captured addresses. Copies reordered rows there."""
        for layer in self.state.layers:
            if not layer.is_initialized or layer.record_past or layer.borrowed:
                return False
        for layer, name, tensor, pointer in self.memory:
            now = getattr(layer, name)
            if tensor.data_ptr() != pointer:
                return False
            if now is not tensor:
                if (now.shape, now.dtype, now.device) != (tensor.shape, tensor.dtype, tensor.device):
                    return False
                setattr(layer, name, tensor.copy_(now))
        return True

    def release(self) -> None:
        self.logits = self.outputs = None
        self.graph.release()


@contextmanager
def capturing(
    steps: dict[int, CapturedStep], model: nn.Module, state: Any, input_ids: Tensor, generation_config: GenerationConfig
) -> Iterator[None]:
    """Has `steps` contain the step of the model with this state, within a `with` block, if it can be captured."""
    thread, step = threading.get_ident(), None
    with CAPTURE_LOCK:
        RUNNING[thread] += 1
    try:
        asked = os.environ.get(GRAPHS_VARIABLE) != "0" and not generation_config.disable_compile
        asked = asked and os.environ.get("CUDA_LAUNCH_BLOCKING", "0") == "0"  # a blocking launch cannot be captured
        longest = generation_config.max_length
        enough = (longest is None or longest - input_ids.shape[1] >= FEWEST_TOKENS) and id(state) not in steps
        if asked and enough and can_be_captured(model, state):
            steps[id(state)] = step = CapturedStep(model, state, GRAPHS[model.device.type](model.device))
        yield
    finally:
        if step is not None:
            del steps[id(state)]
            step.release()
        with CAPTURE_LOCK:
            RUNNING[thread] -= 1
            if not RUNNING[thread]:
                del RUNNING[thread]


def can_be_captured(model: nn.Module, state: Any) -> bool:
    """Returns whether a step consists of operations on one device without side effects, and the state keeps its address."""
    config, device, modules = model.config, model.device, list(model.modules())
    possible = device.type in GRAPHS and type(state) is RetNetState and not state.is_compileable
    possible = possible and all(type(layer) is RetNetStateLayer and not layer.record_past for layer in state.layers)
    possible = possible and not (torch.is_grad_enabled() or torch.is_autocast_enabled(device.type) or is_traced())
    possible = possible and torch._C._len_torch_dispatch_stack() == 0
    possible = possible and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    possible = possible and getattr(config, "num_experts", None) is None
    possible = possible and not (config.output_attentions or config.output_hidden_states or has_hooks(modules))
    possible = possible and model.model.context is None and getattr(model, "hf_quantizer", None) is None
    for module in modules if possible else ():
        known = f"{type(module).__module__}.".startswith(PACKAGES)
        possible = possible and known and not module.training and module._compiled_call_impl is None
    possible = possible and all(type(parameter) is nn.Parameter for parameter in model.parameters())
    return possible and all(tensor.device == device for tensor in (*model.parameters(), *model.buffers()))
