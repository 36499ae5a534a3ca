# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""MetaFormer under the tests that transformers' own vision models have to pass.

`ModelTesterMixin`, `BackboneTesterMixin` and `PipelineTesterMixin` come from the source distribution of the installed
transformers, by `transformers_suite`. What they skip by themselves they say; what is switched off here is in SWITCHED_OFF.
"""

import unittest
from contextlib import contextmanager
from unittest import mock

import PIL.Image
import pytest
import torch
import transformers
import transformers_suite
from small_metaformer import small_metaformer, small_metaformer_config
from transformers.pipelines import ImageClassificationPipeline, ImageFeatureExtractionPipeline

from retnet_hf import (
    MetaFormerBackbone,
    MetaFormerConfig,
    MetaFormerForImageClassification,
    MetaFormerImageProcessorPil,
    MetaFormerModel,
)


try:
    common, backbone_common, pipeline_mixin = transformers_suite.load(
        "test_modeling_common", "test_backbone_common", "test_pipeline_mixin"
    )
except transformers_suite.SuiteUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

NO_TOKENS_IN = "there are no token embeddings: images go in"
SWITCHED_OFF = {
    "test_inputs_embeds": NO_TOKENS_IN,
    "test_inputs_embeds_matches_input_ids": NO_TOKENS_IN,
}

# What a model is for, the mixin looks up by the name of its class, in tables of its own: transformers' stay as they are.
for kind, model_class in {
    "MODEL": MetaFormerModel,
    "MODEL_FOR_IMAGE_CLASSIFICATION": MetaFormerForImageClassification,
    "MODEL_FOR_BACKBONE": MetaFormerBackbone,
}.items():
    table = f"{kind}_MAPPING_NAMES"
    setattr(common, table, {**getattr(common, table, {}), "metaformer": model_class.__name__})


class MetaFormerModelTester:
    """The configuration and the inputs that the mixins ask for: a stage of retention and one of softmax attention."""

    is_training = True
    batch_size = 4
    image_size = (24, 20)
    num_hidden_layers = 2
    num_attention_heads = 2

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

    def prepare_config_and_inputs_for_common(self) -> tuple[MetaFormerConfig, dict]:
        return self.get_config(), {"pixel_values": common.floats_tensor([self.batch_size, 3, *self.image_size])}


class PipelineChecks:
    """The tests of one pipeline task, in the shape in which the mixin calls them."""

    pipeline_class = None

    def get_test_pipeline(self, model, tokenizer=None, image_processor=None, dtype="float32"):
        self.close = {"rtol": 0, "atol": 1e-5 if dtype == "float32" else 1e-2}
        model = model.to(getattr(torch, dtype))
        colours = ("red", "green", "navy")
        pictures = [PIL.Image.new("RGB", (40 + 7 * number, 33), colour) for number, colour in enumerate(colours)]
        return self.pipeline_class(model=model, image_processor=image_processor), pictures


class ImageClassificationChecks(PipelineChecks):
    pipeline_class = ImageClassificationPipeline

    def run_pipeline_test(self, classify, pictures):
        alone = [classify(picture) for picture in pictures]
        for labels in alone:
            assert {label["label"] for label in labels} == set(classify.model.config.id2label.values())
            assert sum(label["score"] for label in labels) == pytest.approx(1, abs=1e-2)
        assert classify(pictures[0], top_k=2) == alone[0][:2]
        for labels, batched in zip(alone, classify(pictures, batch_size=3)):
            scores = [
                torch.tensor([label["score"] for label in sorted(answer, key=lambda label: label["label"])])
                for answer in (batched, labels)
            ]
            torch.testing.assert_close(*scores, **self.close)


class ImageFeatureExtractionChecks(PipelineChecks):
    pipeline_class = ImageFeatureExtractionPipeline

    def run_pipeline_test(self, extract, pictures):
        for picture in pictures:
            features = extract(picture, return_tensors=True)
            assert features.shape == (1, extract.model.config.hidden_size, 2, 2)
            pooled = extract(picture, pool=True, return_tensors=True)
            torch.testing.assert_close(pooled, features.mean((2, 3)), **self.close)


PIPELINES = {
    "image-classification": (MetaFormerForImageClassification, ImageClassificationChecks),
    "image-feature-extraction": (MetaFormerModel, ImageFeatureExtractionChecks),
}
for task, (_, checks) in PIPELINES.items():
    entry = pipeline_mixin.pipeline_test_mapping[task]
    # transformers 5.17 has classes there, 5.23 their names
    entry["test"] = f"{__name__}.{checks.__name__}" if isinstance(entry["test"], str) else checks


@pytest.fixture(scope="module", autouse=True)
def saved_models(tmp_path_factory):
    """The models that the pipelines load: what the mixin otherwise finds on the Hub."""
    folder, summary, processor = tmp_path_factory.mktemp("models"), {}, MetaFormerImageProcessorPil
    for model_class, _ in PIPELINES.values():
        name = model_class.__name__
        small_metaformer(model_class=model_class).save_pretrained(folder / "metaformer" / name)
        processor(size=40).save_pretrained(folder / "metaformer" / name)
        summary[name] = {"tokenizer_classes": [], "processor_classes": [processor.__name__]}
    with (
        mock.patch.multiple(pipeline_mixin, TRANSFORMERS_TINY_MODEL_PATH=str(folder), tiny_model_summary=summary),
        mock.patch.object(transformers, processor.__name__, processor, create=True),
    ):
        yield


class MetaFormerModelTest(common.ModelTesterMixin, pipeline_mixin.PipelineTesterMixin, unittest.TestCase):
    model_tester = MetaFormerModelTester()
    all_model_classes = (MetaFormerModel, MetaFormerForImageClassification, MetaFormerBackbone)
    pipeline_model_mapping = {task: model_class for task, (model_class, _) in PIPELINES.items()}
    test_resize_embeddings = False
    _torch_compile_train_cls = MetaFormerForImageClassification  # a slow test, for accelerators only

    def test_hidden_states_output(self):
        """Of the stem and of each stage, as images: what the mixin takes for length and width is height and width."""
        with mock.patch.multiple(self.model_tester, seq_length=6, hidden_size=5, create=True):
            super().test_hidden_states_output()

    def test_attention_outputs(self):
        """Of each block, between all of its tokens."""
        with mock.patch.multiple(self.model_tester, seq_length=6 * 5, create=True):
            super().test_attention_outputs()

    def test_model_get_set_embeddings(self):
        """They are the stem's convolution, where the mixin looks for an nn.Embedding."""
        for model_class in self.all_model_classes:
            model, stem = model_class(self.model_tester.get_config()), torch.nn.Conv2d(3, 8, 7)
            assert isinstance(model.get_input_embeddings(), torch.nn.Conv2d)
            model.set_input_embeddings(stem)
            assert model.get_input_embeddings() is stem

    def test_bc_torch_dtype(self):
        """Without the text for failures, which the mixin writes of every tensor before it has failed."""
        with mock.patch.object(torch.Tensor, "__format__", return_value="a tensor"):
            super().test_bc_torch_dtype()

    def test_pipeline_image_feature_extraction(self):
        """The mixin has no method for this task."""
        self.run_task_tests("image-feature-extraction")
        self.run_task_tests("image-feature-extraction", dtype="float16")

    @contextmanager
    def subTest(self, *args, **kwargs):
        """Without the report that pytest keeps of each, of which there are thousands; a failure still fails the test."""
        yield

    def skipTest(self, reason):
        if reason.startswith("Could not"):  # what the pipeline tests say of a model that does not load
            self.fail(reason)
        super().skipTest(reason)


class MetaFormerBackboneTest(backbone_common.BackboneTesterMixin, unittest.TestCase):
    model_tester = MetaFormerModelTester()
    all_model_classes = (MetaFormerBackbone,)
    config_class = MetaFormerConfig


for test, reason in SWITCHED_OFF.items():
    setattr(MetaFormerModelTest, test, unittest.skip(reason)(getattr(MetaFormerModelTest, test)))
