# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""`retnet-hf evaluate`: how well models predict a text."""

import json
import math
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from .. import options
from ..errors import InputError
from ..named_inputs import model_source, require_data
from ..options import Model, argument, loading, model_option, run_option


def evaluate(
    model: Model,
    texts: Annotated[list[str], argument(metavar="TEXT...", help="Files, folders, or a data set on the Hub, as for train.")],
    compare: Annotated[
        list[str] | None, model_option(metavar="MODEL", help="Another model on the same text. May be repeated.")
    ] = None,
    field: options.Field = "text",
    split: options.Split = "train",
    subset: options.Subset = None,
    as_json: Annotated[bool, run_option("--json", help="Print a line of JSON for each model.")] = False,
    threads: options.Threads = None,
) -> None:
    """Measure the perplexity of models on a text of any length, in constant memory.

    Each document is read from its first token to its last; of conversations, the answers count. Bits per byte compare
    models with different tokenizers. lm-eval measures tasks: see the guide.

    [bold]Examples[/bold]

    retnet-hf evaluate my-model new-chapter.txt

    retnet-hf evaluate my-tuned-model notes.csv --field body --compare my-model
    """
    names = [model_source(name) for name in (model, *(compare or []))]
    for text in texts:
        require_data(text)
    console = Console(stderr=True, highlight=False)
    with loading(console, threads):
        import torch

        from retnet_hf import RetNetForCausalLM
        from retnet_hf.training.streaming import score_stream

        from ..text.corpus import CHAT_TEMPLATE, document_end, ids_of, prefix, read_documents
        from ..text.generation import load_model, require_known

    documents = read_documents(texts, field, split, subset)
    is_chat = not isinstance(documents[0], str)
    if is_chat:
        from ..training.run import chat_example

        answers = (each["content"] for chat in documents for each in chat if each["role"] == "assistant")
    size = sum(len(text.encode()) for text in (answers if is_chat else documents))
    table = Table("model", "tokens", "perplexity per token", "per byte", "bits per byte", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name in names:
        network, tokenizer = load_model(name)
        if not isinstance(network, RetNetForCausalLM):
            raise InputError(f"{name} holds no causal RetNet, but a model of type {network.config.model_type}")
        end, likelihood, tokens = document_end(tokenizer), 0.0, 0
        begin = prefix(tokenizer) or ([] if end is None else [end])
        with console.status(f"reading {size:,} bytes with {name}"):
            if is_chat:
                tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
            for document in documents:
                if is_chat:
                    ids, labels = (each[None].to(network.device) for each in chat_example(document, tokenizer))
                    require_known(int(ids.max()), network)
                    count = int(labels[:, 1:].ge(0).sum())
                    with torch.no_grad():
                        likelihood -= count * float(network(ids, labels=labels, use_cache=False).loss)
                    tokens += count
                    continue
                ids = [*begin, *ids_of(document, tokenizer)]
                require_known(max(ids), network)
                score = score_stream(network, ids)
                likelihood, tokens = likelihood + score.log_likelihood, tokens + score.tokens
        per_token, per_byte = math.exp(-likelihood / max(tokens, 1)), math.exp(-likelihood / size)
        figures = {"tokens": tokens, "bytes": size, "perplexity": per_token, "perplexity_per_byte": per_byte}
        figures["bits_per_byte"] = math.log2(per_byte)
        if as_json:
            typer.echo(json.dumps({"model": name} | figures))
        table.add_row(name, f"{tokens:,}", f"{per_token:,.2f}", f"{per_byte:.4f}", f"{math.log2(per_byte):.4f}")
    if not as_json:
        Console(highlight=False).print(table)
