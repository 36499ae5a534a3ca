# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RMT under the tests that transformers' own vision models have to pass: `vision_suite` says which."""

import unittest

import transformers_suite
from small_vision_models import small_rmt_config
from vision_suite import NO_TOKENS_IN, FeatureMapModelTests, VisionModelTester, backbone_common, common

from retnet_hf import RMTBackbone, RMTConfig, RMTForImageClassification, RMTModel


CLASSES = {"MODEL": RMTModel, "MODEL_FOR_IMAGE_CLASSIFICATION": RMTForImageClassification, "MODEL_FOR_BACKBONE": RMTBackbone}
transformers_suite.enter_classes(common, "rmt", CLASSES)


class RMTModelTester(VisionModelTester):
    """A decomposed and a whole stage of one block each."""

    def get_config(self) -> RMTConfig:
        return small_rmt_config(
            hidden_sizes=[8, 12],
            depths=[1, 1],
            num_attention_heads=[2, 3],
            mlp_ratios=[2, 2],
            attention_types=["decomposed", "whole"],
            decay_exponents=[2, 2],
            decay_exponent_ranges=[4, 6],
            use_layer_scale=[False, True],
            token_classifier_input="hidden_states",
            out_features=["stage1", "stage2"],
        )


class RMTModelTest(FeatureMapModelTests, unittest.TestCase):
    model_tester = RMTModelTester()
    all_model_classes = (RMTModel, RMTForImageClassification, RMTBackbone)
    _torch_compile_train_cls = RMTForImageClassification  # a slow test, for accelerators only

    test_model_get_set_embeddings = unittest.skip(NO_TOKENS_IN)(FeatureMapModelTests.test_model_get_set_embeddings)


class RMTBackboneTest(backbone_common.BackboneTesterMixin, unittest.TestCase):
    model_tester = RMTModelTester()
    all_model_classes = (RMTBackbone,)
    config_class = RMTConfig
