# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Training that begins, or goes on, with weights and optimizer shared out; the test runs it with other numbers of processes.

Arguments: the folder of the whole model, the one of the checkpoint to go on from ("none": begins), the one to write, and
sizes of `DistributedConfig`, name=number.
"""

import gc
import sys

import torch
from small_models import random_ids
from torch import distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed


gc.disable()
torch.set_num_threads(1)
dist.init_process_group("gloo")
whole, before, after, *sizes = sys.argv[1:]
config = DistributedConfig(**{name: int(number) for name, number in (size.split("=") for size in sizes)})
begins = before == "none"

model = AutoModelForCausalLM.from_pretrained(
    whole if begins else before + "/model", distributed_config=config, dtype=torch.float64
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if not begins:
    load_optimizer_distributed(model, optimizer, before + "/optimizer")
share = dist.get_rank() // config.tp_size
for seed in (0, 1) if begins else (2, 3):
    rows = random_ids(4, 24, seed).chunk(config.dp_size)[share]
    model(rows, labels=rows).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained(after + "/model", distributed_checkpoint=True)
save_optimizer_distributed(model, optimizer, after + "/optimizer")
model.save_pretrained(after + "/whole")
dist.barrier()
dist.destroy_process_group()
