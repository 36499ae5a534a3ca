# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Names that are no arguments of `forward`, but mean something in another library or are misspelt."""

import difflib
import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

from torch import nn
from transformers.utils import TransformersKwargs


# What tools pass to every model; Trainer passes use_cache.
PASSED_ON = frozenset((*TransformersKwargs.__annotations__, "seq_idx", "state_rows", "use_cache"))
WITHOUT_DOCUMENTS = PASSED_ON - {"cu_seq_lens_k"}  # which says nothing without cu_seq_lens_q
# documents, lengths, masks, states and what tokens see, however a library calls them
CHANGES_RESULTS = re.compile("doc|seg|seq|len|mask|pack|pad|offset|bound|indptr|past|cache|state|encoder|causal|bidirect")


def require_known_arguments(model: nn.Module, given: dict[str, Any]) -> None:
    """Passes what tools hand on without a meaning for the model, and refuses what would mean another result elsewhere.

    Args:
        given: keyword arguments of `forward` that its signature does not have.

    Raises:
        ValueError: for what another library calls documents, lengths, masks or states, and for a misspelt argument.
    """
    passed = PASSED_ON if "cu_seq_lens_q" in given else WITHOUT_DOCUMENTS
    if given.get("is_causal") is getattr(model.config, "bidirectional", True):  # which contradicts the configuration
        passed = passed - {"is_causal"}
    if passed.issuperset(given):
        return
    known = passed.union(inspect.signature(model.forward).parameters)
    for name in given.keys() - known:
        nearest = difflib.get_close_matches(name, known, 1, 0.8)
        if given[name] is not None and (nearest or CHANGES_RESULTS.search(name)):
            error = f"{name} is no argument of {type(model).__name__}"
            if nearest:
                error += f": did you mean {nearest[0]}?"
            elif "attention_mask" in known:
                error += (
                    ": absent tokens are given as attention_mask, documents in one row as cu_seq_lens_q or seq_idx, a state "
                    "as past_key_values. What a token sees is bidirectional in the configuration."
                )
            raise ValueError(error)


def with_arguments_of(base: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of a head, whose signature also names the arguments that it hands on to the `forward` of its base model.

    Tools such as Trainer decide by the signature which columns of a dataset, and which options, a model takes.
    """

    own, handed_on = (inspect.signature(each).parameters for each in (function, base))
    further = [argument for name, argument in handed_on.items() if name not in own]
    if not further:  # as in a class that is derived from a head, whose calls need no other function around them
        return function

    @functools.wraps(function)
    def forward(*arguments, **options):
        return function(*arguments, **options)

    *named, rest = own.values()
    forward.__signature__ = inspect.Signature([*named, *further, rest])
    return forward
