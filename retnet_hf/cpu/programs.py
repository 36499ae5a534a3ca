# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Programs: the decode step of a layer, or products of one token, compiled once for this machine and stored in a file.

Without programs, a step of a small model spends as much time on launching operations, a few dozen in each layer, as on
reading its weights. AOTInductor fuses everything between two products with weights into two or three loops, in a library
that loads in milliseconds. A program computes a layer, not a model. Weights and state are its inputs, so that one program
serves all equal layers, takes ten to thirty seconds to compile at any depth, and contains no weights.

The layer itself is compiled: a copy (twin) of it, with products for one token (products.py) instead of linear layers and a
stand-in for the state, is exported as a function of tensors. The computation is defined only in retnet_hf. A twin that uses
`sums` and a twin that calls PyTorch's kernels are both compiled, and a trial on the real weights decides which is kept.

For prompts of any length, two programs with a dynamic number of tokens compute what a layer does before and after its
operator. The operator runs between them as in the model, so that states, padding and documents are those of the model.

The name of a file is a digest of everything that determines the program: the source of both packages, the configuration, the
operands, the versions of PyTorch, transformers and Python, the number of threads, and the processor.
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from torch import Tensor, nn
from torch.export import Dim
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging

from retnet_hf.modules.layers import has_hooks
from retnet_hf.ops.gradients import rotate, rotate_step
from retnet_hf.ops.plan import Plan, Rotation
from retnet_hf.ops.retention_forms import StepDecay, recurrent_step_
from retnet_hf.retnet.modeling_retnet import RetNetForCausalLM, RetNetMLP, RetNetTokenMixer
from retnet_hf.state.retention_state import RetNetState, RetNetStateLayer

from .products import Product, is_clearly_faster, linear, obstacle, product_of, sums


logger = logging.get_logger(__name__)

ROOT = Path(__file__).parent.parent
SOURCES = tuple(ROOT / name for name in ("ops", "state", "modules", "retnet", "hybrid", "cpu"))  # of the code of programs
EXAMPLE = 512  # tokens with which a program is traced; the compiler uses the size to choose which loops are threaded
TOKENS = Dim("tokens", min=2, max=2**31 - 1)
Run = Callable[[list[Tensor]], list[Tensor]]  # a program, as a function of a flat list of its inputs


class ModuleSnapshot:
    """Records the submodules and weights of a module, to detect changes. `within`: the module and all its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self.within = list(module.modules())
        self.owners = [owners for each in self.within for owners in (each._modules, each._parameters)]
        self.held = [thing for owners in self.owners for thing in owners.values()]  # so that their ids are not reused
        self.marks = self._marks()

    def _marks(self) -> list[int | tuple]:
        things = (thing for owners in self.owners for thing in owners.values())
        return [(each.data_ptr(), each.stride()) if type(each) is nn.Parameter else id(each) for each in things]

    def is_unchanged(self) -> bool:
        """Returns whether all submodules are the same objects, and all weights are in the same memory. Warns once if not."""
        if self._marks() == self.marks:
            return True
        advice = "From now on, their layers compute without programs. Call retnet_hf.cpu.compile again."
        logger.warning_once(f"weights of the fast copy were changed, moved or replaced. {advice}")
        return False


def shallow_copy(module: nn.Module) -> nn.Module:
    """Returns a deep copy of a module that shares parameters and buffers with the module."""
    return copy.deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})


def projections(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields the projections of mixers and feed-forward networks in a module, and its head, with their names."""
    for path, module in root.named_modules():
        if isinstance(module, (RetNetTokenMixer, RetNetMLP)):
            yield from ((f"{path}.{name}", each) for name, each in module.named_children() if name.endswith("_proj"))
    if isinstance(root, RetNetForCausalLM):
        yield "lm_head", root.lm_head


def turns(config: PreTrainedConfig) -> bool:
    """Returns whether layers of retention rotate queries and keys."""
    return config.use_rotary and getattr(config, "rotary_layers", None) != "softmax_attention"


def traced_rotation(rotations: list[Tensor], rotate: Callable[..., Tensor], scale: float) -> Rotation:
    """Returns a rotation with cosines and sines that are inputs of the program; without them, `scale` for the queries."""
    rotation = Rotation(None, scale)
    if rotations:
        rotation.rotate, rotation.query_angles, rotation.key_angles = rotate, tuple(rotations[:2]), tuple(rotations[2:])
    return rotation


