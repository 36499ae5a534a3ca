# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The image processors under transformers' tests of its own, which compare the backends where torchvision is installed."""

import inspect
import sys
import unittest
from types import ModuleType
from unittest import mock

import numpy as np
import pytest
import transformers_suite
from small_vision_models import VISION_FAMILIES, random_picture
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING, AutoImageProcessor


# A module of transformers' repository that the distribution leaves out. What it fetches, no test here asks for.
sys.modules["fetch_hub_objects_for_ci"] = stand_in = ModuleType("fetch_hub_objects_for_ci")
stand_in.url_to_local_path = str
try:
    with mock.patch.object(sys, "path", list(sys.path)):
        (processing_common,) = transformers_suite.load("test_image_processing_common")
except transformers_suite.SuiteUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)
finally:
    del sys.modules["fetch_hub_objects_for_ci"]


class ProcessingTester:
    batch_size, num_channels, min_resolution, max_resolution = 4, 3, 60, 160
    options = {"size": {"height": 18, "width": 22}, "crop_pct": 0.75, "do_rescale": True}
    options |= dict.fromkeys(("image_mean", "image_std"), [0.4, 0.5, 0.6])

    def __init__(self, image_processing_classes: dict[str, type]) -> None:
        self.image_processing_classes = image_processing_classes

    def prepare_image_processor_dict(self) -> dict:
        return dict(self.options)

    def expected_output_image_shape(self, images: list) -> tuple[int, int, int]:
        return self.num_channels, 18, 22

    def prepare_image_inputs(self, **options: bool) -> list:
        sizes = self.batch_size, self.min_resolution, self.max_resolution, self.num_channels
        return processing_common.prepare_image_inputs(*sizes, **options)


class ProcessingChecks(processing_common.ImageProcessingTestMixin):
    family = ""
    test_cast_dtype = True
    image_processing_classes = image_processor_dict = None

    def setUp(self):
        np.random.seed(0)  # of which the images are drawn
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


for family in VISION_FAMILIES:
    name = f"{family}ImageProcessingTest"
    globals()[name] = type(name, (ProcessingChecks, unittest.TestCase), {"family": family, "__module__": __name__})
