# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What test_context_parallel.py runs in 2 and then in 4 processes, each of which compares with one process, in float64."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from foreign_folders import FOREIGN, foreign, write_folder
from small_models import close, random_ids, rounding, small_model
from small_vision_models import RECIPES, small_metaformer, small_rmt, small_vir, stage_images, vir_images
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

from retnet_hf import MuonAdamW, RetNetForMaskedLM, ViRBackbone, context_parallel, shard_sequence


gc.disable()
torch.set_num_threads(1)
dist.init_process_group("gloo")

rank, ranks, folder = dist.get_rank(), dist.get_world_size(), Path(sys.argv[1])
IDS = random_ids(4, 24)
GREEDY = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
# the last layer's heads share states, two by two, the first one's have their own
HYBRID = {"num_attention_heads": 4, "num_key_value_heads": 2, "qkv_bias": True, "use_qk_norm": True}
HYBRID["decay_schedule"] = [[0.6, 0.8, 0.9, 0.99], *[[1.0] * 4] * 2, [0.6, 0.6, 0.97, 0.97]]
LANGUAGE_MODELS = {
    "fla": small_model("fla"),
    "hybrid": small_model("hybrid", **HYBRID),
    "post-norm, an embedding norm, tied": small_model("torchscale", use_embedding_norm=True, tie_word_embeddings=True),
}
OTHERS = {
    "encoder": (small_model("fla", RetNetForMaskedLM, bidirectional=True), IDS),
    **{f"ViR, {recipe}": (small_vir(recipe), vir_images(4)) for recipe in RECIPES},
    "backbone": (small_vir("mean", ViRBackbone), vir_images(4)),
    "RMT": (small_rmt().eval(), stage_images(4)),
    "MetaFormer": (small_metaformer("all"), stage_images(4)),
}

OPTIMIZERS = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    "muon": lambda model: MuonAdamW(model, 1e-2),
}
torch.Tensor.bfloat16 = torch.Tensor.clone  # Muon computes in bfloat16, here in float64


def same(ours, whole, what, tolerance=1e-11):
    torch.testing.assert_close(ours, whole, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gradients(model):
    """Of all parameters, by name, whole; and none are left."""
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.grad is not None]
    found = {name.removeprefix("module."): full(parameter.grad) for name, parameter in parameters}
    model.zero_grad()
    return found


def same_gradients(loss, expected, model, whole, what):
    loss.backward()
    expected.backward()
    ours, theirs = gradients(model), gradients(whole)
    assert ours.keys() == theirs.keys(), what
    for name, gradient in theirs.items():
        same(ours[name], gradient, f"{what}, {name}")


def same_training(loss, model, whole, what):
    expected, mean = whole(IDS, labels=IDS).loss, loss.detach().clone()
    dist.all_reduce(mean)
    same(mean / ranks, expected.detach(), f"{what}, loss")
    same_gradients(loss, expected, model, whole, what)


def saved(model, name):
    """A folder with the model, which all ranks find."""
    if rank == 0:
        model.save_pretrained(folder / name)
    dist.barrier()
    return folder / name


def same_language_model(model, whole, what, share=0, shares=1):
    """Logits, loss, gradients and text: of this rank's share of the rows, where data are shared."""
    mine = IDS.chunk(shares)[share]
    output = model(mine, labels=mine)
    same(full(output.logits), whole(IDS).logits.chunk(shares)[share], f"{what}, logits")
    same_training(output.loss, model, whole, what)
    if hasattr(model, "generate") and not model.training:
        same_text(model, whole, mine, what)


def same_text(model, whole, ids, what):
    assert model.generate(ids, generation_config=GREEDY).equal(whole.generate(ids, generation_config=GREEDY)), what


