# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Adapts transformers' `generate()` to a model with a state instead of a list of keys and values."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationMixin, GenerationMode, StoppingCriteriaList
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from ..arguments.checks import cache_of_call
from ..state.retention_state import RetNetState, install_retention_layers


logger = logging.get_logger(__name__)

# The name of the state in inputs and outputs of models: "cache" from transformers 5.24 on.
CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
DEVICES = {"cuda"}  # device types on which steps are captured
STEPS: dict[int, Any] = {}  # the `CapturedStep` of each running call of `generate()`, by the id of its state


def captured_steps(model: GenerationMixin, *call: Any) -> AbstractContextManager:
    """Returns a context in which `replayed` captures and replays decode steps on a GPU. `call` is as in `capturing`."""
    if model.device.type not in DEVICES:
        return nullcontext()
    try:
        from ..gpu.cuda_graphs import capturing
    except ImportError:  # in code saved with a model, if Triton is not installed
        return nullcontext()
    return capturing(STEPS, model, *call)


def replayed(forward: Callable[..., ModelOutput]) -> Callable[..., ModelOutput]:
    """Returns a `forward` of a model with a head that, within `captured_steps`, captures and replays plain decode steps.

    transformers' `get_compiled_call` does not serve for it, because beam search calls the model itself.
    """

    @functools.wraps(forward)
    def call(model: GenerationMixin, *args: Any, **inputs: Any) -> ModelOutput:
        step = None if torch.compiler.is_compiling() or args else STEPS.get(id(inputs.get(CACHE)))
        outputs = None if step is None else step(model, forward, inputs)
        return forward(model, *args, **inputs) if outputs is None else outputs

    return call


def register_causal(model_class: type) -> None:
    """Registers a class in the table by which Trainer decides whether label smoothing shifts the labels."""
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.setdefault(f"{model_class.__module__}.{model_class.__name__}", model_class.__name__)


class EndedRows(StoppingCriteriaList):
    """Stopping criteria that record which rows of a batch have ended. transformers pads these rows."""

    before_last: Tensor | None = None  # (B,) bool, rows that had ended before the last token; None until a row has ended
    _ended: tuple[Tensor, Tensor] | None = None  # (B,) bool, and whether any row has ended, on the host

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        ended = done = super().__call__(input_ids, scores, **kwargs)
        if self._ended is not None:
            before, some = self._ended  # `some` has arrived, because transformers waits for the device in each step
            self.before_last, ended = before if some else None, before | done
        self._ended = ended, ended.any().to("cpu", non_blocking=ended.is_cuda)
        return done


