# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A state on disk: one safetensors file with the fingerprint of the configuration, a mark of the weights and a checksum.

The checksum, "sha256" in the metadata, is the SHA-256 of these bytes, in the order of names:

    for each other entry of the metadata    "{name} {bytes of the value} " and the value, in UTF-8
    for each tensor                         "{name} {dtype} {shape} ", as PyTorch and Python print them, and the values
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import logging

from ..ops.retention_forms import is_traced


logger = logging.get_logger(__name__)

STATE_DTYPES = (torch.float32, torch.float64)
KEY_DTYPES = (*STATE_DTYPES, torch.bfloat16, torch.float16)
DTYPES = {"recurrent_states": STATE_DTYPES, **dict.fromkeys(("keys", "values", "tail"), KEY_DTYPES)}  # others are int64
FORMATS = {"RetNetState": "retnet_hf.RetNetState/3", "StreamState": "retnet_hf.StreamState/1"}
MARKED_VALUES, MARKED_ROWS = 4096, 64  # number of evenly spaced values per weight, and of rows of embeddings
NUM_FIRST_TOKENS, MAX_TEXTS = 4, 8
STALE_MARK = json.dumps({"dtypes": [], "sums": []})  # fits no model: the weights have changed since they computed a state


def network_of(model: nn.Module) -> nn.Module:
    """Returns the model that computes the state, without a head and without the wrapper of PEFT."""
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    return getattr(model, model.base_model_prefix, model) if hasattr(model, "base_model_prefix") else model