def same_other_model(model, whole, inputs, what, share=0, shares=1):
    def output_of(network, inputs):
        output = network(inputs)
        return output.feature_maps[-1] if hasattr(output, "feature_maps") else output.logits

    ours, expected = output_of(model, inputs.chunk(shares)[share]), output_of(whole, inputs)
    same(full(ours), expected.chunk(shares)[share], f"{what}, output")
    losses = [output.square().mean() + output[:, 0].mean() for output in (ours, expected)]  # of every output
    same_gradients(*losses, model, whole, what)
    with torch.no_grad():  # tensor parallelism takes another way without gradients
        same(full(output_of(model, inputs)), expected, f"{what}, without gradients")


def whole_models():
    for name, whole in LANGUAGE_MODELS.items():
        yield name, whole, saved(whole.double(), name)


def distributed(path, model_class=AutoModelForCausalLM, dtype=torch.float64, **sizes):
    return model_class.from_pretrained(path, distributed_config=DistributedConfig(**sizes), dtype=dtype)


def sharded(name, mesh, **options):
    model = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def train(model, seeds, optimizer, share=0, shares=1):
    """A step on each of some batches, of which this is a rank's share."""
    for seed in seeds:
        rows = random_ids(4, 24, seed).chunk(shares)[share]
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def on_two():
    mesh = init_device_mesh("cpu", (2,))
    for name, whole, path in whole_models():
        ddp = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64))
        same_language_model(ddp, whole, f"DDP, {name}", rank, 2)

        model = distributed(path, fsdp_size=2)
        weights = list(model.parameters())
        assert sum(full(each).numel() for each in weights) > 1.9 * sum(each.to_local().numel() for each in weights)
        same_language_model(model, whole, f"FSDP2, {name}", rank, 2)
        model.train().gradient_checkpointing_enable()
        same_language_model(model, whole, f"FSDP2, checkpointing, {name}", rank, 2)
        policy = CPUOffloadPolicy(pin_memory=False)  # which only memory of accelerators needs
        same_language_model(sharded(name, mesh, offload_policy=policy), whole, f"FSDP2, offload, {name}", rank, 2)
        same_language_model(distributed(path, tp_size=2), whole, f"tensor parallel, {name}")

        model = distributed(path, pp_size=2)
        with torch.no_grad():
            same(model(IDS).logits, whole(IDS).logits, f"pipeline, {name}")
        same_text(model, whole, IDS, f"pipeline, {name}")

    padded = {"input_ids": IDS, "attention_mask": (torch.arange(24) >= torch.tensor([[4], [0], [0], [9]])).long()}
    there = padded["attention_mask"].bool()
    for name, heads in (("fla", [2, 2]), ("hybrid", [2, 1])):
        whole = LANGUAGE_MODELS[name]
        model = AutoModelForCausalLM.from_pretrained(folder / name, tp_plan="auto", dtype=torch.float64)
        assert model.model.layers[0].retention.q_proj.weight.to_local().shape[0] == 16
        with torch.no_grad():
            output, expected = model(**padded), whole(**padded)
        same(full(output.logits)[there], expected.logits[there], f"tensor parallel, padding, {name}")
        written = model.generate(**padded, generation_config=GREEDY)
        assert written.equal(whole.generate(**padded, generation_config=GREEDY)), name
        state = output.past_key_values
        assert [state.layers[index].recurrent_states.shape[1] for index in (0, -1)] == heads
        with pytest.raises(ValueError, match="state of all 4 heads can be saved, not a rank's share of 2"):
            state.save(folder / "share")

    for dialect in FOREIGN:  # published folders are read to the same weights
        theirs, state_dict, config = foreign(dialect)
        if rank == 0:
            write_folder(folder / "published" / dialect, state_dict, config)
        dist.barrier()
        loaded = AutoModelForCausalLM.from_pretrained(folder / "published" / dialect, tp_plan="auto").state_dict()
        assert loaded.keys() == theirs.state_dict().keys()
        assert all(full(loaded[name]).equal(weight) for name, weight in theirs.state_dict().items()), dialect

    # products in bfloat16, as one process computes them with weights that were rounded
    rounded = AutoModelForCausalLM.from_pretrained(folder / "fla", dtype=torch.bfloat16)
    mixed = distributed(folder / "fla", dtype=torch.float32, fsdp_size=2, fsdp_mixed_precision=True)
    mine, plans = IDS.chunk(2)[rank], []
    last = mixed.model.layers[-1].retention
    last.register_forward_pre_hook(lambda *given: plans.append(given[2]["plan"]), with_kwargs=True)
    output, expected = mixed(mine, labels=mine), rounded(IDS, labels=IDS)
    assert output.logits.dtype == torch.bfloat16
    # FSDP2 casts the inputs of what it shards, but neither decays nor angles, which a plan holds in a class of its own
    assert {tensor.dtype for tensor in (*plans[0].log_decays, *plans[0].rotate.key_angles)} == {torch.float32}
    close(output.logits, expected.logits.chunk(2)[rank], rounding(IDS.numel(), torch.bfloat16))
    output.loss.backward()
    expected.loss.backward()
    theirs = gradients(rounded)
    for name, gradient in gradients(mixed).items():
        assert gradient.dtype == torch.float32, name
        close(gradient, theirs[name].float(), rounding(IDS.numel(), torch.bfloat16))

    for name, (whole, inputs) in OTHERS.items():
        path = saved(whole.double(), name)
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        for engine, sizes, share in (("tensor parallel", {"tp_size": 2}, (0, 1)), ("FSDP2", {"fsdp_size": 2}, (rank, 2))):
            model = distributed(path, type(whole), **sizes)
            assert any(hasattr(weight, "full_tensor") for weight in model.parameters()), name
            same_other_model(model, whole, inputs, f"{engine}, {name}", *share)

    for name, optimizer_of in OPTIMIZERS.items():
        model = distributed(folder / "hybrid", fsdp_size=2)
        train(model, (0, 1), optimizer := optimizer_of(model), rank, 2)
        model.save_pretrained(folder / name / "sharded", distributed_checkpoint=True)
        save_optimizer_distributed(model, optimizer, str(folder / name / "optimizer"))

    path = saved(small_model("hybrid", num_key_value_heads=1), "one head of keys")
    with pytest.raises(ValueError, match=r"num_key_value_heads must be a multiple of .* tensor-parallel ranks \(2\)"):
        distributed(path, tp_size=2)


