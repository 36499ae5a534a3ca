# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The decode step of a layer as a program of the machine, compiled once and kept in a file.

Eagerly, a step of a small model takes as long for starting its operations, a few dozen in each layer, as for reading its
weights. AOTInductor makes two or three loops of all that is between two products with weights, and a library of it that is
loaded in some milliseconds. The program is that of a layer, not of a model: weights and state are its inputs, so that one
serves all layers that are alike, is compiled in about ten seconds whatever the depth, and holds no weights.

What is compiled is the layer itself: a twin of it, whose linear layers are products for one token (decoding_products.py) and
whose state is a stand-in, is exported as a function of tensors. Everything that the layer does stays written down in one
place.

A file is named by what the program was made of: this package's source, the configuration, the operands, the versions of
PyTorch, transformers and Python, the number of threads, and the processor.
"""

import copy
import hashlib
import json
import os
import platform
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from huggingface_hub import constants
from torch import Tensor, nn
from torch.func import functional_call
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from .decoding_products import OneOutput, TokenProducts, is_linear, token_products
from .fused_projections import FusesProjections, is_hooked
from .retention_forms import StepDecay
from .retention_plan import RetentionPlan
from .retention_state import RetNetStateLayer
from .sequence_layout import SequenceLayout


logger = logging.get_logger(__name__)

CHANGED = "weights of the model were changed, moved or replaced: it decodes without programs until compile_decoding()."


def default_folder() -> Path:
    """Where programs are kept if no folder is named: in the cache of huggingface_hub."""
    return Path(constants.HF_HOME) / "retnet_hf" / "decoding"


class StateOfStep:
    """What a traced layer sees of its state: matrices that the step changes in place."""

    can_be_overwritten = True
    window = None

    def __init__(self, state: Tensor) -> None:
        self.past = state, None

    def update(self, *args, **kwargs) -> None:
        """The position is no business of the program."""


class DecodeStep(nn.Module):
    """The step of a layer, as a function of tensors alone.

    Args:
        twin: the layer, with products for one token in the place of its linear layers.
    """

    def __init__(self, twin: nn.Module) -> None:
        super().__init__()
        self.twin = twin
        self.names = [name for name, _ in twin.named_parameters()]

    def forward(
        self,
        hidden_states: Tensor,  # (1, 1, D)
        state: Tensor,  # (1, M, K, V), changed in place
        decay: Tensor,  # (1, M, 1, 1)
        rotations: list[Tensor],  # (1, 1, 1, K): cosines and sines of the query, then of the key; or nothing
        operands: list[Tensor],  # parameters of the twin
    ) -> Tensor:
        plan = RetentionPlan(
            form="recurrent",
            query_rotation=tuple(rotations[:2]) or None,
            key_rotation=tuple(rotations[2:]) or None,
            layout=SequenceLayout(None, None, None, None),
            attention=None,
            output_maps=False,
            chunk_size=None,
            bidirectional=False,
            step_decay=StepDecay(decay, None),
        )
        states = SimpleNamespace(layers={self.twin.retention.layer_idx: StateOfStep(state)})
        inputs = {"plan": plan, "past_key_values": states, "use_cache": True}
        return functional_call(self.twin, dict(zip(self.names, operands)), (hidden_states,), inputs)


def in_place_of(module: FusesProjections) -> TokenProducts | None:
    """Products in the place of the projections of a module."""
    layers, fused = module.projection_layers(), module.fused_projections
    whole = fused.weight if fused is not None and fused.weight is not None and fused.computes(layers) else None
    return token_products(layers, whole)


def twin_of(layer: nn.Module) -> nn.Module | None:
    """A layer of the same kind that computes with products for one token, and shares all its weights.

    None where a linear layer is not understood: adapted, sharded, or quantised in another way.
    """
    memo = {id(parameter): parameter for parameter in layer.parameters()}
    memo |= {id(module.fused_projections): None for module in layer.modules() if isinstance(module, FusesProjections)}
    twin = copy.deepcopy(layer, memo)
    for path, module in layer.named_modules():
        linear = [name for name, child in module.named_children() if isinstance(child, nn.Linear)]
        if not isinstance(module, FusesProjections):
            if linear:  # of an adapter
                return None
            continue
        own, products = twin.get_submodule(path), in_place_of(module)
        if products is None:
            return None
        own.add_module("products", products)
        vars(own)["project"] = products  # in the place of the method
        for name in module.projections:
            delattr(own, name)
        for name in set(linear) - set(module.projections):
            products = token_products([getattr(module, name)])
            if products is None:
                return None
            setattr(own, name, OneOutput(products))
    return twin.eval()


class LayerProgram:
    """The program of a layer's step, with the operands of this layer.

    A copy of a model, and one that was pickled, has none: programs belong to the process.

    Args:
        run: the program.
        layer: whose weights the operands are.
        operands: parameters of its twin.
        dtype: of the hidden states.
    """

    def __init__(
        self, run: Callable[[list[Tensor]], list[Tensor]], layer: nn.Module, operands: list[Tensor], dtype: torch.dtype
    ) -> None:
        self.run, self.operands, self.dtype = run, operands, dtype
        self.layer = Watched(layer)

    def serves(
        self, hidden_states: Tensor, plan: RetentionPlan, past: RetNetStateLayer | None, use_cache: bool | None
    ) -> bool:
        """Whether the program computes what the layer would: one token that is there, whose state may be overwritten."""
        if past is None or not use_cache or plan.step_decay is None or plan.packed is not None or past.record_past:
            return False
        step = plan.step_decay
        if hidden_states.shape[:2] != (1, 1) or hidden_states.dtype != self.dtype or step.key is not None:
            return False
        if not past.is_initialized or not past.can_be_overwritten or torch.is_autocast_enabled("cpu"):
            return False
        if self.layer.is_hooked():
            return False
        state = past.recurrent_state
        return state.dtype == step.state.dtype == torch.float32 and state.is_contiguous() and hidden_states.is_contiguous()

    def __call__(self, hidden_states: Tensor, plan: RetentionPlan, past: RetNetStateLayer) -> Tensor:
        """(1, 1, D) -> (1, 1, D), and the token is taken in."""
        state, _ = past.past
        rotations = [] if plan.key_rotation is None else [*plan.query_rotation, *plan.key_rotation]
        output = self.run([hidden_states, state, plan.step_decay.state, *rotations, *self.operands])[0]
        past.advance(state, plan.layout.next_position[:, -1], 1)
        return output

    def __reduce__(self) -> tuple:
        return _none, ()


def _none() -> None:
    return None


class Watched:
    """Whether a module is what it was when this was made: its weights and layers, and that nobody looks inside."""

    def __init__(self, module: nn.Module) -> None:
        within = list(module.modules())
        self.inside = [each for each in within if each is not module]
        self.owners = [owners for each in within for owners in (each._modules, each._parameters)]
        self.held = [thing for owners in self.owners for thing in owners.values()]  # so that no other takes its place
        self.marks = self._marks()

    def _marks(self) -> list[int | tuple]:
        things = [thing for owners in self.owners for thing in owners.values()]
        return [(thing.data_ptr(), thing.stride()) if type(thing) is nn.Parameter else id(thing) for thing in things]

    def is_as_it_was(self) -> bool:
        """Whether it has the same layers, and the same weights in the same place, whatever their values have become."""
        return self._marks() == self.marks

    def is_hooked(self) -> bool:
        """Whether a module inside does more than its class does."""
        return any(map(is_hooked, self.inside))


@cache
def machine() -> dict[str, str]:
    """What a program was compiled for: processor with its instructions, system, and versions."""
    instructions = platform.processor()
    information = Path("/proc/cpuinfo")
    if information.is_file():
        lines = information.read_text(encoding="utf-8").splitlines()
        instructions = next((line for line in lines if line.startswith(("flags", "Features"))), instructions)
    source = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        source.update(path.read_bytes())
    return {
        "machine": f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {instructions}",
        "versions": f"python {platform.python_version()} torch {torch.__version__} transformers {transformers.__version__}",
        "source": source.hexdigest(),
    }


def program_path(folder: Path, config: PreTrainedConfig, twin: nn.Module, inputs: list[Tensor]) -> Path:
    """The file in which the program of a twin with such inputs is kept."""
    fields = config.to_diff_dict()
    for name in ("_name_or_path", "architectures", "dtype", "transformers_version", "vocab_size", "num_hidden_layers"):
        fields.pop(name, None)
    constants_of_layer = [
        {name: value for name, value in vars(module).items() if isinstance(value, (int, float, str)) and name != "layer_idx"}
        for module in twin.modules()
    ]
    made_of = machine() | {
        "config": fields,
        "layer": repr(twin),
        "constants": constants_of_layer,
        "inputs": [f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()}" for tensor in inputs],
        "threads": torch.get_num_threads(),
    }
    digest = hashlib.sha256(json.dumps(made_of, sort_keys=True, default=str).encode()).hexdigest()
    return folder / f"{digest[:32]}.pt2"


def make(path: Path, step: DecodeStep, inputs: tuple) -> None:
    """Compiles the program, and writes it whole or not at all.

    Raises:
        OSError: if the folder cannot be written to.
        RuntimeError: if the program cannot be compiled.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as beside, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch about itself
        made = Path(beside) / path.name
        with torch.no_grad():
            exported = torch.export.export(step, inputs, strict=False)
        try:
            torch._inductor.aoti_compile_and_package(exported, package_path=str(made))
        except Exception as error:
            raise RuntimeError(
                f"compile_decoding could not compile the step of a layer, which takes a C++ compiler: {error}"
            ) from error
        os.replace(made, path)


