# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""The README.md that goes to the Hub with an image model: what it is, and how to load and run it."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from transformers.modeling_utils import PreTrainedModel

from .model_card import is_placeholder


# by model type: how the family is called, and its paper
FAMILIES = {
    "vir": ("ViR", "https://arxiv.org/abs/2310.19731"),
    "rmt": ("RMT", "https://arxiv.org/abs/2309.11523"),
    "metaformer": ("MetaFormer", "https://arxiv.org/abs/2111.11418"),
    "vit": ("ViT", "https://arxiv.org/abs/2010.11929"),
}

_TEXT = """\
# {name}

A [{family}]({paper}) of {parameters} parameters{task}.

| | |
|---|---|
| image size | {image_size} |
{facts}
## Use

```bash
pip install retnet-hf
```

```python
{example}```
"""
_CLASSIFIER = """\
import retnet_hf  # registers the model with transformers
from transformers import pipeline

classifier = pipeline("image-classification", model="{name}")
print(classifier("picture.png"))
"""
_OTHER = """\
from retnet_hf import {model_class}
from transformers import AutoImageProcessor

processor = AutoImageProcessor.from_pretrained("{name}")
model = {model_class}.from_pretrained("{name}")
"""


def image_model_card(
    model: PreTrainedModel, name: str, facts: dict[str, str] | None = None, training: str = ""
) -> ModelCard:
    """The model card of `model`.

    Args:
        model: any model of the families above.
        name: what `from_pretrained` is to be given: a repository or a folder.
        facts: further rows of its table, such as {"accuracy": "91.2 %"}.
        training: Markdown about data and procedure, put at the end.
    """
    config = model.config
    family, paper = FAMILIES[config.model_type]
    # a class derived from ours is for what ours is for
    model_class = next(parent.__name__ for parent in type(model).__mro__ if parent.__name__.startswith(family))
    is_classifier = model_class.endswith("ForImageClassification")
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag="image-classification" if is_classifier else "image-feature-extraction",
        tags=sorted({config.model_type, *(["retention"] if family != "ViT" else []), *(model.model_tags or [])}),
    )
    text = _TEXT.format(
        name=name,
        family=family,
        paper=paper,
        parameters=f"{model.num_parameters():,}",
        task=_told_apart(config.id2label) if is_classifier else "",
        image_size=config.image_size,
        facts="".join(f"| {row} | {value} |\n" for row, value in (facts or {}).items()),
        example=(_CLASSIFIER if is_classifier else _OTHER).format(name=name, model_class=model_class),
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}{training}")


def _told_apart(id2label: dict[int, str]) -> str:
    """What a classifier does, with the names of its classes where it has been given any."""
    names = list(id2label.values())
    if len(names) < 2:
        return ""
    if names == [f"LABEL_{number}" for number in id2label]:
        return f" that tells apart {len(names)} classes of images"
    listed = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return f" that tells apart {len(names)} classes of images: {listed}"


class ImageModelCardMixin:
    """Pushes a model with a card that says how to load it, unless the repository has a card of its own."""

    def _upload_modified_files(self, working_dir: str, repo_id: str, *args, **kwargs):
        path = Path(working_dir) / "README.md"
        if path.is_file() and is_placeholder(placeholder := ModelCard.load(path)):
            card = image_model_card(self, repo_id)
            card.data.tags = sorted({*card.data.tags, *(placeholder.data.tags or [])})
            card.save(path)
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)
