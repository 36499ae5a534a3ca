# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A small Llama that can recall, and the text it is trained on: the King James Bible, and lists of pairs of words.

A model of this size learns from the Bible alone to expect words, not to find them again. A part of the documents therefore
names pairs of words and then names them again in another order, so that there is something to lose. And since a feed-forward
learns what words lists consist of long before attention finds out which, attention in two layers learns that first, alone.
"""

import itertools
import json
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from linearization.recall import associative_examples
from retnet_hf_cli.text.corpus import encode

from ..quality import texts
from ..quality.rivals import of_equal_size
from ..quality.settings import SETTINGS
from ..quality.training import fit, parameter_groups, train


SETTING = SETTINGS["laptop"]
TEXT = "king-james"
TOKENS, LEARNING_RATE = 3_000_000, 3e-3
WORDS = 64  # one half of them keys, the other values
MOST_PAIRS = 24
SHARE = 0.3  # of the tokens, in lists of pairs
RECALL_STEPS, RECALL_TOKENS, RECALL_PAIRS, RECALL_LAYERS = 300, 4096, (2, 4, 8, 16), 2
FILE = "text.jsonl"


def tokenizer() -> PreTrainedTokenizerBase:
    return texts.tokenizer(SETTING.vocabulary, SETTING.tokenizer_texts)


def words() -> Tensor:
    """Ids of tokens that are whole words with a space before them, so that they can be put side by side in any order."""
    vocabulary = sorted(tokenizer().get_vocab().items(), key=lambda entry: entry[1])
    found = [number for token, number in vocabulary if token[0] == "Ġ" and token[1:].isalpha() and len(token) > 3]
    return torch.tensor(found[:WORDS])


def lists_of_pairs(tokens: int, seed: int) -> list[str]:
    """Documents of so many tokens in all."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = words().chunk(2)
    documents, count = [], 0
    while count < tokens:
        pairs = int(torch.randint(2, MOST_PAIRS + 1, (), generator=generator))
        ids, _ = associative_examples(keys, values, pairs, 1, generator)
        documents.append(tokenizer().decode(ids[0]))
        count += ids.numel()
    return documents


def training_documents() -> list[str]:
    """Chapters and lists, in an order that is always the same."""
    chapters = texts.documents(TEXT).training
    tokens = len(encode(chapters, tokenizer()))
    documents = chapters + lists_of_pairs(int(tokens * SHARE / (1 - SHARE)), seed=0)
    random.Random(0).shuffle(documents)
    return documents


def write_text(folder: Path) -> Path:
    """The documents as a file that `retnet-hf linearize` reads."""
    file = folder / FILE
    lines = (json.dumps({"text": document}) for document in training_documents())
    file.write_text("\n".join(itertools.chain(lines, [""])), encoding="utf-8")
    return file


def training_stream() -> Tensor:
    """The documents as token ids, (tokens,)."""
    return torch.from_numpy(encode(training_documents(), tokenizer())).long()


def learn_to_recall(model: LlamaForCausalLM, seed: int) -> None:
    """Trains the attention of the first layers on lists of pairs; nothing else of the layers has an output yet."""
    silent = [layer.mlp.down_proj.weight for layer in model.model.layers]
    silent += [layer.self_attn.o_proj.weight for layer in model.model.layers[RECALL_LAYERS:]]
    for weight in silent:
        nn.init.zeros_(weight).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    keys, values = words().chunk(2)

    def loss_of(step: int) -> Tensor:
        reached = min(len(RECALL_PAIRS), 1 + int(len(RECALL_PAIRS) * step / (0.6 * RECALL_STEPS)))
        pairs = RECALL_PAIRS[step % reached]
        ids, labels = associative_examples(keys, values, pairs, RECALL_TOKENS // (4 * pairs), generator)
        asked = labels >= 0
        hidden = model.model(ids, use_cache=False).last_hidden_state
        return F.cross_entropy(model.lm_head(hidden[asked]), labels[asked])

    optimizer = torch.optim.AdamW(parameter_groups(model), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, RECALL_STEPS, pct_start=0.1)
    for _ in fit(model, optimizer, schedule, map(loss_of, range(RECALL_STEPS))):
        pass
    for weight in silent:
        weight.requires_grad_(True)


def write_source(folder: Path, seed: int) -> None:
    """Trains a Llama and saves it with its tokenizer."""
    torch.manual_seed(seed)
    model = of_equal_size("llama", {}, SETTING)
    learn_to_recall(model, seed)
    train(model, training_stream(), TOKENS, LEARNING_RATE, seed, SETTING.block, SETTING.batch)
    for config in (model.config, model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer(), name))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
