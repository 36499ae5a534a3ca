# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Faster decoding on a CPU.

    fast = retnet_hf_cpu.compile(model)
    fast.generate(**inputs)

wraps a model of `retnet_hf` from outside: `retnet_hf` does not know this package.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn
from transformers.utils import logging

from retnet_hf import RetNetForCausalLM
from retnet_hf.hybrid.modeling_hybrid import RetNetHybridDecoderLayer, RetNetHybridRetention
from retnet_hf.retnet.modeling_retnet import RetNetDecoderLayer, RetNetMLP, RetNetPreTrainedModel
from retnet_hf.retnet.retention_mixer import RetNetRetention

from .compiled_layer import CompiledLayer
from .fusing import FastLinear, fused_weights, install, linear_groups, projection_groups
from .products import products_of
from .programs import default_folder, layer_programs, product_programs, shallow_copy
from .prompts import prompt_programs


logger = logging.get_logger(__name__)
Model = TypeVar("Model", bound=RetNetPreTrainedModel)


def compile(
    model: Model,
    folder: str | os.PathLike | None = None,
    programs: bool = True,
    measure: bool = True,
    batch_sizes: Sequence[int] = (1,),
    prompts: bool = False,
) -> Model:
    """Makes a fast copy of a model, to decode on a CPU. The model itself stays exactly as it is.

    The copy has the class of the model and the very same parameters under the same names, so that `generate`, pipelines,
    states, `state_dict` and `save_pretrained` work as those of the model, and a saved folder is the same. It computes the
    same values up to rounding.

    With programs, each decode step of a layer of retention is a program, and so are the products with weights elsewhere:
    those of the head, and of layers of softmax attention, with a window, with experts or with learned angles. A program is
    compiled once, in some ten to thirty seconds, and kept in a file. From then on it is loaded. One program serves all
    layers that are alike. It reads the weights of the model: in float32 and half precision by the fastest kernel that a
    trial finds, and those of torchao (`Int8WeightOnlyConfig`, and `IntxWeightOnlyConfig` with `torch.int4` in groups) by
    kernels for integers, for which weights of 4 bits are packed into new memory. Linear layers that are adapted, hooked or
    quantised in another way, and layers that contain them, have no program. Programs of products serve one sequence, those
    of steps as many as `batch_sizes` says.

    Without programs, no compiler is needed. Projections of one input (queries, keys, values and gate; up and gate of the
    feed-forward network), and a head that is not tied to the embedding, take one product with a copy of their weights side
    by side, if a trial finds that faster on this machine. The copies take as much memory again as these weights, and serve
    prompts and several sequences, too.

    With autocast, hooks, training mode, a recorded gradient or `torch.export`, the layers compute as in the model. Since the
    parameters are shared, training or moving the copy trains or moves the model. `original` returns a model without any of
    this.

    If weights are replaced or moved, their layers compute as in the model, and one warning says so: call `compile` again.
    Values may change in place: programs read the new ones, unless the weights are quantised, and layers with fused copies
    compute as in the model. PyTorch does not count the changes of its fused optimizers, nor those through `weight.data`:
    fused layers notice these when they read the next prompt, and never after `torch.compile` has compiled the fast copy.
    Numbers such as the eps of a norm are part of a program.

    Args:
        model: a causal RetNet, usually a `RetNetForCausalLM` or `RetNetModel`, on a CPU in float32 or half precision.
        folder: where programs are kept. They are code that is executed: a folder that other users may write to is refused.
            By default, a folder in the cache of huggingface_hub.
        programs: whether to compile. Otherwise projections are fused.
        measure: whether a trial decides which projections are fused, once in a process for each kind of product and in a
            second or two in all. Otherwise everything that can be is fused.
        batch_sizes: numbers of sequences for whose steps layers of retention have programs, each with one of its own. With
            other numbers, layers compute as in the model.
        prompts: whether layers of retention also have programs for calls with two or more tokens of each sequence. Two
            serve all layers that are alike, any length and any number of sequences, and take some fifteen seconds more to
            compile. Quantised layers have none. Tested with torch 2.13.

    Raises:
        ValueError: for another model, numbers of sequences that are not one or several, each 1 or more, or `prompts` without
            `programs`, or a folder that other users may write to.
        OSError: if the folder cannot be written to.
        RuntimeError: if a program has to be compiled and cannot be, as without a C++ compiler.
    """
    if not isinstance(model, RetNetPreTrainedModel):
        raise ValueError(f"retnet_hf_cpu.compile takes a model of retnet_hf, got {type(model).__name__}.")
    if model.device.type != "cpu" or model.dtype == torch.float64 or model.config.bidirectional:
        raise ValueError(
            "retnet_hf_cpu.compile takes models that decode on a CPU, in float32 or half precision, got "
            f"device {model.device}, {model.dtype} and bidirectional={model.config.bidirectional}."
        )
    sizes = () if isinstance(batch_sizes, int) else tuple(dict.fromkeys(batch_sizes))
    if not sizes or min(sizes) < 1:
        raise ValueError(f"batch_sizes must be one or several numbers of sequences, each 1 or more, got {batch_sizes}.")
    if prompts and not programs:
        raise ValueError("prompts=True needs programs=True: prompts are read by programs.")
    fast = original(model)
    if programs:
        install_programs(fast, default_folder() if folder is None else Path(folder), sizes, prompts)
    else:
        install_fused(fast, measure)
    return fast


