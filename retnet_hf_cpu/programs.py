# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The decode step of a layer, or products of one token, as a program for this machine, compiled once and kept in a file.

Without it, a step of a small model takes as long for starting its operations, a few dozen in each layer, as for reading its
weights. AOTInductor fuses everything between two products with weights into two or three loops, in a library that is loaded
in some milliseconds. A program is that of a layer, not of a model. Weights and state are its inputs, so that one program
serves all layers that are alike, takes some ten to thirty seconds to compile whatever the depth, and holds no weights.

What is compiled is the layer itself: a twin of it, whose linear layers are products for one token (products.py) and whose
state is a stand-in, is exported as a function of tensors. The computation is written down only in retnet_hf. A twin that
sums products and one that calls PyTorch's kernels are both compiled, and a trial on the real weights decides which is kept.

The name of a file is a digest of everything that the program was made of: the source of both packages, the configuration,
the operands, the versions of PyTorch, transformers and Python, the number of threads, and the processor.
"""

import copy
import hashlib
import itertools
import json
import os
import platform
import stat
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from huggingface_hub import constants
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

import retnet_hf
from retnet_hf.modules.hooks import has_hooks
from retnet_hf.ops.gradients import rotate_step
from retnet_hf.ops.operators import Step
from retnet_hf.ops.plan import Plan, Rotation, Scaling
from retnet_hf.ops.retention_forms import StepDecay, recurrent_step_
from retnet_hf.state.retention_state import RetNetStateLayer

from .changed_modules import ModuleSnapshot
from .fusing import linear_groups
from .products import OneOfProducts, Product, Products, is_clearly_faster, products_of, sums


logger = logging.get_logger(__name__)

SOURCES = (Path(retnet_hf.__file__).parent, Path(__file__).parent)  # folders of the code that programs are made of
Run = Callable[[list[Tensor]], list[Tensor]]  # a program, as a function of a flat list of its inputs


def default_folder() -> Path:
    """The folder of programs if none is named: in the cache of huggingface_hub."""
    return Path(constants.HF_HOME) / "retnet_hf" / "decoding"


def shallow_copy(module: nn.Module) -> nn.Module:
    """A copy of a module and of everything in it, which shares parameters and buffers with the module."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})


def turns(config: PreTrainedConfig) -> bool:
    """Whether layers of retention rotate queries and keys."""
    return config.use_rotary and getattr(config, "rotary_layers", None) != "softmax_attention"


class TracedRotation(Rotation):
    """A rotation by cosines and sines that are inputs of the program."""

    def __init__(self, rotations: list[Tensor], turn: Callable[..., Tensor]) -> None:
        self.turn, self.narrows = turn, ()
        self.of_query, self.of_key = tuple(rotations[:2]), tuple(rotations[2:])


class TracedState:
    """A state whose matrices are an input of the program, which changes them in place. Positions are counted outside."""

    def __init__(self, state: Tensor) -> None:
        self.state = state

    def update(self, key: Tensor, value: Tensor, query: Tensor, plan: Plan, layer_idx: int) -> Tensor:
        output, _ = plan.operators[layer_idx](query, key, value, self.state)
        return output


class TracedStep(nn.Module):
    """Something to compile, as a function of tensors alone, of which the last are the parameters of a module.

    Args:
        twin: the module. Its parameters are called `operands`.
    """

    def __init__(self, twin: nn.Module) -> None:
        super().__init__()
        self.twin = twin
        self.names = [name for name, _ in twin.named_parameters()]

    def open_dimensions(self, inputs: tuple) -> tuple | None:
        """Dimensions of the inputs whose sizes are open, as `torch.export.export` takes them."""
        return None


