# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""ViR under the tests that transformers' own vision models have to pass: `vision_suite` says which."""

import unittest

import transformers_suite
from small_vision_models import small_vir_config
from vision_suite import VisionModelTester, VisionModelTests, backbone_common, common

from retnet_hf import (
    ViRBackbone,
    ViRConfig,
    ViRForImageClassification,
    ViRForMaskedImageModeling,
    ViRModel,
)


CLASSES = {
    "MODEL": ViRModel,
    "MODEL_FOR_IMAGE_CLASSIFICATION": ViRForImageClassification,
    "MODEL_FOR_MASKED_IMAGE_MODELING": ViRForMaskedImageModeling,
    "MODEL_FOR_BACKBONE": ViRBackbone,
}
transformers_suite.enter_classes(common, "vir", CLASSES)


class ViRModelTester(VisionModelTester):
    """3 x 3 patches and the class token, in chunks of 5."""

    height = width = image_size = 24
    patch_size = 8
    seq_length = 3 * 3 + 1
    hidden_size = 16

    def get_config(self) -> ViRConfig:
        return small_vir_config(patch_size=self.patch_size, num_hidden_layers=2, out_features=["stage1", "stage2"])


class ViRModelTest(VisionModelTests, unittest.TestCase):
    model_tester = ViRModelTester()
    all_model_classes = (ViRModel, ViRForImageClassification, ViRForMaskedImageModeling, ViRBackbone)
    _torch_compile_train_cls = ViRForImageClassification  # a slow test, for accelerators only
    model_split_percents = [0.5, 0.8, 0.9]  # for accelerators, too: embeddings and first layer are 0.7 of so small a model


class ViRBackboneTest(backbone_common.BackboneTesterMixin, unittest.TestCase):
    model_tester = ViRModelTester()
    all_model_classes = (ViRBackbone,)
    config_class = ViRConfig
