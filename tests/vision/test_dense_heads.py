# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Our backbones under a dense head of transformers: UperNet, which labels every pixel."""

import math

import pytest
import torch
from small_models import close
from transformers import UperNetConfig, UperNetForSemanticSegmentation

from retnet_hf import MetaFormerConfig, RMTConfig, ViRConfig


STAGES = ["stage1", "stage2", "stage3", "stage4"]


def backbone_config(family: str):
    if family == "rmt":
        return RMTConfig.from_preset("tiny", hidden_sizes=[16, 16, 32, 64], depths=[1, 1, 1, 1], out_features=STAGES)
    if family == "metaformer":
        return MetaFormerConfig.from_preset("tiny", depths=[1, 1, 1, 1], out_features=STAGES)
    return ViRConfig.from_preset("tiny-16", image_size=64, hidden_size=48, num_hidden_layers=4, out_features=STAGES)


def segmenter(family: str) -> UperNetForSemanticSegmentation:
    head = {"hidden_size": 16, "pool_scales": [1, 2], "auxiliary_channels": 8, "auxiliary_in_channels": None}
    torch.manual_seed(0)
    return UperNetForSemanticSegmentation(UperNetConfig(backbone_config=backbone_config(family), num_labels=3, **head))


@pytest.mark.parametrize("family", ["vir", "rmt", "metaformer"])
def test_the_backbone_learns_and_is_saved(family, tmp_path):
    """To tell the bright half of each picture from the dark one, head and backbone together. The folder names the backbone's
    configuration, from which transformers finds the class."""
    model = segmenter(family).train()
    pixel_values = torch.zeros(2, 3, 32, 64)
    pixel_values[0, :, :, :32] = pixel_values[1, :, :, 32:] = 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(16):
        out = model(pixel_values, labels=(pixel_values[:, 0] > 0).long())
        optimizer.zero_grad()
        out.loss.backward()
        assert all(parameter.grad is not None for parameter in model.backbone.parameters())
        optimizer.step()
    assert out.logits.shape == (2, 3, 32, 64)
    blind = math.log(2) * (1 + model.config.auxiliary_loss_weight)  # of both heads, for an answer that has not looked
    assert out.loss.item() < 0.85 * blind
    model.eval().save_pretrained(tmp_path)
    loaded = UperNetForSemanticSegmentation.from_pretrained(tmp_path).eval()
    assert type(loaded.backbone) is type(model.backbone)
    close(loaded(pixel_values).logits, model(pixel_values).logits)
