# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""ViR under the tests that transformers' own vision models have to pass: `vision_suite` says which."""

import unittest

import transformers_suite
from small_vision_models import small_vir, small_vir_config
from vision_suite import ImageFeatureExtractionChecks, VisionModelTester, VisionModelTests, backbone_common, common

from retnet_hf import (
    ViRBackbone,
    ViRConfig,
    ViRForImageClassification,
    ViRForMaskedImageModeling,
    ViRImageProcessorPil,
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


class TokenExtractionChecks(ImageFeatureExtractionChecks):
    def run_pipeline_test(self, extract, pictures):
        for picture in pictures:
            features = extract(picture, return_tensors=True)
            assert features.shape == (1, 13, extract.model.config.hidden_size)
            pooled = extract(picture, pool=True, return_tensors=True)
            self.close(pooled, features[:, -1])


class ViRModelTest(VisionModelTests, unittest.TestCase):
    model_tester = ViRModelTester()
    all_model_classes = (ViRModel, ViRForImageClassification, ViRForMaskedImageModeling, ViRBackbone)
    pipeline_model_mapping = {"image-classification": ViRForImageClassification, "image-feature-extraction": ViRModel}
    pipeline_checks = VisionModelTests.pipeline_checks | {"image-feature-extraction": TokenExtractionChecks}
    _torch_compile_train_cls = ViRForImageClassification  # a slow test, for accelerators only
    model_split_percents = [0.5, 0.8, 0.9]  # for accelerators, too: embeddings and first layer are 0.7 of so small a model

    @classmethod
    def model_and_preprocessor(cls, model_class):
        processor = ViRImageProcessorPil(size={"height": 24, "width": 24}, crop_pct=None)
        return small_vir("authors", model_class), processor


class ViRBackboneTest(backbone_common.BackboneTesterMixin, unittest.TestCase):
    model_tester = ViRModelTester()
    all_model_classes = (ViRBackbone,)
    config_class = ViRConfig