class DecodeStep(TracedStep):
    """The step of a layer, with products for one token in place of its linear layers."""

    def forward(
        self,
        hidden_states: Tensor,  # (B, 1, D)
        state: Tensor,  # (B, M, K, V), changed in place
        keep: Tensor,  # (1, M, 1, 1)
        rotations: list[Tensor],  # (B, 1, 1, K): cosines and sines for the query, then for the key; or nothing
        operands: list[Tensor],  # parameters of the twin
    ) -> Tensor:
        index = self.twin.retention.layer_idx
        rotate = TracedRotation(rotations, rotate_step) if rotations else Scaling(self.twin.retention.head_dim**-0.5)
        operator = partial(recurrent_step_, decay=StepDecay(keep, None))
        plan = Plan(None, rotate, {index: operator}, {}, in_place=True)
        inputs = {"plan": plan, "state": SimpleNamespace(layers={index: TracedState(state)})}
        # products that several modules share have several names each, of which `names` has one
        return functional_call(self.twin, dict(zip(self.names, operands)), (hidden_states,), inputs, tie_weights=False)


class ProductStep(TracedStep):
    """Products of one token."""

    def forward(self, token: Tensor, operands: list[Tensor]) -> tuple[Tensor, ...]:
        return functional_call(self.twin, dict(zip(self.names, operands)), (token,))


def twin_of(layer: nn.Module, summed: bool, sequences: int = 1) -> nn.Module | None:
    """A copy of a layer that computes with products for one token of each sequence, and shares all its weights.

    None if a module is hooked, or a linear layer adapted, sharded, or quantised in a way that no product supports.

    Args:
        summed, sequences: as in `products_of`.
    """
    if has_hooks(layer.modules()):  # they would be compiled, and the file would not say so
        return None
    twin = shallow_copy(layer)
    for names in linear_groups(layer):
        products = products_of([layer.get_submodule(name) for name in names], None, summed, sequences)
        if products is None:
            return None
        for place, name in enumerate(names):
            twin.set_submodule(name, OneOfProducts(products, place))
    return None if any(isinstance(module, nn.Linear) for module in twin.modules()) else twin.eval()


def has_sums(module: nn.Module) -> bool:
    """Whether any product inside is computed by `sums`."""
    return any(isinstance(each, Product) and each.kernel is sums for each in module.modules())


class LayerProgram:
    """The program of a layer's step, with the operands of this layer. Pickling and copying drop it.

    Args:
        run: the program.
        layer: the layer whose weights the operands are.
        inputs: that the program was made for, as `DecodeStep.forward` takes them.
    """

    def __init__(self, run: Run, layer: nn.Module, inputs: tuple) -> None:
        hidden_states, state, _, self.rotations, self.operands = inputs
        self.run, self.dtype, self.state_shape = run, hidden_states.dtype, state.shape
        self.layer_idx, self.snapshot = layer.retention.layer_idx, ModuleSnapshot([layer])

    def decay(self, hidden_states: Tensor, plan: Plan, past: RetNetStateLayer) -> Tensor | None:
        """The decay (1, M, 1, 1) of a step that the program computes as the layer would; None where it does not.

        It computes present tokens, with a state that may be overwritten.
        """
        operator, rotate, state = plan.operators[self.layer_idx], plan.rotate, past.recurrent_states
        if not isinstance(operator, Step) or operator.step_ is not recurrent_step_:
            return None
        keep, write = operator.decay
        if write is not None or len(keep) > 1:
            return None
        if past.record_past or not past.is_initialized or not past.can_be_overwritten() or torch.is_autocast_enabled("cpu"):
            return None
        if hidden_states.dtype != self.dtype or not hidden_states.is_contiguous() or not state.is_contiguous():
            return None
        if self.rotations and (rotate.turn is not rotate_step or self.dtype in rotate.narrows):
            return None
        return keep if state.dtype == keep.dtype == torch.float32 and state.shape == self.state_shape else None

    def __call__(self, hidden_states: Tensor, plan: Plan, past: RetNetStateLayer, keep: Tensor) -> Tensor:
        """(B, 1, D) -> (B, 1, D), with the decay of `decay`. The state reads the tokens."""
        rotations = [*plan.rotate.of_query, *plan.rotate.of_key] if self.rotations else []
        if len(hidden_states) > 1:
            rotations = [table.expand(len(hidden_states), -1, -1, -1).contiguous() for table in rotations]
        output = self.run([hidden_states, past.recurrent_states, keep, *rotations, *self.operands])[0]
        plan.layout.advance_(past.next_position, past.cumulative_length)
        return output

    def __reduce__(self) -> tuple:
        return type(None), ()