def on_four():
    for name, whole, path in whole_models():
        model = distributed(path, fsdp_size=2, dp_replicate_size=2)
        same_language_model(model, whole, f"hybrid sharding, {name}", rank, 4)
        model = distributed(path, fsdp_size=2, tp_size=2)
        same_language_model(model, whole, f"tensor parallel and FSDP2, {name}", rank // 2, 2)

    # what two ranks began, with their weights shared out, goes on in two groups of two that share heads
    for name, optimizer_of in OPTIMIZERS.items():
        model = distributed(folder / name / "sharded", fsdp_size=2, tp_size=2)
        load_optimizer_distributed(model, optimizer := optimizer_of(model), str(folder / name / "optimizer"))
        train(model, (2, 3), optimizer, rank // 2, 2)
        whole = AutoModelForCausalLM.from_pretrained(folder / "hybrid", dtype=torch.float64)
        train(whole, range(4), optimizer_of(whole))
        for (name, weight), expected in zip(model.named_parameters(), whole.parameters()):
            same(full(weight), expected, f"resumed, {name}", 1e-8)  # Adam divides by the size of gradients

    # two groups share the rows, two ranks of each group share their tokens, and all four the weights
    whole = LANGUAGE_MODELS["fla"]
    mesh, everyone = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), init_device_mesh("cpu", (4,))
    for order in ("contiguous", "head_to_tail"):
        model = sharded("fla", everyone)
        context_parallel(model, mesh["cp"], order)
        rows = IDS.chunk(2)[mesh["dp"].get_local_rank()]
        output = model(**shard_sequence({"input_ids": rows, "labels": rows}, mesh["cp"], order))
        same_training(output.loss, model, whole, f"context parallel and FSDP2, {order}")


{2: on_two, 4: on_four}[ranks]()
dist.barrier()
dist.destroy_process_group()
