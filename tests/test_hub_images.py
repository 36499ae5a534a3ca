# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""push_to_hub of image models: the model card that goes with them, against a stand-in of the Hub on this machine."""

import pytest
from hub_stand_in import HubStandIn, serving
from huggingface_hub import ModelCard
from small_vision_models import VISION_FAMILIES
from test_hub import run

from retnet_hf.image_model_card import image_model_card


PUSH = """
from small_vision_models import VISION_FAMILIES

for name, family in VISION_FAMILIES.items():
    family.model().push_to_hub(f"someone/{name}", tags=["tiny"])
VISION_FAMILIES["rmt"].model(VISION_FAMILIES["rmt"].backbone_class).push_to_hub("someone/backbone")
VISION_FAMILIES["vir"].model().push_to_hub("someone/own-card")
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """A Hub to which everything has been pushed."""
    with serving(HubStandIn()) as hub:
        hub.files["someone/own-card"] = {"README.md": b"---\nlicense: mit\n---\n\n# Written by hand\n"}
        run(PUSH, hub, tmp_path_factory.mktemp("push"))
        yield hub


@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_push_to_hub_writes_a_model_card(hub, name):
    """The card names task, library and the model itself; its code is Python that a reader can run."""
    card = ModelCard(hub.files[f"someone/{name}"]["README.md"].decode())
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "image-classification")
    assert {name, "retention", "tiny"} <= set(card.data.tags)
    assert f"# someone/{name}\n" in card.text
    parameters = VISION_FAMILIES[name].model().num_parameters()
    assert f"{parameters:,} parameters that tells apart 5 classes of images.\n" in card.text
    code = card.text.split("```python")[1].split("```")[0]
    compile(code, name, "exec")
    assert f'pipeline("image-classification", model="someone/{name}")' in code


def test_push_to_hub_of_a_backbone(hub):
    card = ModelCard(hub.files["someone/backbone"]["README.md"].decode())
    assert card.data.pipeline_tag == "image-feature-extraction"
    assert 'RMTBackbone.from_pretrained("someone/backbone")' in card.text


def test_push_to_hub_leaves_a_card_of_one_s_own_alone(hub):
    card = ModelCard(hub.files["someone/own-card"]["README.md"].decode())
    assert card.data.license == "mit"
    assert "# Written by hand" in card.text
    assert "model.safetensors" in hub.files["someone/own-card"]


def test_a_card_names_the_classes():
    family = VISION_FAMILIES["vir"]

    def text(names: list[str]) -> str:
        return image_model_card(family.model(num_labels=len(names), id2label=dict(enumerate(names))), "some-model").text

    assert "that tells apart 3 classes of images: cat, dog, owl.\n" in text(["cat", "dog", "owl"])
    assert "that tells apart 23 classes of images: 0, 1," in text([str(number) for number in range(23)])
    assert ", 19 and 3 more.\n" in text([str(number) for number in range(23)])
    assert "tells apart" not in text(["height"])
    subclass = type("Renamed", (family.classifier_class,), {})
    assert "image-classification" in image_model_card(subclass(family.config()), "some-model").text
