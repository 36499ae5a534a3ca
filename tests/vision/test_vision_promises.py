# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What users of a Hugging Face image classifier rely on, for ViR, RMT and MetaFormer."""

import copy
import gzip
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command_answers import same_weights
from datasets import Dataset, Image
from places import ROOT
from safetensors.torch import load_file
from small_models import PACKAGE_ABSENT, close, rounding, same_tensors
from small_vision_models import COLOURS, VISION_FAMILIES, colour_picture, random_images, random_picture, write_pictures
from torch import Tensor
from torch.export import Dim
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from transformers import AutoBackbone, AutoConfig, AutoModel, UperNetConfig, UperNetForSemanticSegmentation, pipeline
from transformers import AutoModelForImageClassification as AutoClassifier
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING, AutoImageProcessor

from retnet_hf import MetaFormerConfig, RMTConfig, ViRConfig


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def family(request):
    return VISION_FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family):
    """A classifier, which tests do not change."""
    return family.model()


@pytest.fixture
def folder(family, model, tmp_path):
    model.save_pretrained(tmp_path)
    family.processor().save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
def logits_of(model, pixel_values: Tensor | None = None, **kwargs) -> Tensor:
    return model(random_images() if pixel_values is None else pixel_values, **kwargs).logits


@pytest.mark.parametrize("size", [(32, 32), (64, 40), (24, 48)])
def test_logits_of_images_of_any_size_do_not_depend_on_each_other(model, size):
    double, pixel_values = copy.deepcopy(model).double(), random_images(2, *size, dtype=torch.float64)
    each = (pixel_values, *pixel_values.split(1))
    logits, *rows = (logits_of(double, images, interpolate_pos_encoding=True) for images in each)
    assert logits.shape == (2, 5)
    close(logits, torch.cat(rows), 1e-11)
    pixel_values[1, :, -8:, -8:] += 1
    moved = logits_of(double, pixel_values, interpolate_pos_encoding=True)
    close(moved[0], logits[0], 1e-11)
    assert not moved[1].allclose(logits[1], atol=1e-4)


@torch.no_grad()
def test_outputs(family, model):
    """Logits, features, and on request a state of each layer, as a tuple too; also interpolated at the model's own size."""
    images, labels = random_images(3), torch.tensor([0, 3, 1])
    out, base = model(images, labels=labels, output_hidden_states=True), model.base_model(images, output_hidden_states=True)
    assert out.logits.shape == (3, 5)
    assert not model.training
    assert model(images, interpolate_pos_encoding=True).logits.equal(out.logits)
    assert base.last_hidden_state.shape[0] == 3
    assert base.last_hidden_state.isfinite().all()
    assert base.pooler_output.shape == (3, model.config.hidden_size)
    by_config, states = family.model(output_hidden_states=True)(images).hidden_states, out.hidden_states
    assert len(states) == model.config.num_hidden_layers + 1
    assert all(mine.equal(theirs) for mine, theirs in zip(states, by_config, strict=True))
    assert not any(torch.equal(state, following) for state, following in zip(states, states[1:]))
    assert model(images).hidden_states is None
    for named, plain in (
        (out, model(images, labels=labels, output_hidden_states=True, return_dict=False)),
        (model(images), model(images, return_dict=False)),
        (base, model.base_model(images, output_hidden_states=True, return_dict=False)),
    ):
        assert type(plain) is tuple
        assert all(a.equal(b) for a, b in zip(tree_leaves(plain), tree_leaves(named.to_tuple()), strict=True))


@pytest.mark.parametrize(("size", "interpolate"), [((64, 64), False), ((33, 35), True), ((31, 32), True), ((5, 149), True)])
def test_sizes_that_do_not_fit_are_refused_or_work(family, model, size, interpolate):
    """A ValueError that says the size, or an answer to which the last pixels matter."""
    pixel_values = random_images(3, *size)
    pixel_values[1:] = pixel_values[0]
    pixel_values[1, :, -1, :] += 10
    pixel_values[2, :, :, -1] += 10
    if family is VISION_FAMILIES["vir"]:
        with pytest.raises(ValueError, match=re.escape(str(size))):
            logits_of(model, pixel_values, interpolate_pos_encoding=interpolate)
    else:
        logits, *others = logits_of(model, pixel_values, interpolate_pos_encoding=interpolate)
        assert logits.isfinite().all()
        assert not any(other.allclose(logits, atol=1e-4) for other in others)


