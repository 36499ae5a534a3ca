# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What test_context_parallel.py runs in several processes, each of which compares with the whole that it computes, too."""

import gc
import itertools

import pytest
import torch
from small_models import multiply_bfloat16, random_ids, small_model
from torch import distributed as dist

from retnet_hf import context_parallel, shard_sequence
from retnet_hf.ops.retention_split import Context


gc.disable()
torch.set_num_threads(1)
dist.init_process_group("gloo")

LENGTH, WORLD = 96, dist.group.WORLD
rank, ranks = dist.get_rank(), dist.get_world_size()
exact = {"rtol": 0, "atol": 1e-11}

mask = torch.ones(2, LENGTH, dtype=torch.long)
mask[0, :25] = 0  # all of the first rank's, of four
mask[1, 30:37] = 0
documents = torch.tensor([0] * 10 + [1] * 22 + [2] * 7 + [3] * (LENGTH - 39)).expand(2, -1).contiguous()
position = torch.cat([torch.arange(length) for length in (10, 22, 7, LENGTH - 39)]).expand(2, -1).contiguous()
INPUTS = {
    "plain": {},
    "masked": {"attention_mask": mask},
    "positions of documents": {"position_ids": position},
    "numbers of documents": {"seq_idx": documents, "position_ids": position},
    "numbers of documents alone": {"seq_idx": documents},
    "numbers of documents alone, masked": {"seq_idx": documents.masked_fill(mask == 0, 9), "attention_mask": mask},
    "a document of several segments": {"seq_idx": (torch.arange(LENGTH) >= 9).long().expand(2, -1)},
    "a document at a segment's start": {"seq_idx": (torch.arange(LENGTH) >= LENGTH // ranks).long().expand(2, -1)},
}
SHORT = {"decay_schedule": [0.001, 0.004, 0.002, 0.005]}  # nothing is seen through a segment, of twelve tokens or more
MODELS = {"plain": ("fla", {}), "short decays": ("fla", SHORT | {"num_attention_heads": 4})}
if ranks == 2:  # whatever the number of ranks
    MODELS |= {"states of several sizes": ("grouped", {}), "post-norm": ("torchscale", {})}


def about(what):
    return lambda text: f"{', '.join(what)}: {text}"


def agree(ours, whole, order, what):
    parts = ranks * (2 if order == "head_to_tail" else 1)
    pieces = whole.chunk(parts, dim=1)
    mine = [rank] if parts == ranks else [rank, parts - 1 - rank]
    torch.testing.assert_close(ours, torch.cat([pieces[place] for place in mine], dim=1), msg=about(what), **exact)


def same_states(ours, theirs, what):
    for mine, other in zip(ours.layers, theirs.layers):
        for name in mine.SAVED:
            torch.testing.assert_close(getattr(mine, name), getattr(other, name), msg=about((*what, name)), **exact)


def gradients(model):
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def same_means(ours, whole, *what):
    for mine, other in zip(ours, whole):
        dist.all_reduce(mine)
        torch.testing.assert_close(mine / ranks, other, msg=about(what), **exact)


def trained_and_read(inputs, past, **options):
    """Outputs with and without a loss, and gradients."""
    output = model(**inputs, past_key_values=past and past.clone(), **options)
    output.loss.backward()
    plain = {key: value for key, value in inputs.items() if "labels" not in key and key != "num_items_in_batch"}
    with torch.no_grad():
        return output, gradients(model), model(**plain, past_key_values=past and past.clone(), use_cache=True)


CASES = [(kind, name) for kind in MODELS for name in (INPUTS if kind == "plain" else ("plain", "masked"))]
for (kind, name), order in itertools.product(CASES, ("contiguous", "head_to_tail")):
    model = small_model(MODELS[kind][0], **MODELS[kind][1]).double()
    for continues in (False, True) if ranks == 2 and name != "numbers of documents" else (False,):
        what = kind, name, order, f"continues: {continues}"
        ids, given, past, options = random_ids(2, LENGTH, seed=1), INPUTS[name], None, {}
        labels = ids.masked_fill(given.get("attention_mask", torch.ones_like(ids)) == 0, -100)
        whole = dict(input_ids=ids, labels=labels, **given)
        if continues:
            options = {"use_cache": True}
            with torch.no_grad():
                past = model(random_ids(2, 9, seed=2), use_cache=True).past_key_values
            if "position_ids" in whole:
                whole["position_ids"] = torch.where(documents == 0, position + 9, position)
        expected, expected_gradients, expected_read = trained_and_read(whole, past, **options)
        context_parallel(model, WORLD, order)
        output, found_gradients, read = trained_and_read(shard_sequence(whole, WORLD, order), past, **options)
        context_parallel(model, None)
        agree(output.logits, expected.logits, order, what)
        agree(read.logits, expected_read.logits, order, what)
        same_means([output.loss.detach()], [expected.loss.detach()], *what, "loss")
        same_means(found_gradients, expected_gradients, *what, "gradient")
        same_states(read.past_key_values, expected_read.past_key_values, what)
        if continues:
            same_states(output.past_key_values, expected.past_key_values, what)

# a gradient through the states, from a later part of a text to an earlier one
model = small_model("fla").double()
first, second = random_ids(1, LENGTH, seed=3), random_ids(1, LENGTH, seed=4)
for order in ("contiguous", "head_to_tail"):
    context_parallel(model, None)
    past = model(first, use_cache=True).past_key_values
    model(second, past_key_values=past, labels=second).loss.backward()
    expected_gradients = gradients(model)
    context_parallel(model, WORLD, order)
    past = model(**shard_sequence({"input_ids": first}, WORLD, order), use_cache=True).past_key_values
    model(**shard_sequence({"input_ids": second, "labels": second}, WORLD, order), past_key_values=past).loss.backward()
    same_means(gradients(model), expected_gradients, "through the states", order)

# segments of one token
ids, apart = random_ids(2, 2 * ranks, seed=6), (torch.arange(2 * ranks) // 3).expand(2, -1).contiguous()
for inputs in ({"input_ids": ids}, {"input_ids": ids, "seq_idx": apart}):
    context_parallel(model, None)
    expected = model(**inputs).logits
    context_parallel(model, WORLD, "head_to_tail")
    cut = shard_sequence(inputs, WORLD, "head_to_tail")
    agree(model(**cut).logits, expected, "head_to_tail", ("one token", *inputs))

# checkpointing computes, and exchanges, again
context_parallel(model, WORLD)
found = []
for checkpointing in (True, False):
    model.train().gradient_checkpointing_enable() if checkpointing else model.gradient_checkpointing_disable()
    model(**shard_sequence({"input_ids": second, "labels": second}, WORLD)).loss.backward()
    found.append(gradients(model))
torch.testing.assert_close(*found, **exact)

# bfloat16 is as near to float64 as in one process, whatever its products are multiplied as
for narrow in (False, True):
    multiplied = multiply_bfloat16() if narrow else []
    rounded, truth = small_model("fla", chunk_size=8).bfloat16(), small_model("fla", chunk_size=8).double()
    truth.load_state_dict(rounded.state_dict())
    whole, found = {"input_ids": random_ids(2, LENGTH, seed=5), "labels": random_ids(2, LENGTH, seed=5)}, []
    for network, group in ((truth, None), (rounded, None), (rounded, WORLD)):
        context_parallel(network, group)
        cut = whole if group is None else shard_sequence(whole, WORLD)
        output = network(**cut, retention_form="chunkwise")
        output.loss.backward()
        results = [output.logits.detach().double(), *(gradient.double() for gradient in gradients(network))]
        if group is not None:
            parts = [torch.empty_like(results[0]) for _ in range(ranks)]
            dist.all_gather(parts, results[0])
            results[0] = torch.cat(parts, dim=1)
            for gradient in results[1:]:
                dist.all_reduce(gradient.div_(ranks))
        found.append([results[0].flatten(), torch.cat([gradient.flatten() for gradient in results[1:]])])
    for what, true, alone, split in zip(("logits", "gradients"), *found):
        assert (split - true).norm() < 1.5 * (alone - true).norm(), (what, narrow)
        assert (split - true).norm() > 1e-4 * true.norm(), "nothing was rounded"
    assert bool(multiplied) == narrow

# a prompt that was read by all ranks is continued by each
model.eval()
with torch.no_grad():
    state = model(**shard_sequence({"input_ids": second}, WORLD), use_cache=True).past_key_values
with pytest.raises(ValueError, match=r"context_parallel\(model, None\)"):
    model.generate(second, max_new_tokens=2)
with pytest.raises(ValueError, match="shift_labels"):
    model(second, labels=second)
with pytest.raises(ValueError, match="cache holds 1 sequences, but the batch has 2"):
    model(random_ids(2, LENGTH), past_key_values=state)
context_parallel(model, None)
written = model.generate(second, max_new_tokens=8, do_sample=False)
again = model.generate(written[:, : LENGTH + 1], past_key_values=state, max_new_tokens=7, do_sample=False)
assert torch.equal(written, again)

# what is exchanged does not grow with the sequence, and only neighbours talk where decays are short
sent = []
gather, shift = Context.gather, Context.shift
Context.gather = lambda self, tensor: sent.append((ranks - 1) * tensor.numel()) or gather(self, tensor)
Context.shift = lambda self, tensor, step: sent.append(tensor.numel()) or shift(self, tensor, step)
for fields, factor in (({}, ranks - 1), (SHORT | {"num_attention_heads": 4}, 1)):
    model = small_model("fla", **fields).double()
    context_parallel(model, WORLD)
    for length in (LENGTH, 4 * LENGTH):
        sent.clear()
        ids = random_ids(1, length)
        model(**shard_sequence({"input_ids": ids, "labels": ids}, WORLD)).loss.backward()
        size, layers = model.config.state_size, model.config.num_hidden_layers
        states = [numbers for numbers in sent if numbers > 100]
        assert states == 2 * layers * [factor * size // layers], (states, size)
dist.destroy_process_group()
