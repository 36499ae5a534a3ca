# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Continuous batching of transformers (`generate_batch`, `transformers serve --continuous-batching`) with a RetNet.

Transformers shares out the memory of its paged cache by kind of layer, and knows two: full and sliding attention. Here is
a third, "linear_attention", for models all of whose layers are retention: a request has one block, of one page for each
layer, which is its state, whatever its length. There is no public place to say so. `register` therefore replaces two private
methods of transformers by ones that call them and add what belongs to the new kind; models of other kinds are not affected.
A version of transformers that knows the kind by itself is refused, until this file is made to fit it.
"""

from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig

from .retention_state import RetNetState, require_retention_alone


KIND = "linear_attention"
TESTED = "5.23"  # of transformers


def register(config: PreTrainedConfig) -> None:
    """Makes the kind known, once in a process.

    Raises:
        ValueError: for a model with softmax attention. RuntimeError: for a version of transformers that is built otherwise.
    """
    require_retention_alone(config)
    try:
        from transformers.generation.continuous_batching.cache import ATTN_TYPE_TO_ALLOCATOR, PagedAttentionCache
        from transformers.generation.continuous_batching.cache_allocators import CacheAllocator
        from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

        known = ATTN_TYPE_TO_ALLOCATOR.get(KIND)
        if getattr(known, "is_for_retention", False):
            return
        if known is not None:
            raise AttributeError(f"it has a cache for {KIND} of its own")
        setup, limit = ContinuousBatchingIOs._setup_static_tensors, PagedAttentionCache._infer_read_cache_limit
    except (ImportError, AttributeError) as error:
        raise RuntimeError(
            f"continuous batching of a RetNet is made for transformers {TESTED}, and {transformers.__version__} is built "
            f"otherwise ({error}): generate() and pipelines decode a RetNet without it."
        ) from error

    class StateAllocator(_StateBlocks, CacheAllocator):
        """One block of states for each request."""

    def setup_static_tensors(self: Any, logit_processor: Any) -> None:
        setup(self, logit_processor)
        if KIND in self.cache.cache_allocators:
            self.cumulative_seqlens_k[KIND] = torch.zeros_like(self.cumulative_seqlens_q)
            self.total_seqlen_k[KIND] = self.max_length_k[KIND] = 0
            self.attention_mask = None

    def infer_read_cache_limit(self: Any) -> int | None:
        return 0 if KIND in self.cache_allocators else limit(self)

    ContinuousBatchingIOs._setup_static_tensors = setup_static_tensors
    PagedAttentionCache._infer_read_cache_limit = infer_read_cache_limit
    ATTN_TYPE_TO_ALLOCATOR[KIND] = StateAllocator


class _StateBlocks:
    """What an allocator of transformers' paged cache is asked for, where a request has one block from beginning to end.

    Attributes:
        state: of all blocks, a view of the cache's memory.
    """

    is_for_retention = True
    supports_block_sharing = False
    supports_block_table = False
    rows_per_token = 1
    layer_type = KIND

    def __init__(
        self,
        index: int,
        config: PreTrainedConfig,
        num_key_value_heads: int,
        cache_dtype: torch.dtype,
        page_size: int,
        layer_indices: list[int],
        allow_block_sharing: bool,
    ) -> None:
        if config.model_type != "retnet":
            raise ValueError(f"Invalid layer type: {KIND}")  # as transformers says
        self.config = config
        ranks = config.num_key_value_heads // num_key_value_heads  # that share out the heads
        self.heads = [config.state_heads(layer) // ranks for layer in layer_indices]
        self.numbers = max(self.heads) * config.head_dim * config.value_head_dim
        self._before_cache_tensor_init(
            index=index,
            layer_indices=layer_indices,
            tokens_per_page=1,
            bytes_per_page=self.numbers * torch.float32.itemsize,
            allow_block_sharing=allow_block_sharing,
        )

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any) -> None:
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        pages = self._copy_view.view(torch.float32).unflatten(
            1, (self.pages_per_block, self.numbers)
        )  # (S, layers, numbers)
        self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, pages, pool)
        self.state, position = RetNetState(self.config), torch.zeros(len(pages), dtype=torch.int64, device=pages.device)
        sizes = self.config.head_dim, self.config.value_head_dim
        for index, (layer, heads) in enumerate(zip(self.state.layers, self.heads)):
            matrices = pages[:, index, : heads * sizes[0] * sizes[1]].unflatten(1, (heads, *sizes))
            layer.fill_(matrices, position, torch.zeros((), dtype=torch.int64, device=pages.device))

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        return 0 if self.block_table.get(request_id) else 1

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        if not self.block_table.get(request_id):
            self.block_table[request_id] = list(self.pool.get_free_blocks(self.index, 1))

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return query_length

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        return []

    def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """The block of a request, for each of its tokens."""
        return self.block_table[request_id] * query_length

    def fill_block_table(self, *_: Any) -> None:
        raise NotImplementedError("a state has no table of blocks.")

    def update(self, *_: Any) -> None:
        raise NotImplementedError("a state is updated by its layer.")

    def get_cache_for_block_table(self, *_: Any) -> None:
        raise NotImplementedError("a state has no table of blocks.")


def requests_of(paged_cache: Any, cu_seq_lens_q: Tensor, write_index: list[Tensor]) -> tuple[RetNetState, Tensor]:
    """The state of all blocks of a paged cache, and the row of it that each request of a batch has, (D,)."""
    allocator = paged_cache.cache_allocators[KIND]
    return allocator.state, write_index[allocator.index][cu_seq_lens_q[:-1].long()]