def test_maps_change_no_logits_and_have_gradients(family):
    """Those of retention and of attention, on request by argument or by configuration, in both implementations."""
    model, images = family.model().double(), random_images(dtype=torch.float64)
    out = model(images, output_attentions=True)
    assert all(maps.shape[2] == maps.shape[3] for maps in out.attentions)
    assert all(gradient.any() for gradient in torch.autograd.grad(out.logits.square().sum(), out.attentions))
    assert model(images).attentions is None
    close(model(images).logits, out.logits, 1e-11)
    if family is not VISION_FAMILIES["vir"]:
        model.set_attn_implementation("eager")
    model.config.output_attentions = True
    again = model(images)
    close(again.logits, out.logits, 1e-11)
    close(again.attentions, out.attentions, 1e-11)


def test_other_configs_run_and_are_saved(family, tmp_path):
    shapes = {"image_size": (24, 40)} | ({"patch_size": (4, 8)} if "patch_size" in family.fields else {})
    names = dict(enumerate(["cat", "dog", "bird", "fish", "yak", "zebu", "ant"]))
    named = {"num_labels": 7, "id2label": names, "label2id": {name: number for number, name in names.items()}}
    for options, images in (
        (shapes, random_images(2, 24, 40)),
        ({"num_channels": 1}, random_images(channels=1)),
        ({"num_labels": 1}, random_images()),
        (named, random_images()),
    ):
        model = family.model(**options)
        model.save_pretrained(tmp_path)
        loaded = AutoClassifier.from_pretrained(tmp_path)
        close(logits_of(loaded, images), logits_of(model, images), rounding(10))
        assert logits_of(model, images).shape == (2, options.get("num_labels", 5))
    assert {field: getattr(loaded.config, field) for field in named} == named


def test_another_number_of_labels(model, folder):
    options = {"num_labels": 8, "ignore_mismatched_sizes": True}
    loaded, report = AutoClassifier.from_pretrained(folder, **options, output_loading_info=True)
    assert logits_of(loaded).shape == (2, 8)
    assert {key for key, *_ in report["mismatched_keys"]} == {"classifier.weight", "classifier.bias"}
    assert not report["missing_keys"]
    same_tensors(loaded.base_model.state_dict(), model.base_model.state_dict())
    assert 0 < loaded.classifier.weight.std() < 0.1
    with pytest.raises(RuntimeError, match="size mismatch|mismatched"):
        AutoClassifier.from_pretrained(folder, num_labels=8)


SEVERAL = torch.tensor([[1.0, 0, 0, 1, 0], [0, 0, 1, 0, 0]])


@pytest.mark.parametrize(
    ("problem", "labels", "formula"),
    [
        ("single_label_classification", torch.tensor([0, 3]), F.cross_entropy),
        ("multi_label_classification", SEVERAL, F.binary_cross_entropy_with_logits),
        ("regression", torch.tensor([0.5, -2.0]), lambda logits, labels: F.mse_loss(logits.squeeze(), labels)),
    ],
)
def test_problem_types(family, problem, labels, formula):
    for options in ({}, {"problem_type": problem}):
        out = family.model(num_labels=1 if problem == "regression" else 5, **options)(random_images(), labels=labels)
        close(out.loss, formula(out.logits, labels), rounding(10))
        assert out.loss.requires_grad


def test_auto_image_processor_by_model(family, folder):
    """It is registered for the configuration, also where the file of the processor does not name its class."""
    assert family.processor_class in IMAGE_PROCESSOR_MAPPING[family.config_class].values()
    (folder / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 32, "width": 32}}))
    processor = AutoImageProcessor.from_pretrained(folder)
    assert type(processor) is family.processor_class
    assert processor(random_picture(), return_tensors="pt").pixel_values.shape == (1, 3, 32, 32)
    pil = AutoImageProcessor.from_pretrained(folder, backend="pil")
    assert (pil.backend, type(pil).__name__.removesuffix("Pil")) == ("pil", family.processor_class.__name__)


