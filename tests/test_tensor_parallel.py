# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Tensor parallelism: two processes that hold half the heads each, with their decays, compute what one does."""

import socket
import subprocess
import sys

import torch
from small_models import random_ids, small_model


RANK = """
import os, sys, torch
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo")
from transformers import AutoModelForCausalLM
import retnet_hf
folder = sys.argv[1]
model = AutoModelForCausalLM.from_pretrained(folder + "/model", tp_plan="auto").eval()
assert model.model.layers[0].retention.q_proj.weight.to_local().shape[0] == 16
inputs = torch.load(folder + "/inputs.pt")
with torch.no_grad():
    logits = model(**inputs).logits
tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)
loss = model(input_ids=inputs["input_ids"], labels=inputs["input_ids"], use_cache=False).loss
if torch.distributed.get_rank() == 0:
    torch.save({"logits": logits, "tokens": tokens, "loss": loss.detach()}, folder + "/outputs.pt")
torch.distributed.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_ranks_compute_what_one_process_does(tmp_path):
    model = small_model("fla")
    model.save_pretrained(tmp_path / "model")
    ids = random_ids(2, 19)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    torch.save(inputs, tmp_path / "inputs.pt")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    (tmp_path / "rank.py").write_text(RANK, encoding="utf-8")
    command += [f"--master-port={free_port()}", str(tmp_path / "rank.py"), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]

    outputs = torch.load(tmp_path / "outputs.pt")
    with torch.no_grad():
        expected = model(**inputs).logits
        loss = model(ids, labels=ids).loss
    assert (outputs["logits"] - expected).abs().max().item() < 1e-4
    assert outputs["tokens"].tolist() == model.generate(**inputs, max_new_tokens=6, do_sample=False).tolist()
    assert torch.allclose(outputs["loss"], loss, atol=1e-5)
