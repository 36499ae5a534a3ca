# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Image processors and image pipelines under the tests that transformers' own have to pass.

`ImageProcessingTestMixin` and `PipelineTesterMixin` come from the source distribution of the installed transformers, by
`transformers_suite`. The pipelines of ViR and RMT are in the test files of their models' mixins, MetaFormer's are here.
"""

import inspect
import sys
import unittest
from types import ModuleType
from unittest import mock

import pytest
import torch
import transformers
import transformers_suite
from small_vision_models import VISION_FAMILIES, random_picture
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING, AutoImageProcessor
from transformers.pipelines import ImageClassificationPipeline, ImageFeatureExtractionPipeline

from retnet_hf import MetaFormerForImageClassification, MetaFormerImageProcessor, MetaFormerModel


# a module of transformers' repository that the distribution leaves out; what it fetches, no test here asks for
images_of_the_hub = ModuleType("fetch_hub_objects_for_ci")
images_of_the_hub.url_to_local_path = str
try:
    with (
        mock.patch.dict(sys.modules, {images_of_the_hub.__name__: images_of_the_hub}),
        mock.patch.object(sys, "path", list(sys.path)),
    ):
        processing_common, pipeline_mixin = transformers_suite.load("test_image_processing_common", "test_pipeline_mixin")
except transformers_suite.SuiteUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)


class ProcessingTester:
    """Options of a processor, and images for it."""

    batch_size, num_channels, min_resolution, max_resolution = 4, 3, 30, 80
    options = {
        "size": {"height": 18, "width": 22},
        "crop_pct": 0.75,
        "image_mean": [0.4, 0.5, 0.6],
        "image_std": [0.3, 0.2, 0.1],
        "do_rescale": True,
    }

    def __init__(self, image_processing_classes: dict[str, type]) -> None:
        self.image_processing_classes = image_processing_classes

    def prepare_image_processor_dict(self) -> dict:
        return dict(self.options)

    def expected_output_image_shape(self, images: list) -> tuple[int, int, int]:
        return self.num_channels, 18, 22

    def prepare_image_inputs(self, equal_resolution=False, numpify=False, torchify=False) -> list:
        return processing_common.prepare_image_inputs(
            self.batch_size,
            self.min_resolution,
            self.max_resolution,
            self.num_channels,
            equal_resolution=equal_resolution,
            numpify=numpify,
            torchify=torchify,
        )


class ProcessingChecks(processing_common.ImageProcessingTestMixin):
    family = ""
    test_cast_dtype = True
    image_processing_classes = image_processor_dict = None

    def setUp(self):
        self.image_processing_classes = dict(IMAGE_PROCESSOR_MAPPING[VISION_FAMILIES[self.family].config_class])
        self.image_processor_tester = ProcessingTester(self.image_processing_classes)
        self.image_processor_dict = self.image_processor_tester.prepare_image_processor_dict()
        patches = mock.patch.multiple(
            processing_common,
            AutoImageProcessor=AutoImageProcessor,  # which 5.17 exports only with torchvision
            load_test_image=lambda url: random_picture(240, 320),
        )
        patches.start()
        self.addCleanup(patches.stop)

    def test_call_numpy_4_channels(self):
        if "do_convert_rgb" not in inspect.getsource(processing_common.ImageProcessingTestMixin.test_call_numpy_4_channels):
            self.skipTest("four channels are RGB with transparency, unless do_convert_rgb=False says that they are not")
        super().test_call_numpy_4_channels()

    def test_new_models_require_torchvision_backend(self):
        if "torchvision" not in self.image_processing_classes:
            self.skipTest("torchvision is not installed")
        super().test_new_models_require_torchvision_backend()


class ViRImageProcessingTest(ProcessingChecks, unittest.TestCase):
    family = "vir"


class RMTImageProcessingTest(ProcessingChecks, unittest.TestCase):
    family = "rmt"


class MetaFormerImageProcessingTest(ProcessingChecks, unittest.TestCase):
    family = "metaformer"


class PipelineChecks:
    """The tests of one pipeline task, in the shape in which the mixin calls them."""

    pipeline_class = None

    def get_test_pipeline(self, model, tokenizer=None, image_processor=None, dtype="float32"):
        self.close = {"rtol": 0, "atol": 1e-5 if dtype == "float32" else 1e-2}
        model = model.to(getattr(torch, dtype))
        pictures = [random_picture(40 + seed, 33, seed=seed) for seed in range(3)]
        return self.pipeline_class(model=model, image_processor=image_processor), pictures


class ImageClassificationChecks(PipelineChecks):
    pipeline_class = ImageClassificationPipeline

    def run_pipeline_test(self, classify, pictures):
        alone = [classify(picture) for picture in pictures]
        for labels in alone:
            assert {label["label"] for label in labels} == set(classify.model.config.id2label.values())
            assert sum(label["score"] for label in labels) == pytest.approx(1, abs=1e-2)
        for labels, batched in zip(alone, classify(pictures, batch_size=3)):
            scores = [torch.tensor([label["score"] for label in answer]) for answer in (batched, labels)]
            torch.testing.assert_close(*scores, **self.close)


class ImageFeatureExtractionChecks(PipelineChecks):
    pipeline_class = ImageFeatureExtractionPipeline

    def run_pipeline_test(self, extract, pictures):
        alone = [extract(picture, return_tensors=True) for picture in pictures]
        for picture, features in zip(pictures, alone):
            assert features.shape == (1, extract.model.config.hidden_size, 1, 1)
            pooled = extract(picture, pool=True, return_tensors=True)
            assert pooled.shape == (1, extract.model.config.hidden_size)
        for features, batched in zip(alone, extract(pictures, batch_size=3, return_tensors=True)):
            torch.testing.assert_close(batched, features, **self.close)


PIPELINES = {
    "image-classification": (MetaFormerForImageClassification, ImageClassificationChecks),
    "image-feature-extraction": (MetaFormerModel, ImageFeatureExtractionChecks),
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
    folder, summary, family = tmp_path_factory.mktemp("models"), {}, VISION_FAMILIES["metaformer"]
    name = MetaFormerImageProcessor.__name__
    for model_class, _ in PIPELINES.values():
        place = folder / "metaformer" / model_class.__name__
        family.model(model_class).save_pretrained(place)
        family.processor().save_pretrained(place)
        summary[model_class.__name__] = {"tokenizer_classes": [], "processor_classes": [name]}
    with (
        mock.patch.multiple(pipeline_mixin, TRANSFORMERS_TINY_MODEL_PATH=str(folder), tiny_model_summary=summary),
        mock.patch.object(transformers, name, MetaFormerImageProcessor, create=True),
    ):
        yield


class MetaFormerPipelineTest(pipeline_mixin.PipelineTesterMixin, unittest.TestCase):
    pipeline_model_mapping = {task: model_class for task, (model_class, _) in PIPELINES.items()}

    def test_pipeline_image_feature_extraction(self):
        """As the mixin has it, which asks for timm and has no use for it; the next likewise."""
        self.run_task_tests("image-feature-extraction")

    def test_pipeline_image_feature_extraction_fp16(self):
        self.run_task_tests("image-feature-extraction", dtype="float16")

    def skipTest(self, reason):
        if reason.startswith("Could not"):  # what the pipeline tests say of a model that does not load
            self.fail(reason)
        super().skipTest(reason)
