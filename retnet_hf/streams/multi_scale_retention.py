# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Retention as a layer of any model: the token mixer of a RetNet, together with the plans of its calls."""

from typing import Any

import torch
from torch import Tensor, nn

from ..modules.layers import init_weights
from ..ops.layout import layout_of
from ..retnet.configuration_retnet import RetNetConfig
from ..retnet.modeling_retnet import PlansRetention, RetNetRetention
from ..state.retention_state import RetNetState
from ..state.state_file import first_tokens_of
from .stream_state import StreamState, checked_call


# Fields of RetNetConfig that a retention layer reads.
OPTIONS = (
    *("num_key_value_heads", "key_expansion", "value_expansion", "decay_schedule", "decay_range", "feature_map"),
    *("use_rotary", "rotary_endpoint", "rope_parameters", "max_position_embeddings", "qkv_bias", "use_qk_norm"),
    *("use_output_gate", "output_gate_act", "use_head_norm", "head_norm_affine", "rms_norm_eps"),
    *("bidirectional", "initialization", "initializer_range", "retention_form", "chunk_size", "kernels"),
)


class MultiScaleRetention(PlansRetention, RetNetRetention):
    r"""Gated multi-scale retention (arXiv 2307.08621, equation 8) as a layer of any model, instead of attention.

    Its weights are named as in `RetNetRetention`, the token mixer of a RetNet, and are interchangeable with them. Each call
    runs in parallel, in chunks or token by token, whichever is fastest, and with kernels on a GPU.

    Args:
        hidden_size: size D of the hidden states. num_heads: number of heads H, each with its own decay.
        options: fields of `RetNetConfig`: `decay_schedule` and `decay_range`; `use_rotary`, `rotary_endpoint`,
            `rope_parameters` and `max_position_embeddings`; `num_key_value_heads`, `key_expansion`, `value_expansion`,
            `qkv_bias` and `use_qk_norm`; `feature_map`; `use_output_gate` and `output_gate_act`; `use_head_norm`,
            `head_norm_affine` and `rms_norm_eps`; `bidirectional`; `initialization` and `initializer_range`;
            `retention_form`, `chunk_size` and `kernels`.

    Raises:
        ValueError: for an unknown option, or a hidden_size that is no multiple of num_heads.
        huggingface_hub.errors.StrictDataclassError: for a value that `RetNetConfig` does not allow.

    Example:

    ```python
    >>> import torch
    >>> from retnet_hf import MultiScaleRetention

    >>> layer = MultiScaleRetention(64, 4, decay_schedule="geometric")
    >>> output, _ = layer(torch.randn(2, 10, 64))
    >>> stream = layer.new_state()
    >>> for frame in torch.randn(10, 2, 1, 64):
    ...     output, stream = layer(frame, stream)
    ```
    """

    reads_streams = True
    batch_first = False  # so that layers of torch.nn call this module, and not their fused attention

    def __init__(self, hidden_size: int, num_heads: int, **options: Any) -> None:
        if unknown := sorted(options.keys() - set(OPTIONS)):
            raise ValueError(f"{unknown[0]} is not an option of MultiScaleRetention. Its options are {', '.join(OPTIONS)}.")
        if "key_expansion" not in options and hidden_size % max(num_heads, 1):
            raise ValueError(f"hidden_size ({hidden_size}) must be a multiple of num_heads ({num_heads}).")
        sizes = {"hidden_size": hidden_size, "num_attention_heads": num_heads, "num_hidden_layers": 1, "vocab_size": 1}
        tokens = dict.fromkeys(("bos_token_id", "eos_token_id"))
        super().__init__(RetNetConfig(**sizes, **tokens, **options), 0)
        self.prepare_plans(self.config)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialises the weights as the configuration's `initialization` says."""
        for module in self.modules():
            if isinstance(module, nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                if self.config.initialization == "normal":
                    nn.init.normal_(module.weight, std=self.config.initializer_range)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            init_weights(module, self.config)

    def new_state(self) -> RetNetState:
        """Returns the state of new streams. The first call sets the number of rows.

        Methods of `RetNetState` for streams: `select` and `concatenate` for rows that leave and join, `reset_rows` for rows
        that start again, `clone`, `save` and `load`, `nbytes`.

        Raises:
            ValueError: for a bidirectional layer.
        """
        if self.config.bidirectional:
            raise ValueError("a bidirectional layer has no state, because tokens also see later tokens.")
        return RetNetState(self.config)

    def forward(
        self,
        hidden_states: Tensor,  # (B, T, D)
        state: RetNetState | StreamState | None = None,
        mask: Tensor | None = None,  # (B, T)
        documents: Tensor | None = None,  # (B, T)
    ) -> tuple[Tensor, RetNetState | StreamState | None]:
        """Mixes each token with all earlier tokens of its row, or with all tokens in a bidirectional layer.

        Args:
            hidden_states: (B, T, D).
            state: the state from `new_state` or an earlier call, or of the whole model, updated in place. None if the rows
                begin and end with this call.
            mask: (B, T), False or 0 where a token is absent. An absent token changes no other token and no state, and its
                output has no meaning. A row without tokens in this call keeps its state.
            documents: (B, T) integers, the index of each token's document. Tokens only see their own document. The first
                document of a row continues from the state.

        Returns:
            output (B, T, D), and the state that was passed.

        Raises:
            ValueError: for hidden states, masks or documents of other shapes, a float mask, a state in a bidirectional
                layer, and a state of other options, of another number of rows or, except in compiled code, of another
                layer with other weights.
            TypeError: for something else than a state.
        """
        config = self.config
        if config.bidirectional and state is not None:
            raise ValueError("state must be None in a bidirectional layer, because tokens also see later tokens.")
        own, hidden_states = checked_call(self, RetNetState, config.hidden_size, state, hidden_states, mask, documents)
        past = None if own is None else own.layers[0]
        if own is not None and own.config is not config:
            if own.config.state_fingerprint != config.state_fingerprint:
                raise ValueError("state is that of a layer with other options.")
            own.config = config  # so that the options are compared once
        if isinstance(state, RetNetState) and not torch.compiler.is_compiling():
            state.require_weights(self, alone=True)  # StreamState compares the weights of a whole model
        device, dtype = hidden_states.device, hidden_states.dtype
        layout = layout_of(tuple(hidden_states.shape[:2]), device, mask, past=past, seq_idx=documents)
        begins = past is not None and not past.is_initialized
        plan = self.plan_of_layout(layout, past, config.retention_form, dtype)
        try:
            output, _ = super().forward(hidden_states, plan, own)
        finally:
            layout.advance_()
        if begins:
            inputs = {"hidden_states": hidden_states, "mask": mask, "documents": documents}
            own.first_tokens = first_tokens_of(self, output, mask, **inputs)
        return output, state
