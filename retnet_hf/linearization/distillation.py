# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Stage 2: the whole model learns the transformer's distribution of the next token.

The transformer runs while the student trains, or before. Then its most likely tokens are stored on disk.
"""

import bisect
import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import PreTrainedModel, Trainer

from retnet_hf.conversion.replaced_folder import whole, write_whole

from .measures import HEAD_TOKENS, logits_of


ROWS = 256  # distributions exist for this many tokens at a time
_PART, _INDEX = "part-{:06}.safetensors", "index.json"  # the index is written last, with the number of blocks of each file
_STORED = ("input_ids", "top_log_probs", "top_indices")


class DivergenceByRows(torch.autograd.Function):
    """The mean Kullback-Leibler divergence of a student from its teacher, in nats, without all logits in memory at once.

    The gradient (p - q) W is computed in the forward pass, some rows at a time. The arguments are hidden states (N, D) and
    weights (V, D) of the student's head, and those of the teacher, which get no gradients.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        head, of_head = weight.to(dtype), torch.zeros_like(weight) if weight.requires_grad else None
        of_hidden, total = torch.empty_like(hidden), torch.zeros((), device=hidden.device)
        teacher_rows = teacher_hidden.to(teacher_weight.dtype).split(ROWS)
        for own, theirs, gradient in zip(hidden.split(ROWS), teacher_rows, of_hidden.split(ROWS), strict=True):
            own = own.to(dtype)
            log_probs = (own @ head.T).float().log_softmax(-1)
            teacher = (theirs @ teacher_weight.T).to(log_probs).log_softmax(-1)
            total += F.kl_div(log_probs, teacher, log_target=True, reduction="sum")
            if not any(ctx.needs_input_grad):  # evaluation needs no gradients
                continue
            difference = log_probs.exp_().sub_(teacher.exp_()).div_(len(hidden)).to(dtype)
            gradient.copy_(difference @ head)
            if of_head is not None:
                of_head += difference.T @ own
        ctx.save_for_backward(of_hidden, of_head)
        return total / len(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_head = ctx.saved_tensors
        return gradient * of_hidden, None if of_head is None else gradient * of_head, None, None


def divergence_from(
    student: nn.Module, head: nn.Module, teacher: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """Returns the mean divergence of a student from its teacher over the present tokens.

    Args:
        student: a causal language model, which may be wrapped. head: the student's output embeddings.
        input_ids, attention_mask: (B, T).
    """
    read = {"input_ids": input_ids} | ({} if attention_mask is None else {"attention_mask": attention_mask})
    there = ... if attention_mask is None else attention_mask.bool()
    hidden = student(**read, use_cache=False, output_hidden_states=True, logits_to_keep=1).hidden_states[-1]
    with torch.no_grad():
        wanted = teacher.model(**read, use_cache=False).last_hidden_state.to(hidden.device)
    weight = head.weight if torch.is_grad_enabled() else head.weight.detach()
    hidden, wanted = (states[there].flatten(0, -2) for states in (hidden, wanted))
    return DivergenceByRows.apply(hidden, weight, wanted, teacher.get_output_embeddings().weight)


def divergence_of_top(logits: Tensor, top_log_probs: Tensor, top_indices: Tensor) -> Tensor:
    """Returns the divergence with only the teacher's k most likely tokens distinguished, and all others as one class.

    It is a lower bound of the whole divergence, and 0 for equal distributions.

    Args:
        logits: (..., V), of the student. top_log_probs, top_indices: (..., k), of the teacher.
    """
    log_probs = logits.float().log_softmax(-1).gather(-1, top_indices)
    teacher = top_log_probs.float()
    told = (teacher.exp() * (teacher - log_probs)).sum(-1)
    smallest = torch.finfo(torch.float32).eps
    rest, own_rest = ((1 - each.exp().sum(-1)).clamp(min=smallest).log() for each in (teacher, log_probs))
    return told + rest.exp() * (rest - own_rest)


def prepare_for_distillation(student: PreTrainedModel) -> None:
    """Sets all parameters to require gradients, except embeddings that are tied to the head, which stay unchanged."""
    student.requires_grad_(True)
    if student.get_input_embeddings().weight is student.get_output_embeddings().weight:
        student.get_input_embeddings().requires_grad_(False)


class DistillationTrainer(Trainer):
    """Trainer of stage 2. Batches have input_ids and optionally attention_mask; without a teacher, also its stored output.

    Args:
        teacher: the transformer, which is not trained. None if the data set is a `StoredTeacher`.
    """

    def __init__(self, *args: Any, teacher: PreTrainedModel | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = None if teacher is None else teacher.requires_grad_(False).eval().to(self.args.device)
        self.model_accepts_loss_kwargs = False  # the loss is a mean over the tokens of a batch
        self.label_names = ["input_ids"]  # so that evaluation computes a loss without labels

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Returns the mean divergence of the present tokens."""
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        if self.teacher is None:
            logits = model(ids, attention_mask=mask, use_cache=False).logits
            each = divergence_of_top(logits, inputs["top_log_probs"], inputs["top_indices"])
            loss = each.mean() if mask is None else each[mask.bool()].mean()
        else:
            head = self.accelerator.unwrap_model(model).get_output_embeddings()
            loss = divergence_from(model, head, self.teacher, ids, mask)
        return (loss, {}) if return_outputs else loss


class StoredTeacher(Dataset):
    """Blocks of token ids with a teacher's most likely next tokens, read on demand from a folder of `store_teacher`.

    Raises:
        ValueError: if the folder was not written by `store_teacher`, or is not complete.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        index = Path(folder) / _INDEX
        if not index.is_file():
            raise ValueError(f"{folder} does not hold the complete output of store_teacher.")
        self.folder = Path(folder)
        self.ends = list(itertools.accumulate(json.loads(index.read_text(encoding="utf-8"))["blocks"]))
        self._open: dict[int, Any] = {}  # open files by index

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # each worker of a data loader opens the files itself

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index = range(len(self))[index]
        number = bisect.bisect_right(self.ends, index)
        row = index - (self.ends[number - 1] if number else 0)
        if number not in self._open:
            self._open[number] = safe_open(self.folder / _PART.format(number), framework="pt")
        one = {name: self._open[number].get_slice(name)[row] for name in _STORED}
        return {name: value.long() if name in ("input_ids", "top_indices") else value for name, value in one.items()}


@torch.no_grad()
def store_teacher(teacher: PreTrainedModel, batches: Iterable[Tensor], folder: str | os.PathLike, k: int = 32) -> None:
    """Writes a teacher's k most likely next tokens at every position of blocks (B, T), one file for each batch.

    Probabilities are stored as logarithms in half precision. A repeated call skips files that exist, if they hold the same
    blocks, the same k and a teacher of the same name.

    Raises:
        ValueError: if there is no block.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _INDEX).unlink(missing_ok=True)
    lengths, k = [], min(k, teacher.config.vocab_size)
    for number, ids in enumerate(batches):
        lengths.append(len(ids))
        path = folder / _PART.format(number)
        content = f"{tuple(ids.shape)}".encode() + ids.int().cpu().contiguous().numpy().tobytes()
        asked = {"teacher": teacher.name_or_path, "k": str(k), "ids": hashlib.sha256(content).hexdigest()}
        if path.is_file():
            with contextlib.suppress(SafetensorError), safe_open(path, framework="pt") as file:
                if file.metadata() == asked:
                    continue
        hidden = teacher.model(ids.to(teacher.device), use_cache=False).last_hidden_state.flatten(0, 1)  # (B T, D)
        tops = [logits_of(teacher, rows).float().log_softmax(-1).topk(k) for rows in hidden.split(HEAD_TOKENS)]
        values, indices = (torch.cat(parts).view(*ids.shape, k) for parts in zip(*tops))
        tensors = zip(_STORED, (ids.int(), values.half(), indices.int()))
        with whole(path) as partial:
            save_file({name: tensor.cpu().contiguous() for name, tensor in tensors}, partial, metadata=asked)
    if not lengths:
        raise ValueError("batches must hold at least one block of tokens.")
    write_whole(folder / _INDEX, json.dumps({"blocks": lengths}))