@torch.no_grad()
def weights_mark(model: nn.Module) -> str | None:
    """Returns a short text that distinguishes the weights of two models, for example two fine-tunes of one base model.

    It holds the norm and the alternating sum of some thousand values of each weight that computes: weights of active
    adapters and their scales, but not weights of other adapters, nor rows by which embeddings may be resized. None if the
    values of a weight cannot be read, because it is quantised, offloaded or split over ranks.
    """
    model, dtypes, sums, unused = network_of(model), set(), [], set()
    embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    for module in model.modules():
        if not hasattr(module, "adapter_layer_names"):  # no layer of PEFT
            continue
        disabled = module.disable_adapters or getattr(module, "merged", False)
        active = [] if disabled else module.active_adapters
        if active and hasattr(module, "original_module"):
            unused.update(module.original_module.parameters())
        for name in module.adapter_layer_names:
            for adapter, part in getattr(module, name, {}).items():
                if adapter not in active:
                    unused.update([part] if isinstance(part, Tensor) else part.parameters())
        scales = getattr(module, "scaling", {})
        sums += [(scales[adapter], abs(scales[adapter])) for adapter in active if adapter in scales]
    for weight in model.parameters():
        if weight in unused:
            continue
        if type(weight) is not nn.Parameter or weight.is_meta or not weight.is_floating_point() or weight.numel() == 0:
            return None
        weight = weight[:MARKED_ROWS] if weight in embeddings else weight
        values = weight.reshape(-1)[:: max(1, weight.numel() // MARKED_VALUES)].to("cpu", torch.float64)
        dtypes.add(str(weight.dtype))
        sums.append((float(values[::2].sum() - values[1::2].sum()), float(values.norm())))
    return json.dumps({"dtypes": sorted(dtypes), "sums": [[f"{number:+.5e}" for number in pair] for pair in sums]})


@dataclass(frozen=True, eq=False)
class FirstTokens:
    """The first tokens that a state has read, and a module's outputs for them, which other weights do not reproduce.

    Attributes:
        inputs: arguments of the module. outputs: (1, F, D). autocast: the dtype of autocast in the call, or None.
    """

    inputs: dict[str, Tensor]
    outputs: Tensor
    autocast: torch.dtype | None

    @torch.no_grad()
    def fits(self, module: nn.Module) -> bool:
        """Returns whether the module in evaluation mode gives the same outputs."""
        device = next(module.parameters()).device
        modes = [(part, part.training) for part in module.modules()]
        module.eval()
        try:
            with torch.autocast(device.type, self.autocast, enabled=self.autocast is not None):
                found = module(**{name: part.to(device) for name, part in self.inputs.items()})[0]
        finally:
            for part, training in modes:
                part.training = training
        is_half = self.autocast is not None or not {found.dtype, self.outputs.dtype} <= {*STATE_DTYPES}
        tolerance = 2**-5 if is_half else 1e-4 if device.type == "cpu" else 2**-8  # a GPU may use TF32
        expected = self.outputs.to(device, torch.promote_types(found.dtype, self.outputs.dtype))
        differs = (found - expected).masked_fill(expected == 0, 0)  # absent tokens
        return bool(differs.norm() <= tolerance * expected.norm())


def first_tokens_of(
    module: nn.Module, outputs: Tensor, mask: Tensor | None, /, **inputs: Tensor | None
) -> tuple[FirstTokens, ...]:
    """Copies the first tokens of a call from inputs and outputs (B, T, ...), and the mask (B, T), which is also in inputs.

    They are of the row with the fewest absent tokens at its beginning, from its first present token. Returns nothing in
    compiled calls, nor in training, where the weights change between the calls that read one text.
    """
    if is_traced() or module.training:
        return ()
    length, device, absent = outputs.shape[1], outputs.device, None if mask is None else mask == 0
    count = min(NUM_FIRST_TOKENS, length)
    if absent is not None:
        begin, row = torch.where(absent.all(1), length, absent.byte().argmin(1)).min(0, keepdim=True)
        columns = begin.clamp(max=length - count) + torch.arange(count, device=mask.device)
    first = {}
    for name, part in (inputs | {"outputs": outputs, "absent": absent}).items():
        if part is not None and absent is None:
            first[name] = part.detach()[:1, :count].clone()
        elif part is not None:
            rows = part.detach().expand(len(outputs), *part.shape[1:]).index_select(1, columns.to(part.device))
            first[name] = rows.index_select(0, row.to(part.device))
    outputs = first.pop("outputs")
    if absent is not None:
        outputs.masked_fill_(first.pop("absent")[..., None].to(device), 0)
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return (FirstTokens(first, outputs, autocast),)


def joint_first_tokens(states: Iterable[Any]) -> tuple[FirstTokens, ...]:
    """Returns the first tokens of all texts of several states, or of some if there are many."""
    return tuple({id(first): first for state in states for first in state.first_tokens}.values())[-MAX_TEXTS:]


def is_of_same_weights(mark: str | None, other: str | None) -> bool:
    """Returns whether two marks belong to equal weights, apart from rounding to different dtypes. None fits every mark."""
    if mark is None or other is None:
        return True
    try:
        first, second = json.loads(mark), json.loads(other)
        if len(first["sums"]) != len(second["sums"]):
            return False
        tolerance = 1e-5 if first["dtypes"] == second["dtypes"] else 2**-7  # relative to the norm: 7 deviations of bfloat16
        pairs = zip(first["sums"], second["sums"])
        return all(abs(float(one) - float(two)) <= tolerance * float(norm) for (one, norm), (two, _) in pairs)
    except (ValueError, TypeError, KeyError, RecursionError):  # a file may hold anything
        return False


def write_state_file(
    path: str | os.PathLike, tensors: dict[str, Tensor], fingerprint: str, mark: str | None, class_name: str = "RetNetState"
) -> None:
    """Writes a state, completely or not at all. If the path is a link, replaces the file that it points to.

    Tensors have names such as "layers.0.recurrent_states". Raises ValueError if the path exists and is not a file.
    """
    path = Path(path).resolve()
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file, so no state can be saved there.")
    if mark == STALE_MARK:
        reason = "the model's weights or active adapters have changed since it computed the state."
        logger.warning(f"{path} will only load with other_weights=True: {reason}")
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # layers may share position tensors, which safetensors refuses to save
    tensors |= {name: tensor.clone() for name, tensor in tensors.items() if not tensor.is_floating_point()}
    metadata = {"format": FORMATS[class_name], "fingerprint": fingerprint} | ({} if mark is None else {"weights": mark})
    metadata["sha256"] = _checksum(metadata, tensors)
    partial = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.partial")
    try:
        save_file(tensors, partial, metadata=metadata)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def read_state_file(path: str | os.PathLike, state: Any, fingerprint: str, device: torch.device | str) -> str | None:
    """Fills a state, `LayerStates`, from a file that `write_state_file` wrote. Returns the mark of the weights.

    Raises ValueError if the file is damaged or no state of the model, and OSError if it cannot be opened.
    """
    names, file_format = state.named_tensors(), FORMATS[state.class_name]
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Copies, because the tensors of safetensors are a map of the file, which other programs may change.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118, not a dict
    except OSError:
        raise
    except Exception as error:  # a damaged header can cause any error
        raise ValueError(f"{path} is not a readable safetensors file: {error}.") from error
    if metadata.get("format") != file_format:
        raise ValueError(f"{path} does not hold a saved {state.class_name} of the format {file_format}.")
    if metadata.get("fingerprint") != fingerprint:
        raise ValueError(f"{path} holds the state of a model of another configuration than this one.")
    if missing := sorted(set(names) - set(tensors)):
        raise ValueError(f"{path} lacks {missing[0]}.")
    if foreign := sorted(set(tensors) - set(names)):
        raise ValueError(f"{path} holds {foreign[0]}, which is no part of a state.")
    first = next(tensors[name] for name in names if name.endswith((".next_position", ".tail")))
    if first.shape[:1] == (0,):
        raise ValueError(f"{path} holds the state of no sequence.")
    expected = state.shapes(first.shape[0] if first.dim() else 1, tensors)
    found = {name.rpartition(".")[2]: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}
    for name, tensor in tensors.items():
        part = name.rpartition(".")[2]
        allowed = DTYPES.get(part, (torch.int64,))
        if state.class_name == "RetNetState" and found.get(part) in allowed:  # layers of streams may differ
            allowed = (found[part],)
        if tensor.shape != expected[name] or tensor.dtype not in allowed:
            given, wanted = f"{tuple(tensor.shape)} {tensor.dtype}", " or ".join(map(str, allowed))
            raise ValueError(f"{path} holds {name} as {given}, which should be {expected[name]} {wanted}.")
        if tensor.dtype == torch.int64 and part != "document" and (tensor < 0).any():
            raise ValueError(f"{path} holds {name} with negative values.")
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise ValueError(f"{path} holds {name} with values that are not finite.")
    if metadata.get("sha256") != _checksum(metadata, tensors):
        raise ValueError(f"{path} is damaged: its contents have changed since it was saved.")
    for name, layer in state.named_layers().items():
        layer.fill_(*(tensors[f"{name}.{part}"].to(device) for part in layer.SAVED))
    return metadata.get("weights")


def _checksum(metadata: dict[str, str], tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(metadata.items()):
        if name != "sha256":
            digest.update(f"{name} {len(value.encode())} {value}".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        bits = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor  # NumPy has no bfloat16
        digest.update(bits.reshape(-1).numpy())
    return digest.hexdigest()
