# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Who chooses the code that computes retention, and what happens where it cannot be had."""

import sys

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetModel
from retnet_hf.ops.kernels import KERNELS_VARIABLE, TORCH, load_kernels, logger


SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch):
    """Neither by the environment nor by an earlier warning."""
    monkeypatch.delenv(KERNELS_VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    logger.warning_once.cache_clear()


@pytest.fixture
def no_triton(monkeypatch):
    """None in the place of a module is how Python says that it is not to be found."""
    monkeypatch.setitem(sys.modules, "triton", None)
    for module in ("retnet_hf.gpu.retention_triton", "retnet_hf.gpu.retention_fla"):
        monkeypatch.delitem(sys.modules, module, raising=False)


def test_a_name_that_is_none_is_refused():
    with pytest.raises(StrictDataclassError, match="kernels must be one of torch, triton, fla, got 'cuda'"):
        RetNetConfig(**SIZES, kernels="cuda")


def test_the_environment_goes_before_the_configuration(monkeypatch):
    monkeypatch.setenv(KERNELS_VARIABLE, "torch")
    assert load_kernels("triton") is TORCH
    monkeypatch.setenv(KERNELS_VARIABLE, "cuda")
    with pytest.raises(ValueError, match=f"{KERNELS_VARIABLE} must be one of torch, triton, fla, got 'cuda'"):
        load_kernels("torch")


@pytest.mark.parametrize("kernels", ["triton", "fla"])
def test_without_triton_pytorch_computes(no_triton, kernels):
    """A folder whose configuration asks for kernels loads and runs everywhere."""
    torch.manual_seed(0)
    model = RetNetForCausalLM(RetNetConfig(**SIZES, kernels=kernels))
    assert model.model.kernels is TORCH
    ids = torch.arange(3, 30)[None]
    plain = RetNetForCausalLM(RetNetConfig(**SIZES))
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=0)


def test_without_fla_pytorch_computes(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops.simple_gla", None)
    monkeypatch.delitem(sys.modules, "retnet_hf.gpu.retention_fla", raising=False)
    assert load_kernels("fla") is TORCH


@pytest.mark.parametrize("kernels", ["triton", "fla"])
def test_a_gpu_without_triton_is_told_about(no_triton, monkeypatch, caplog, kernels):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("retnet_hf.ops.kernels.logger.propagate", True, raising=False)
    with caplog.at_level("WARNING"):
        assert load_kernels(kernels) is TORCH
    assert f"kernels='{kernels}' cannot be used here" in caplog.text


def test_where_kernels_do_not_run_pytorch_computes():
    pytest.importorskip("triton", reason="triton cannot be imported here")
    kernels = load_kernels("triton")
    assert kernels.runs_on(torch.device("cuda"))
    assert not kernels.runs_on(torch.device("cpu"))
    torch.manual_seed(0)
    model = RetNetForCausalLM(RetNetConfig(**SIZES, kernels="triton"))
    assert model.model.kernels is not TORCH
    model(torch.arange(3, 30)[None]).logits.sum().backward()  # a kernel would not run on this device


def test_an_encoder_has_none():
    assert RetNetModel(RetNetConfig(**SIZES, kernels="triton", bidirectional=True)).kernels is TORCH
