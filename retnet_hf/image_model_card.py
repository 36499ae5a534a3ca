# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The README.md that goes to the Hub with a classifier of images: what it is, how to run it, and what it gets wrong."""

from huggingface_hub import ModelCard, ModelCardData
from transformers import PreTrainedModel

from .image_report import CONFUSION, PREDICTIONS
from .training_report import CURVE


PAPERS = {
    "ViR": "[ViR](https://arxiv.org/abs/2310.19731)",
    "RMT": "[RMT](https://arxiv.org/abs/2309.11523)",
    "MetaFormer": "[MetaFormer](https://arxiv.org/abs/2111.11418)",
    "ViT": "[ViT](https://arxiv.org/abs/2010.11929)",
}

_TEXT = """\
# {name}

A {title} of {parameters} parameters that tells apart {count} classes of images: {classes}.

| | |
|---|---|
| image size | {image_size} |
{facts}
## Use

```bash
pip install retnet-hf
```

```python
import retnet_hf  # registers the model with transformers
from transformers import pipeline

classifier = pipeline("image-classification", model="{name}")
print(classifier("picture.png"))
```

## Training

Trained with `retnet-hf train-image`.

![loss]({curve})

![predictions on images held out]({predictions})

![confusion matrix]({confusion})
"""


def image_model_card(model: PreTrainedModel, title: str, name: str, classes: list[str], facts: dict[str, str]) -> ModelCard:
    """The model card of a classifier.

    Args:
        title: name of its family.
        name: what `from_pretrained` is to be given: a repository or a folder.
        facts: rows of its table, such as {"accuracy": "91.2 %"}.
    """
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="image-classification",
        tags=sorted({model.config.model_type, *(["retention"] if title != "ViT" else [])}),
    )
    listed = ", ".join(classes[:20]) + (f" and {len(classes) - 20} more" if len(classes) > 20 else "")
    text = _TEXT.format(
        name=name,
        title=PAPERS[title],
        parameters=f"{model.num_parameters():,}",
        count=len(classes),
        classes=listed,
        image_size=model.config.image_size,
        facts="".join(f"| {row} | {value} |\n" for row, value in facts.items()),
        curve=CURVE,
        predictions=PREDICTIONS,
        confusion=CONFUSION,
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")
