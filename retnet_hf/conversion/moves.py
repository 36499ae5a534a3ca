# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Conversion plans: which tensors of a checkpoint become which tensors of a model, and how, decided before reading values.

A plan is a list of moves. It is checked against its model: every foreign tensor is used exactly once, every tensor of the
model is filled exactly once, and every shape fits. A plan reads a checkpoint or, in reverse, writes one.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig
from transformers.initialization import no_init_weights
from transformers.modeling_utils import PreTrainedModel

from retnet_hf.retnet.configuration_retnet import RetNetConfig
from retnet_hf.state.state_fingerprint import meaning

from .changes import DROPPED, Change, Shape, joined, known, tied
from .dialect import Dialect, renamed
from .errors import CheckpointError


@dataclass(frozen=True)
class Move:
    """Foreign tensors, our tensors that they become, and the change of their values."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    change: Change = field(default_factory=Change)


@dataclass(frozen=True)
class Conversion:
    """All moves of one checkpoint, in order of execution, and class and configuration of the model that they fill."""

    format: str  # name of the foreign format
    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    moves: list[Move]

    def empty_model(self) -> PreTrainedModel:
        """Returns the model with parameters on the meta device and real buffers."""
        return empty_model(self.model_class, self.config)

    def check(self, shapes: Mapping[str, Shape]) -> None:
        """Raises CheckpointError if a tensor of theirs or ours is missing, left over, used twice, or has a wrong shape."""
        expected = {name: tensor.to("meta") for name, tensor in saved_tensors(self.empty_model()).items()}
        used = Counter(source for move in self.moves for source in move.sources)
        for name, times in used.items():
            if name not in shapes:
                raise CheckpointError(f"tensor {name} is missing, but a checkpoint of format {self.format} has it")
            if times > 1:
                raise CheckpointError(f"tensor {name} would be used {times} times")
        for name in shapes:
            if name not in used:
                raise CheckpointError(f"tensor {name} has no place in the format {self.format} with this configuration")
        filled = Counter(target for move in self.moves for target in move.targets)
        if absent := next((name for name in expected if not filled[name]), None):
            number = re.compile(r"\d+")  # the foreign name is guessed from another layer
            pairs = ((target, move.sources[0]) for move in self.moves for target in move.targets)
            alike = (pair for pair in pairs if number.sub("", pair[0]) == number.sub("", absent))
            other, source = next(alike, (absent, absent))
            instead = dict(zip(number.findall(other), number.findall(absent)))
            source = number.sub(lambda found: instead.get(found[0], found[0]), source)
            raise CheckpointError(f"tensor {source} is missing; with this configuration it becomes {absent}")
        for name in expected:
            if filled[name] > 1:
                raise CheckpointError(f"{filled[name]} tensors of the checkpoint would become {name}")
        for move in self.moves:
            if unknown := [name for name in move.targets if name not in expected]:
                reason = f"with this configuration, the model has no {unknown[0]}"
                raise CheckpointError(f"tensor {move.sources[0]} has no place in {self.model_class.__name__}: {reason}")
            if move.change.backward is None:
                continue
            theirs = move.change.backward([expected[name] for name in move.targets])
            for name, tensor in zip(move.sources, theirs, strict=True):
                found, wanted = tuple(shapes[name]), tuple(tensor.shape)
                if found != wanted:
                    raise CheckpointError(f"tensor {name} has shape {found}, but with this configuration it is {wanted}")

    def build(
        self,
        theirs: Mapping[str, Tensor],
        done: Callable[[Move], None] = lambda move: None,
        keep: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> PreTrainedModel:
        """Returns the model. Values are read one move at a time, and `done` is called after each.

        `keep` is called with each tensor that was computed, instead of read from `theirs`. Its result becomes the parameter.
        Raises CheckpointError for values that are not finite, have a dtype that no model is trained in, or differ from the
        values that the configuration implies.
        """
        model = self.empty_model()
        expected, values = saved_tensors(model), {}
        for move in self.moves:
            tensors = [theirs[name] for name in move.sources]
            for name, tensor in zip(move.sources, tensors):
                small = tensor.is_floating_point() and tensor.itemsize < 2
                if tensor.layout is not torch.strided or tensor.is_complex() or tensor.is_quantized or small:
                    said = f"tensor {name} is of type {tensor.dtype if tensor.layout is torch.strided else tensor.layout}"
                    raise CheckpointError(f"{said}: only checkpoints of 16 bits or more can be converted")
                if tensor.is_floating_point() and not tensor.isfinite().all():
                    raise CheckpointError(f"tensor {name} holds values that are not finite")
            try:
                made = move.change.forward(tensors)
            except CheckpointError as error:
                raise CheckpointError(f"tensor {move.sources[-1]} {error}") from error
            for name, tensor in zip(move.targets, made, strict=True):
                if tensor.is_floating_point() != expected[name].is_floating_point():
                    raise CheckpointError(f"tensor {move.sources[0]} has dtype {tensor.dtype}, but {name} cannot have it")
                read = any(tensor.untyped_storage().data_ptr() == one.untyped_storage().data_ptr() for one in tensors)
                values[name] = tensor.contiguous() if read else keep(tensor.contiguous())
            done(move)

        model.load_state_dict(values, strict=False, assign=True)  # after `check`, only tied names are missing
        model.tie_weights()
        model.config.dtype = Counter(t.dtype for t in values.values() if t.is_floating_point()).most_common(1)[0][0]
        return model

    @torch.no_grad()
    def reverse(self, model: PreTrainedModel) -> dict[str, Tensor]:
        """Returns the foreign state dict from which the plan would make `model`."""
        ours = saved_tensors(model)
        theirs = {}
        for move in self.moves:
            tensors = move.change.backward([ours[name] for name in move.targets])
            theirs.update((name, tensor.detach().contiguous()) for name, tensor in zip(move.sources, tensors, strict=True))
        return theirs


def shapes_of(state_dict: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Returns the shapes of tensors by name."""
    return {name: tuple(tensor.shape) for name, tensor in state_dict.items()}