def scores_of(answer: list[dict]) -> dict[str, float]:
    return {label["label"]: label["score"] for label in answer}


def expected_scores(family, model, picture, processor_class: type | None = None) -> dict[str, float]:
    processor = (processor_class or family.processor_class)(size=32)
    probabilities = logits_of(model, processor(picture, return_tensors="pt").pixel_values).softmax(-1)[0]
    return {model.config.id2label[number]: score.item() for number, score in enumerate(probabilities)}


def test_pipeline_image_classification(family):
    model = family.model(id2label=dict(enumerate(["ant", "bee", "cow", "dog", "eel"]))).double()
    classifier = pipeline("image-classification", model=model, image_processor=family.processor())
    pictures = [random_picture(seed=seed) for seed in range(5)]
    alone = [scores_of(classifier(picture)) for picture in pictures]
    for picture, scores in zip(pictures, alone):
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
        assert scores == pytest.approx(expected_scores(family, model, picture), abs=1e-5)
    for one, other in zip(classifier(pictures, batch_size=2), alone, strict=True):
        assert scores_of(one) == pytest.approx(other, abs=1e-5)
    assert list(scores_of(classifier(pictures[0], top_k=2))) == list(alone[0])[:2]
    assert len(classifier(random_picture(mode="L"))) == 5


def test_pipeline_from_folder(family, model, folder):
    picture = random_picture()
    picture.save(folder / "picture.png")
    classifier = pipeline("image-classification", model=str(folder))
    assert type(classifier.model) is family.classifier_class
    assert type(classifier.image_processor) is family.processor_class
    for inputs in (picture, str(folder / "picture.png")):
        assert scores_of(classifier(inputs)) == pytest.approx(expected_scores(family, model, picture), abs=1e-5)

    extractor = pipeline("image-feature-extraction", model=str(folder))
    assert type(extractor.model) is family.model_class
    with torch.no_grad():
        expected = model.base_model(family.processor()(picture, return_tensors="pt").pixel_values)
    for features in (extractor(picture), *extractor([picture, picture], batch_size=2)):
        close(torch.tensor(features), expected.last_hidden_state)
    close(torch.tensor(extractor(picture, pool=True)), expected.pooler_output)