class TracedStep(nn.Module):
    """A module to compile as a function of tensors alone. The last inputs, `operands`, are the parameters of its twin."""

    any_length = False  # whether dimension 1 of all inputs but the operands is dynamic

    def __init__(self, twin: nn.Module) -> None:
        super().__init__()
        self.twin = twin
        self.names = [name for name, _ in twin.named_parameters()]


class DecodeStep(TracedStep):
    """Computes the step of a layer, with products for one token instead of linear layers."""

    def forward(
        self,
        hidden_states: Tensor,  # (B, 1, D)
        state: Tensor,  # (B, M, K, V), changed in place
        decay: Tensor,  # (1, M, 1, 1)
        rotations: list[Tensor],  # (B, 1, 1, K): cosines and sines for the query, then for the key; or nothing
        operands: list[Tensor],  # parameters of the twin
    ) -> Tensor:

        def retain(_, query: Tensor, key: Tensor, value: Tensor, past: None) -> tuple[Tensor, None]:
            return recurrent_step_(query, key, value, state, StepDecay(decay, None))[0], None

        rotation = traced_rotation(rotations, rotate_step, self.twin.retention.head_dim**-0.5)
        plan = SimpleNamespace(rotate=rotation, retain=retain)
        return functional_call(self.twin, dict(zip(self.names, operands)), (hidden_states, plan))


class ProductStep(TracedStep):
    """Computes the product of one token."""

    def forward(self, token: Tensor, operands: list[Tensor]) -> Tensor:
        return functional_call(self.twin, dict(zip(self.names, operands)), (token,))


def twin_of(layer: nn.Module, summed: bool, sequences: int = 1) -> nn.Module | None:
    """Returns a copy of a layer that shares all weights, with products for one token. None as in `product_of`."""
    if has_hooks(layer.modules()):  # hooks would be compiled, but the file name does not depend on them
        return None
    twin = shallow_copy(layer).eval()
    for name, projection in projections(layer):
        product = product_of(projection, summed, sequences)
        if product is None:
            return None
        twin.set_submodule(name, product)
    return None if any(isinstance(module, nn.Linear) for module in twin.modules()) else twin


def has_sums(module: nn.Module) -> bool:
    """Returns whether the module contains a product with the kernel `sums`."""
    return any(isinstance(each, Product) and each.kernel is sums for each in module.modules())


class Unsaved:
    """Base class of programs with the operands of a layer. Pickling and copying drop them."""

    def __reduce__(self) -> tuple:
        return type(None), ()


class LayerProgram(Unsaved):
    """The program of a layer's step with the layer's operands. `inputs`: of `DecodeStep.forward`, for which it was made."""

    def __init__(self, run: Run, layer: nn.Module, inputs: tuple) -> None:
        hidden_states, state, _, self.rotations, self.operands = inputs
        self.run, self.dtype, self.state_shape = run, hidden_states.dtype, state.shape
        self.layer_idx, self.snapshot = layer.retention.layer_idx, ModuleSnapshot(layer)

    def decay(self, hidden_states: Tensor, plan: Plan, past: RetNetStateLayer) -> Tensor | None:
        """Returns the decay (1, M, 1, 1) of a step in place without absent tokens, or None if the program does not fit."""
        rotate, state = plan.rotate, past.recurrent_states
        if type(plan) is not Plan or not plan.in_place or plan.kernels.step_ is not recurrent_step_:
            return None
        decay, write_mask = plan.decays(plan.log_decays[self.layer_idx])
        fits = write_mask is None and len(decay) == 1 and not torch.is_autocast_enabled("cpu")
        fits = fits and not past.record_past and past.is_initialized and past.can_be_overwritten()
        fits = fits and hidden_states.dtype == self.dtype and hidden_states.is_contiguous() and state.is_contiguous()
        fits = fits and (not self.rotations or (rotate.rotate is rotate_step and self.dtype not in rotate.cast_dtypes))
        fits = fits and state.dtype == decay.dtype == torch.float32 and state.shape == self.state_shape
        return decay if fits else None

    def __call__(self, hidden_states: Tensor, plan: Plan, past: RetNetStateLayer, decay: Tensor) -> Tensor:
        """Returns the layer's output (B, 1, D) for (B, 1, D), with the result of `decay`, and updates the state."""
        rotations = [*plan.rotate.query_angles, *plan.rotate.key_angles] if self.rotations else []
        if len(hidden_states) > 1:
            rotations = [table.expand(len(hidden_states), -1, -1, -1).contiguous() for table in rotations]
        output = self.run([hidden_states, past.recurrent_states, decay, *rotations, *self.operands])[0]
        plan.layout.written.append(past)
        return output