def load(path: Path) -> Callable[[list[Tensor]], list[Tensor]]:
    """The program in a file, of a flat list of its inputs."""
    return torch._inductor.aoti_load_package(str(path)).loader.run


def kept_or_made(path: Path, step: DecodeStep, inputs: tuple) -> Callable[[list[Tensor]], list[Tensor]]:
    """The program in a file, which is made where there is none, or none that can be loaded."""
    if path.is_file():
        try:
            return load(path)
        except Exception as error:  # of PyTorch's, of many kinds
            logger.warning(f"{path} is no program that can be loaded here, and is made anew: {error}")
    make(path, step, inputs)
    return load(path)


def compile_layers(layers: list[nn.Module], config: PreTrainedConfig, folder: Path) -> list[LayerProgram | None]:
    """A program for each layer, from the folder where one is kept, else compiled and kept; None where there can be none.

    Args:
        layers: of retention, on a CPU.

    Raises:
        RuntimeError: if a program cannot be compiled.
    """
    runs: dict[Path, Callable[[list[Tensor]], list[Tensor]]] = {}
    programs: list[LayerProgram | None] = []
    for layer in layers:
        twin = twin_of(layer)
        if twin is None:
            programs.append(None)
            continue
        operands = [parameter.detach() for parameter in twin.parameters()]
        mixer, dtype = layer.retention, layer.retention_norm.weight.dtype
        matrices = config.state_heads(mixer.layer_idx)
        inputs = (
            torch.zeros(1, 1, config.hidden_size, dtype=dtype),
            torch.zeros(1, matrices, mixer.head_dim, mixer.value_head_dim),
            torch.ones(1, matrices, 1, 1),
            [torch.ones(1, 1, 1, mixer.head_dim) for _ in range(4 if config.use_rotary else 0)],
            operands,
        )
        path = program_path(folder, config, twin, [*inputs[:3], *inputs[3], *operands])
        if path not in runs:
            runs[path] = kept_or_made(path, DecodeStep(twin), inputs)
        programs.append(LayerProgram(runs[path], layer, operands, dtype))
    return programs


class HeadProduct:
    """The product of a linear head for one token, by a kernel of its own."""

    def __init__(self, head: nn.Linear, products: TokenProducts) -> None:
        self.head, self.products, self.dtype, self.watched = head, products, head.weight.dtype, Watched(head)

    @classmethod
    def of(cls, head: nn.Module) -> "HeadProduct | None":
        """None where the linear layer itself is as fast."""
        products = token_products([head]) if isinstance(head, nn.Linear) else None
        return None if products is None or products.are_linear else cls(head, products)

    def serves(self, head: nn.Module, hidden_states: Tensor) -> bool:
        """Whether it computes what this head would."""
        if hidden_states.shape[:-1] != (1, 1) or hidden_states.dtype != self.dtype or torch.is_grad_enabled():
            return False
        return head is self.head and is_linear(head) and self.watched.is_as_it_was() and not torch.is_autocast_enabled("cpu")

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """(1, 1, D) -> (1, 1, vocab_size)."""
        return self.products(hidden_states)[0]

    def __reduce__(self) -> tuple:
        return _none, ()