IN_ANOTHER_PROCESS = f"""{PACKAGE_ABSENT}
sys.modules["torchvision"] = None  # neither found nor imported

import json, pathlib
from PIL import Image
from transformers import AutoModelForImageClassification, pipeline
from transformers.models.auto.image_processing_auto import AutoImageProcessor

folder, out = map(pathlib.Path, sys.argv[1:])

def ask(name, **kwargs):
    classifier = pipeline("image-classification", model=str(folder / name), **kwargs)
    assert classifier.image_processor.backend == "pil"
    parts = classifier.model, classifier.image_processor
    modules = sorted({{type(part).__module__.split(".")[0] for part in parts}})
    return modules, classifier(Image.open(folder / "picture.png"))

names = {list(VISION_FAMILIES)}
answers = {{"remote": {{name: ask(name, trust_remote_code=True) for name in names}}}}
for name in names:
    for auto_class in (AutoModelForImageClassification, AutoImageProcessor):
        auto_class.from_pretrained(folder / name, trust_remote_code=True).save_pretrained(out / name)

sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__name__ != "Absent"]
import retnet_hf
answers["package"] = {{name: ask(name) for name in names}}
(out / "answers.json").write_text(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def another_process(tmp_path_factory):
    """What pipelines answer in a process without torchvision, from folders with code, without the package and with it."""
    path, out = tmp_path_factory.mktemp("with_code"), tmp_path_factory.mktemp("out")
    random_picture().save(path / "picture.png")
    with pytest.MonkeyPatch.context() as patch:
        for name, family in VISION_FAMILIES.items():
            patch.setattr(family.config_class, "_auto_class", "AutoConfig")
            patch.setattr(family.classifier_class, "_auto_class", "AutoModelForImageClassification")
            patch.setattr(family.processor_class, "_auto_class", "AutoImageProcessor")
            family.model().save_pretrained(path / name)
            family.processor().save_pretrained(path / name)
    caches = {"HF_HOME": str(out / "hf_home"), "HF_MODULES_CACHE": str(out / "modules")}
    environment = os.environ | caches | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(path), str(out)]
    done = subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return path, out, json.loads((out / "answers.json").read_text())


@pytest.mark.parametrize(("place", "package"), [("package", "retnet_hf"), ("remote", "transformers_modules")])
def test_pipeline_without_torchvision(family, another_process, place, package):
    """With the package, and where it cannot be imported with trust_remote_code: scores of this process, with Pillow."""
    path, out, answers = another_process
    name = family.config_class.model_type
    modules, answer = answers[place][name]
    pil = getattr(sys.modules[family.processor_class.__module__], family.processor_class.__name__ + "Pil")
    assert modules == [package]
    expected = expected_scores(family, family.model(), random_picture(), pil)
    assert scores_of(answer) == pytest.approx(expected, abs=1e-4)  # logits may be 50
    code = {file.name for file in (path / name).glob("*.py")}
    assert {f"configuration_{name}.py", f"modeling_{name}.py", "image_processing_retention.py"} <= code
    assert code <= {file.name for file in (out / name).glob("*.py")}


def test_saved_folders_load_to_the_same_model(family, model, folder):
    for config in (AutoConfig.from_pretrained(folder), AutoConfig.for_model(model.config.model_type)):
        assert type(config) is family.config_class
    assert load_file(folder / "model.safetensors").keys() == model.state_dict().keys()
    assert set() < set(model._no_split_modules) <= {type(module).__name__ for module in model.modules()}
    model.save_pretrained(folder / "sharded", max_shard_size="10KB")
    assert len(list((folder / "sharded").glob("model-*-of-*.safetensors"))) > 2
    for path, kwargs in ((folder, {}), (folder / "sharded", {}), (folder / "sharded", {"device_map": "auto"})):
        loaded, report = AutoClassifier.from_pretrained(path, output_loading_info=True, **kwargs)
        assert not any(report.values()), report
        assert not loaded.training
        assert type(loaded) is type(AutoClassifier.from_config(model.config)) is family.classifier_class
        same_tensors(loaded.state_dict(), model.state_dict())
        assert logits_of(loaded).equal(logits_of(model))
        assert loaded.config.to_dict() | {"_name_or_path": ""} == model.config.to_dict() | {"_name_or_path": ""}

    base, report = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert type(base) is type(AutoModel.from_config(model.config)) is family.model_class
    assert not report["missing_keys"]
    same_tensors(base.state_dict(), model.base_model.state_dict())
    base.save_pretrained(folder / "base")
    classifier, report = AutoClassifier.from_pretrained(folder / "base", num_labels=5, output_loading_info=True)
    assert not report["unexpected_keys"]
    same_tensors(classifier.base_model.state_dict(), base.state_dict())


def test_auto_backbone(family, folder):
    names = family.config().stage_names
    for chosen in ([names[-1]], names[1:], names[-2:]):
        backbone, report = family.backbone_class.from_pretrained(folder, out_features=chosen, output_loading_info=True)
        assert all(name.startswith("norms.") for name in report["missing_keys"])  # those that a classifier has not
        assert type(AutoBackbone.from_config(backbone.config)) is type(backbone)
        with torch.no_grad():
            maps = backbone(random_images()).feature_maps
        assert [features.shape[:2] for features in maps] == [(2, channels) for channels in backbone.channels]
        assert all(features.dim() == 4 and features.isfinite().all() for features in maps)
    by_index = AutoBackbone.from_config(family.config(out_indices=[len(names) - 1])).eval()
    assert by_index.out_features == names[-1:]
    with torch.no_grad():
        assert len(by_index(random_images(), output_hidden_states=True).hidden_states) == len(names)
        assert by_index(random_images()).hidden_states is None


def test_half_precision(family, model):
    for dtype, tolerance in ((torch.bfloat16, 0.06), (torch.float16, 0.03)):
        half = copy.deepcopy(model).to(dtype)
        logits, expected = logits_of(half, random_images().to(dtype)), logits_of(copy.deepcopy(half).float())
        assert logits.dtype == dtype
        assert logits_of(half, random_images()).equal(logits)  # images of float32, as a processor gives them
        assert (logits.float() - expected).norm() < tolerance * expected.norm()

    trained, losses = family.model().train(), []
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    for _ in range(10):
        with torch.autocast("cpu", torch.bfloat16):
            loss = trained(random_images(), labels=torch.tensor([0, 3])).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in trained.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def gradients_of(model, forward=None) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = (model if forward is None else forward)(pixel_values=random_images(3), labels=torch.tensor([0, 3, 1])).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(family, reentrant):
    model, runs = family.model().train(), []
    blocks = [module for module in model.modules() if type(module).__name__.endswith("Block")]
    layers = [layer for block in blocks for layer in block.modules() if isinstance(layer, torch.nn.Linear)]
    for layer in layers:
        layer.register_forward_hook(lambda *_: runs.append(1))
    loss, expected = gradients_of(model)
    assert [name for name, gradient in expected.items() if not gradient.abs().max() > 0] == []
    assert len(runs) == len(layers) > 0
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    runs.clear()
    checkpointed_loss, gradients = gradients_of(model)
    assert 1.8 * len(layers) < len(runs) <= 2 * len(layers)  # the last of a block need not be run again
    close(checkpointed_loss, loss, 1e-6)
    close(gradients.values(), expected.values(), 1e-5)
    runs.clear()
    logits_of(model.eval())
    assert len(runs) == len(layers)


def test_compiled_training_step(family, fresh_compiler):
    model = family.model(**family.smallest).train()
    loss, expected = gradients_of(model)
    compiled_loss, gradients = gradients_of(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    close(compiled_loss, loss, 1e-5)
    close(gradients.values(), expected.values())


def test_torch_export(family, fresh_compiler):
    model, shapes = family.model(**family.smallest), {"pixel_values": {0: Dim("batch")}}
    inputs = {"pixel_values": random_images(3)}
    program = torch.export.export(copy.deepcopy(model), (), inputs, dynamic_shapes=shapes)
    for batch in (1, 5):
        close(program.module()(pixel_values=random_images(batch)).logits, logits_of(model, random_images(batch)))


BACKBONES = {  # presets, and other fields
    ViRConfig: ("tiny-16", {"image_size": 64, "hidden_size": 48, "num_hidden_layers": 4}),
    RMTConfig: ("tiny", {"hidden_sizes": [16, 16, 32, 64], "depths": [1, 1, 1, 1]}),
    MetaFormerConfig: ("tiny", {"depths": [1, 1, 1, 1]}),
}


def segmenter(config_class: type) -> UperNetForSemanticSegmentation:
    head = {"hidden_size": 16, "pool_scales": [1, 2], "auxiliary_channels": 8, "auxiliary_in_channels": None}
    preset, fields = BACKBONES[config_class]
    backbone = config_class.from_preset(preset, **fields, out_features=["stage1", "stage2", "stage3", "stage4"])
    torch.manual_seed(0)
    return UperNetForSemanticSegmentation(UperNetConfig(backbone_config=backbone, num_labels=3, **head))


@pytest.mark.parametrize("family", BACKBONES)
def test_the_backbone_learns_and_is_saved(family, tmp_path):
    """To tell the bright half of each picture from the dark one; the folder names the backbone's configuration."""
    model, pixel_values = segmenter(family).train(), torch.zeros(2, 3, 32, 64)
    pixel_values[0, :, :, :32] = pixel_values[1, :, :, 32:] = 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(16):
        out = model(pixel_values, labels=(pixel_values[:, 0] > 0).long())
        optimizer.zero_grad()
        out.loss.backward()
        assert all(parameter.grad is not None for parameter in model.backbone.parameters())
        optimizer.step()
    assert out.logits.shape == (2, 3, 32, 64)
    blind = math.log(2) * (1 + model.config.auxiliary_loss_weight)  # of both heads, for an answer that has not looked
    assert out.loss.item() < 0.85 * blind
    model.eval().save_pretrained(tmp_path)
    loaded = UperNetForSemanticSegmentation.from_pretrained(tmp_path).eval()
    assert type(loaded.backbone) is type(model.backbone)
    close(loaded(pixel_values).logits, model(pixel_values).logits)


