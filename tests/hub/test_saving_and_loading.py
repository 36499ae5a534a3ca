# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Folders of weights: saved, sharded, split over devices, read by every Auto class, grown and shrunk."""

import copy
import json
import pickle

import pytest
import torch
from accelerate import infer_auto_device_map, init_empty_weights
from safetensors import safe_open
from safetensors.torch import load_file
from small_models import VOCAB_SIZE, close, greedy, of_every_model, random_ids, rounding, shake, small_config, small_model
from small_vision_models import VISION_FAMILIES
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from retnet_hf import (
    RetNetConfig,
    RetNetForCausalLM,
    RetNetForQuestionAnswering,
    RetNetForSequenceClassification,
    RetNetForTokenClassification,
    RetNetModel,
)


@pytest.fixture
def folder(model, tmp_path):
    """A saved model: the fixtures `model` and `folder` belong together."""
    model.save_pretrained(tmp_path)
    return tmp_path


def logits(model, length: int = 21) -> torch.Tensor:
    with torch.no_grad():
        return model(random_ids(2, length)).logits.cpu()


def same_weights(actual, expected) -> None:
    actual, expected = actual.state_dict(), expected.state_dict()
    assert actual.keys() == expected.keys()
    for name, weight in expected.items():
        assert actual[name].dtype == weight.dtype, name
        assert actual[name].equal(weight), name


def same_buffers(actual, expected) -> None:
    rotates, expected = expected.config.use_rotary, dict(expected.named_buffers())
    assert expected.keys() == dict(actual.named_buffers()).keys()
    assert any(name.endswith("log_decay") for name in expected)
    assert any(name.endswith("frequency") for name in expected) == rotates
    for name, buffer in actual.named_buffers():
        assert buffer.dtype == expected[name].dtype, name
        assert buffer.equal(expected[name]), name


@of_every_model
def test_save_load_roundtrip(model, folder):
    loaded, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert not loaded.training
    same_weights(loaded, model)
    same_buffers(loaded, model)
    assert logits(loaded).equal(logits(model))
    mine, theirs = loaded.config.to_dict(), model.config.to_dict()
    assert {**mine, "_name_or_path": None} == {**theirs, "_name_or_path": None}
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()  # no buffer that is computed from the configuration
    assert json.loads((folder / "config.json").read_text())["model_type"] == model.config.model_type
    ids = random_ids(2, 7)
    on_devices = AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
    assert greedy(on_devices, ids.to(on_devices.device)).cpu().equal(greedy(model, ids))


def test_save_load_roundtrip_of_the_configuration(model, tmp_path):
    model.config.save_pretrained(tmp_path)
    loaded = type(model.config).from_pretrained(tmp_path)
    assert loaded.to_dict() == model.config.to_dict()
    assert type(model.config)(**model.config.to_dict()).to_dict() == model.config.to_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_save_load_dtypes(tmp_path, dtype):
    half = small_model().to(dtype)
    half.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {dtype}  # noqa: SIM118
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert loaded.dtype == loaded.config.dtype == dtype
    same_weights(loaded, half)
    same_buffers(loaded, small_model())
    assert logits(loaded).equal(logits(half))

    widened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert widened.dtype == widened.config.dtype == torch.float32
    assert all(mine.equal(theirs.float()) for mine, theirs in zip(widened.parameters(), half.parameters()))


def decays_of(config):
    """(H,), or (layers, H) where layers have decays of their own; float64."""
    layers = range(config.num_hidden_layers) if config.has_decays_per_layer else range(1)
    return torch.tensor([config.decays(layer) for layer in layers], dtype=torch.float64).squeeze(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_buffers_survive_loading(model, folder, dtype):
    """The decays and frequencies of a fresh model, whatever the type of the weights and the way of loading."""
    for kwargs in ({}, {"device_map": "auto"}, {"device_map": {"": "cpu"}}):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs)
        same_buffers(loaded, model)
        same_buffers(copy.deepcopy(model).to(dtype), model)
    expected = decays_of(model.config)
    torch.testing.assert_close(loaded.model.decay(torch.float64, loaded.device).exp(), expected, rtol=1e-6, atol=0)


def test_buffers_survive_casts(model):
    """From bfloat16 back to float32, and on to float64: never the rounded decays."""
    travelled = copy.deepcopy(model).to(torch.bfloat16).float()
    same_buffers(travelled, model)
    double = copy.deepcopy(model).half().double()
    expected = decays_of(model.config).log()
    torch.testing.assert_close(double.model.decay(torch.float64, double.device), expected, rtol=1e-14, atol=0)


