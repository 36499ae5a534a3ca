# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Folders of weights: saved, sharded, split over devices, read by every Auto class, grown and shrunk."""

import copy
import json
import pickle

import pytest
import small_models
import torch
import transformers
from accelerate import infer_auto_device_map, init_empty_weights
from safetensors.torch import load_file
from small_models import COVERING, VOCAB_SIZE, close, greedy, of_every_model, random_ids, same_tensors, shake, small_model
from small_vision_models import VISION_FAMILIES, random_images
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageClassification

import retnet_hf


@pytest.fixture
def folder(model, tmp_path):
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture(scope="module", params=[*COVERING, *VISION_FAMILIES])
def any_model(request):
    return VISION_FAMILIES[request.param].model() if request.param in VISION_FAMILIES else small_model(request.param)


@torch.no_grad()
def logits(model, inputs=None) -> torch.Tensor:
    if inputs is None:
        inputs = random_images(dtype=model.dtype) if model.main_input_name == "pixel_values" else random_ids(2, 21)
    return model(inputs).logits.cpu()


def same_weights(actual, expected) -> None:
    same_tensors(actual.state_dict(), expected.state_dict())


def same_buffers(actual, expected) -> None:
    """Those that no checkpoint holds, which follow from the configuration, whatever the type of the weights."""
    computed = [{n: b for n, b in each.named_buffers() if n not in each.state_dict()} for each in (actual, expected)]
    assert any(name.endswith("log_decay") for name in computed[1])
    same_tensors(*computed)


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
    ids, on_devices = random_ids(2, 7), AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
    assert greedy(on_devices, ids.to(on_devices.device)).cpu().equal(greedy(model, ids))


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
    close(logits(model, ids)[..., :VOCAB_SIZE], expected, small_models.rounding(32))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model(ids, labels=ids).loss.isfinite()

    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.vocab_size == size
    assert logits(loaded, ids).equal(logits(model, ids))
    assert greedy(loaded, ids[:, :5]).equal(greedy(model, ids[:, :5]))


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_save_load_dtypes(any_model, tmp_path, dtype):
    auto_class = AutoModelForImageClassification if any_model.main_input_name == "pixel_values" else AutoModelForCausalLM
    half = copy.deepcopy(any_model).to(dtype)
    half.save_pretrained(tmp_path / "half")
    any_model.save_pretrained(tmp_path / "whole")
    same_tensors(load_file(tmp_path / "half" / "model.safetensors"), half.state_dict())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    loaded = auto_class.from_pretrained(tmp_path / "half", dtype="auto")
    assert loaded.dtype == loaded.config.dtype == dtype
    assert logits(loaded).equal(logits(half))
    options = ({}, {"device_map": "auto"}, {"device_map": {"": "cpu"}})
    for each in (loaded, *(auto_class.from_pretrained(tmp_path / "whole", dtype=dtype, **kwargs) for kwargs in options)):
        same_tensors(dict(each.named_parameters()), dict(half.named_parameters()))
        same_buffers(each, any_model)
    same_buffers(half, any_model)
    widened = auto_class.from_pretrained(tmp_path / "half", dtype=torch.float32)
    assert widened.config.dtype == torch.float32
    same_weights(widened, half.float())


def test_meta_device_load(any_model):
    with init_empty_weights(include_buffers=True):
        empty = type(any_model)(any_model.config)
    assert {tensor.device.type for tensor in [*empty.parameters(), *empty.buffers()]} == {"meta"}
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*empty.parameters(), *empty.buffers()]:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)  # what materialised memory may hold
    for module in empty.modules():
        module._is_hf_initialized = False
    empty.init_weights()
    fresh = type(any_model)(any_model.config)
    same_tensors(dict(empty.named_buffers()), dict(fresh.named_buffers()))
    for (name, mine), theirs in zip(empty.named_parameters(), fresh.parameters()):
        assert mine.isfinite().all(), name
        if mine.numel() > 200:
            assert mine.std().item() == pytest.approx(theirs.std().item(), rel=0.3), name
    empty.eval().load_state_dict(any_model.state_dict())
    assert logits(empty).equal(logits(any_model))


@pytest.mark.parametrize("assign", [False, True])
def test_buffers_that_no_checkpoint_has_are_right_however_weights_are_loaded(any_model, assign):
    """`to_empty` allocates memory that holds any numbers; `assign` keeps a model on the meta device until then."""
    with torch.device("meta"):
        empty = type(any_model)(any_model.config).eval()
    if not assign:
        empty.to_empty(device="cpu")
        for buffer in empty.buffers():
            buffer.fill_(3)
    empty.load_state_dict(any_model.state_dict(), assign=assign)
    same_tensors(dict(empty.named_buffers()), dict(any_model.named_buffers()))


def test_deepcopy_and_pickle(any_model, tmp_path):
    """Of a model that was never asked for hidden states: the hooks that transformers leaves then do not pickle."""
    twin = type(any_model)(any_model.config).eval()
    twin.load_state_dict(any_model.state_dict())
    torch.save(twin, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    for each in (twin, copy.deepcopy(twin), pickle.loads(pickle.dumps(twin)), loaded):
        same_buffers(each, any_model)
        assert logits(each).equal(logits(any_model))
