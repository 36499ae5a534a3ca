# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""transformers' tests of pipelines, on models saved here.

The source distribution has no tests of single pipeline tasks. What runs is the mixin's own procedure (load a saved model and
what prepares its inputs, build the pipeline, check it, read ten examples in batches of four), in float32 and float16, with
checks of each task written here.
"""

import tempfile
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
import transformers_suite
from small_models import close
from transformers import PreTrainedTokenizerBase


try:
    (pipeline_mixin,) = transformers_suite.load("test_pipeline_mixin")
except transformers_suite.SuiteUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)


class PipelineChecks:
    """The tests of one pipeline task, in the shape in which the mixin calls them."""

    pipeline_class = None
    options = {}
    examples = []

    def get_test_pipeline(self, model, tokenizer=None, dtype="float32", **processors):
        self.tolerance = 1e-4 if dtype == "float32" else 1e-2
        model = model.to(getattr(torch, dtype))
        return self.pipeline_class(model=model, tokenizer=tokenizer, **processors, **self.options), self.examples

    def run_pipeline_test(self, pipeline, examples):
        raise NotImplementedError

    def close(self, actual, expected):
        close(actual, expected, self.tolerance)

    def close_scores(self, actual, expected):
        self.close(*(torch.tensor([x["score"] for x in answer]) for answer in (actual, expected)))


class PipelineTests(pipeline_mixin.PipelineTesterMixin):
    """The mixin, for the models of `pipeline_model_mapping` and the checks of `pipeline_checks`, each by its task.

    The mixin looks for both elsewhere: in tables that all test files of a process share, and on the Hub. What it finds there
    is ours for as long as the tests of the class run.
    """

    pipeline_checks = {}

    @classmethod
    def model_and_preprocessor(cls, model_class):
        """A model, and the tokenizer or image processor that is saved beside it."""
        raise NotImplementedError

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        patches = ExitStack()
        cls.addClassCleanup(patches.close)
        folder, summary = Path(patches.enter_context(tempfile.TemporaryDirectory())), {}
        for model_class in set(cls.pipeline_model_mapping.values()):
            model, preprocessor = cls.model_and_preprocessor(model_class)
            for part in (model, preprocessor):
                part.save_pretrained(folder / model.config.model_type / model_class.__name__)
            kind = type(preprocessor)
            names = {"tokenizer_classes": [], "processor_classes": []}
            names["tokenizer_classes" if issubclass(kind, PreTrainedTokenizerBase) else "processor_classes"] = [
                kind.__name__
            ]
            summary[model_class.__name__] = names
            patches.enter_context(mock.patch.object(transformers, kind.__name__, kind, create=True))
        checks = {}
        for task, its_checks in cls.pipeline_checks.items():
            entry = pipeline_mixin.pipeline_test_mapping[task]
            # transformers 5.17 has classes there, 5.23 their names
            named = isinstance(entry["test"], str)
            checks[task] = {**entry, "test": f"{its_checks.__module__}.{its_checks.__name__}" if named else its_checks}
        patches.enter_context(mock.patch.dict(pipeline_mixin.pipeline_test_mapping, checks))
        patches.enter_context(
            mock.patch.multiple(pipeline_mixin, TRANSFORMERS_TINY_MODEL_PATH=str(folder), tiny_model_summary=summary)
        )

    def skipTest(self, reason):
        if reason.startswith("Could not"):  # what the mixin says of a model that does not load
            self.fail(reason)
        super().skipTest(reason)