class CompiledProducts(Products):
    """Products by a program."""

    is_traceable = False

    def __init__(self, products: Products, run: Run) -> None:
        super().__init__(list(products.products))
        self.run, self.held = run, [parameter.detach() for parameter in products.parameters()]

    def forward(self, token: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.run([token.contiguous(), *self.held]))


@cache
def machine() -> dict[str, str]:
    """What a program was compiled for, and from: processor with its instructions, system, versions and source."""
    instructions = platform.processor()
    information = Path("/proc/cpuinfo")
    if information.is_file():
        lines = information.read_text(encoding="utf-8").splitlines()
        instructions = next((line for line in lines if line.startswith(("flags", "Features"))), instructions)
    sources = (path.read_bytes() for folder in SOURCES for path in sorted(folder.rglob("*.py")))
    return {
        "machine": f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {instructions}",
        "versions": f"python {platform.python_version()} torch {torch.__version__} transformers {transformers.__version__}",
        "source": hashlib.sha256(b"".join(sources)).hexdigest(),
    }


def program_path(folder: Path, config: PreTrainedConfig | None, twin: nn.Module, inputs: list[Tensor]) -> Path:
    """The file of the program of a twin, or of products, with such inputs."""
    fields = {} if config is None else config.to_diff_dict()
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


def make(path: Path, steps: list[nn.Module], inputs: list[tuple]) -> None:
    """Compiles the program of the fastest of some modules, and writes it completely or not at all.

    Args:
        steps: one module, or two that compute the same. The second one's program is kept unless the first is clearly faster.
        inputs: of the modules, one set for each layer or group of layers that the program is to serve. The trial uses all.

    Raises:
        OSError: if the folder cannot be written to.
        RuntimeError: if a program cannot be compiled.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as beside, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch about itself
        made = []
        for number, step in enumerate(steps):
            made.append(Path(beside) / f"{number}{path.suffix}")
            try:
                with torch.no_grad():
                    open_dimensions = step.open_dimensions(inputs[0]) if isinstance(step, TracedStep) else None
                    exported = torch.export.export(step, inputs[0], dynamic_shapes=open_dimensions, strict=False)
                torch._inductor.aoti_compile_and_package(exported, package_path=str(made[-1]))
            except Exception as error:
                raise RuntimeError(
                    f"retnet_hf_cpu.compile could not compile a program, which takes a C++ compiler: {error}"
                ) from error
        kept = made[0] if len(made) == 1 or is_faster_program(*made, inputs) else made[1]
        kept.chmod(0o600)
        os.replace(kept, path)


@torch.no_grad()
def is_faster_program(one: Path, other: Path, inputs: list[tuple]) -> bool:
    """Whether one program takes clearly less time than the other, for all of the inputs."""
    flat = [tree_leaves(each) for each in inputs]
    first, second = load(one), load(other)
    return is_clearly_faster(lambda: [first(each) for each in flat], lambda: [second(each) for each in flat])


def load(path: Path) -> Run:
    """The program in a file."""
    return torch._inductor.aoti_load_package(str(path)).loader.run


def require_private(path: Path) -> None:
    """Raises ValueError for a folder or file of programs, which are code, that another user may write to.

    Systems that have no owners and modes of files, such as Windows, are not asked.
    """
    if os.name != "posix" or not path.exists():
        return
    places = [(path, 0o022), *((parent, 0o002) for parent in path.resolve().parents)]
    for place, forbidden in places:
        status = place.stat()
        sticky = place != path and status.st_mode & stat.S_ISVTX  # as of /tmp, where others cannot replace a folder
        if status.st_uid not in (0, os.getuid()) or (status.st_mode & forbidden and not sticky):
            raise ValueError(
                f"{place} can be written to by other users (mode {stat.filemode(status.st_mode)}), and programs are code: "
                "take that permission away (chmod go-w), or name another folder."
            )


def kept_or_made(path: Path, step_of: Callable[[bool], TracedStep], inputs: list[tuple]) -> Run:
    """The program in a file, which is made if there is none that can be loaded.

    Args:
        step_of: makes the module to compile, with products by sums or, for False, by PyTorch's kernels.
        inputs: as those of `make`.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    require_private(path.parent)
    require_private(path)
    if path.is_file():
        try:
            return load(path)
        except Exception as error:  # PyTorch raises many kinds
            logger.warning(f"{path} cannot be loaded as a program, and is compiled again: {error}")
    step = step_of(True)
    make(path, [step, step_of(False)] if has_sums(step) else [step], inputs)
    return load(path)