def install_programs(fast: nn.Module, folder: Path, batch_sizes: Sequence[int], prompts: bool) -> None:
    """Gives layers of retention programs of steps and, if asked for, of prompts; and other layers programs of products."""
    candidates = [layer for layer in fast.modules() if has_step(layer)]
    layers = [layer for layer in candidates if is_served(layer)]
    if left := len(candidates) - len(layers):
        logger.warning(
            f"retnet_hf_cpu.compile makes no programs for {left} of {len(candidates)} layers of retention, those with "
            "experts or learned angles: programs compute their products, and PyTorch the rest."
        )
    with_steps = [pair for pair in zip(layers, layer_programs(layers, fast.config, folder, batch_sizes)) if pair[1]]
    of_prompts = [None] * len(with_steps)
    if prompts:
        of_prompts = prompt_programs([layer for layer, _ in with_steps], fast.config, folder)
        if left := of_prompts.count(None):
            logger.warning(f"prompts=True makes no programs for {left} of {len(with_steps)} layers, which are quantised.")
    served: set[nn.Module] = set()
    for (layer, steps), of_prompt in zip(with_steps, of_prompts):
        layer.__class__, layer.programs, layer.prompts = CompiledLayer, steps, of_prompt
        served |= set(layer.modules())
    groups = [[fast.get_submodule(name) for name in names] for names in linear_groups(fast)]
    groups = [layers for layers in groups if layers[0] not in served]
    for layers, products in zip(groups, product_programs(groups, folder)):
        if products is not None:
            install(layers, products)


def install_fused(fast: nn.Module, measure: bool) -> None:
    """Fuses projections of one input, and gives a head of half precision the faster kernel."""
    groups = [[fast.get_submodule(name) for name in names] for names in projection_groups(fast)]
    head = fast.lm_head if isinstance(fast, RetNetForCausalLM) else None
    if head is not None and head.weight is not fast.get_input_embeddings().weight:
        groups.append([head])
    fused = fused_weights(groups, measure)
    for layers in groups:
        if layers[0] in fused:
            install(layers, products_of(layers, fused[layers[0]]))
    products = None if head is None or head in fused else products_of([head])
    if products is not None and not products.are_linear:
        install([head], products)


def has_step(layer: nn.Module) -> bool:
    """Whether it is a layer of retention alone, without softmax attention."""
    known = type(layer) in (RetNetDecoderLayer, RetNetHybridDecoderLayer)
    return known and type(layer.mixer) in (RetNetRetention, RetNetHybridRetention)


def is_served(layer: nn.Module) -> bool:
    """Whether such a layer has a feed-forward network and a rotation that a program can have."""
    return type(layer.mlp) is RetNetMLP and getattr(layer.retention, "learned_rotation", None) is None


def original(fast: Model) -> Model:
    """A plain model that shares the parameters of a fast copy, without programs and fused products: to train, adapt or save.

    Given a plain model, it returns a plain copy that shares the parameters.
    """
    plain = shallow_copy(fast)
    for module in plain.modules():
        if isinstance(module, (CompiledLayer, FastLinear)):
            for name in module.added:
                delattr(module, name)
            module.__class__ = module.original_class
    return plain


def number_of_programs(fast: nn.Module) -> int:
    """How many layers of a fast copy compute their decode steps by programs."""
    return sum(isinstance(module, CompiledLayer) and any(module.programs.values()) for module in fast.modules())


__all__ = ["compile", "number_of_programs", "original"]
