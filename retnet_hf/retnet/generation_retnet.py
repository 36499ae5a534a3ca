# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What `generate()` of transformers needs to be told about a model whose state is not a list of keys and values."""

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationMixin, GenerationMode
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from ..modules.captured_steps import DEVICES
from ..state.retention_state import RetNetState, install_retention_layers


logger = logging.get_logger(__name__)

# The name of a state among the inputs and outputs of models: "cache" from transformers 5.24 on.
CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"


def captured_steps(model: GenerationMixin, *call: Any) -> AbstractContextManager:
    """Within, decode steps of a model on a GPU are captured and replayed. `call` is as in `capturing`."""
    if model.device.type not in DEVICES:
        return nullcontext()
    try:
        from ..gpu.cuda_graphs import capturing
    except ImportError:  # of a model that carries its code, where Triton is not installed
        return nullcontext()
    return capturing(model, *call)


def register_causal(model_class: type) -> None:
    """Enters a class into the table of names by which Trainer decides whether label smoothing shifts the labels."""
    name = model_class.__name__
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(f"{model_class.__module__}.{name}", name)


class RetNetGeneration(GenerationMixin):
    """Generation with a `RetNetState`."""

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        register_causal(cls)

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        """As in transformers, with a state by either of its names: the other one would be passed over."""
        for name in {"past_key_values", "cache"} - {CACHE}:
            if name in kwargs:
                kwargs[CACHE] = kwargs.pop(name)
        return super().generate(*args, **kwargs)

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict, generation_mode: GenerationMode, *args, **kwargs
    ) -> None:
        """Lets transformers check the request, then replaces the cache that it made by a `RetNetState`."""
        if self.model.context is not None:
            raise ValueError(
                "generate() writes where the whole sequence is: end context_parallel(model, ...) by context_parallel(model, "
                "None) first. The state that a prompt left on each rank remains valid."
            )
        implementation = generation_config.cache_implementation
        if implementation == "quantized":
            raise ValueError(
                'cache_implementation must be None, "dynamic" or "static", got "quantized": '
                "a retention state is constant in size and accumulates, so it is kept in full precision."
            )
        if implementation is not None and implementation.startswith("offloaded"):
            logger.warning_once(
                f"cache_implementation={implementation!r} moves nothing: a retention state does not grow, so it stays where "
                "the layers are."
            )
        given = model_kwargs.get(CACHE)
        if generation_mode == GenerationMode.ASSISTED_GENERATION and RetNetState.length_of(given):
            raise ValueError(
                "past_key_values must be empty or absent for assisted decoding, in which transformers reads the whole "
                f"prompt again; the state given has read {RetNetState.length_of(given)} tokens."
            )
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)
        cache = model_kwargs.get(CACHE)
        if given is not None:
            install_retention_layers(given, self.config)
        elif cache is not None:
            state = RetNetState(self.config, compileable=implementation is not None and "static" in implementation)
            if generation_config.is_assistant:
                state.activate_past_recording()
            model_kwargs[CACHE] = state

    def _sample(self, input_ids: Tensor, *args, generation_config, **model_kwargs):
        """As in transformers, with decode steps that are captured where that is possible."""
        with captured_steps(self, model_kwargs.get(CACHE), input_ids, generation_config):
            return super()._sample(input_ids, *args, generation_config=generation_config, **model_kwargs)

    def _beam_search(self, input_ids: Tensor, *args, generation_config, **model_kwargs):
        """As in transformers, with decode steps that are captured where that is possible."""
        with captured_steps(self, model_kwargs.get(CACHE), input_ids, generation_config):
            return super()._beam_search(input_ids, *args, generation_config=generation_config, **model_kwargs)

    def _assisted_decoding(self, *args, **model_kwargs):
        """As in transformers. What was recorded to take drafts back is dropped at the end, unless the caller recorded."""
        state = model_kwargs[CACHE]
        recorded = [layer.record_past for layer in state.layers]
        try:
            return super()._assisted_decoding(*args, **model_kwargs)
        finally:
            for layer, kept in zip(state.layers, recorded):
                layer.record(kept)

    def init_continuous_batching(self, *args, **kwargs):
        """Raises ValueError: transformers' continuous batching has a place for keys and values alone."""
        raise ValueError(
            "continuous batching of transformers (generate_batch, transformers serve --continuous-batching) keeps keys and "
            "values in pages, and has no place for the state of a RetNet. Serve the model by vLLM (retnet-hf serve), or "
            "call it with packed documents (cu_seq_lens_q, state_rows)."
        )

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict) -> None:
        """None: the state holds the next position."""

    def _prepare_attention_mask_for_generation(self, inputs_tensor, generation_config, model_kwargs: dict) -> Tensor:
        """Transformers' mask. If a state and only new tokens are given, columns for what the state has read come first.

        Raises:
            ValueError: for ids of a whole text that do not begin with what the state has read.
        """
        attention_mask = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        state = model_kwargs.get(CACHE)
        past = RetNetState.length_of(state)
        if past and attention_mask.shape[1] <= past:
            attention_mask = torch.cat([attention_mask.new_ones(attention_mask.shape[0], past), attention_mask], dim=1)
        elif isinstance(state, RetNetState) and inputs_tensor.shape == attention_mask.shape:
            state.require_read(inputs_tensor)
        return attention_mask

    @staticmethod
    def create_masks_for_generate(
        config: PreTrainedConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        position_ids: Tensor | None = None,
        **kwargs,
    ) -> Tensor | None:
        """The mask of the new tokens alone, (B, T): the state needs no mask for what it has read."""
        if attention_mask is None:
            return None
        attention_mask = attention_mask[:, -inputs_embeds.shape[1] :]
        return None if bool(attention_mask.all()) else attention_mask