SCRIPT = ROOT / "examples" / "train_image_classifier.py"
FEW = ["--size", "micro", "--image_size", "16", "--per_device_train_batch_size", "8", "--learning_rate", "0.003"]
FEW += ["--shift", "1", "--use_cpu", "True", "--disable_tqdm", "True", "--num_train_epochs", "2"]


@pytest.fixture(scope="module")
def example():
    if not SCRIPT.exists():
        pytest.skip("a source distribution has no examples")
    return runpy.run_path(str(SCRIPT))


@pytest.fixture
def pictures(tmp_path, in_an_empty_folder) -> None:
    for split, count in (("train", 16), ("test", 4)):
        write_pictures(tmp_path / "pictures" / split, count)


@pytest.mark.parametrize("family", ["vir", "rmt", "metaformer", "vit"])
def test_every_family_learns_colours_into_a_folder_that_a_pipeline_loads(example, pictures, family):
    options = ["--data", "pictures", "--model", family, *FEW, "--output_dir", "made", "--save_strategy", "no"]
    metrics = example["main"](options)
    assert metrics["eval_accuracy"] > 0.9
    card = Path("made/README.md").read_text(encoding="utf-8")
    assert all(f"| {colour} | 4 | " in card for colour in COLOURS)
    assert all(Path("made", f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("accuracy", "confusion"))
    classify = pipeline("image-classification", model="made", device="cpu")
    assert (classify.model.config.model_type, classify(colour_picture("green", 99))[0]["label"]) == (family, "green")


def test_an_interrupted_run_that_is_resumed_ends_with_the_same_weights(example, pictures, monkeypatch):
    run = ["--data", "pictures", *FEW, "--output_dir"]
    example["main"]([*run, "whole"])
    example["main"]([*run, "resumed", "--save_total_limit", "3"])
    for file in Path("resumed").glob("*.safetensors"):
        file.unlink()
    _, second = sorted(Path("resumed").glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    shutil.rmtree(second)
    example["main"]([*run, "resumed", "--resume_from_checkpoint", "True"])
    same_weights(Path("whole"), Path("resumed"))


def test_names_of_labels_have_one_number_in_all_splits(example, tmp_path):
    for split, labels in (("train", [3, 1, 2]), ("test", [3, 2])):
        rows = {"image": [colour_picture("green", 0)] * len(labels), "label": labels}
        Dataset.from_dict(rows).cast_column("image", Image()).to_parquet(tmp_path / f"{split}.parquet")
    data = example["load"](example["Options"](data=str(tmp_path)))
    assert data["train"].features["label"].names == ["1", "2", "3"]
    assert [data[split]["label"][:] for split in ("train", "test")] == [[2, 0, 1], [2, 1]]


def write_idx(file: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    file.write_bytes(gzip.compress(head + array.astype(np.uint8).tobytes()))


def test_folders_idx_files_and_data_sets_are_read_with_a_fair_share_held_out(example, tmp_path, in_an_empty_folder):
    load, options = example["load"], example["Options"]
    write_pictures(tmp_path / "photos", 10)
    data = load(options(data="photos", held_out=0.2))
    assert data["train"].features["label"].names == list(COLOURS)
    assert [data[split]["label"].count(label) for split in ("train", "test") for label in range(3)] == [8] * 3 + [2] * 3

    pixels = np.random.default_rng(0).integers(0, 256, (12, 6, 6))
    for part, count in (("train", 12), ("t10k", 4)):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", pixels[:count])
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", np.arange(count) % 3)
    data = load(options(data=str(tmp_path)))
    assert ([len(data[split]) for split in ("train", "test")], data["train"]["label"][:4]) == ([12, 4], [0, 1, 2, 0])
    assert np.array_equal(np.asarray(data["test"][3]["image"]), np.repeat(pixels[3][..., None], 3, axis=2))

    rows = {"picture": [colour_picture(colour, 0) for colour in COLOURS] * 4, "colour": list(COLOURS) * 4}
    Dataset.from_dict(rows).cast_column("picture", Image()).to_parquet(tmp_path / "saved" / "train.parquet")
    data = load(options(data="saved", image_column="picture", label_column="colour", held_out=0.25))
    assert (data["train"].features["label"].names, data["train"][0]["image"].mode) == (list(COLOURS), "RGB")
