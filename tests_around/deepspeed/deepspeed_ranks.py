# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What test_works_with_deepspeed.py runs in two processes, each of which compares with one."""

import sys
from pathlib import Path

import deepspeed
import torch
from small_models import close, random_ids, rounding, small_model
from torch import distributed as dist
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig


torch.set_num_threads(1)
deepspeed.init_distributed("gloo")
rank, folder, ids = dist.get_rank(), Path(sys.argv[1]), random_ids(4, 24)
mine = ids.chunk(2)[rank]
if rank == 0:
    small_model("fla").save_pretrained(folder / "model")
dist.barrier()

for stage in (2, 3):
    whole = AutoModelForCausalLM.from_pretrained(folder / "model")
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    settings = {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.0, "zero_force_ds_cpu_optimizer": False}
    settings["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    settings["zero_allow_untested_optimizer"] = True
    kept = HfDeepSpeedConfig(settings)  # transformers then loads a share of each weight, in stage 3
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert (sum(weight.numel() for weight in model.parameters()) == 0) == (stage == 3)
    own = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=own, config=settings)
    for _ in range(3):
        loss = engine(mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        expected = whole(ids, labels=ids).loss
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        close(loss / 2, expected.detach(), rounding(ids.numel()))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for (name, ours), theirs in zip(model.named_parameters(), whole.parameters()):
            assert ours.shape == theirs.shape, name
            close(ours, theirs, 1e-4)  # Adam divides by the size of gradients, some of which are mostly rounding
    greedy = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    written = model.generate(ids, synced_gpus=stage == 3, **greedy)
    assert torch.equal(written, whole.generate(ids, **greedy)), stage
    kept = None
dist.barrier()