def empty_model(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    """Returns a model with parameters on the meta device and real buffers, without drawing random numbers."""
    with init_empty_weights(include_buffers=False), no_init_weights():
        model = model_class(config)
    return model.eval()


def saved_tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    """Returns the model's state dict with tied tensors once, as `save_pretrained` writes it."""
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def shape_of(shapes: Mapping[str, Shape], name: str, dimensions: int, target_format: str) -> Shape:
    """Returns the shape of a tensor that determines fields of a configuration. Raises CheckpointError if it has another."""
    if len(shapes.get(name, ())) != dimensions:
        needed = f"the shape that the format {target_format} requires"
        raise CheckpointError(f"tensor {name} is missing, or does not have {needed}")
    return shapes[name]


def renamed_tensors(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, rules: Iterable[tuple[str, Any]]
) -> Iterator[tuple[str, str, Tensor]]:
    """Yields our name, the foreign name after applying rules (pattern, replacement) of `re.sub`, and the tensor."""
    for name, tensor in saved_tensors(empty_model(model_class, config)).items():
        theirs = name
        for pattern, replacement in rules:
            theirs = re.sub(pattern, replacement, theirs)
        yield name, theirs, tensor


def body_of(shapes: Mapping[str, Shape], prefix: str) -> dict[str, Shape]:
    """Returns the tensors with a prefix, without the prefix."""
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def backbone_moves(moves: Iterable[Move], prefix: str, names: Iterable[str]) -> list[Move]:
    """Returns the moves of a backbone in the checkpoint of a detector or segmenter, where its names have a prefix."""
    prefixed = [Move(tuple(prefix + source for source in move.sources), move.targets, move.change) for move in moves]
    return prefixed + [Move((name,), (), DROPPED) for name in names if not name.startswith(prefix)]


def xpos_buffers(prefix: str, head_dim: int, decays: list[float]) -> list[Move]:
    """Returns moves that check the angles (K,) and decays (H,) that torchscale and RMT save."""
    angle = 10000 ** -torch.linspace(0, 1, head_dim // 2)
    return [
        Move((f"{prefix}.angle",), (), known(angle.repeat_interleave(2))),
        Move((f"{prefix}.decay",), (), known(torch.tensor(decays).log())),
    ]


def dialect_moves(
    dialect: Dialect,
    config: RetNetConfig,
    names: Iterable[str],
    theirs: Callable[[str], str] | None = None,
    copy: str | None = None,
) -> list[Move]:
    """Returns the moves that fill a RetNet's tensors of these names from a checkpoint in a dialect.

    `theirs` returns the foreign name for one of ours; it is `Dialect.theirs` if absent. `copy` is the foreign name of a head
    that is a copy of the embedding, or None if there is none.
    """
    modules = [(ours, theirs) for theirs, ours in dialect.modules_of(config)]
    theirs = theirs or (lambda name: renamed(name, modules))
    changes = {ends[0]: (end, ends, change) for end, (ends, change) in dialect.changes(config, fused=False).items()}
    others = tuple(end for _, ends, _ in changes.values() for end in ends[1:])  # the move of ends[0] fills them, too
    moves = []
    for name in names:
        if name.endswith(others):
            continue
        if dialect.experts is not None and ".mlp.experts." in name:
            prefix, _, joint = name.rpartition(".")
            parts = dialect.experts[:2] if joint == "gate_up_proj" else dialect.experts[2:]
            each = (f"{prefix}.{number}.{part}.weight" for number in range(config.num_experts) for part in parts)
            moves.append(Move(tuple(map(theirs, each)), (name,), joined(config.num_experts, len(parts))))
            continue
        first = next((end for end in changes if name.endswith(end)), "")
        end, ends, change = changes.get(first, ("", ("",), Change()))
        stem = name.removesuffix(first)
        if copy is not None and name.endswith("embed_tokens.weight"):
            moves.append(Move((theirs(name), copy), (name,), tied()))
        else:
            moves.append(Move((theirs(stem + end),), tuple(stem + each for each in ends), change))
    return moves


def fields_of_transformers(model: PreTrainedModel) -> dict[str, Any]:
    """Returns the keys that all config.json files of RetNets for transformers have under the same names."""
    same = ("initializer_range", "tie_word_embeddings", "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")
    return {name: getattr(model.config, name) for name in same} | {
        "architectures": ["RetNetForCausalLM"],
        "model_type": "retnet",
        "use_cache": True,  # Trainer sets it to False, and generation would then read the whole text for every token
        "torch_dtype": str(model.dtype).removeprefix("torch."),
    }


def written(
    target_format: str,
    model: PreTrainedModel,
    config: dict[str, Any],
    plan: Callable[[dict[str, Shape] | None, dict | None], Conversion],
    moves: list[Move] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the foreign state dict and `config`. They are read back: ValueError says what the format cannot express.

    `plan` is the reader of the format. `moves` are the model's; if absent, of the plan for `config` without shapes.
    """
    ours = model.config
    try:
        content = json.loads(json.dumps(config))
        planned = plan(None, content) if moves is None else Conversion(target_format, type(model), ours, moves)
        require_same(ours, planned.config, target_format)
        state_dict = planned.reverse(model)
        shapes = shapes_of(state_dict)
        again = plan(shapes, content)
        if getattr(ours, "is_hybrid", False) and not again.config.is_hybrid:
            raise ValueError(f"the format {target_format} needs a plain RetNet, got a {type(model).__name__}.")
        require_same(ours, again.config, target_format)
        again.check(shapes)
        if left := saved_tensors(model).keys() - {target for move in planned.moves for target in move.targets}:
            raise CheckpointError(f"it has no tensor for {min(left)}")
    except (CheckpointError, StrictDataclassError, TypeError, LookupError, RuntimeError) as error:
        raise ValueError(f"the format {target_format} cannot express this model: {error}") from error
    return state_dict, config


def require_same(ours: PreTrainedConfig, again: PreTrainedConfig, target_format: str) -> None:
    """Raises ValueError for a field of a configuration that is read back from a format with another meaning."""
    said, read = meaning(ours), meaning(again)
    differing = [name for name, value in said.items() if read.get(name) != value]
    elsewhere = [name for name, value in said.items() if value is None]  # fields that another field includes
    for name in [*differing, *elsewhere] if differing else ():  # the cause comes first
        value, allowed = getattr(ours, name), getattr(again, name)
        if value != allowed:
            raise ValueError(f"{name} must be {allowed!r} for the format {target_format}, which cannot express {value!r}.")
    if differing:  # another field changes the meaning of this one, such as factors on decays
        name, value = differing[0], getattr(ours, differing[0])
        raise ValueError(f"{name}, with fields that change it, has no counterpart in the format {target_format}: {value!r}.")


def model_from(plan: Callable[[dict[str, Shape], dict | None], Conversion], state_dict: Mapping[str, Tensor], config: Any):
    """Plans, checks and builds a model, for every `from_<format>`. Unchanged tensors are shared, not copied."""
    shapes = shapes_of(state_dict)
    planned = plan(shapes, config)
    planned.check(shapes)
    return planned.build(state_dict)
