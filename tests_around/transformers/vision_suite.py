# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The tests that transformers' own vision models have to pass, as far as they are the same for all of our families.

`ModelTesterMixin` and `BackboneTesterMixin` come from the source distribution of the installed transformers, by
`transformers_suite`. What they skip by themselves they say.
"""

import unittest
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import transformers_suite


try:
    common, backbone_common = transformers_suite.load("test_modeling_common", "test_backbone_common")
except transformers_suite.SuiteUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

NO_TOKENS_IN = "there are no token embeddings: images go in"


class VisionModelTester:
    """The inputs that the mixins ask for; a family adds the configuration, of two layers or stages with two heads."""

    is_training = True
    batch_size = 4
    height, width = 24, 20
    num_hidden_layers = 2
    num_attention_heads = 2

    def get_config(self):
        raise NotImplementedError

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {"pixel_values": common.floats_tensor([self.batch_size, 3, self.height, self.width])}


class VisionModelTests(common.ModelTesterMixin):
    test_resize_embeddings = False
    test_inputs_embeds = unittest.skip(NO_TOKENS_IN)(common.ModelTesterMixin.test_inputs_embeds)
    test_inputs_embeds_matches_input_ids = unittest.skip(NO_TOKENS_IN)(
        common.ModelTesterMixin.test_inputs_embeds_matches_input_ids
    )

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
        """Of each block, between all of its tokens."""
        with mock.patch.multiple(self.model_tester, seq_length=6 * 5, create=True):
            super().test_attention_outputs()
