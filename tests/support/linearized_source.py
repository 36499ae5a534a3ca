# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What a test linearizes: a small Llama with its tokenizer, and a text."""

from pathlib import Path

import torch
from command_answers import TEXT
from transformers import LlamaConfig, LlamaForCausalLM

from retnet_hf.cli.text.corpus import train_tokenizer


SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1, "initializer_range": 0.2}


def make_source(folder: Path) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.generation_config.temperature, model.generation_config.do_sample = 0.5, True
    model.save_pretrained(folder / "llama")
    tokenizer = train_tokenizer([TEXT], 300)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    tokenizer.save_pretrained(folder / "llama")
    (folder / "llama" / "README.md").write_text("---\nlicense: mit\n---\nA Llama.\n", encoding="utf-8")
    (folder / "book.txt").write_text(TEXT, encoding="utf-8")
