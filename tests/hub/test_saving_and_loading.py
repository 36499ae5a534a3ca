# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Folders of weights: saved, sharded, split over devices, read by every Auto class, grown and shrunk."""

import copy
import json
import pickle

import pytest
import torch
import transformers
from accelerate import infer_auto_device_map, init_empty_weights
from safetensors.torch import load_file
from small_models import VOCAB_SIZE, close, greedy, of_every_model, random_ids, rounding, same_tensors, shake, small_model
from small_vision_models import VISION_FAMILIES
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import retnet_hf


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path)
    return tmp_path


@torch.no_grad()
def logits(model, ids=None) -> torch.Tensor:
    return model(random_ids(2, 21) if ids is None else ids).logits.cpu()


def same_weights(actual, expected) -> None:
    same_tensors(actual.state_dict(), expected.state_dict())


def same_buffers(actual, expected) -> None:
    buffers = dict(expected.named_buffers())
    assert any(name.endswith("log_decay") for name in buffers)
    assert any(name.endswith("frequency") for name in buffers) == expected.config.use_rotary
    same_tensors(dict(actual.named_buffers()), buffers)


@of_every_model
def test_save_load_roundtrip(model, folder):
    loaded, report = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert not loaded.training
    same_weights(loaded, model)
    same_buffers(loaded, model)
    assert logits(loaded).equal(logits(model))
    config = model.config.to_dict() | {"_name_or_path": ""}
    assert loaded.config.to_dict() | {"_name_or_path": ""} == config
    assert type(model.config)(**model.config.to_dict()).to_dict() | {"_name_or_path": ""} == config
    saved = load_file(folder / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()  # no buffer that is computed from the configuration
    ids = random_ids(2, 7)
    on_devices = AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
    assert greedy(on_devices, ids.to(on_devices.device)).cpu().equal(greedy(model, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_save_load_dtypes(tmp_path, dtype):
    half = small_model().to(dtype)
    half.save_pretrained(tmp_path)
    same_tensors(load_file(tmp_path / "model.safetensors"), half.state_dict())
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == loaded.config.dtype == dtype
    same_weights(loaded, half)
    same_buffers(loaded, small_model())
    assert logits(loaded).equal(logits(half))

    widened = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert widened.config.dtype == torch.float32
    same_weights(widened, half.float())


def decays_of(config):
    """(H,), or (layers, H) where layers have decays of their own; float64."""
    layers = range(config.num_hidden_layers) if config.has_decays_per_layer else range(1)
    return torch.tensor([config.decays(layer) for layer in layers], dtype=torch.float64).squeeze(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_buffers_survive_loading(model, folder, dtype):
    for kwargs in ({}, {"device_map": "auto"}, {"device_map": {"": "cpu"}}):
        same_buffers(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs), model)
    cast = copy.deepcopy(model).to(dtype)
    same_buffers(cast, model)
    same_buffers(cast.float(), model)
    decays = cast.double().model.decay(torch.float64, cast.device)
    torch.testing.assert_close(decays, decays_of(model.config).log(), rtol=1e-14, atol=0)


def test_meta_device_load(model):
    with init_empty_weights(include_buffers=True):
        empty = type(model)(model.config)
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.fill_(float("nan"))  # what materialised memory may hold
    for module in empty.modules():
        module._is_hf_initialized = False
    empty.init_weights()
    same_buffers(empty.eval(), model)
    for (name, mine), theirs in zip(empty.named_parameters(), type(model)(model.config).parameters()):
        assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.2), name
    assert len(set(greedy(empty, random_ids(1, 5), 10)[0].tolist())) > 1

    empty.load_state_dict(model.state_dict())
    assert logits(empty).equal(logits(model))


def test_no_split_modules(model):
    assert set(model._no_split_modules) <= {type(module).__name__ for module in model.modules()}
    sizes = {name: sum(p.nbytes for p in module.parameters()) for name, module in model.named_modules()}
    layer = max(sizes[f"model.layers.{index}"] for index in range(2))
    memory = {"cpu": sizes["model.embed_tokens"] + sizes["lm_head"] + int(1.5 * layer), "disk": 10**9}
    device_map = infer_auto_device_map(model, max_memory=memory, no_split_module_classes=model._no_split_modules)
    assert set(device_map.values()) == {"cpu", "disk"}
    assert not any(name.startswith("model.layers.") and name.count(".") > 2 for name in device_map), device_map


ON_DISK = ["model.layers", "model.embed_tokens", "model.decay", "model.norm", "model.rotary", "model", "lm_head"]


@pytest.mark.parametrize("on_disk", ON_DISK)
def test_disk_offload(model, folder, on_disk):
    """Of any part, buffers included: the state goes where layers are computed, and nothing else changes."""
    parts = [f"model.{name}" for name, _ in model.model.named_children()] + ["lm_head"]
    device_map = {part: "disk" if part.startswith(on_disk) else "cpu" for part in parts}
    ids = random_ids(2, 7)
    for number, offload_buffers in enumerate((True, False) if on_disk == "model.layers" else (True,)):
        offload = {"offload_folder": folder / str(number), "offload_buffers": offload_buffers}
        loaded = AutoModelForCausalLM.from_pretrained(folder, device_map=device_map, **offload)
        on_meta = {p.device.type for p in loaded.model.layers.parameters()} == {"meta"}
        assert on_meta == (on_disk in ("model", "model.layers"))
        close(logits(loaded), logits(model))
        assert greedy(loaded, ids).equal(greedy(model, ids))
        assert greedy(loaded, ids, num_beams=3).equal(greedy(model, ids, num_beams=3))


def test_sharded_checkpoint(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = {shard.name for shard in tmp_path.glob("*.safetensors")}
    assert len(shards) > 2
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert (set(index), set(index.values())) == (set(model.state_dict()), shards)
    for kwargs in ({}, {"device_map": "auto"}):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, **kwargs)
        same_weights(loaded, model)
        assert logits(loaded).equal(logits(model))
    same_weights(AutoModel.from_pretrained(tmp_path), model.model)


def test_tied_embeddings(tmp_path):
    tied = small_model(tie_word_embeddings=True)
    assert "lm_head.weight" not in dict(tied.named_parameters())
    tied.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert [name for name in saved if "embed_tokens" in name or "lm_head" in name] == ["model.embed_tokens.weight"]

    for kwargs in ({"dtype": torch.bfloat16}, {"device_map": "auto"}, {}):
        loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **kwargs)
        assert not any(report.values()), report
        assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert logits(loaded).equal(logits(tied))
    untied = small_model()
    assert untied.lm_head.weight.data_ptr() != untied.model.embed_tokens.weight.data_ptr()


def test_base_model_loads_from_lm_checkpoint(model, folder):
    base, report = type(model.model).from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    same_weights(base, model.model)

    model.model.save_pretrained(folder / "base")
    causal, report = type(model).from_pretrained(folder / "base", output_loading_info=True)
    assert set(report["missing_keys"]) == {"lm_head.weight"}
    assert not report["unexpected_keys"]
    same_weights(causal.model, model.model)
    by_fan_in = model.config.initialization == "fan_in"
    drawn = (3 * model.config.hidden_size) ** -0.5 if by_fan_in else model.config.initializer_range
    assert causal.lm_head.weight.std().item() == pytest.approx(drawn, rel=0.2)


@pytest.mark.parametrize("size", [VOCAB_SIZE + 13, VOCAB_SIZE - 20])
@pytest.mark.parametrize("tied", [False, True])
def test_resize_token_embeddings(tmp_path, size, tied):
    model, ids = small_model(tie_word_embeddings=tied), random_ids(2, 21) % (VOCAB_SIZE - 20)
    expected = logits(model, ids)[..., :size]
    assert model.resize_token_embeddings(size).num_embeddings == model.config.vocab_size == size
    assert model.lm_head.weight.shape[0] == model.lm_head.out_features == logits(model, ids).shape[-1] == size
    close(logits(model, ids)[..., :VOCAB_SIZE], expected, rounding(32))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model(ids, labels=ids).loss.isfinite()

    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == size
    assert logits(loaded, ids).equal(logits(model, ids))
    assert greedy(loaded, ids[:, :5]).equal(greedy(model, ids[:, :5]))


def test_deepcopy_and_pickle(model, tmp_path):
    """Of a model that was never asked for hidden states: the hooks that transformers leaves then do not pickle."""
    twin = type(model)(model.config).eval()
    twin.load_state_dict(model.state_dict())
    torch.save(twin, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for each in (twin, copy.deepcopy(twin), pickle.loads(pickle.dumps(twin)), loaded):
        same_buffers(each, model)
        assert logits(each).equal(logits(model))


TASKS = ["", "ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"]


@pytest.mark.parametrize("task", TASKS)
def test_auto_classes(model, folder, task):
    auto_class, prefix = getattr(transformers, f"AutoModel{task}"), "RetNetHybrid" if model.config.is_hybrid else "RetNet"
    assert type(AutoConfig.from_pretrained(folder)) is type(model.config)
    assert type(AutoConfig.for_model("retnet", hidden_size=64, num_attention_heads=2)) is retnet_hf.RetNetConfig
    model_class = type(auto_class.from_config(model.config))
    assert model_class is type(auto_class.from_pretrained(folder)) is getattr(retnet_hf, f"{prefix}{task or 'Model'}")
    made = shake(model_class(model.config))
    made.save_pretrained(folder / "again")
    loaded, report = model_class.from_pretrained(folder / "again", output_loading_info=True)
    assert not any(report.values()), report
    same_weights(loaded, made)
    assert loaded.config.architectures == [model_class.__name__]


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
