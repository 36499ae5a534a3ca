# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Texts longer than memory: exact scores in one pass, and training with the state carried from segment to segment."""

import itertools
import math
import numbers
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset, get_worker_info
from transformers import TrainerCallback
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from ..state.retention_state import RetNetState


@dataclass
class StreamScore:
    """Result of `score_stream`.

    Attributes:
        log_likelihood: sum of ln p(token | all earlier tokens), in nats.
        tokens: number of predicted tokens.
        state: the state after the last token, with which to continue.
    """

    log_likelihood: float
    tokens: int
    state: Cache

    @property
    def perplexity(self) -> float:
        """Returns exp of the negative log-likelihood per token, or NaN if no token was predicted."""
        return math.exp(-self.log_likelihood / self.tokens) if self.tokens else float("nan")


def segments(tokens: Tensor | Iterable, segment_length: int) -> Iterator[Tensor]:
    """Splits a stream of tokens into int64 tensors (1, segment_length). The last one may be shorter.

    Args:
        tokens: a tensor of ids, or an iterable of ids or of lists or tensors of ids, which is read only as far as needed.

    Raises:
        ValueError: for a tensor of several texts.
        TypeError: for a text that is not tokenized.
    """
    if isinstance(tokens, Tensor):
        if tokens.dim() != 1 and tuple(tokens.shape[:-1]) != (1,):
            raise ValueError(f"tokens must be one text, (tokens,) or (1, tokens), got {tuple(tokens.shape)}.")
        yield from (segment[None].long() for segment in tokens.flatten().split(segment_length) if len(segment))
        return
    if isinstance(tokens, str):
        raise TypeError("tokens must be ids, got a str. Tokenize the text first.")
    pieces = (piece.flatten().tolist() if isinstance(piece, Tensor) else piece for piece in tokens)
    ids = itertools.chain.from_iterable([int(each)] if isinstance(each, numbers.Integral) else each for each in pieces)
    while segment := list(itertools.islice(ids, segment_length)):
        yield torch.tensor([segment])


@torch.no_grad()
def score_stream(
    model: PreTrainedModel, tokens: Tensor | Iterable, segment_length: int = 4096, state: Cache | None = None
) -> StreamScore:
    """Returns the exact log-likelihood of a stream of any length, with memory that does not depend on the length.

    Args:
        model: a causal language model with a constant-size state. It is set to eval mode during the call.
        tokens: as in `segments`. segment_length: tokens read at a time. The score does not depend on it.
        state: the state after earlier tokens; updated in place. The first token is then not scored, since its logits were
            an output of the earlier call.

    Raises:
        ValueError: for an empty stream, a tensor of several texts, or segment_length < 1.
        TypeError: for a text that is not tokenized.
    """
    if segment_length < 1:
        raise ValueError(f"segment_length must be a positive integer, got {segment_length}.")
    log_likelihood, predicted, last_logits, training = 0.0, 0, None, model.training
    state = RetNetState(model.config) if state is None else state
    model.eval()
    try:
        for segment in segments(tokens, segment_length):
            segment = segment.to(model.device)
            logits = model(segment, cache=state, use_cache=True).logits[0]  # (S, vocabulary)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            scores = logits[:-1] if last_logits is None else torch.cat([last_logits, logits[:-1]])
            targets = segment[0, 1:] if last_logits is None else segment[0]
            log_likelihood -= F.cross_entropy(scores, targets, reduction="sum").double().item()
            predicted += len(targets)
            last_logits = logits[-1:]
    finally:
        model.train(training)
    if last_logits is None:
        raise ValueError("tokens must not be empty.")
    return StreamScore(log_likelihood, predicted, state)


class TokenStreams(IterableDataset):
    """Training examples from one long text: row b of every batch continues row b of the previous batch.

    The text is split into `batch_size * processes` streams of equal length, and each stream into segments. Segments are
    yielded in the order that the data loaders of a `Trainer` need, also with several workers. Use it with `CarryState`.

    Args:
        tokens: (all tokens,), a tensor or array of integers, such as a memory map of uint16. Segments become int64.
        batch_size: batch size of a data loader, `per_device_train_batch_size`.
        segment_length: tokens in an example.
        processes: number of processes. Each process trains on `batch_size` streams.

    Raises:
        ValueError: if tokens are no integers or of several texts, or if the text is too short for one batch.
    """

    def __init__(self, tokens: Tensor, batch_size: int, segment_length: int, processes: int = 1) -> None:
        tokens = torch.as_tensor(tokens)
        if tokens.dim() != 1 or tokens.dtype.is_floating_point or tokens.dtype.is_complex or tokens.dtype == torch.bool:
            raise ValueError(f"tokens must be integers of shape (all tokens,), got {tokens.dtype}, {tuple(tokens.shape)}.")
        streams = batch_size * processes
        length = len(tokens) // streams // segment_length
        if length < 1:
            needed = f"batch_size * processes * segment_length = {streams * segment_length}"
            raise ValueError(f"len(tokens) must be at least {needed}, got {len(tokens)}.")
        self.batch_size = batch_size
        self.streams = tokens[: streams * length * segment_length].view(streams, length, segment_length)  # (B, segments, T)

    def __len__(self) -> int:
        return self.streams.shape[0] * self.streams.shape[1]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()  # a loader takes one batch from each of its workers in turn
        streams, length, _ = self.streams.shape
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        batches = itertools.product(range(length), range(0, streams, self.batch_size))
        for segment, row in itertools.islice(batches, first, None, step):
            for tokens in self.streams[row : row + self.batch_size, segment].long():
                yield {"input_ids": tokens, "labels": tokens}


