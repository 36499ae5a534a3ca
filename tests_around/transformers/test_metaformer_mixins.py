# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""MetaFormer under the tests that transformers' own vision models have to pass: `vision_suite` says which."""

import unittest

import transformers_suite
from small_vision_models import small_metaformer_config
from vision_suite import FeatureMapModelTests, VisionModelTester, backbone_common, common

from retnet_hf import (
    MetaFormerBackbone,
    MetaFormerConfig,
    MetaFormerForImageClassification,
    MetaFormerModel,
)


CLASSES = {
    "MODEL": MetaFormerModel,
    "MODEL_FOR_IMAGE_CLASSIFICATION": MetaFormerForImageClassification,
    "MODEL_FOR_BACKBONE": MetaFormerBackbone,
}
transformers_suite.enter_classes(common, "metaformer", CLASSES)


class MetaFormerModelTester(VisionModelTester):
    """A stage of retention and one of softmax attention."""

    def get_config(self) -> MetaFormerConfig:
        return small_metaformer_config(
            token_mixers=["manhattan", "attention"],
            hidden_sizes=[8, 12],
            depths=[1, 1],
            num_attention_heads=[2, 3],
            patch_sizes=[7, 3],
            strides=[4, 2],
            padding=[2, 1],
            out_features=["stage1", "stage2"],
        )


class MetaFormerModelTest(FeatureMapModelTests, unittest.TestCase):
    model_tester = MetaFormerModelTester()
    all_model_classes = (MetaFormerModel, MetaFormerForImageClassification, MetaFormerBackbone)
    _torch_compile_train_cls = MetaFormerForImageClassification  # a slow test, for accelerators only


class MetaFormerBackboneTest(backbone_common.BackboneTesterMixin, unittest.TestCase):
    model_tester = MetaFormerModelTester()
    all_model_classes = (MetaFormerBackbone,)
    config_class = MetaFormerConfig
