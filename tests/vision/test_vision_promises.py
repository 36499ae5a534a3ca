# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""What users of a Hugging Face image classifier rely on, one test per promise, for ViR, RMT and MetaFormer."""

import copy
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from accelerate import init_empty_weights
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file
from small_models import PACKAGE_ABSENT, close, rounding
from small_vision_models import VISION_FAMILIES, random_images, random_picture
from torch import Tensor
from torch.export import Dim
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.data import Dataset
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    AutoModelForImageClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    pipeline,
)
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING, AutoImageProcessor


@pytest.fixture(scope="module", params=VISION_FAMILIES)
def family(request):
    return VISION_FAMILIES[request.param]


@pytest.fixture(scope="module")
def model(family):
    """A classifier, which tests do not change."""
    return family.model()


@pytest.fixture
def folder(family, model, tmp_path):
    """The classifier, saved with its image processor."""
    model.save_pretrained(tmp_path)
    family.processor().save_pretrained(tmp_path)
    return tmp_path


def logits_of(model, pixel_values: Tensor | None = None, **kwargs) -> Tensor:
    with torch.no_grad():
        return model(random_images() if pixel_values is None else pixel_values, **kwargs).logits


def in_float64(model, pixel_values: Tensor) -> Tensor:
    """Logits in which the order of summation, which depends on the batch, is no matter."""
    return logits_of(copy.deepcopy(model).double(), pixel_values.double(), interpolate_pos_encoding=True)


def same_tensors(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype, name
        assert actual[name].equal(tensor), name


def same_buffers(actual, expected) -> None:
    same_tensors(dict(actual.named_buffers()), dict(expected.named_buffers()))


def computed_buffers(model) -> dict[str, Tensor]:
    """Buffers that no checkpoint holds: they follow from the configuration."""
    saved = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in saved}


def test_forward_shapes(family, model):
    """(batch, num_labels) logits; the base model gives last_hidden_state."""
    assert logits_of(model, random_images(3)).shape == (3, 5)
    base = family.model(family.model_class)
    with torch.no_grad():
        out = base(random_images(3))
    assert out.last_hidden_state.shape[0] == 3
    assert out.last_hidden_state.isfinite().all()
    assert out.pooler_output.shape == (3, base.config.hidden_size)
    close(model.base_model(random_images(3)).pooler_output, model.base_model(pixel_values=random_images(3))[1], 0)


def test_batch_equals_rows(model):
    together = random_images(4)
    close(in_float64(model, together), torch.cat([in_float64(model, row[None]) for row in together]), 1e-11)
    assert not logits_of(model, together)[0].allclose(logits_of(model, together)[1], atol=1e-2)


def test_eval_is_deterministic(model):
    """Also with interpolated positions, at the model's own size."""
    assert not model.training
    assert logits_of(model).equal(logits_of(model))
    assert logits_of(model, interpolate_pos_encoding=True).equal(logits_of(model))


def test_tuple_output(model):
    options = {"labels": torch.tensor([0, 3]), "output_hidden_states": True}
    for one, inputs in ((model, options), (model, {}), (model.base_model, {"output_hidden_states": True})):
        with torch.no_grad():
            named = one(random_images(), **inputs)
            plain = one(random_images(), return_dict=False, **inputs)
        assert type(plain) is tuple
        for mine, theirs in zip(tree_leaves(plain), tree_leaves(named.to_tuple()), strict=True):
            assert mine.equal(theirs)


def test_output_hidden_states(family, model):
    """One per layer, or stage, and the embeddings, by argument and by config; none unasked."""
    with torch.no_grad():
        assert model(random_images()).hidden_states is None
        asked = model(random_images(), output_hidden_states=True)
        by_config = family.model(output_hidden_states=True)(random_images())
    assert len(asked.hidden_states) == model.config.num_hidden_layers + 1
    assert asked.logits.equal(logits_of(model))
    for mine, theirs in zip(asked.hidden_states, by_config.hidden_states, strict=True):
        assert mine.equal(theirs)
        assert mine.shape[0] == 2
    states = asked.hidden_states
    assert not any(torch.equal(state, following) for state, following in zip(states, states[1:]))


