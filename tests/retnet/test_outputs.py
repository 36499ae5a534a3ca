# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What forward() takes and returns, as every causal language model of transformers does."""

import pytest
import torch
from small_models import PAD, VOCAB_SIZE, close, left_padded, of_every_model, random_ids, rounding, same_state, small_model
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForSequenceClassification

from retnet_hf import RetNetForSequenceClassification, RetNetState


pytestmark = pytest.mark.usefixtures("no_gradients")


def test_inputs_embeds_forward(model):
    ids = random_ids(2, 21)
    embeds = model.get_input_embeddings()(ids)
    for form in ("auto", "parallel", "chunkwise", "recurrent"):
        assert model(inputs_embeds=embeds, retention_form=form).logits.equal(model(ids, retention_form=form).logits)
    state = model(inputs_embeds=embeds[:, :9]).past_key_values
    close(model(inputs_embeds=embeds[:, 9:], past_key_values=state).logits, model(ids).logits[:, 9:])


def test_logits_to_keep(model):
    ids = random_ids(2, 21)
    whole = model(ids).logits
    assert whole.shape == (2, 21, VOCAB_SIZE)
    assert model(ids, logits_to_keep=0).logits.equal(whole)
    close(model(ids, logits_to_keep=1).logits, whole[:, -1:], rounding(32))
    close(model(ids, logits_to_keep=3).logits, whole[:, -3:], rounding(32))
    for index in (torch.tensor([0, 5, 20]), torch.tensor([-1, 3])):
        close(model(ids, logits_to_keep=index).logits, whole[:, index], rounding(32))


def test_output_hidden_states(model):
    """What enters the first layer, with factor and norm of the embedding, and leaves each; the last is normalised."""
    ids, entered, returned = random_ids(2, 21), [], []
    handles = [layer.register_forward_hook(lambda m, i, output: returned.append(output)) for layer in model.model.layers]
    handles.append(model.model.layers[0].register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0])))
    out = model(ids, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    base = model.model(ids, output_hidden_states=True)
    embedded = model.get_input_embeddings()(ids) * model.config.embedding_multiplier
    assert entered[0].equal(model.model.embed_norm(embedded) if model.config.use_embedding_norm else embedded)
    expected = [*entered, *returned[:-1]]
    assert all(hidden.equal(other) for hidden, other in zip(out.hidden_states[:-1], expected, strict=True))
    close(out.hidden_states[-1], model.model.norm(returned[-1]), rounding(32))
    close(model.lm_head(out.hidden_states[-1]), out.logits, rounding(32))
    assert model(ids).hidden_states is None
    assert base.hidden_states[-1].equal(base.last_hidden_state)
    assert all(mine.equal(theirs) for mine, theirs in zip(base.hidden_states, out.hidden_states, strict=True))

    asked = small_model(output_hidden_states=True)
    assert len(asked(ids).hidden_states) == len(asked.model(ids).hidden_states) == 3
    assert asked(ids, output_hidden_states=False).hidden_states is None


@pytest.mark.parametrize("kwargs", [{}, {"output_hidden_states": True}, {"use_cache": False}, {"labels": random_ids(2, 9)}])
def test_tuple_output(model, kwargs):
    ids = random_ids(2, 9)
    for one in (model,) if "labels" in kwargs else (model, model.model):
        named, plain = one(ids, **kwargs), one(ids, return_dict=False, **kwargs)
        assert type(plain) is tuple
        for mine, theirs in zip(plain, named.to_tuple(), strict=True):
            assert type(mine) is type(theirs)
            if isinstance(mine, RetNetState):
                same_state(mine, theirs, 0)
            else:
                assert all(a.equal(b) for a, b in zip(tree_leaves(mine), tree_leaves(theirs), strict=True))


@of_every_model
@pytest.mark.parametrize("form", ["parallel", "chunkwise", "recurrent"])
@torch.enable_grad()
def test_every_parameter_gets_a_gradient(model, form):
    model.zero_grad()
    model(random_ids(2, 21), labels=random_ids(2, 21), retention_form=form).loss.backward()
    assert [name for name, parameter in model.named_parameters() if not parameter.grad.abs().max() > 0] == []
    model.zero_grad()


def test_inputs_of_odd_types(fla_model):
    ids = random_ids(2, 9)
    expected = fla_model(ids).logits
    close(fla_model(ids.int()).logits, expected, 1e-6)
    assert fla_model(ids, torch.ones_like(ids)).logits.equal(expected)  # by position, as everywhere
    assert small_model(return_dict=False)(ids)[0].equal(expected)
    close(fla_model(random_ids(2, 9).t().contiguous().t()).logits, expected, 1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_auto_sequence_classification(side):
    model = small_model(model_class=RetNetForSequenceClassification, num_labels=3)
    assert type(AutoModelForSequenceClassification.from_config(model.config)) is type(model)
    prompts = [random_ids(1, length, seed) for seed, length in enumerate((12, 5, 1))]
    ids, mask = left_padded(prompts)
    if side == "right":
        ids = torch.cat([F.pad(prompt, (0, 12 - prompt.shape[1]), value=PAD) for prompt in prompts])
        mask = (ids != PAD).long()
    expected = torch.cat([model(prompt).logits for prompt in prompts])
    close(model.score(model.model(prompts[0]).last_hidden_state[:, -1]), expected[:1])
    # what follows the last real token needs no mask to be ignored
    for options in ({"attention_mask": mask}, {"attention_mask": mask.bool()}, *([{}] if side == "right" else [])):
        close(model(ids, **options).logits, expected)
