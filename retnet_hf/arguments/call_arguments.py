# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Checks of unknown arguments of `forward`, which may be misspelt or have a meaning in other libraries."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.utils import TransformersKwargs


# Arguments that tools pass to every model. Trainer passes use_cache.
PASSED_ON = frozenset((*TransformersKwargs.__annotations__, "seq_idx", "state_rows", "use_cache"))
# names of documents, lengths, masks, states and visibility of tokens in other libraries
CHANGES_RESULTS = re.compile("doc|seg|seq|len|mask|pack|pad|offset|bound|indptr|past|cache|state|encoder|causal|bidirect")


def cache_of_call(cache: Any, past_key_values: Any) -> Any:
    """Returns the state that a call passes by one of two names, or None. Raises ValueError for two states."""
    if cache is not None and past_key_values is not None:
        raise ValueError("cache and past_key_values are two names of one argument: pass one of them.")
    return past_key_values if cache is None else cache


def require_known_arguments(model: nn.Module, given: dict[str, Any]) -> None:
    """Ignores arguments that tools pass to every model, and refuses arguments that would change results elsewhere.

    Args:
        given: keyword arguments of `forward` that are not in its signature.

    Raises:
        ValueError: for another library's names of documents, lengths, masks or states, and for misspelt arguments.
    """
    passed = PASSED_ON if "cu_seq_lens_q" in given else PASSED_ON - {"cu_seq_lens_k"}  # which has no meaning alone
    if given.get("is_causal") is getattr(model.config, "bidirectional", True):  # it contradicts the configuration
        passed = passed - {"is_causal"}
    if passed.issuperset(given):
        return
    known = passed.union(inspect.signature(model.forward).parameters)
    for name in given.keys() - known:
        nearest = difflib.get_close_matches(name, known, 1, 0.8)
        if given[name] is not None and (nearest or CHANGES_RESULTS.search(name)):
            advice = f": did you mean {nearest[0]}?" if nearest else ""
            if not nearest and "attention_mask" in known:
                advice = (
                    ": pass absent tokens as attention_mask, documents in one row as cu_seq_lens_q or seq_idx, and a state "
                    "as cache. Whether tokens see later tokens is set by bidirectional in the configuration."
                )
            raise ValueError(f"{name} is no argument of {type(model).__name__}{advice}")


def with_arguments_of(base: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `forward` of a head with a signature that includes the arguments it passes on to its base model.

    Tools such as Trainer read from the signature which dataset columns and options a model accepts.
    """
    own, handed_on = (inspect.signature(each).parameters for each in (function, base))
    further = [argument for name, argument in handed_on.items() if name not in own]
    if not further:  # e.g. in a class derived from a head: no wrapper is needed
        return function

    @functools.wraps(function)
    def forward(*arguments, **options):
        return function(*arguments, **options)

    *named, rest = own.values()
    forward.__signature__ = inspect.Signature([*named, *further, rest])
    return forward
