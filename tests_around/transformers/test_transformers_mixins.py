# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""RetNet, decoder, encoder and hybrid with sinks, under the tests that transformers' own models have to pass.

`ModelTesterMixin` and `TrainingTesterMixin` come from `transformers_suite`, without tests of generation, export and tasks of
pipelines. What they skip by themselves they say; what is switched off here is in SWITCHED_OFF.
"""

import unittest
from unittest import mock

import pytest
import transformers_suite
from small_models import small_config

import retnet_hf
from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetHybridForCausalLM, RetNetHybridModel, RetNetModel


try:
    common, training_mixin = transformers_suite.load("test_modeling_common", "test_training_mixin")
except transformers_suite.SuiteUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

SCALED = "RetNetConfig refuses to scale rotations: positions never run out, so there is nothing to scale them for"
SWITCHED_OFF = {f"test_model_rope_scaling_from_config_{case}": SCALED for case in ("0_linear", "1_dynamic", "2_yarn")}
SWITCHED_OFF["test_generation_tester_mixin_inheritance"] = "the source distribution has no GenerationTesterMixin"

HEADS = ("ForCausalLM", "ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification")
KINDS = {"MODEL": "Model", "MODEL_FOR_CAUSAL_LM": "ForCausalLM", "MODEL_FOR_MASKED_LM": "ForMaskedLM"}
KINDS |= {"MODEL_FOR_QUESTION_ANSWERING": "ForQuestionAnswering", "MODEL_FOR_TOKEN_CLASSIFICATION": "ForTokenClassification"}
KINDS["MODEL_FOR_SEQUENCE_CLASSIFICATION"] = "ForSequenceClassification"


def classes(*endings: str, family: str = "RetNet") -> tuple[type, ...]:
    return tuple(getattr(retnet_hf, family + ending) for ending in endings)


transformers_suite.enter_classes(common, "retnet", dict(zip(KINDS, classes(*KINDS.values()))))


class RetNetModelTester:
    """The configuration and the inputs that the mixins ask for."""

    base_model_class = RetNetModel
    causal_lm_class = RetNetForCausalLM
    is_training = True
    batch_size = 13
    seq_length = 7

    def __init__(self) -> None:
        for size in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            setattr(self, size, getattr(self.get_config(), size))

    def get_config(self, **overrides) -> RetNetConfig:
        return small_config("grouped", chunk_size=4, **overrides)  # fewer than seq_length: the chunkwise form runs

    def prepare_config_and_inputs_for_common(self) -> tuple[RetNetConfig, dict]:
        config, shape = self.get_config(), [self.batch_size, self.seq_length]
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
        layers = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "sliding_attention"]}
        options = {"decay_schedule": "alibi", "chunk_size": 4, "num_experts": self.experts}
        return small_config("sinks", **layers, **options, **overrides)


def switch_off(test_class: type[unittest.TestCase]) -> type[unittest.TestCase]:
    for test, reason in SWITCHED_OFF.items():
        setattr(test_class, test, unittest.skip(reason)(getattr(test_class, test)))
    return test_class


OF_EXPERTS = ("test_moe_models_record", "test_output_router_logits", "test_eager_matches_batched_and_grouped")


def experts_where_asked(test_class: type[unittest.TestCase]) -> type[unittest.TestCase]:
    """Those tests with a model that has experts."""
    for name in dir(test_class):
        test = getattr(test_class, name)
        if test is not None and name.startswith(OF_EXPERTS):
            setattr(test_class, name, mock.patch.object(test_class.model_tester, "experts", 4)(test))
    return test_class


@switch_off
class RetNetModelTest(common.ModelTesterMixin, training_mixin.TrainingTesterMixin, unittest.TestCase):
    model_tester = RetNetModelTester()
    all_model_classes = classes("Model", *HEADS)
    _torch_compile_train_cls = RetNetForCausalLM  # a slow test, for accelerators only


@switch_off
class RetNetEncoderTest(common.ModelTesterMixin, unittest.TestCase):
    model_tester = RetNetEncoderTester()
    all_model_classes = classes("Model", "ForMaskedLM", *HEADS[1:])


@experts_where_asked
@switch_off
class RetNetHybridTest(common.ModelTesterMixin, unittest.TestCase):
    model_tester = RetNetHybridTester()
    all_model_classes = classes("Model", *HEADS, family="RetNetHybrid")
    _torch_compile_train_cls = RetNetHybridForCausalLM
