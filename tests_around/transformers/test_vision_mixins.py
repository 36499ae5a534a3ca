# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""ViR, RMT and MetaFormer under transformers' tests of vision models and backbones, which say what they skip."""

import unittest
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import transformers_suite
from small_vision_models import small_metaformer_config, small_rmt_config, small_vir_config

import retnet_hf


try:
    common, backbone_common = transformers_suite.load("test_modeling_common", "test_backbone_common")
except transformers_suite.SuiteUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

NO_TOKENS_IN = "there are no token embeddings: images go in"


class VisionModelTester:
    """The inputs that the mixins ask for; a family adds `get_config`, of two layers or stages with two heads."""

    is_training = True
    batch_size = 4
    height, width = 24, 20
    num_hidden_layers = 2
    num_attention_heads = 2

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {"pixel_values": common.floats_tensor([self.batch_size, 3, self.height, self.width])}


class VisionModelTests(common.ModelTesterMixin):
    test_resize_embeddings = False
    test_inputs_embeds = unittest.skip(NO_TOKENS_IN)(common.ModelTesterMixin.test_inputs_embeds)
    test_inputs_embeds_matches_input_ids = test_inputs_embeds

    def test_model_get_set_embeddings(self):
        """They are a convolution, where the mixin looks for an nn.Embedding."""
        for model_class in self.all_model_classes:
            model, convolution = model_class(self.model_tester.get_config()), torch.nn.Conv2d(3, 4, 2)
            assert isinstance(model.get_input_embeddings(), torch.nn.Conv2d)
            model.set_input_embeddings(convolution)
            assert model.get_input_embeddings() is convolution

    def test_bc_torch_dtype(self):
        """Without the text for failures, which the mixin writes of every tensor before it has failed."""
        with mock.patch.object(torch.Tensor, "__format__", return_value="a tensor"):
            super().test_bc_torch_dtype()

    @contextmanager
    def subTest(self, *args, **kwargs):
        """Without the report that pytest keeps of each, of which there are thousands; a failure still fails the test."""
        yield


class FeatureMapModelTests(VisionModelTests):
    """For models whose stem is at a quarter of the image's height and width, rounded up."""

    def test_hidden_states_output(self):
        """Of the stem and of each stage, as images: what the mixin takes for length and width is height and width."""
        with mock.patch.multiple(self.model_tester, seq_length=6, hidden_size=5, create=True):
            super().test_hidden_states_output()

    def test_attention_outputs(self):
        with mock.patch.multiple(self.model_tester, seq_length=6 * 5, create=True):
            super().test_attention_outputs()


def classes(family: str, *further: str) -> tuple[type, ...]:
    """The classes of a family, which transformers' tests know by what they are for."""
    endings = {"MODEL": "Model", "MODEL_FOR_IMAGE_CLASSIFICATION": "ForImageClassification"}
    endings |= {"MODEL_FOR_BACKBONE": "Backbone"} | dict(zip(["MODEL_FOR_MASKED_IMAGE_MODELING"], further))
    found = {kind: getattr(retnet_hf, family + ending) for kind, ending in endings.items()}
    transformers_suite.enter_classes(common, family.lower(), found)
    return tuple(found.values())


class ViRModelTester(VisionModelTester):
    """3 x 3 patches and the class token, in chunks of 5."""

    height = width = image_size = 24
    patch_size = 8
    seq_length = 3 * 3 + 1
    hidden_size = 16

    def get_config(self) -> retnet_hf.ViRConfig:
        return small_vir_config(patch_size=self.patch_size, num_hidden_layers=2, out_features=["stage1", "stage2"])


STAGES = {"hidden_sizes": [8, 12], "depths": [1, 1], "num_attention_heads": [2, 3], "out_features": ["stage1", "stage2"]}


class RMTModelTester(VisionModelTester):
    def get_config(self) -> retnet_hf.RMTConfig:
        decays = {"decay_exponents": [2, 2], "decay_exponent_ranges": [4, 6], "attention_types": ["decomposed", "whole"]}
        options = {"mlp_ratios": [2, 2], "use_layer_scale": [False, True], "token_classifier_input": "hidden_states"}
        return small_rmt_config(**STAGES, **decays, **options)


class MetaFormerModelTester(VisionModelTester):
    def get_config(self) -> retnet_hf.MetaFormerConfig:
        embeddings = {"patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]}
        return small_metaformer_config(token_mixers=["manhattan", "attention"], **STAGES, **embeddings)


class ViRModelTest(VisionModelTests, unittest.TestCase):
    model_tester = ViRModelTester()
    all_model_classes = classes("ViR", "ForMaskedImageModeling")
    _torch_compile_train_cls = retnet_hf.ViRForImageClassification  # a slow test, for accelerators only
    model_split_percents = [0.5, 0.8, 0.9]  # for accelerators, too: embeddings and first layer are 0.7 of so small a model


class RMTModelTest(FeatureMapModelTests, unittest.TestCase):
    model_tester = RMTModelTester()
    all_model_classes = classes("RMT")
    _torch_compile_train_cls = retnet_hf.RMTForImageClassification

    test_model_get_set_embeddings = unittest.skip(NO_TOKENS_IN)(FeatureMapModelTests.test_model_get_set_embeddings)


class MetaFormerModelTest(FeatureMapModelTests, unittest.TestCase):
    model_tester = MetaFormerModelTester()
    all_model_classes = classes("MetaFormer")
    _torch_compile_train_cls = retnet_hf.MetaFormerForImageClassification


class ViRBackboneTest(backbone_common.BackboneTesterMixin, unittest.TestCase):
    model_tester, config_class = ViRModelTester(), retnet_hf.ViRConfig
    all_model_classes = (retnet_hf.ViRBackbone,)


class RMTBackboneTest(backbone_common.BackboneTesterMixin, unittest.TestCase):
    model_tester, config_class = RMTModelTester(), retnet_hf.RMTConfig
    all_model_classes = (retnet_hf.RMTBackbone,)


class MetaFormerBackboneTest(backbone_common.BackboneTesterMixin, unittest.TestCase):
    model_tester, config_class = MetaFormerModelTester(), retnet_hf.MetaFormerConfig
    all_model_classes = (retnet_hf.MetaFormerBackbone,)
