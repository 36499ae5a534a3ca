# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Fixtures: a small model in each dialect, built once. Tests that change a model build their own, by `small_model`."""

import pytest
import torch
from small_models import DIALECTS, small_model, word_tokenizer


# The tensors of small models are no work for two threads, which mostly wait for each other where the processor is shared.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session", params=DIALECTS)
def model(request):
    return small_model(request.param)


@pytest.fixture(scope="session")
def fla_model():
    return small_model("fla")


@pytest.fixture(scope="session")
def tokenizer():
    return word_tokenizer()