class ProductProgram(Unsaved):
    """The product of a linear layer for one token, with the layer's operands. `run`: its program; by default the product."""

    def __init__(self, layer: nn.Linear, product: Product, run: Run | None = None) -> None:
        self.run = run or (lambda inputs: [product(inputs[0])])
        self.operands = [parameter.detach() for parameter in product.parameters()]
        self.dtype, self.snapshot = layer.weight.dtype, ModuleSnapshot(layer)

    def computes(self, hidden_states: Tensor) -> bool:
        """Returns whether the program computes the same as the layer for this call."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return False
        return hidden_states.shape[:-1] == (1, 1) and hidden_states.dtype == self.dtype

    def __call__(self, token: Tensor) -> Tensor:
        """Returns the layer's output (1, 1, out) for (1, 1, in)."""
        return self.run([token.contiguous(), *self.operands])[0]


@cache
def machine() -> dict[str, str]:
    """Returns what determines programs on this machine: processor with its instructions, system, versions and source."""
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
    """Returns the file of the program of a twin, or of products, for inputs of these shapes and dtypes."""
    fields = {} if config is None else config.to_diff_dict()
    for name in ("_name_or_path", "architectures", "dtype", "transformers_version", "vocab_size", "num_hidden_layers"):
        fields.pop(name, None)
    constants_of_layer = [
        {name: value for name, value in vars(module).items() if isinstance(value, (int, float, str)) and "_idx" not in name}
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
    """Compiles the program of a module, or of the faster of two that compute the same, and writes it atomically.

    The second is kept unless the first is clearly faster. `inputs`: one set for each layer or group that the program will
    serve. The trial uses all. Raises OSError if the folder cannot be written to, and RuntimeError without a compiler.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as beside, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns about its own code
        made = []
        for number, step in enumerate(steps):
            made.append(Path(beside) / f"{number}{path.suffix}")
            try:
                with torch.no_grad():
                    *tensors, operands = inputs[0]
                    dynamic = *tree_map(lambda _: {1: TOKENS}, tensors), [None for _ in operands]
                    dynamic = dynamic if step.any_length else None
                    exported = torch.export.export(step, inputs[0], dynamic_shapes=dynamic, strict=False)
                torch._inductor.aoti_compile_and_package(exported, package_path=str(made[-1]))
            except Exception as error:
                said = "retnet_hf.cpu.compile could not compile a program"
                raise RuntimeError(f"{said}. This needs a C++ compiler: {error}") from error
        kept = made[-1]
        if len(made) == 2:
            flat, (first, second) = [tree_leaves(each) for each in inputs], map(load, made)
            with torch.no_grad():
                if is_clearly_faster(lambda: [first(each) for each in flat], lambda: [second(each) for each in flat]):
                    kept = made[0]
        kept.chmod(0o600)
        os.replace(kept, path)


def load(path: Path) -> Run:
    """Returns the program in a file."""
    return torch._inductor.aoti_load_package(str(path)).loader.run


def require_private(path: Path) -> None:
    """Raises ValueError if another user may write to a path of programs, which are code. Windows is not checked."""
    if os.name != "posix" or not path.exists():
        return
    places = [(path, 0o022), *((parent, 0o002) for parent in path.resolve().parents)]
    for place, forbidden in places:
        status = place.stat()
        sticky = place != path and status.st_mode & stat.S_ISVTX  # as for /tmp, where others cannot replace a folder
        if status.st_uid not in (0, os.getuid()) or (status.st_mode & forbidden and not sticky):
            reason = f"can be written to by other users (mode {stat.filemode(status.st_mode)}), and programs are code"
            raise ValueError(f"{place} {reason}: remove that permission (chmod go-w), or use another folder.")


def programs_of(
    folder: Path, config: PreTrainedConfig | None, asked: list[tuple[nn.Module, Callable[[bool], TracedStep], tuple]]
) -> list[Run]:
    """Returns programs, loaded from the folder or compiled into it. Equal ones are loaded or compiled once.

    Args:
        asked: modules that determine the file of a program, each with a function that makes the module to compile, with
            products by `sums` or, for False, by PyTorch's kernels, and with one set of inputs.
    """
    paths = [program_path(folder, config, twin, tree_leaves(inputs)) for twin, _, inputs in asked]
    runs: dict[Path, Run] = {}
    for path, (_, step_of, _) in zip(paths, asked):
        if path in runs:
            continue
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        require_private(folder)
        require_private(path)
        if path.is_file():
            try:
                runs[path] = load(path)
                continue
            except Exception as error:  # PyTorch may raise any error
                logger.warning(f"{path} cannot be loaded as a program, and is compiled again: {error}")
        step = step_of(True)
        inputs = [own for other, (*_, own) in zip(paths, asked) if other == path]
        make(path, [step, step_of(False)] if has_sums(step) else [step], inputs)
        runs[path] = load(path)
    return [runs[path] for path in paths]


def layer_programs(
    layers: list[nn.Module], config: PreTrainedConfig, folder: Path, batch_sizes: Sequence[int]
) -> dict[nn.Module, dict[int, LayerProgram]]:
    """Returns programs of layers of retention, by layer and number of sequences, for layers with a twin from `twin_of`."""
    twins = [(layer, twin) for layer in layers if (twin := twin_of(layer, summed=True)) is not None]
    served, asked = list(itertools.product(batch_sizes, twins)), []
    for batch, (layer, twin) in served:
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
        asked.append((twin, lambda summed, layer=layer, batch=batch: DecodeStep(twin_of(layer, summed, batch)), inputs))
    programs: dict[nn.Module, dict[int, LayerProgram]] = {layer: {} for layer, _ in twins}
    for (batch, (layer, _)), run, (*_, inputs) in zip(served, programs_of(folder, config, asked), asked):
        programs[layer][batch] = LayerProgram(run, layer, inputs)
    return programs


def product_programs(layers: list[nn.Module], folder: Path | None) -> list[ProductProgram | None]:
    """Returns a program for each linear layer's product, or None. Without a folder, it is a PyTorch kernel."""
    products = [product_of(layer, summed=folder is not None) for layer in layers]
    if left := Counter(obstacle(layer) for layer, product in zip(layers, products) if product is None):
        reasons = ", ".join(f"{count} {reason}" for reason, count in left.items())
        said = f"retnet_hf.cpu.compile has no faster product for {left.total()} linear layers, which PyTorch computes"
        logger.warning(f"{said}: {reasons}.")
    if folder is None:
        own = (product is None or product.kernel is linear for product in products)
        return [None if is_own else ProductProgram(*pair) for is_own, *pair in zip(own, layers, products)]
    asked = []
    for layer, product in zip(layers, products):
        if product is None:
            continue
        token = torch.zeros(1, 1, layer.in_features, dtype=layer.weight.dtype)
        inputs = token, [parameter.detach() for parameter in product.parameters()]
        asked.append((product, lambda summed, layer=layer: ProductStep(product_of(layer, summed)), inputs))
    runs = iter(programs_of(folder, None, asked))
    return [product and ProductProgram(layer, product, next(runs)) for layer, product in zip(layers, products)]


class BeforeOperator(TracedStep):
    """Computes queries, keys and values of a layer."""

    any_length = True

    def forward(
        self,
        hidden_states: Tensor,  # (1, N, D)
        rotations: list[Tensor],  # (1, N, 1, K/2): cosines and sines for queries, then for keys; or nothing
        operands: list[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:  # (1, N, H, K), (1, N, G, K) and (1, N, G, V)
        tables = [table.transpose(1, 2) for table in rotations]
        kept: list[Tensor] = []

        def retain(_, query: Tensor, key: Tensor, value: Tensor, past: None = None) -> tuple[Tensor, None]:
            kept.extend([query, key, value])
            return query.new_zeros(*query.shape[:3], value.shape[-1]), None

        rotation = traced_rotation(tables, rotate, self.twin.retention.head_dim**-0.5)
        plan = SimpleNamespace(rotate=rotation, retain=retain)
        functional_call(self.twin, dict(zip(self.names, operands)), (hidden_states, plan))
        return tuple(heads.transpose(1, 2) for heads in kept)


class AfterOperator(TracedStep):
    """Computes the output of a layer from the output of its operator."""

    any_length = True

    def forward(
        self,
        hidden_states: Tensor,  # (1, N, D)
        output: Tensor,  # (1, N, H, V), output of the operator, float32
        operands: list[Tensor],
    ) -> Tensor:  # (1, N, D)
        retained = output.transpose(1, 2), None
        plan = SimpleNamespace(rotate=lambda query, key: (query, key), retain=lambda *call: retained)
        return functional_call(self.twin, dict(zip(self.names, operands)), (hidden_states, plan))


class PromptPrograms(Unsaved):
    """Both programs with the operands of a layer. In shapes, N = B T: they see the tokens of all sequences in one row."""

    def __init__(self, before: Run, after: Run, layer: nn.Module) -> None:
        self.before, self.after = before, after
        self.rotates = turns(layer.retention.config)
        self.operands = [parameter.detach() for parameter in layer.parameters()]
        self.dtype, self.snapshot = layer.retention.q_proj.weight.dtype, ModuleSnapshot(layer)

    def computes(self, hidden_states: Tensor, plan: Plan) -> bool:
        """Returns whether the programs compute the same as the layer for this call."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or hidden_states.dtype != self.dtype or plan.maps:
            return False
        return not self.rotates or (plan.rotate.rotate is rotate and self.dtype not in plan.rotate.cast_dtypes)

    def __call__(self, hidden_states: Tensor, plan: Plan, state: RetNetState | None, layer_idx: int) -> Tensor:
        """Returns the layer's output (B, T, D) for (B, T, D), and updates the state."""
        batch, past = hidden_states.shape[0], None if state is None else state.layers[layer_idx]
        tokens = hidden_states.reshape(1, -1, hidden_states.shape[-1]).contiguous()  # (1, N, D)
        tables = [*plan.rotate.query_angles, *plan.rotate.key_angles] if self.rotates else []
        tables = [in_one_row(table.float().expand(batch, -1, -1, -1)) for table in tables]
        operands = self.before([tokens, *tables, *self.operands])  # (1, N, H, K), in the operator (B, H, T, K)
        query, key, value = (heads[0].unflatten(0, (batch, -1)).transpose(1, 2) for heads in operands)
        output, _ = plan.retain(layer_idx, query, key, value, past)
        [result] = self.after([tokens, in_one_row(output.float()), *self.operands])
        return result.view(hidden_states.shape)


def in_one_row(tensor: Tensor) -> Tensor:
    """Returns (B, H, T, V) as (1, N, H, V), contiguous."""
    return tensor.transpose(1, 2).flatten(0, 1)[None].contiguous()


def prompt_programs(layers: list[nn.Module], config: PreTrainedConfig, folder: Path) -> dict[nn.Module, PromptPrograms]:
    """Returns programs for prompts by layer, for layers of `layer_programs` without quantised weights."""
    asked, dense = [], []
    for layer in layers:
        if not all(type(weight) is nn.Parameter and weight.is_floating_point() for weight in layer.parameters()):
            continue
        dense.append(layer)
        twin, mixer = shallow_copy(layer).eval(), layer.retention
        heads, _, key_size, value_size = config.mixer_sizes(mixer.layer_idx)
        operands = [parameter.detach() for parameter in twin.parameters()]
        hidden_states = torch.zeros(1, EXAMPLE, config.hidden_size, dtype=mixer.q_proj.weight.dtype)
        rotations = [torch.ones(1, EXAMPLE, 1, key_size // 2) for _ in range(4 if turns(config) else 0)]
        output = torch.zeros(1, EXAMPLE, heads, value_size)
        before, after = BeforeOperator(twin), AfterOperator(twin)
        asked.append((before, lambda summed, step=before: step, (hidden_states, rotations, operands)))
        asked.append((after, lambda summed, step=after: step, (hidden_states, output, operands)))
    runs = iter(programs_of(folder, config, asked))
    return {layer: PromptPrograms(next(runs), next(runs), layer) for layer in dense}
