# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""RMT under the tests that transformers' own vision models have to pass.

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
from small_rmt import small_rmt, small_rmt_config
from transformers.pipelines import ImageClassificationPipeline, ImageFeatureExtractionPipeline

from retnet_hf import RMTBackbone, RMTConfig, RMTForImageClassification, RMTImageProcessorPil, RMTModel


try:
    common, backbone_common, pipeline_mixin = transformers_suite.load(
        "test_modeling_common", "test_backbone_common", "test_pipeline_mixin"
    )
except transformers_suite.SuiteUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

NO_TOKENS_IN = "there are no token embeddings: images go in"
SWITCHED_OFF = {
    "test_model_get_set_embeddings": NO_TOKENS_IN,
    "test_inputs_embeds": NO_TOKENS_IN,
    "test_inputs_embeds_matches_input_ids": NO_TOKENS_IN,
}

# What a model is for, the mixin looks up by the name of its class, in tables of its own: transformers' stay as they are.
for kind, model_class in {
    "MODEL": RMTModel,
    "MODEL_FOR_IMAGE_CLASSIFICATION": RMTForImageClassification,
    "MODEL_FOR_BACKBONE": RMTBackbone,
}.items():
    table = f"{kind}_MAPPING_NAMES"
    setattr(common, table, {**getattr(common, table, {}), "rmt": model_class.__name__})


class RMTModelTester:
    """The configuration and the inputs that the mixins ask for: a decomposed and a whole stage of one block each."""

    is_training = True
    batch_size = 4
    image_size = (24, 20)
    num_hidden_layers = 2
    num_attention_heads = 2

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

    def prepare_config_and_inputs_for_common(self) -> tuple[RMTConfig, dict]:
        pixel_values = common.floats_tensor([self.batch_size, 3, *self.image_size])
        return self.get_config(), {"pixel_values": pixel_values}


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
            scores = [torch.tensor([label["score"] for label in answer]) for answer in (batched, labels)]
            torch.testing.assert_close(*scores, **self.close)


class ImageFeatureExtractionChecks(PipelineChecks):
    pipeline_class = ImageFeatureExtractionPipeline

    def run_pipeline_test(self, extract, pictures):
        config, processor = extract.model.config, extract.image_processor
        side = processor.crop_size["height"] if processor.crop_size else processor.size["height"]
        for picture in pictures:
            features = extract(picture, return_tensors=True)
            assert features.shape == (1, config.hidden_size, -(-side // 32), -(-side // 32))
            pooled = extract(picture, pool=True, return_tensors=True)
            torch.testing.assert_close(pooled, features.mean((2, 3)), **self.close)


PIPELINES = {
    "image-classification": (RMTForImageClassification, ImageClassificationChecks),
    "image-feature-extraction": (RMTModel, ImageFeatureExtractionChecks),
}


@pytest.fixture(scope="module", autouse=True)
def pipeline_checks():
    """The mixin finds the tests of a task in a table that all test files of a process share: ours, as long as these run."""
    table = {}
    for task, (_, checks) in PIPELINES.items():
        entry = pipeline_mixin.pipeline_test_mapping[task]
        # transformers 5.17 has classes there, 5.23 their names
        named = isinstance(entry["test"], str)
        table[task] = {**entry, "test": f"{__name__}.{checks.__name__}" if named else checks}
    with mock.patch.dict(pipeline_mixin.pipeline_test_mapping, table):
        yield


@pytest.fixture(scope="module", autouse=True)
def saved_models(tmp_path_factory):
    """The models that the pipelines load: what the mixin otherwise finds on the Hub."""
    folder, summary, processor = tmp_path_factory.mktemp("models"), {}, RMTImageProcessorPil
    for model_class, _ in PIPELINES.values():
        name = model_class.__name__
        small_rmt(model_class).save_pretrained(folder / "rmt" / name)
        processor(size=40).save_pretrained(folder / "rmt" / name)
        summary[name] = {"tokenizer_classes": [], "processor_classes": [processor.__name__]}
    with (
        mock.patch.multiple(pipeline_mixin, TRANSFORMERS_TINY_MODEL_PATH=str(folder), tiny_model_summary=summary),
        mock.patch.object(transformers, processor.__name__, processor, create=True),
    ):
        yield


class RMTModelTest(common.ModelTesterMixin, pipeline_mixin.PipelineTesterMixin, unittest.TestCase):
    model_tester = RMTModelTester()
    all_model_classes = (RMTModel, RMTForImageClassification, RMTBackbone)
    pipeline_model_mapping = {task: model_class for task, (model_class, _) in PIPELINES.items()}
    test_resize_embeddings = False
    _torch_compile_train_cls = RMTForImageClassification  # a slow test, for accelerators only

    def test_hidden_states_output(self):
        """Of the stem and of each stage, as images: what the mixin takes for length and width is height and width."""
        with mock.patch.multiple(self.model_tester, seq_length=6, hidden_size=5, create=True):
            super().test_hidden_states_output()

    def test_attention_outputs(self):
        """Of each block, between all of its tokens."""
        with mock.patch.multiple(self.model_tester, seq_length=6 * 5, create=True):
            super().test_attention_outputs()

    def test_pipeline_image_feature_extraction(self):
        """As the mixin has it, which asks for timm and has no use for it; the next likewise."""
        self.run_task_tests("image-feature-extraction")

    def test_pipeline_image_feature_extraction_fp16(self):
        self.run_task_tests("image-feature-extraction", dtype="float16")

    @contextmanager
    def subTest(self, *args, **kwargs):
        """Without the report that pytest keeps of each, of which there are thousands; a failure still fails the test."""
        yield

    def skipTest(self, reason):
        if reason.startswith("Could not"):  # what the pipeline tests say of a model that does not load
            self.fail(reason)
        super().skipTest(reason)


class RMTBackboneTest(backbone_common.BackboneTesterMixin, unittest.TestCase):
    model_tester = RMTModelTester()
    all_model_classes = (RMTBackbone,)
    config_class = RMTConfig


for test, reason in SWITCHED_OFF.items():
    setattr(RMTModelTest, test, unittest.skip(reason)(getattr(RMTModelTest, test)))
