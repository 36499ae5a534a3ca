# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Texts longer than memory: exact scores in one pass, and training with the state carried from segment to segment.

A RetNet needs nothing of what it has read but its state, so a text is walked in segments, in constant memory, and the result
is that of reading it at once.
"""

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
from transformers import TrainerCallback, TrainerState
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel

from ..state.retention_state import RetNetState


@dataclass
class StreamScore:
    """What `score_stream` found.

    Attributes:
        log_likelihood: sum of ln p(token | all before it), in nats.
        tokens: number of tokens that were predicted.
        state: the state after the last token, to read on from.
    """

    log_likelihood: float
    tokens: int
    state: Cache

    @property
    def perplexity(self) -> float:
        """exp of the negative log-likelihood per token."""
        return math.exp(-self.log_likelihood / self.tokens) if self.tokens else float("nan")


def segments(tokens: Tensor | Iterable, segment_length: int) -> Iterator[Tensor]:
    """Cuts a stream of tokens into int64 tensors (1, segment_length), the last one shorter.

    Args:
        tokens: a tensor of ids, or anything that yields ids, or lists or tensors of ids; read no further than needed.

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
        raise TypeError("tokens must be ids, got a str: tokenize the text first.")
    ids = itertools.chain.from_iterable(_ids(piece) for piece in tokens)
    while segment := list(itertools.islice(ids, segment_length)):
        yield torch.tensor([segment])


def _ids(piece: int | Iterable[int]) -> Iterable[int]:
    if isinstance(piece, Tensor):
        return piece.flatten().tolist()
    return [int(piece)] if isinstance(piece, numbers.Integral) else piece


