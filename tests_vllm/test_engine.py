# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""vLLM says what plain `generate` says, however it cuts, batches and stores what it is asked."""

import pytest
from engine import MODELS, engine, expected, generated, model_of, prompts


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_generate(kind, tmp_path):
    """Prompts of 1 to 150 tokens, more of them than there are slots, cut into pieces and mixed with steps of decoding."""
    model = model_of(kind)
    model.save_pretrained(tmp_path)
    with engine(tmp_path, max_num_seqs=3, max_num_batched_tokens=48) as llm:
        assert generated(llm, prompts()) == expected(model, prompts())
