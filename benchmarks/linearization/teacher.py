# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A small Llama, and the text that it is linearized on: chapters, or lists too, which it can recall; or Python's library.

A model of this size learns from the King James Bible to expect words, not to find them again, and then there is nothing to
lose. So one of the two sources learns a second thing beside: lists that name pairs of words, and then the same pairs in
another order, where it is asked for the second word of each. Attention in two layers learns that first, and alone:
feed-forwards would learn what lists consist of long before attention finds out which word follows.
"""

import itertools
import json
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from retnet_hf_cli.text.corpus import encode
from retnet_hf_linearization.recall import associative_examples

from ..quality import texts
from ..quality.rivals import of_equal_size
from ..quality.settings import SETTINGS
from ..quality.training import BETAS, batches, fit, parameter_groups, rate_of, train
from ..whole_files import write_whole


SETTING = SETTINGS["laptop"]
# what a source has learned, by name, and the text of it
TEXTS = {"text": "king-james", "lists": "king-james", "python": "python"}
TOKENS, LEARNING_RATE = 2_000_000, 3e-3
WORDS = 64  # one half of them keys, the other values
PAIRS = (2, 4, 8, 16)  # of a list
SHARE = 0.3  # of the tokens of the text, in lists
ALONE_STEPS, ALONE_TOKENS, ALONE_LAYERS = 300, 4096, 2
BESIDE_TOKENS = 1024  # of lists, in a step on text
FILE = "text.jsonl"


def tokenizer(learned: str = "text") -> PreTrainedTokenizerBase:
    return texts.tokenizer(SETTING.vocabulary, ("python",) if learned == "python" else SETTING.tokenizer_texts)


def words(learned: str = "text") -> Tensor:
    """Ids of tokens that are whole words with a space before them, so that they can be put side by side in any order."""
    vocabulary = sorted(tokenizer(learned).get_vocab().items(), key=lambda entry: entry[1])
    found = [number for token, number in vocabulary if token[0] == "Ġ" and token[1:].isalpha() and len(token) > 3]
    return torch.tensor(found[:WORDS])


def lists_of_pairs(tokens: int, seed: int) -> list[str]:
    """Documents of so many tokens in all."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = words().chunk(2)
    documents, count = [], 0
    for pairs in itertools.cycle(PAIRS):
        if count >= tokens:
            return documents
        ids, _ = associative_examples(keys, values, pairs, 1, generator)
        documents.append(tokenizer().decode(ids[0]))
        count += ids.numel()


def training_documents(learned: str) -> list[str]:
    """Documents, and lists among them where it learned lists, in an order that is always the same."""
    documents = list(texts.documents(TEXTS[learned]).training)
    if learned == "lists":
        documents += lists_of_pairs(int(len(stream(learned)) * SHARE / (1 - SHARE)), seed=0)
        random.Random(0).shuffle(documents)
    return documents


def write_text(file: Path, learned: str) -> None:
    """The documents as a file that `retnet-hf linearize` reads."""
    lines = (json.dumps({"text": document}) for document in training_documents(learned))
    write_whole(file, "\n".join(itertools.chain(lines, [""])))


def stream(learned: str, part: str = "training") -> Tensor:
    """A part of the text, without lists, as token ids, (tokens,)."""
    return torch.from_numpy(encode(getattr(texts.documents(TEXTS[learned]), part), tokenizer(learned))).long()


def recall_loss(model: LlamaForCausalLM, pairs: int, tokens: int, generator: torch.Generator) -> Tensor:
    """The loss where lists ask, over so many tokens of lists."""
    ids, labels = associative_examples(*words().chunk(2), pairs, tokens // (4 * pairs), generator)
    asked = labels >= 0
    hidden = model.model(ids, use_cache=False).last_hidden_state
    return F.cross_entropy(model.lm_head(hidden[asked]), labels[asked])


def learn_to_recall(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Trains attention in the first layers on lists, of more pairs as it goes; nothing else has an output yet."""
    layers = model.model.layers
    silent = [layer.mlp.down_proj.weight for layer in layers]
    for weight in [*silent, *(layer.self_attn.o_proj.weight for layer in layers[ALONE_LAYERS:])]:
        nn.init.zeros_(weight).requires_grad_(False)
    model.model.layers = layers[:ALONE_LAYERS]

    def loss_of(step: int) -> Tensor:
        reached = min(len(PAIRS), 1 + int(len(PAIRS) * step / (0.6 * ALONE_STEPS)))
        return recall_loss(model, PAIRS[step % reached], ALONE_TOKENS, generator)

    optimizer = torch.optim.AdamW(parameter_groups(model), lr=LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, ALONE_STEPS, pct_start=0.1)
    for _ in fit(model, optimizer, schedule, map(loss_of, range(ALONE_STEPS))):
        pass
    model.model.layers = layers
    model.requires_grad_(True)


def learn_text_beside(model: LlamaForCausalLM, seed: int, generator: torch.Generator) -> None:
    """Trains all of it on chapters, with some lists in every step."""
    steps = TOKENS // (SETTING.block * SETTING.batch)
    blocks = batches(stream("lists"), seed, SETTING.block, SETTING.batch)

    def loss_of(step: int) -> Tensor:
        ids = next(blocks)
        text = model(ids, labels=ids, use_cache=False).loss
        return text + recall_loss(model, PAIRS[step % len(PAIRS)], BESIDE_TOKENS, generator)

    optimizer = torch.optim.AdamW(parameter_groups(model), lr=LEARNING_RATE, betas=BETAS, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of(steps))
    for _ in fit(model, optimizer, schedule, map(loss_of, range(steps))):
        pass


def write_source(folder: Path, seed: int, learned: str) -> None:
    """Trains a Llama, and saves it with its tokenizer."""
    torch.manual_seed(seed)
    model = of_equal_size("llama", {}, SETTING)
    if learned == "lists":
        generator = torch.Generator().manual_seed(seed)
        learn_to_recall(model, generator)
        learn_text_beside(model, seed, generator)
    else:
        train(model, stream(learned), TOKENS, LEARNING_RATE, seed, SETTING.block, SETTING.batch)
    for config in (model.config, model.generation_config):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(config, name, getattr(tokenizer(learned), name))
    model.save_pretrained(folder)
    tokenizer(learned).save_pretrained(folder)