class CarryState(TrainerCallback):
    """Truncated back-propagation through time: each training step starts from the final state of the previous step.

    The state is detached between steps and reset at every epoch. Evaluation does not change it. Every checkpoint contains
    it, so that a resumed run continues with it. Each of several processes carries the state of its own rows. A run may be
    resumed with another number of processes if the total number of rows is the same. Pass it to a `Trainer` with
    `TokenStreams`: `Trainer(model, args, train_dataset=TokenStreams(tokens, batch_size, 512), callbacks=[CarryState()])`.

    Raises:
        ValueError: when training begins, if the dataset is no `TokenStreams` or was made for another batch size or number
            of processes, or if the checkpoint to resume has no state of these rows. In a step, if the tokens are not those
            that continue what the state has read, for example because `auto_find_batch_size` reduced the batch size.
    """

    FILE = "carried_state.safetensors"  # for one process; several processes write carried_state.1-of-2.safetensors etc.

    def __init__(self) -> None:
        self.state: RetNetState | None = None
        self._hooks: list = []

    def on_train_begin(self, args, state, control, model: nn.Module = None, train_dataloader=None, **kwargs) -> None:
        dataset = getattr(train_dataloader, "dataset", None)
        dataset = getattr(dataset, "dataset", dataset)  # accelerate's dataset for several processes wraps ours
        if not isinstance(dataset, TokenStreams):
            raise ValueError(f"CarryState needs a train_dataset of type TokenStreams, got {type(dataset).__name__}.")
        batch_size, streams = args.train_batch_size, dataset.streams.shape[0]
        if dataset.batch_size != batch_size or streams != batch_size * args.world_size:
            made_for = f"batch_size {dataset.batch_size} and {streams // dataset.batch_size} processes"
            given = f"{batch_size} and {args.world_size}. Create it with the Trainer's numbers."
            raise ValueError(f"TokenStreams was made for {made_for}, but the Trainer runs with {given}")
        self.on_step_end()
        first = args.process_index * batch_size
        self.state, self._own = None, dataset.streams[first : first + batch_size]
        if (state.epoch or 0.0) % 1:  # Trainer counts epochs with their fraction
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            any_file = next(folder.glob(f"{Path(self.FILE).stem}*"), None)
            if any_file is None:
                raise ValueError(f"{folder} has no {self.FILE}, so it was not written by a run with CarryState.")
            processes = re.search(r"-of-(\d+)", any_file.name)  # of the run that wrote it
            files = self._files_of(folder, int(processes[1]) if processes else 1)
            parts = [RetNetState.load(file, model.config, model.device, other_weights=True) for file in files]
            whole = RetNetState.concatenate(parts)
            if whole.layers[0].batch_size != streams:
                raise ValueError(f"{folder} has the state of {whole.layers[0].batch_size} rows, but this run has {streams}.")
            self.state = whole.select(list(range(first, first + batch_size)))

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        if not (state.epoch or 0.0) % 1:  # a resumed run continues within an epoch, with the loaded state
            self.state = None

    def on_step_begin(self, args, state, control, model: nn.Module = None, **kwargs) -> None:
        self.on_step_end()
        passing = model.register_forward_pre_hook(self._pass_state, with_kwargs=True)
        self._hooks = [passing, model.register_forward_hook(self._store_state)]

    def on_step_end(self, *event, **kwargs) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def on_save(self, args, state, control, **kwargs) -> None:
        if self.state is None:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)  # Trainer creates it in the first process only
        own = self._files_of(folder, args.world_size)
        self.state.save(own[args.process_index])
        if args.process_index == 0:  # removes files that a run with another number of processes wrote here earlier
            for file in set(folder.glob(f"{Path(self.FILE).stem}*")) - set(own):
                file.unlink()

    def _files_of(self, folder: Path, processes: int) -> list[Path]:
        """Returns the state files of a run with `processes` processes, in order."""
        whole = folder / self.FILE
        several = [whole.with_stem(f"{whole.stem}.{process}-of-{processes}") for process in range(processes)]
        return several if processes > 1 else [whole]

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self.on_step_end()
        self.state = None

    def _pass_state(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self.state = RetNetState(model.config) if self.state is None else self.state
        ids = kwargs["input_ids"]
        number = int(self.state.get_seq_length()) // ids.shape[1]
        if not any(ids.cpu().equal(segment.long()) for segment in self._own[:, number : number + 1].unbind(1)):
            raise ValueError(
                f"input_ids must be segment {number} of the {len(self._own)} rows of TokenStreams, which continues what "
                f"the state has read, got others of shape {tuple(ids.shape)}. Batches must be whole and in the order of the "
                "dataset, as with the defaults of accelerator_config."
            )
        return args, kwargs | {"cache": self.state, "use_cache": True}

    def _store_state(self, model: nn.Module, args: tuple, outputs) -> None:
        self.state = self.state.clone()