@pytest.mark.parametrize("size", [(64, 64), (64, 40), (24, 48)])
def test_bigger_images(family, model, size):
    """Taken as they are, or with interpolate_pos_encoding=True."""
    pixel_values = random_images(2, *size)
    logits = logits_of(model, pixel_values, interpolate_pos_encoding=True)
    assert logits.shape == (2, 5)
    assert logits.isfinite().all()
    close(in_float64(model, pixel_values), torch.cat([in_float64(model, row[None]) for row in pixel_values]), 1e-11)
    corner = pixel_values.clone()
    corner[:, :, -8:, -8:] += 1
    assert not logits_of(model, corner, interpolate_pos_encoding=True).allclose(logits, atol=1e-4)


def answer_or_refusal(model, pixel_values: Tensor, **kwargs) -> Tensor | str:
    """Logits, or the message of a ValueError."""
    try:
        return logits_of(model, pixel_values, **kwargs)
    except ValueError as error:
        return str(error)


def test_wrong_size_is_refused(model):
    """Without interpolation another size works, or is refused with a ValueError that says the size."""
    answer = answer_or_refusal(model, random_images(1, 64, 64))
    if isinstance(answer, str):
        assert "64" in answer
        assert "32" in answer
    else:
        assert answer.isfinite().all()


def test_other_configs_run(family):
    """Non-square images and patches where the config has them, grey images, one label."""
    shapes = {"image_size": (24, 40)} | ({"patch_size": (4, 8)} if "patch_size" in family.fields else {})
    assert logits_of(family.model(**shapes), random_images(2, 24, 40)).shape == (2, 5)
    assert logits_of(family.model(num_channels=1), random_images(channels=1)).shape == (2, 5)
    assert logits_of(family.model(num_labels=1)).shape == (2, 1)


def test_wrong_channels_are_refused(model):
    for channels in (1, 4):
        with pytest.raises(ValueError, match="num_channels"):
            logits_of(model, random_images(channels=channels))


@pytest.mark.parametrize("size", [(33, 33), (32, 35), (31, 32)])
def test_odd_sizes_are_refused_or_work(model, size):
    """A size that is no multiple of the patch: a ValueError, or an answer to which the last pixels matter."""
    pixel_values = random_images(2, *size)
    logits = answer_or_refusal(model, pixel_values, interpolate_pos_encoding=True)
    if isinstance(logits, str):
        assert str(size) in logits
        return
    assert logits.isfinite().all()
    for edge in (pixel_values[:, :, -1, :], pixel_values[:, :, :, -1]):
        edge += 10
        moved = logits_of(model, pixel_values, interpolate_pos_encoding=True)
        assert not moved.allclose(logits, atol=1e-4)
        logits = moved


def test_labels_in_the_config(family, tmp_path):
    names = dict(enumerate(["cat", "dog", "bird", "fish", "yak", "zebu", "ant"]))
    model = family.model(num_labels=7, id2label=names, label2id={name: number for number, name in names.items()})
    assert logits_of(model).shape == (2, 7)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert (loaded.config.num_labels, loaded.config.id2label) == (7, names)
    assert loaded.config.label2id == {name: number for number, name in names.items()}
    assert logits_of(loaded).equal(logits_of(model))


