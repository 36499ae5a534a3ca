# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The README.md that goes to the Hub with a RetNet: what the model is, and how to load and run it."""

from huggingface_hub import ModelCard, ModelCardData
from transformers.modeling_utils import PreTrainedModel


PIPELINE_TAGS = {
    "ForCausalLM": "text-generation",
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "Model": "feature-extraction",
}

_TEXT = """\
# {name}

A [RetNet](https://arxiv.org/abs/2307.08621) of {parameters} parameters{nature}

| | |
|---|---|
| hidden size | {config.hidden_size} |
| layers | {config.num_hidden_layers} |
| heads | {config.num_attention_heads} (key size {config.head_dim}, value size {config.value_head_dim}) |
| vocabulary | {config.vocab_size} |
{facts}
## Use

```bash
pip install retnet-hf
```

```python
import retnet_hf  # registers RetNet with transformers
from transformers import {imports}

model = {auto_class}.from_pretrained("{name}")
{example}```
"""
_DECODER = """\
: trained like a transformer, decoded like a recurrent
network. Its state takes {state_bytes} bytes per sequence, however long the text is."""
_HYBRID = """\
 with layers of softmax attention: those of
retention keep {state_bytes} bytes per sequence, however long the text is; the others keep {token_numbers} numbers of each
token that they may look back to."""
_ENCODER = """\
 that reads in both directions:
a token sees those before and after it, in time linear in the length of the text."""
_EXAMPLE = """\
tokenizer = AutoTokenizer.from_pretrained("{name}")
inputs = tokenizer({prompt!r}, return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100, do_sample=True)[0]))
"""


def model_card(
    model: PreTrainedModel,
    name: str,
    facts: dict[str, str] | None = None,
    prompt: str | None = None,
    training: str = "",
) -> ModelCard:
    """The model card of `model`.

    Args:
        model: any RetNet model.
        name: what `from_pretrained` is to be given: a repository or a folder.
        facts: further rows of its table, such as {"perplexity": "12.3"}.
        prompt: what its example of generation continues; without one, or a tokenizer, there is no example.
        training: Markdown about data and procedure, put at the end.
    """
    config = model.config
    classes = [parent.__name__ for parent in type(model).__mro__]  # a class derived from ours is for what ours is for
    suffix = next(suffix for name in classes for suffix in PIPELINE_TAGS if name.endswith(suffix))
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=PIPELINE_TAGS[suffix],
        tags=sorted({"retnet", "retention", *(model.model_tags or [])}),
    )
    nature = _ENCODER if config.bidirectional else _HYBRID if config.is_hybrid else _DECODER
    sizes = {"state_bytes": f"{4 * config.state_size:,}", "token_numbers": f"{config.cache_size_per_token:,}"}
    auto_class = f"AutoModel{'' if suffix == 'Model' else suffix}"
    text = _TEXT.format(
        name=name,
        parameters=f"{model.num_parameters():,}",
        nature=nature.format(**sizes),
        config=config,
        facts="".join(f"| {row} | {value} |\n" for row, value in (facts or {}).items()),
        auto_class=auto_class,
        imports=auto_class if prompt is None else f"{auto_class}, AutoTokenizer",
        example="" if prompt is None else _EXAMPLE.format(name=name, prompt=prompt),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}{training}")


def is_placeholder(card: ModelCard) -> bool:
    """Whether `card` is the one that transformers fills in where a repository has none."""
    return "This model card has been automatically generated." in card.text