def programs_of(asked: list[tuple[Path, Callable[[bool], TracedStep], tuple]]) -> list[Run]:
    """The program of each file, which is loaded or made once however often it is asked for.

    Args:
        asked: files, with `step_of` and inputs as those of `kept_or_made` and of `make`.
    """
    inputs: dict[Path, list[tuple]] = {}
    for path, _, own in asked:
        inputs.setdefault(path, []).append(own)
    runs: dict[Path, Run] = {}
    for path, step_of, _ in asked:
        if path not in runs:
            runs[path] = kept_or_made(path, step_of, inputs[path])
    return [runs[path] for path, *_ in asked]


def layer_programs(
    layers: list[nn.Module], config: PreTrainedConfig, folder: Path, batch_sizes: Sequence[int]
) -> list[dict[int, LayerProgram]]:
    """Programs of each layer by the number of sequences, loaded from the folder or compiled and kept there.

    A layer of which `twin_of` has no twin has none.

    Args:
        layers: of retention, on a CPU.

    Raises:
        RuntimeError: if a program cannot be compiled.
    """
    twins = [twin_of(layer, summed=True) for layer in layers]
    asked, served = [], []
    for batch, (number, layer, twin) in itertools.product(batch_sizes, zip(itertools.count(), layers, twins)):
        if twin is None:
            continue
        if batch > 1 and has_sums(twin):
            twin = twin_of(layer, summed=True, sequences=batch)
        mixer = layer.retention
        matrices, key_size, value_size = config.state_shape(mixer.layer_idx)
        inputs = (
            torch.zeros(batch, 1, config.hidden_size, dtype=mixer.q_proj.weight.dtype),
            torch.zeros(batch, matrices, key_size, value_size),
            torch.ones(1, matrices, 1, 1),
            [torch.ones(batch, 1, 1, mixer.head_dim) for _ in range(4 if turns(config) else 0)],
            [parameter.detach() for parameter in twin.parameters()],
        )

        def step_of(summed: bool, layer: nn.Module = layer, batch: int = batch) -> DecodeStep:
            return DecodeStep(twin_of(layer, summed, batch))

        asked.append((program_path(folder, config, twin, tree_leaves(inputs)), step_of, inputs))
        served.append((number, batch))
    programs: list[dict[int, LayerProgram]] = [{} for _ in layers]
    for (number, batch), run, (*_, inputs) in zip(served, programs_of(asked), asked):
        programs[number][batch] = LayerProgram(run, layers[number], inputs)
    return programs


def product_programs(groups: list[list[nn.Module]], folder: Path) -> list[CompiledProducts | None]:
    """Products by programs for each group of linear layers of one input; None for a group that has no products.

    Raises:
        RuntimeError: if a program cannot be compiled.
    """
    compiled: list[CompiledProducts | None] = [None] * len(groups)
    asked, served = [], []
    for number, layers in enumerate(groups):
        products = products_of(layers, summed=True)
        if products is None:
            continue
        token = torch.zeros(1, 1, layers[0].in_features, dtype=layers[0].weight.dtype)
        inputs = token, [parameter.detach() for parameter in products.parameters()]

        def step_of(summed: bool, layers: list[nn.Module] = layers) -> ProductStep:
            return ProductStep(products_of(layers, summed=summed))

        asked.append((program_path(folder, None, products, tree_leaves(inputs)), step_of, inputs))
        served.append((number, products))
    for (number, products), run in zip(served, programs_of(asked)):
        compiled[number] = CompiledProducts(products, run)
    return compiled