class RetNetGeneration(GenerationMixin):
    """Generation with a `RetNetState`."""

    def __init_subclass__(cls, **kwargs) -> None:
        super().__init_subclass__(**kwargs)
        register_causal(cls)

    @functools.wraps(GenerationMixin.generate)
    def generate(self, *args, **kwargs):
        """Generates as in transformers. Accepts both names of the state; transformers would ignore one of them."""
        given = cache_of_call(kwargs.pop("cache", None), kwargs.pop("past_key_values", None))
        return super().generate(*args, **kwargs | ({} if given is None else {CACHE: given}))

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs: dict, generation_mode: GenerationMode, *args, **kwargs
    ) -> None:
        """Lets transformers check the request, then replaces its cache by a `RetNetState`."""
        if self.model.context is not None:
            advice = "Call context_parallel(model, None) first. The state that a prompt left on each rank stays valid."
            raise ValueError(f"generate() needs the whole sequence on one rank. {advice}")
        self.model.arrange_layers()
        implementation = generation_config.cache_implementation or ""
        if implementation == "quantized":
            reason = "a retention state has a constant size and accumulates, so it is kept in full precision."
            raise ValueError(f'cache_implementation must be None, "dynamic" or "static", got "quantized": {reason}')
        if implementation.startswith("offloaded"):
            reason = "a retention state does not grow, so it stays on the device of the layers."
            logger.warning_once(f"cache_implementation={implementation!r} has no effect: {reason}")
        given = model_kwargs.get(CACHE)
        past = RetNetState.length_of(given)
        if generation_mode == GenerationMode.ASSISTED_GENERATION and past:
            reason = f"transformers then reads the whole prompt again. The state has already read {past} tokens."
            raise ValueError(f"cache must be empty or absent for assisted decoding, because {reason}")
        super()._prepare_cache_for_generation(generation_config, model_kwargs, generation_mode, *args, **kwargs)
        if given is not None:
            install_retention_layers(given, self.config)
        elif model_kwargs.get(CACHE) is not None:
            model_kwargs[CACHE] = state = RetNetState(self.config, compileable="static" in implementation)
            if generation_config.is_assistant:
                state.activate_past_recording()

    def _sample(self, input_ids: Tensor, *args, stopping_criteria, generation_config, **model_kwargs):
        """Samples as in transformers, with captured decode steps where possible. Ended rows leave their states unchanged."""
        if len(input_ids) > 1 and any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria):
            model_kwargs["ended_rows"] = stopping_criteria = EndedRows(stopping_criteria)
        model_kwargs |= {"stopping_criteria": stopping_criteria, "generation_config": generation_config}
        with captured_steps(self, model_kwargs.get(CACHE), input_ids, generation_config):
            return super()._sample(input_ids, *args, **model_kwargs)

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)
    def prepare_inputs_for_generation(self, *args, ended_rows: EndedRows | None = None, **kwargs) -> dict[str, Any]:
        """Returns inputs as in transformers, with a mask (B, 1) of False for the padding tokens of rows that have ended."""
        if ended_rows is not None and ended_rows.before_last is not None and kwargs.get(CACHE) is not None:
            kwargs["attention_mask"] = ~ended_rows.before_last[:, None]
        return super().prepare_inputs_for_generation(*args, **kwargs)

    def _beam_search(self, input_ids: Tensor, *args, generation_config, **model_kwargs):
        """Searches as in transformers, with captured decode steps where possible."""
        with captured_steps(self, model_kwargs.get(CACHE), input_ids, generation_config):
            return super()._beam_search(input_ids, *args, generation_config=generation_config, **model_kwargs)

    def _assisted_decoding(self, *args, **model_kwargs):
        """Decodes as in transformers. At the end drops the record for rewinding drafts, unless the caller had started it."""
        state = model_kwargs[CACHE]
        recorded = [layer.record_past for layer in state.layers]
        try:
            return super()._assisted_decoding(*args, **model_kwargs)
        finally:
            for layer, kept in zip(state.layers, recorded):
                layer.record(kept)

    def init_continuous_batching(self, *args, **kwargs):
        """Raises ValueError."""
        raise ValueError(
            "continuous batching of transformers (generate_batch, transformers serve --continuous-batching) stores keys and "
            "values in pages and has no place for the state of a RetNet. Serve the model with vLLM (retnet-hf serve), or "
            "call it with packed documents (cu_seq_lens_q, state_rows)."
        )

    def _prepare_position_ids_for_generation(self, inputs_tensor: Tensor, model_kwargs: dict) -> None:
        """Returns None, because the state holds the next position."""

    def _prepare_attention_mask_for_generation(self, inputs_tensor, generation_config, model_kwargs: dict) -> Tensor:
        """Returns transformers' mask. With a state and only new tokens, columns for the tokens read before come first.

        Raises:
            ValueError: if ids of a whole text do not begin with the tokens that the state has read.
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
        config: PreTrainedConfig, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs
    ) -> Tensor | None:
        """Returns the mask (B, T) of the new tokens. The state needs no mask for tokens read before."""
        if attention_mask is None:
            return None
        attention_mask = attention_mask[:, -inputs_embeds.shape[1] :]
        return None if bool(attention_mask.all()) else attention_mask