@torch.no_grad()
def score_stream(
    model: PreTrainedModel,
    tokens: Tensor | Iterable,
    segment_length: int = 4096,
    state: Cache | None = None,
) -> StreamScore:
    """The exact log-likelihood of a stream of any length, in memory that does not depend on it.

    Args:
        model: a causal language model with a constant-size state. It reads in eval mode, whatever mode it is in.
        tokens: ids: a tensor, or any iterable of ids or of sequences of ids, a generator included.
        segment_length: tokens read at a time; the score does not depend on it.
        state: what was read before; updated in place. The first token is then not scored, since the logits that predict it
            went with the earlier call.

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
            logits = model(segment, past_key_values=state, use_cache=True).logits[0]  # (S, vocabulary)
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            targets = segment[0]
            scores = logits[:-1] if last_logits is None else torch.cat([last_logits, logits[:-1]])
            targets = targets[1:] if last_logits is None else targets
            log_likelihood -= F.cross_entropy(scores, targets, reduction="sum").double().item()
            predicted += len(targets)
            last_logits = logits[-1:]
    finally:
        model.train(training)
    if last_logits is None:
        raise ValueError("tokens must not be empty.")
    return StreamScore(log_likelihood, predicted, state)


class TokenStreams(IterableDataset):
    """One long text as training examples, such that row b of every batch continues row b of the batch before.

    The text is cut into `batch_size * processes` streams of equal length, and these into segments, which come out in the
    order in which the data loaders of a `Trainer` need them, also if they have several workers. Use it with `CarryState`.

    Args:
        tokens: (all tokens,) int64.
        batch_size: that of a data loader: `per_device_train_batch_size`.
        segment_length: tokens in an example.
        processes: that train side by side, each on `batch_size` streams of its own.

    Raises:
        ValueError: for a text too short for one batch.
    """

    def __init__(self, tokens: Tensor, batch_size: int, segment_length: int, processes: int = 1) -> None:
        streams = batch_size * processes
        length = len(tokens) // streams // segment_length
        if length < 1:
            raise ValueError(
                f"tokens must be at least batch_size * processes * segment_length = {streams * segment_length}, "
                f"got {len(tokens)}."
            )
        self.batch_size = batch_size
        kept = tokens[: streams * length * segment_length]
        self.streams = kept.view(streams, length, segment_length)  # (B, segments, T)

    def __len__(self) -> int:
        return self.streams.shape[0] * self.streams.shape[1]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        worker = get_worker_info()  # a loader takes one batch from each of its workers in turn
        streams, length, _ = self.streams.shape
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        batches = itertools.product(range(length), range(0, streams, self.batch_size))
        for segment, row in itertools.islice(batches, first, None, step):
            for tokens in self.streams[row : row + self.batch_size, segment]:
                yield {"input_ids": tokens, "labels": tokens}


class CarryState(TrainerCallback):
    """Truncated back-propagation through time: each training step starts from the state that the last one ended with.

    The state is detached between steps, begins anew with every epoch, is left alone by evaluation, and is kept in every
    checkpoint, so that a resumed run goes on with it. Each of several processes carries the state of its own rows; a run may
    be resumed by another number of them with as many rows in all. Hand it to a `Trainer` along with `TokenStreams`:

        Trainer(model, args, train_dataset=TokenStreams(tokens, batch_size, 512), callbacks=[CarryState()])

    Raises:
        ValueError: when training begins with another dataset, another batch size or number of processes, so that rows would
            not continue each other; or from a checkpoint without a state of these rows.
    """

    FILE = "carried_state.safetensors"  # of one process; of several, carried_state.1-of-2.safetensors

    def __init__(self) -> None:
        self.state: RetNetState | None = None
        self._hooks: list = []

    def on_train_begin(self, args, state, control, model: nn.Module = None, train_dataloader=None, **kwargs) -> None:
        dataset = getattr(train_dataloader, "dataset", None)
        dataset = getattr(dataset, "dataset", dataset)  # within that of accelerate which shares it out
        if not isinstance(dataset, TokenStreams):
            raise ValueError(f"CarryState needs a train_dataset of type TokenStreams, got {type(dataset).__name__}.")
        batch_size, streams = args.train_batch_size, dataset.streams.shape[0]
        if dataset.batch_size != batch_size or streams != batch_size * args.world_size:
            raise ValueError(
                f"TokenStreams was made for batch_size {dataset.batch_size} and {streams // dataset.batch_size} processes, "
                f"but the Trainer runs with {batch_size} and {args.world_size}: its rows would not continue each other."
            )
        if args.world_size > 1 and args.dataloader_num_workers > 1 and args.accelerator_config.dispatch_batches is False:
            raise ValueError(
                "dispatch_batches must not be False where several processes have several data loader workers each: rows "
                "would not continue each other."
            )
        if args.world_size > 1 and args.accelerator_config.split_batches:
            raise ValueError("split_batches must be off with several processes: rows would not continue each other.")
        self._remove_hooks()
        self.state = None
        if _is_within_epoch(state):
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            whole = self._load(folder, model)
            if whole.layers[0].batch_size != streams:
                raise ValueError(f"{folder} has the state of {whole.layers[0].batch_size} rows, and this run has {streams}.")
            first = args.process_index * batch_size
            self.state = whole.select(list(range(first, first + batch_size)))

    def _load(self, folder: Path, model: nn.Module) -> RetNetState:
        """The state of all rows, of however many processes."""
        any_of_them = next(self._files(folder), None)
        if any_of_them is None:
            raise ValueError(f"{folder} has no {self.FILE}: it was not written by a run with CarryState.")
        of_several = re.search(r"-of-(\d+)", any_of_them.name)
        files = self._files_of(folder, int(of_several[1]) if of_several else 1)
        return RetNetState.concatenate(
            RetNetState.load(file, model.config, model.device, other_weights=True) for file in files
        )

    def on_epoch_begin(self, args, state, control, **kwargs) -> None:
        if not _is_within_epoch(state):  # as it is where a run is resumed
            self.state = None

    def on_step_begin(self, args, state, control, model: nn.Module = None, **kwargs) -> None:
        self._remove_hooks()
        self._hooks = [
            model.register_forward_pre_hook(self._give, with_kwargs=True),
            model.register_forward_hook(self._take),
        ]

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self._remove_hooks()

    def on_save(self, args, state, control, **kwargs) -> None:
        if self.state is None:
            return
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder.mkdir(parents=True, exist_ok=True)  # Trainer makes it in its first process
        own = self._files_of(folder, args.world_size)
        self.state.save(own[args.process_index])
        if args.process_index == 0:  # of a run with another number of processes, which wrote its checkpoint here before
            for file in set(self._files(folder)) - set(own):
                file.unlink()

    def _files(self, folder: Path) -> Iterator[Path]:
        """All that are there."""
        return folder.glob(f"{Path(self.FILE).stem}*")

    def _files_of(self, folder: Path, processes: int) -> list[Path]:
        """Those of a run with so many processes, in their order."""
        whole = folder / self.FILE
        several = [whole.with_stem(f"{whole.stem}.{process}-of-{processes}") for process in range(processes)]
        return several if processes > 1 else [whole]

    def on_train_end(self, args, state, control, **kwargs) -> None:
        self._remove_hooks()
        self.state = None

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _give(self, model: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self.state = RetNetState(model.config) if self.state is None else self.state
        return args, kwargs | {"past_key_values": self.state, "use_cache": True}

    def _take(self, model: nn.Module, args: tuple, outputs) -> None:
        self.state = self.state.clone()


def _is_within_epoch(state: TrainerState) -> bool:
    return (state.epoch or 0.0) % 1 > 0  # Trainer counts the epochs that are over, with the share of the last one


__all__ = ["CarryState", "StreamScore", "TokenStreams", "score_stream", "segments"]