def test_another_number_of_labels(family, model, folder):
    """The body is kept and the head made anew."""
    loaded, report = AutoModelForImageClassification.from_pretrained(
        folder, num_labels=8, ignore_mismatched_sizes=True, output_loading_info=True
    )
    assert logits_of(loaded).shape == (2, 8)
    assert {key for key, *_ in report["mismatched_keys"]} == {"classifier.weight", "classifier.bias"}
    assert not report["missing_keys"]
    kept = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("classifier.")}
    same_tensors({name: loaded.state_dict()[name] for name in kept}, kept)
    assert loaded.classifier.weight.isfinite().all()
    assert loaded.classifier.weight.std() < 0.1
    with pytest.raises(RuntimeError, match="size mismatch|mismatched"):
        AutoModelForImageClassification.from_pretrained(folder, num_labels=8)


PROBLEMS = {
    "single_label_classification": (5, torch.tensor([0, 3]), lambda z, y: F.cross_entropy(z, y)),
    "multi_label_classification": (
        5,
        torch.tensor([[1.0, 0, 0, 1, 0], [0, 0, 1, 0, 0]]),
        lambda z, y: F.binary_cross_entropy_with_logits(z, y),
    ),
    "regression": (1, torch.tensor([0.5, -2.0]), lambda z, y: F.mse_loss(z.squeeze(), y)),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_problem_types(family, problem):
    """The loss is that of the formula, by problem_type and by guess."""
    num_labels, labels, formula = PROBLEMS[problem]
    for options in ({}, {"problem_type": problem}):
        model = family.model(num_labels=num_labels, **options)
        out = model(random_images(), labels=labels)
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
    assert pil.backend == "pil"
    assert isinstance(pil, family.processor_class) or type(pil).__name__ == family.processor_class.__name__ + "Pil"


def scores_of(answer: list[dict]) -> dict[str, float]:
    return {label["label"]: label["score"] for label in answer}


def expected_scores(family, model, picture, processor_class: type | None = None) -> dict[str, float]:
    processor = (processor_class or family.processor_class)(size=32)
    probabilities = logits_of(model, processor(picture, return_tensors="pt").pixel_values).softmax(-1)[0]
    return {model.config.id2label[number]: score.item() for number, score in enumerate(probabilities)}


def test_pipeline_image_classification(family):
    """Labels of the config, scores that sum to one, top_k, batches."""
    model = family.model(id2label=dict(enumerate(["ant", "bee", "cow", "dog", "eel"]))).double()
    classifier = pipeline("image-classification", model=model, image_processor=family.processor())
    pictures = [random_picture(seed=seed) for seed in range(5)]
    alone = [scores_of(classifier(picture)) for picture in pictures]
    for picture, scores in zip(pictures, alone):
        assert list(scores.values()) == sorted(scores.values(), reverse=True)
        assert sum(scores.values()) == pytest.approx(1, abs=1e-5)
        assert scores == pytest.approx(expected_scores(family, model, picture), abs=1e-5)
    for one, other in zip(classifier(pictures, batch_size=2), alone, strict=True):
        assert list(scores_of(one)) == list(other)
        assert scores_of(one) == pytest.approx(other, abs=1e-5)
    assert list(scores_of(classifier(pictures[0], top_k=2))) == list(alone[0])[:2]
    assert len(classifier(random_picture(mode="L"))) == 5


def test_pipeline_from_folder(family, model, folder):
    """pipeline(model=<saved folder>) finds model and processor by itself; image-feature-extraction too."""
    picture = random_picture()
    picture.save(folder / "picture.png")
    classifier = pipeline("image-classification", model=str(folder))
    assert type(classifier.model) is family.classifier_class
    assert type(classifier.image_processor) is family.processor_class
    for inputs in (picture, str(folder / "picture.png")):
        assert scores_of(classifier(inputs)) == pytest.approx(expected_scores(family, model, picture), abs=1e-5)
    assert pipeline(model=str(folder), task="image-classification", dtype=torch.bfloat16).model.dtype == torch.bfloat16

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
    parts = classifier.model, classifier.image_processor
    assert classifier.image_processor.backend == "pil"
    answer = classifier(Image.open(folder / "picture.png"))
    return sorted({{type(part).__module__.split(".")[0] for part in parts}}), answer

names = {list(VISION_FAMILIES)}
answers = {{"remote": {{name: ask(name, trust_remote_code=True) for name in names}}}}
for name in names:
    for auto_class in (AutoModelForImageClassification, AutoImageProcessor):
        auto_class.from_pretrained(folder / name, trust_remote_code=True).save_pretrained(out / name)

[absent] = [finder for finder in sys.meta_path if type(finder).__name__ == "Absent"]
sys.meta_path.remove(absent)
import retnet_hf
answers["package"] = {{name: ask(name) for name in names}}
(out / "answers.json").write_text(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def another_process(tmp_path_factory):
    """What pipelines answer in a process without torchvision, from folders with code and without the package, then with."""
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
    name, model = family.config_class.model_type, family.model()
    modules, answer = answers[place][name]
    pil = getattr(sys.modules[family.processor_class.__module__], family.processor_class.__name__ + "Pil")
    expected = expected_scores(family, model, random_picture(), pil)
    assert modules == [package]
    assert scores_of(answer) == pytest.approx(expected, abs=1e-4)  # logits may be 50
    code = {file.name for file in (path / name).glob("*.py")}
    assert {f"configuration_{name}.py", f"modeling_{name}.py", "image_processing_retention.py"} <= code
    assert code <= {file.name for file in (out / name).glob("*.py")}


def test_save_load_roundtrip(family, model, folder):
    loaded, report = AutoModelForImageClassification.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert not loaded.training
    same_tensors(loaded.state_dict(), model.state_dict())
    same_buffers(loaded, model)
    assert logits_of(loaded).equal(logits_of(model))
    assert {**loaded.config.to_dict(), "_name_or_path": None} == {**model.config.to_dict(), "_name_or_path": None}
    assert load_file(folder / "model.safetensors").keys() == model.state_dict().keys()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_save_load_dtypes(family, model, folder, tmp_path_factory, dtype):
    half = family.model().to(dtype)
    path = tmp_path_factory.mktemp("half")
    half.save_pretrained(path)
    with safe_open(path / "model.safetensors", "pt") as file:
        saved = {file.get_tensor(name).dtype for name in file.keys() if not name.endswith("num_batches_tracked")}  # noqa: SIM118
    assert saved == {dtype}
    loaded = AutoModelForImageClassification.from_pretrained(path, dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert loaded.config.dtype == dtype
    same_tensors(loaded.state_dict(), half.state_dict())
    assert logits_of(loaded, random_images().to(dtype)).equal(logits_of(half, random_images().to(dtype)))

    asked = AutoModelForImageClassification.from_pretrained(folder, dtype=dtype)
    assert {parameter.dtype for parameter in asked.parameters()} == {dtype}
    for mine, theirs in zip(asked.parameters(), model.parameters()):
        assert mine.equal(theirs.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_survive_loading(model, folder, dtype):
    """Buffers of a loaded model equal those of a fresh one, also in bf16 and with a device map."""
    expected = computed_buffers(model)
    assert expected
    for kwargs in ({}, {"device_map": "auto"}, {"device_map": {"": "cpu"}}):
        loaded = AutoModelForImageClassification.from_pretrained(folder, dtype=dtype, **kwargs)
        same_tensors(computed_buffers(loaded), expected)
    same_tensors(computed_buffers(copy.deepcopy(model).to(dtype)), expected)


def test_sharded_and_device_map(family, model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="10KB")
    shards = sorted(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(shards) > 2
    assert (
        json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"].keys() == model.state_dict().keys()
    )
    for kwargs in ({}, {"device_map": "auto"}):
        loaded = AutoModelForImageClassification.from_pretrained(tmp_path, **kwargs)
        same_tensors(loaded.state_dict(), model.state_dict())
        assert logits_of(loaded).equal(logits_of(model))


def test_no_split_modules(model):
    names = {type(module).__name__ for module in model.modules()}
    assert model._no_split_modules
    assert set(model._no_split_modules) <= names


def test_base_model_loads_from_classifier(family, model, folder, tmp_path_factory):
    base, report = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert type(base) is family.model_class
    assert not report["missing_keys"]
    same_tensors(base.state_dict(), model.base_model.state_dict())
    with torch.no_grad():
        assert base(random_images())[0].equal(model.base_model(random_images())[0])

    path = tmp_path_factory.mktemp("base")
    base.save_pretrained(path)
    classifier, report = AutoModelForImageClassification.from_pretrained(path, num_labels=5, output_loading_info=True)
    assert not report["unexpected_keys"]
    same_tensors(classifier.base_model.state_dict(), base.state_dict())


def test_auto_classes(family, folder):
    assert type(AutoConfig.from_pretrained(folder)) is family.config_class
    assert type(AutoConfig.for_model(family.config_class.model_type)) is family.config_class
    for auto_class, model_class in (
        (AutoModel, family.model_class),
        (AutoModelForImageClassification, family.classifier_class),
    ):
        assert type(auto_class.from_pretrained(folder)) is model_class
        assert type(auto_class.from_config(family.config())) is model_class
    assert type(AutoBackbone.from_config(family.config())) is family.backbone_class


def test_auto_backbone(family, folder):
    """Feature maps (n, channels, h, w) of the chosen stages, with the weights of the classifier's folder."""
    names = family.config().stage_names
    for chosen in ([names[-1]], names[1:], names[-2:]):
        backbone, report = family.backbone_class.from_pretrained(folder, out_features=chosen, output_loading_info=True)
        assert all(name.startswith("norms.") for name in report["missing_keys"])  # those that a classifier has not
        assert type(AutoBackbone.from_config(backbone.config)) is type(backbone)
        assert backbone.out_features == chosen
        with torch.no_grad():
            maps = backbone(random_images()).feature_maps
        assert [feature_map.shape[:2] for feature_map in maps] == [(2, channels) for channels in backbone.channels]
        assert all(feature_map.dim() == 4 and feature_map.isfinite().all() for feature_map in maps)
    by_index = AutoBackbone.from_config(family.config(out_indices=[len(names) - 1])).eval()
    assert by_index.out_features == names[-1:]
    with torch.no_grad():
        assert len(by_index(random_images(), output_hidden_states=True).hidden_states) == len(names)
        assert by_index(random_images()).hidden_states is None


def test_deepcopy_and_pickle(family, tmp_path):
    model = family.model()
    expected = logits_of(model)
    torch.save(model, tmp_path / "model.pt")
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(tmp_path / "model.pt", weights_only=False)]
    for twin in twins:
        assert logits_of(twin).equal(expected)
        same_buffers(twin, model)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    fresh = family.fresh(seed=9).eval()
    fresh.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert logits_of(fresh).equal(expected)


def test_meta_device_load(family, model):
    """Built on the meta device, materialised and initialised, the model runs and its buffers are right."""
    with init_empty_weights(include_buffers=True):
        empty = family.classifier_class(model.config)
    assert {tensor.device.type for tensor in [*empty.parameters(), *empty.buffers()]} == {"meta"}
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*empty.parameters(), *empty.buffers()]:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)  # what materialised memory may hold
    for module in empty.modules():
        module._is_hf_initialized = False
    empty.init_weights()
    fresh = family.fresh()
    same_buffers(empty, fresh)
    for (name, mine), theirs in zip(empty.named_parameters(), fresh.parameters()):
        assert mine.isfinite().all(), name
        if mine.numel() > 200:
            assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.3), name
    assert logits_of(empty.eval()).isfinite().all()
    empty.load_state_dict(model.state_dict())
    assert logits_of(empty).equal(logits_of(model))


def test_half_precision(family, model):
    """bf16 close to fp32, fp16 finite, autocast trains."""
    half = copy.deepcopy(model).to(torch.bfloat16)
    full = copy.deepcopy(model)
    full.load_state_dict(half.state_dict())
    expected = logits_of(full)
    logits = logits_of(half, random_images().to(torch.bfloat16))
    assert logits.dtype == torch.bfloat16
    assert logits_of(half, random_images()).equal(logits)  # images of float32, as a processor gives them
    assert (logits.float() - expected).norm() < 0.06 * expected.norm()
    small = logits_of(copy.deepcopy(model).half(), random_images().half())
    assert small.dtype == torch.float16
    assert small.isfinite().all()
    assert (small.float() - logits_of(model)).norm() < 0.03 * expected.norm()

    labels = torch.tensor([0, 3])
    trained = family.model().train()
    with torch.autocast("cpu", torch.bfloat16):
        out = trained(random_images(), labels=labels)
    out.loss.backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in trained.parameters())
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    losses = []
    for _ in range(10):
        with torch.autocast("cpu", torch.bfloat16):
            loss = trained(random_images(), labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
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
    """Loss and gradients are the same, and blocks are run again; in evaluation nothing is."""
    model = family.model().train()
    blocks = [module for module in model.modules() if type(module).__name__.endswith("Block")]
    layers = [layer for block in blocks for layer in block.modules() if isinstance(layer, torch.nn.Linear)]
    runs = []
    for layer in layers:
        layer.register_forward_hook(lambda *_: runs.append(1))
    loss, expected = gradients_of(model)
    assert len(runs) == len(layers) > 0
    assert model.supports_gradient_checkpointing
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    model.enable_input_require_grads()
    runs.clear()
    checkpointed_loss, gradients = gradients_of(model)
    assert 1.8 * len(layers) < len(runs) <= 2 * len(layers)  # the last of a block need not be run again
    close(checkpointed_loss, loss, 1e-6)
    for name in expected:
        close(gradients[name], expected[name], 1e-5)
    runs.clear()
    logits_of(model.eval())
    assert len(runs) == len(layers)


def test_every_parameter_gets_a_gradient(family):
    """No dead parameters in the classifier."""
    _, gradients = gradients_of(family.model().train())
    assert [name for name, gradient in gradients.items() if not gradient.abs().max() > 0] == []


def test_compiled_training_step(family, fresh_compiler):
    """One graph (aot_eager): same loss and gradients."""
    model = family.model(**family.smallest).train()
    loss, expected = gradients_of(model)
    compiled_loss, gradients = gradients_of(model, torch.compile(model, fullgraph=True, backend="aot_eager"))
    close(compiled_loss, loss, 1e-5)
    for name in expected:
        close(gradients[name], expected[name])


def test_torch_export(family, fresh_compiler):
    """With the batch size left open."""
    model = family.model(**family.smallest)
    program = torch.export.export(
        copy.deepcopy(model), (), {"pixel_values": random_images(3)}, dynamic_shapes={"pixel_values": {0: Dim("batch")}}
    )
    for batch in (1, 2, 5):
        close(program.module()(pixel_values=random_images(batch)).logits, logits_of(model, random_images(batch)))


class Colours(Dataset):
    """Noisy pictures of one of five colours, each a class."""

    def __init__(self, count: int = 64, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        colours = torch.randn(5, 3, 1, 1, generator=torch.Generator().manual_seed(1))
        self.labels = torch.randint(5, (count,), generator=generator)
        self.images = 2 * colours[self.labels] + 0.5 * torch.randn(count, 3, 32, 32, generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def accuracy(evaluated) -> dict[str, float]:
    assert evaluated.predictions.shape == (20, 5)
    return {"accuracy": float((evaluated.predictions.argmax(-1) == evaluated.label_ids).mean())}


def trainer(folder, model, callbacks=(), **arguments) -> Trainer:
    defaults = {
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "max_steps": 20,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
    }
    return Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(folder), **(defaults | arguments)),
        train_dataset=Colours(),
        eval_dataset=Colours(20, seed=5),
        compute_metrics=accuracy,
        callbacks=list(callbacks),
    )


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


class StopAtTen(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= 10


def test_trainer_learns(family, tmp_path):
    """20 steps lower the loss, evaluate() returns the metric, resuming at step 10 ends at the same weights."""
    whole = trainer(tmp_path / "whole", family.fresh())
    whole.train()
    assert len(losses(whole)) == 20
    assert sum(losses(whole)[-3:]) / 3 < 0.8 * losses(whole)[0]
    metrics = whole.evaluate()
    assert metrics["eval_accuracy"] > 0.5
    assert whole.predict(Colours(20, seed=5)).predictions.shape == (20, 5)

    saving = {"save_strategy": "steps", "save_steps": 10}
    first = trainer(tmp_path / "two", family.fresh(), callbacks=[StopAtTen()], **saving)
    first.train()
    assert first.state.global_step == 10
    second = trainer(tmp_path / "two", family.fresh(seed=9), **saving)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 20
    same_tensors(second.model.state_dict(), whole.model.state_dict())
    assert losses(second) == losses(whole)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "two" / "checkpoint-20")
    same_tensors(loaded.state_dict(), whole.model.state_dict())


class SeveralColours(Colours):
    """Pictures that may have several labels at once, for which the loss is a mean whatever the number of items."""

    def __getitem__(self, index: int) -> dict:
        item = super().__getitem__(index)
        return item | {"labels": torch.eye(5)[item["labels"]]}


@pytest.mark.parametrize("pictures", [Colours, SeveralColours])
def test_accumulated_gradients_are_those_of_the_whole_batch(family, tmp_path, pictures):
    """Trainer divides by the number of steps only for a model that says that it does not take the number of items."""
    options = {"max_steps": 1, "logging_steps": 1}
    whole = trainer(tmp_path / "whole", family.fresh(), **options)
    parts = trainer(
        tmp_path / "parts", family.fresh(), per_device_train_batch_size=4, gradient_accumulation_steps=2, **options
    )
    for run in (whole, parts):
        run.train_dataset = pictures()
        run.train()
    assert losses(parts) == pytest.approx(losses(whole), rel=0.1)  # a batch norm sees half the images at a time


def test_peft_lora(family, tmp_path):
    """On all linear layers with the head trained: attaches, trains, saves, loads, merges to the same logits."""
    base = family.model()
    options = {"r": 4, "lora_alpha": 16, "target_modules": "all-linear", "modules_to_save": ["classifier"]}
    tuned = get_peft_model(copy.deepcopy(base), LoraConfig(**options))
    close(logits_of(tuned), logits_of(base), 1e-6)
    frozen = {name: parameter.clone() for name, parameter in tuned.named_parameters() if not parameter.requires_grad}
    trained = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    assert frozen
    assert len(trained) > 4
    batch = next(iter(torch.utils.data.DataLoader(Colours(), batch_size=16)))
    optimizer, history = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(12):
        loss = tuned(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    assert history[-1] < 0.7 * history[0]
    assert all(parameter.equal(frozen[name]) for name, parameter in tuned.named_parameters() if name in frozen)

    tuned.eval().double()  # in which a merged weight is as good as two
    expected = logits_of(tuned)
    tuned.save_pretrained(tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(copy.deepcopy(base).double(), tmp_path / "adapter").eval()
    close(logits_of(loaded), expected, 1e-11)
    merged = loaded.merge_and_unload()
    assert type(merged) is family.classifier_class
    close(logits_of(merged), expected, 1e-11)
    merged.save_pretrained(tmp_path / "merged")
    close(logits_of(AutoModelForImageClassification.from_pretrained(tmp_path / "merged")), expected, 1e-11)
