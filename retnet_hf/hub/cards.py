# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Model cards: the README.md that is pushed with a model. It describes the model, and shows how to load and run it."""

import re

from huggingface_hub import ModelCard, ModelCardData
from transformers.modeling_utils import PreTrainedModel


# Maps a model type to the name and the paper of its family.
FAMILIES = {
    "retnet": ("RetNet", "https://arxiv.org/abs/2307.08621"),
    "retnet_hybrid": ("RetNetHybrid", "https://arxiv.org/abs/2307.08621"),
    "vir": ("ViR", "https://arxiv.org/abs/2310.19731"),
    "rmt": ("RMT", "https://arxiv.org/abs/2309.11523"),
    "metaformer": ("MetaFormer", "https://arxiv.org/abs/2111.11418"),
    "vit": ("ViT", "https://arxiv.org/abs/2010.11929"),
}
# Maps the last part of a class name to the task under which the Hub lists the model. Image models get the prefix "image-".
TASKS = {
    "ForCausalLM": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForImageClassification": "classification",
    "ForMaskedImageModeling": "feature-extraction",
    "Backbone": "feature-extraction",
    "Model": "feature-extraction",
}

_CARD = """\
# {name}

A [{family}]({paper}) of {parameters:,} parameters{nature}

| | |
|---|---|
{rows}
## Use

{needs}

```python
{example}```
"""
_NEEDS = "The model needs the package `retnet_hf`. Install it with `pip install .` in its repository."
_CARRIES = "The model's code is in this repository, and `trust_remote_code=True` runs it."
_DECODER = """\
: trained like a transformer, decoded like a recurrent
network. Its state takes {state_bytes} bytes per sequence, however long the text is."""
_HYBRID = """\
 with layers of softmax attention. The layers of
retention keep {state_bytes} bytes per sequence, however long the text is. The other layers keep {token_numbers} values of
each token that later tokens may see."""
_SOFTMAX = """\
 without retention. Layers with a
window keep the last {window} tokens and the first {sinks}, other layers all tokens: {token_numbers} values of each."""
_ENCODER = """\
 that reads in both directions:
a token sees earlier and later tokens, in time linear in the length of the text."""

_MODEL = """\
import retnet_hf  # registers RetNet with transformers
from transformers import {imports}

model = {auto_class}.from_pretrained("{name}")
"""
_GENERATION = """\
tokenizer = AutoTokenizer.from_pretrained("{name}")
inputs = tokenizer({prompt!r}, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100, do_sample=True)[0]))
"""
_CLASSIFIER = """\
import retnet_hf  # registers the model with transformers
from transformers import pipeline

classifier = pipeline("image-classification", model="{name}")
print(classifier("picture.png"))
"""
_IMAGE_MODEL = """from retnet_hf import {model_class}
from transformers import AutoImageProcessor

processor = AutoImageProcessor.from_pretrained("{name}")
model = {model_class}.from_pretrained("{name}")
"""


def model_card(
    model: PreTrainedModel, name: str, facts: dict[str, str] | None = None, prompt: str | None = None, training: str = ""
) -> ModelCard:
    """Returns the model card of a model of one of `FAMILIES`.

    Args:
        name: the argument of `from_pretrained` in the example: a repository or a folder.
        facts: further rows of the table, such as {"perplexity": "12.3"}.
        prompt: text that a language model continues in the example. Without a prompt, the example only loads the model.
        training: Markdown about data and procedure, added at the end.
    """
    config = model.config
    kind = next(each.model_type for each in type(config).__mro__ if getattr(each, "model_type", None) in FAMILIES)
    family, paper = FAMILIES[kind]
    # The model's class, or a class that it is derived from, is one of ours.
    suffixes = (parent.__name__.removeprefix(family) for parent in type(model).__mro__)
    suffix = next(suffix for suffix in suffixes if suffix in TASKS)
    tags = {config.model_type, *(["retention"] if family != "ViT" else []), *(model.model_tags or [])}
    if kind in ("retnet", "retnet_hybrid"):
        task, auto_class = TASKS[suffix], f"AutoModel{suffix.removeprefix('Model')}"
        nature, sizes = _ENCODER if config.bidirectional else _DECODER, {"state_bytes": f"{4 * config.state_size:,}"}
        if config.has_softmax_attention:
            nature = _SOFTMAX if config.sliding_window and "linear_attention" not in config.layer_types else _HYBRID
            sizes |= {"window": config.sliding_window, "sinks": config.attention_sinks}
            sizes["token_numbers"] = f"{config.cache_size_per_token:,}"
        nature = nature.format(**sizes)
        heads = f"{config.num_attention_heads} (key size {config.head_dim}, value size {config.value_head_dim})"
        rows = {"hidden size": config.hidden_size, "layers": config.num_hidden_layers, "heads": heads}
        rows["vocabulary"] = config.vocab_size
        imports = auto_class if prompt is None else f"{auto_class}, AutoTokenizer"
        example = _MODEL if prompt is None else _MODEL + _GENERATION
        example = example.format(imports=imports, auto_class=auto_class, name=name, prompt=prompt)
    else:
        auto_class = family + suffix
        task, is_classifier = f"image-{TASKS[suffix]}", suffix == "ForImageClassification"
        nature, rows, names = ".", {"image size": config.image_size}, list(config.id2label.values())
        if is_classifier and len(names) > 1:
            more = f" and {len(names) - 20} more" if len(names) > 20 else ""
            listed = "" if names == [f"LABEL_{number}" for number in config.id2label] else f": {', '.join(names[:20])}{more}"
            nature = f" that distinguishes {len(names)} classes of images{listed}."
        example = (_CLASSIFIER if is_classifier else _IMAGE_MODEL).format(name=name, model_class=family + suffix)
    carried = (getattr(config, "auto_map", None) or {}).values()
    portable = any(str(each).endswith(f".{type(model).__name__}") for each in carried)
    if portable:
        example = re.sub("^import retnet_hf.*\n", "", example)
        for call in (f'{auto_class}.from_pretrained("{name}"', f'model="{name}"'):
            example = example.replace(call, f"{call}, trust_remote_code=True")
    lines = "".join(f"| {row} | {value} |\n" for row, value in (rows | (facts or {})).items())
    parts = {"name": name, "family": family, "paper": paper, "nature": nature, "rows": lines, "example": example}
    text = _CARD.format(parameters=model.num_parameters(), needs=_CARRIES if portable else _NEEDS, **parts)
    data = ModelCardData(library_name="transformers", pipeline_tag=task, tags=sorted(tags))
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}{training}")