def test_meta_device_load(model):
    """Built on the meta device, materialised and initialised: it runs, with the right buffers and fresh weights."""
    with init_empty_weights(include_buffers=True):
        empty = type(model)(model.config)
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.fill_(float("nan"))  # what materialised memory may hold
    torch.manual_seed(3)
    for module in empty.modules():
        module._is_hf_initialized = False
    empty.init_weights()
    empty.eval()
    same_buffers(empty, model)
    assert all(parameter.isfinite().all() for parameter in empty.parameters())
    assert logits(empty).isfinite().all()
    assert len(set(greedy(empty, random_ids(1, 5), 10)[0].tolist())) > 1

    empty.load_state_dict(model.state_dict())
    assert logits(empty).equal(logits(model))


def test_meta_device_load_initialises_as_construction_does(model):
    torch.manual_seed(3)
    built = type(model)(model.config)
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.to_empty(device="cpu")
    torch.manual_seed(3)
    empty.init_weights()
    for (name, mine), theirs in zip(empty.named_parameters(), built.parameters()):
        assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.2), name


def test_no_split_modules(model):
    names = {type(module).__name__ for module in model.modules()}
    assert model._no_split_modules
    assert set(model._no_split_modules) <= names

    sizes = {name: sum(p.nbytes for p in module.parameters()) for name, module in model.named_modules()}
    layer = max(sizes[f"model.layers.{index}"] for index in range(2))
    rest = sizes["model.embed_tokens"] + sizes["lm_head"]
    device_map = infer_auto_device_map(
        model, max_memory={"cpu": rest + int(1.5 * layer), "disk": 10**9}, no_split_module_classes=model._no_split_modules
    )
    assert set(device_map.values()) == {"cpu", "disk"}
    assert not any(name.startswith("model.layers.") and name.count(".") > 2 for name in device_map), device_map


def test_disk_offload(model, folder, tmp_path_factory):
    """The layers on disk: the state goes where they are computed, and nothing else changes."""
    names = [name for name, _ in model.model.named_children()]
    device_map = {f"model.{name}": "cpu" for name in names} | {"lm_head": "cpu", "model.layers": "disk"}
    for offload_buffers in (False, True):
        loaded = AutoModelForCausalLM.from_pretrained(
            folder, device_map=device_map, offload_folder=tmp_path_factory.mktemp("offload"), offload_buffers=offload_buffers
        )
        assert {p.device.type for p in loaded.model.layers.parameters()} == {"meta"}
        close(logits(loaded), logits(model))
        ids = random_ids(2, 7)
        assert greedy(loaded, ids).equal(greedy(model, ids))
        assert greedy(loaded, ids, num_beams=3).equal(greedy(model, ids, num_beams=3))


@pytest.mark.parametrize("on_disk", ["model.embed_tokens", "model.decay", "model.norm", "model.rotary", "model", "lm_head"])
def test_disk_offload_of_every_part(fla_model, tmp_path, tmp_path_factory, on_disk):
    """Whatever accelerate decides to put on disk, buffers included."""
    model, folder = fla_model, tmp_path
    model.save_pretrained(folder)
    parts = [f"model.{name}" for name, _ in model.model.named_children()] + ["lm_head"]
    device_map = {part: "disk" if part.startswith(on_disk) else "cpu" for part in parts}
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, device_map=device_map, offload_folder=tmp_path_factory.mktemp("offload"), offload_buffers=True
    )
    close(logits(loaded), logits(model))
    assert greedy(loaded, random_ids(2, 7)).equal(greedy(model, random_ids(2, 7)))


