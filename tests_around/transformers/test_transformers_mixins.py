# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNet, decoder, encoder and hybrid with sinks, under the tests that transformers' own models have to pass.

`ModelTesterMixin`, `PipelineTesterMixin` and `TrainingTesterMixin` come from the source distribution of the installed
transformers, by `transformers_suite`. What they skip by themselves they say; what is switched off here is in SWITCHED_OFF.

The distribution has no tests of generation and of export. What runs of the tests of pipelines, `pipeline_suite` says.
"""

import functools
import unittest
from collections.abc import Callable
from unittest import mock

import pytest
import transformers_suite
from pipeline_suite import PipelineChecks, PipelineTests
from small_models import small_config, small_model, word_tokenizer
from transformers.pipelines import (
    FeatureExtractionPipeline,
    FillMaskPipeline,
    TextClassificationPipeline,
    TextGenerationPipeline,
    TokenClassificationPipeline,
    ZeroShotClassificationPipeline,
)

from retnet_hf import (
    RetNetConfig,
    RetNetForCausalLM,
    RetNetForMaskedLM,
    RetNetForQuestionAnswering,
    RetNetForSequenceClassification,
    RetNetForTokenClassification,
    RetNetHybridForCausalLM,
    RetNetHybridForQuestionAnswering,
    RetNetHybridForSequenceClassification,
    RetNetHybridForTokenClassification,
    RetNetHybridModel,
    RetNetModel,
)


try:
    common, training_mixin = transformers_suite.load("test_modeling_common", "test_training_mixin")
except transformers_suite.SuiteUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

SWITCHED_OFF = {
    "test_generation_tester_mixin_inheritance": "the source distribution has no GenerationTesterMixin to inherit from",
    **dict.fromkeys(
        [f"test_model_rope_scaling_from_config_{case}" for case in ("0_linear", "1_dynamic", "2_yarn")],
        "RetNetConfig refuses to scale rotations: positions never run out, so there is nothing to scale them for",
    ),
}

transformers_suite.enter_classes(
    common,
    "retnet",
    {
        "MODEL": RetNetModel,
        "MODEL_FOR_CAUSAL_LM": RetNetForCausalLM,
        "MODEL_FOR_MASKED_LM": RetNetForMaskedLM,
        "MODEL_FOR_QUESTION_ANSWERING": RetNetForQuestionAnswering,
        "MODEL_FOR_SEQUENCE_CLASSIFICATION": RetNetForSequenceClassification,
        "MODEL_FOR_TOKEN_CLASSIFICATION": RetNetForTokenClassification,
    },
)


class RetNetModelTester:
    """The configuration and the inputs that the mixins ask for."""

    base_model_class = RetNetModel
    causal_lm_class = RetNetForCausalLM
    is_training = True
    batch_size = 13
    seq_length = 7

    def __init__(self) -> None:
        config = self.get_config()
        self.hidden_size = config.hidden_size
        self.num_hidden_layers = config.num_hidden_layers
        self.num_attention_heads = config.num_attention_heads

    def get_config(self, **overrides) -> RetNetConfig:
        return small_config("grouped", chunk_size=4, **overrides)  # fewer than seq_length: the chunkwise form runs

    def prepare_config_and_inputs_for_common(self) -> tuple[RetNetConfig, dict]:
        config = self.get_config()
        shape = [self.batch_size, self.seq_length]
        input_ids = common.ids_tensor(shape, config.vocab_size)
        return config, {"input_ids": input_ids, "attention_mask": common.random_attention_mask(shape)}


class RetNetEncoderTester(RetNetModelTester):
    causal_lm_class = None

    def get_config(self) -> RetNetConfig:
        return super().get_config(bidirectional=True)


class RetNetHybridTester(RetNetModelTester):
    """With sinks, and with experts where a test is of them."""

    base_model_class = RetNetHybridModel
    causal_lm_class = RetNetHybridForCausalLM
    experts = None

    def get_config(self, **overrides) -> RetNetConfig:
        layers = {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "sliding_attention"],
            "decay_schedule": "alibi",
        }
        return small_config("sinks", **layers, **overrides, chunk_size=4, num_experts=self.experts)


class TextChecks(PipelineChecks):
    examples = ["w5 w9", "w7 w3 w11 w20 w4", "w8"]


class FeatureExtractionChecks(TextChecks):
    pipeline_class = FeatureExtractionPipeline

    def run_pipeline_test(self, extract, examples):
        alone = [extract(text, return_tensors=True) for text in examples]
        for text, features in zip(examples, alone):
            assert features.shape == (1, len(text.split()), extract.model.config.hidden_size)
        for features, batched in zip(alone, extract(examples, batch_size=3, return_tensors=True)):
            padding = batched.shape[1] - features.shape[1]  # on the left
            self.close(batched[:, padding:], features)


class FillMaskChecks(TextChecks):
    pipeline_class = FillMaskPipeline
    examples = ["w5 <unk> w9", "<unk> w7 w3 w11 w20 w4", "w8 <unk>"]

    def run_pipeline_test(self, fill, examples):
        words = ["w30", "w40", "w50"]
        for text, batched in zip(examples, fill(examples, batch_size=3, targets=words)):
            alone = fill(text, targets=words)
            assert {word["token_str"] for word in alone} == set(words)
            assert [word["token_str"] for word in batched] == [word["token_str"] for word in alone]
            assert [word["sequence"] for word in alone] == [text.replace("<unk>", word["token_str"]) for word in alone]
            self.close_scores(batched, alone)


class TextClassificationChecks(TextChecks):
    pipeline_class = TextClassificationPipeline

    def run_pipeline_test(self, classify, examples):
        alone = [classify(text, top_k=None) for text in examples]
        for labels in alone:
            assert {label["label"] for label in labels} == set(classify.model.config.id2label.values())
            assert sum(label["score"] for label in labels) == pytest.approx(1, abs=1e-2)
        for labels, batched in zip(alone, classify(examples, batch_size=3, top_k=None)):
            self.close_scores(batched, labels)


class ZeroShotClassificationChecks(TextChecks):
    pipeline_class = ZeroShotClassificationPipeline
    options = {"candidate_labels": ["w30", "w40 w41"], "hypothesis_template": "w50 {}"}

    def run_pipeline_test(self, classify, examples):
        for text in examples:
            answer = classify(text)
            assert answer["sequence"] == text
            assert set(answer["labels"]) == {"w30", "w40 w41"}
            assert sum(answer["scores"]) == pytest.approx(1, abs=1e-2)
            assert answer["scores"] == sorted(answer["scores"], reverse=True)


class TokenClassificationChecks(TextChecks):
    pipeline_class = TokenClassificationPipeline

    def run_pipeline_test(self, classify, examples):
        for text, batched in zip(examples, classify(examples, batch_size=3)):
            alone = classify(text)
            assert [entity["word"] for entity in alone] == text.split()
            assert [entity["entity"] for entity in batched] == [entity["entity"] for entity in alone]
            spans = [text[group["start"] : group["end"]] for group in classify(text, aggregation_strategy="simple")]
            assert " ".join(spans) == text


class TextGenerationChecks(TextChecks):
    pipeline_class = TextGenerationPipeline
    options = {"max_new_tokens": 5, "do_sample": False}

    def run_pipeline_test(self, generate, examples):
        alone = [generate(text)[0]["generated_text"] for text in examples]
        for text, whole in zip(examples, alone):
            inputs = generate.tokenizer(text, return_tensors="pt")
            expected = generate.model.generate(**inputs, max_new_tokens=5, do_sample=False)
            assert generate(text, return_tensors=True)[0]["generated_token_ids"] == expected[0].tolist()
            assert whole == text + generate(text, return_full_text=False)[0]["generated_text"]
        batched = generate(examples, batch_size=3)
        assert [answers[0]["generated_text"] for answers in batched] == alone
        assert len(generate(examples[0], do_sample=True, num_return_sequences=2)) == 2


def switch_off(test_class: type[unittest.TestCase]) -> type[unittest.TestCase]:
    for test, reason in SWITCHED_OFF.items():
        setattr(test_class, test, unittest.skip(reason)(getattr(test_class, test)))
    return test_class


OF_EXPERTS = ("test_moe_models_record", "test_output_router_logits", "test_eager_matches_batched_and_grouped")


def with_experts(test: Callable[[unittest.TestCase], None]) -> Callable[[unittest.TestCase], None]:
    """The test with a model that has experts."""

    @functools.wraps(test)
    def run(self: unittest.TestCase) -> None:
        with mock.patch.object(self.model_tester, "experts", 4):
            test(self)

    return run


def experts_where_asked(test_class: type[unittest.TestCase]) -> type[unittest.TestCase]:
    for name in dir(test_class):
        test = getattr(test_class, name)
        if test is not None and name.startswith(OF_EXPERTS):
            setattr(test_class, name, with_experts(test))
    return test_class


@switch_off
class RetNetModelTest(common.ModelTesterMixin, PipelineTests, training_mixin.TrainingTesterMixin, unittest.TestCase):
    model_tester = RetNetModelTester()
    all_model_classes = (
        RetNetModel,
        RetNetForCausalLM,
        RetNetForSequenceClassification,
        RetNetForTokenClassification,
        RetNetForQuestionAnswering,
    )
    _torch_compile_train_cls = RetNetForCausalLM  # a slow test, for accelerators only
    pipeline_model_mapping = {
        "feature-extraction": RetNetModel,
        "fill-mask": RetNetForMaskedLM,
        "text-classification": RetNetForSequenceClassification,
        "text-generation": RetNetForCausalLM,
        "token-classification": RetNetForTokenClassification,
        "zero-shot": RetNetForSequenceClassification,
    }
    pipeline_checks = {
        "feature-extraction": FeatureExtractionChecks,
        "fill-mask": FillMaskChecks,
        "text-classification": TextClassificationChecks,
        "text-generation": TextGenerationChecks,
        "token-classification": TokenClassificationChecks,
        "zero-shot": ZeroShotClassificationChecks,
    }

    @classmethod
    def model_and_preprocessor(cls, model_class):
        labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
        options = {"id2label": labels, "label2id": {label: number for number, label in labels.items()}}
        model = small_model("fla", model_class, bidirectional=model_class is RetNetForMaskedLM, **options)
        tokenizer = word_tokenizer()
        tokenizer.mask_token = tokenizer.unk_token
        return model, tokenizer


@switch_off
class RetNetEncoderTest(common.ModelTesterMixin, unittest.TestCase):
    model_tester = RetNetEncoderTester()
    all_model_classes = (
        RetNetModel,
        RetNetForMaskedLM,
        RetNetForSequenceClassification,
        RetNetForTokenClassification,
        RetNetForQuestionAnswering,
    )


@experts_where_asked
@switch_off
class RetNetHybridTest(common.ModelTesterMixin, unittest.TestCase):
    model_tester = RetNetHybridTester()
    all_model_classes = (
        RetNetHybridModel,
        RetNetHybridForCausalLM,
        RetNetHybridForSequenceClassification,
        RetNetHybridForTokenClassification,
        RetNetHybridForQuestionAnswering,
    )
    _torch_compile_train_cls = RetNetHybridForCausalLM
