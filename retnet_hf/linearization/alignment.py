# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Stage 1: each layer learns to compute the output of the attention that it replaces, from the transformer's own inputs.

A layer's activations are freed after its backward pass, so that memory holds those of a single layer.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from retnet_hf import RetNetForCausalLM


def replaced_layers(student: RetNetForCausalLM) -> list[int]:
    """Returns the layers with replaced attention: the layers of retention or, if there are none, of windows."""
    kinds = student.config.layer_types
    kind = "linear_attention" if "linear_attention" in kinds else "sliding_attention"
    return [index for index, own in enumerate(kinds) if own == kind]


def align(
    student: RetNetForCausalLM,
    teacher: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    with_loss: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Returns the squared error of each replaced layer, relative to the squared output of the source's attention.

    Args:
        input_ids, attention_mask: (B, T).
        with_loss: called with the loss of each layer while its graph exists, for a backward pass.

    Returns:
        (replaced layers,), detached.
    """
    layers = replaced_layers(student)
    embeddings = student.model.embed_tokens(input_ids).detach()  # a plan needs their shape and dtype
    plans = student.model.plan(embeddings, attention_mask)
    there = None if attention_mask is None else attention_mask.bool()
    losses: dict[int, Tensor] = {}

    def compare(index: int, _: nn.Module, __: tuple, inputs: dict[str, Any], output: tuple[Tensor, ...]) -> None:
        with torch.set_grad_enabled(with_loss is not None):
            plan, entering = plans[index], inputs["hidden_states"].to(student.dtype)
            mixed, *_ = student.model.layers[index].mixer(entering, plan=plan)
            wanted, found = (tokens.float() if there is None else tokens[there].float() for tokens in (output[0], mixed))
            loss = (found - wanted).square().sum() / wanted.square().sum().clamp(min=torch.finfo(torch.float32).tiny)
            if with_loss is not None:
                with_loss(loss)
        losses[index] = loss.detach()

    attentions = {index: teacher.model.layers[index].self_attn for index in layers}
    handles = [each.register_forward_hook(partial(compare, index), with_kwargs=True) for index, each in attentions.items()]
    try:
        with torch.no_grad():
            teacher.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack([losses[index] for index in layers])


def measure_layers(student: RetNetForCausalLM, teacher: PreTrainedModel, blocks: Tensor) -> dict[int, float]:
    """Returns the error of each replaced layer relative to the attention of the source, on blocks (B, T)."""
    layers = replaced_layers(student)
    if not layers:
        return {}
    errors = torch.stack([align(student, teacher, ids.to(student.device)).cpu() for ids in blocks.split(4)]).mean(0)
    return dict(zip(layers, errors.tolist()))


class LayersBefore:
    """A copy of the replaced layers before alignment, to restore layers that alignment makes worse.

    Args:
        blocks: (N, T) token ids, on which layers are compared.
    """

    def __init__(self, student: RetNetForCausalLM, teacher: PreTrainedModel, blocks: Tensor) -> None:
        self.teacher, self.blocks = teacher, blocks
        self.errors = measure_layers(student, teacher, blocks)
        self.weights = {index: copy.deepcopy(student.model.layers[index].mixer.state_dict()) for index in self.errors}

    def worse(self, student: RetNetForCausalLM) -> list[int]:
        """Returns the layers with a larger error than before."""
        after = measure_layers(student, self.teacher, self.blocks)
        return [index for index, error in after.items() if not error <= self.errors[index]]

    def restore(self, student: RetNetForCausalLM, layers: list[int] | None = None) -> list[int]:
        """Restores the weights of layers, by default of the `worse` ones, and returns these layers."""
        layers = self.worse(student) if layers is None else layers
        for index in layers:
            student.model.layers[index].mixer.load_state_dict(self.weights[index])
        return layers


def prepare_for_alignment(student: RetNetForCausalLM) -> list[nn.Parameter]:
    """Sets only the parameters of the replaced layers' mixers to require gradients, and returns them."""
    student.requires_grad_(False)
    parameters = []
    for index in replaced_layers(student):
        parameters += list(student.model.layers[index].mixer.requires_grad_(True).parameters())
    return parameters


class AlignmentTrainer(Trainer):
    """Trainer of stage 1. `model` is the student, after `prepare_for_alignment`. Batches have input_ids and attention_mask.

    Args:
        teacher: the transformer, which is not trained.
    """

    def __init__(self, *args: Any, teacher: PreTrainedModel, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.teacher = teacher.requires_grad_(False).eval().to(self.args.device)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Tensor:
        """Computes losses and gradients layer by layer, and returns the mean loss."""
        model.train()
        inputs = self._prepare_inputs(inputs)
        student = self.accelerator.unwrap_model(model)
        parts = len(replaced_layers(student)) * self.current_gradient_accumulation_steps

        def backward(loss: Tensor) -> None:
            with torch.autocast(loss.device.type, enabled=False):  # a backward pass usually runs outside autocast
                self.accelerator.backward(loss / parts)

        with self.accelerator.autocast():
            losses = align(student, self.teacher, inputs["input_ids"], inputs.get("attention_mask"), backward)
        if self.accelerator.num_processes > 1 and self.accelerator.sync_gradients:
            # No layer runs inside the DDP wrapper, so gradients are reduced here.
            for parameter in student.parameters():
                if parameter.grad is not None:
                    parameter.grad = self.accelerator.reduce(parameter.grad, "mean")
        return losses.sum() / parts

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Tensor, None, None]:
        """Returns the mean of the layers' losses."""
        inputs = self._prepare_inputs(inputs)
        student = self.accelerator.unwrap_model(model)
        with self.accelerator.autocast():
            losses = align(student, self.teacher, inputs["input_ids"], inputs.get("attention_mask"))
        return losses.mean(), None, None