def test_sharded_checkpoint(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*-of-*.safetensors"))
    assert len(shards) > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(model.state_dict())
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert not (tmp_path / "model.safetensors").exists()

    for kwargs in ({}, {"device_map": "auto"}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **kwargs)
        same_weights(loaded, model)
        assert logits(loaded).equal(logits(model))
    assert AutoModel.from_pretrained(tmp_path)(random_ids(2, 9))[0].equal(model.model(random_ids(2, 9))[0])


def test_tied_embeddings(tmp_path):
    tied = small_model(tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(tied.named_parameters())
    tied.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert [name for name in saved if "embed_tokens" in name or "lm_head" in name] == ["model.embed_tokens.weight"]

    for kwargs in ({}, {"device_map": "auto"}, {"dtype": torch.bfloat16}):
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **kwargs)
        assert not any(report.values()), report
        assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert logits(loaded).equal(logits(tied))
    with torch.no_grad():
        loaded.model.embed_tokens.weight[5] += 1
    assert loaded.lm_head.weight[5].equal(loaded.model.embed_tokens.weight[5])

    untied = small_model()
    assert untied.lm_head.weight.data_ptr() != untied.model.embed_tokens.weight.data_ptr()


def test_base_model_loads_from_lm_checkpoint(model, folder, tmp_path_factory):
    base, report = type(model.model).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    same_weights(base, model.model)
    assert base(random_ids(2, 9)).last_hidden_state.equal(model.model(random_ids(2, 9)).last_hidden_state)

    alone = tmp_path_factory.mktemp("base")
    model.model.save_pretrained(alone)
    causal, report = type(model).from_pretrained(alone, output_loading_info=True)
    assert set(report["missing_keys"]) == {"lm_head.weight"}
    assert not report["unexpected_keys"]
    same_weights(causal.model, model.model)
    assert causal.lm_head.weight.isfinite().all()
    by_fan_in = model.config.initialization == "fan_in"
    drawn = (3 * model.config.hidden_size) ** -0.5 if by_fan_in else model.config.initializer_range
    assert causal.lm_head.weight.std().item() == pytest.approx(drawn, rel=0.2)


@pytest.mark.parametrize("size", [VOCAB_SIZE + 13, VOCAB_SIZE - 20])
@pytest.mark.parametrize("tied", [False, True])
def test_resize_token_embeddings(tmp_path, size, tied):
    model = small_model(tie_word_embeddings=tied)
    ids = random_ids(2, 21) % (VOCAB_SIZE - 20)
    kept = min(size, VOCAB_SIZE)
    expected = model(ids).logits[..., :kept]
    embeddings = model.resize_token_embeddings(size)
    assert embeddings.num_embeddings == model.config.vocab_size == size
    assert model.lm_head.weight.shape[0] == model.lm_head.out_features == size
    close(model(ids).logits[..., :kept], expected, rounding(32))
    assert model(ids).logits.shape[-1] == size
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model(ids, labels=ids).loss.isfinite()

    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == size
    assert logits_of(loaded, ids).equal(logits_of(model, ids))
    assert greedy(loaded, ids[:, :5]).equal(greedy(model, ids[:, :5]))


def logits_of(model, ids):
    with torch.no_grad():
        return model(ids).logits


def untouched(model):
    """The same weights, never asked for hidden states: the hooks that transformers leaves then do not pickle."""
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    return twin


def test_deepcopy_and_pickle(model, tmp_path):
    model = untouched(model)
    expected = logits(model)
    assert logits(copy.deepcopy(model)).equal(expected)
    assert logits(pickle.loads(pickle.dumps(model))).equal(expected)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert logits(loaded).equal(expected)
    same_buffers(loaded, model)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    fresh = type(model)(model.config).eval()
    fresh.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert logits(fresh).equal(expected)


AUTO_CLASSES = {
    AutoModel: RetNetModel,
    AutoModelForCausalLM: RetNetForCausalLM,
    AutoModelForSequenceClassification: RetNetForSequenceClassification,
    AutoModelForTokenClassification: RetNetForTokenClassification,
    AutoModelForQuestionAnswering: RetNetForQuestionAnswering,
}


def test_auto_classes(model, folder):
    assert type(AutoConfig.from_pretrained(folder)) is type(model.config)
    assert type(AutoConfig.for_model("retnet", hidden_size=64, num_attention_heads=2)) is RetNetConfig
    for auto_class, model_class in AUTO_CLASSES.items():
        name = model_class.__name__
        name = name.replace("RetNet", "RetNetHybrid") if model.config.is_hybrid else name
        assert type(auto_class.from_pretrained(folder)).__name__ == name
        assert type(auto_class.from_config(small_config())) is model_class


@pytest.mark.parametrize("model_class", list(AUTO_CLASSES.values())[2:])
def test_auto_classes_of_heads_save_and_load(tmp_path, model_class):
    head = shake(model_class(small_config(num_labels=2))).eval()
    head.save_pretrained(tmp_path)
    loaded, report = model_class.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    same_weights(loaded, head)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == [model_class.__name__]


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dialect", ["fla", "hybrid", "vir", "rmt", "metaformer"])
def test_buffers_that_no_checkpoint_has_are_right_however_weights_are_loaded(dialect, assign):
    """`to_empty` allocates memory that holds any numbers; `assign` keeps a model on the meta device until then."""
    model = VISION_FAMILIES[dialect].model().eval() if dialect in VISION_FAMILIES else small_model(dialect)
    with torch.device("meta"):
        empty = type(model)(model.config).eval()
    if not assign:
        empty.to_empty(device="cpu")
        for buffer in empty.buffers():
            buffer.fill_(3)
    empty.load_state_dict(model.state_dict(), assign=assign)
    for (name, buffer), (_, other) in zip(model.named_buffers(), empty.named_buffers()):
        assert torch.equal(buffer, other), name
