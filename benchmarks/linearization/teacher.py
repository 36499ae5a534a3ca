# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A small Llama and its training text, for linearization: chapters, chapters with lists, or Python's library.

From the King James Bible alone, a model of this size learns to predict words, but not to recall them, so linearization would
have nothing to lose. One source therefore also learns lists: pairs of words, then the same pairs in another order, where it
must predict the second words. At first, only attention in two layers learns these lists: feed-forwards would learn the words
of lists long before attention learns to find the right one.
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
# names of sources, and their texts
TEXTS = {"text": "king-james", "lists": "king-james", "python": "python"}
TOKENS, LEARNING_RATE = 2_000_000, 3e-3
WORDS = 64  # half keys, half values
PAIRS = (2, 4, 8, 16)  # in a list
SHARE = 0.3  # share of tokens in lists
ALONE_STEPS, ALONE_TOKENS, ALONE_LAYERS = 300, 4096, 2
BESIDE_TOKENS = 1024  # tokens of lists in a step on text
FILE = "text.jsonl"


def tokenizer(learned: str = "text") -> PreTrainedTokenizerBase:
    return texts.tokenizer(SETTING.vocabulary, ("python",) if learned == "python" else SETTING.tokenizer_texts)


def words(learned: str = "text") -> Tensor:
    """Returns ids of tokens that are whole words after a space, so that they can be joined in any order."""
    vocabulary = sorted(tokenizer(learned).get_vocab().items(), key=lambda entry: entry[1])
    found = [number for token, number in vocabulary if token[0] == "Ġ" and token[1:].isalpha() and len(token) > 3]
    return torch.tensor(found[:WORDS])


def lists_of_pairs(tokens: int, seed: int) -> list[str]:
    """Returns documents with a total number of tokens."""
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
    """Returns the documents in a fixed order, with lists among them for a source of lists."""
    documents = list(texts.documents(TEXTS[learned]).training)
    if learned == "lists":
        documents += lists_of_pairs(int(len(stream(learned)) * SHARE / (1 - SHARE)), seed=0)
        random.Random(0).shuffle(documents)
    return documents


def write_text(file: Path, learned: str) -> None:
    """Writes the documents as a file for `retnet-hf linearize`."""
    lines = (json.dumps({"text": document}) for document in training_documents(learned))
    write_whole(file, "\n".join(itertools.chain(lines, [""])))


def stream(learned: str, part: str = "training") -> Tensor:
    """Returns a part of the text, without lists, as token ids, (tokens,)."""
    return torch.from_numpy(encode(getattr(texts.documents(TEXTS[learned]), part), tokenizer(learned))).long()


def recall_loss(model: LlamaForCausalLM, pairs: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Returns the loss of the values in lists with a number of tokens."""
    ids, labels = associative_examples(*words().chunk(2), pairs, tokens // (4 * pairs), generator)
    asked = labels >= 0
    hidden = model.model(ids, use_cache=False).last_hidden_state
    return F.cross_entropy(model.lm_head(hidden[asked]), labels[asked])


def learn_to_recall(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Trains attention in the first layers on lists with a growing number of pairs; other parts have no output yet."""
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
    """Trains the whole model on chapters, with some lists in every step."""
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
    """Trains a Llama and saves it with its tokenizer."""
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
