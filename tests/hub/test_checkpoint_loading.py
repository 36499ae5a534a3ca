"""from_pretrained reads folders of fla and syncdoth as they are, and saves them under our own names."""

import dataclasses
import inspect
import json
import logging
from types import SimpleNamespace

import pytest
import torch
from foreign_folders import FOREIGN, foreign, write_folder
from golden import at_hand, golden
from safetensors.torch import load_file
from small_models import small_model
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments
from transformers.modeling_utils import LoadStateDictConfig

from retnet_hf import RetNetConfig, RetNetForCausalLM
from retnet_hf.conversion import dialect_loading
from retnet_hf.hub.loading import names_in, tensor_parallel_share
from retnet_hf.vllm.weights import canonical_weights


CASES = at_hand(
    [
        "fla/hub_options",
        "fla/gqa_noaffine",
        "fla/unfused_nogate_relu",
        "fla_2025_02/fused_gate_proj",
        "syncdoth/published_options",
        "syncdoth/lm_decay_tied",
    ]
)


@pytest.mark.parametrize("layout", ["safetensors", "sharded", "bin"])
@pytest.mark.parametrize("case", CASES)
def test_a_published_folder_loads_with_no_key_missing_or_unexpected_and_no_warning(case, layout, tmp_path, caplog):
    data = golden(case)
    write_folder(tmp_path, data.state_dict, data.config, layout)
    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addHandler(caplog.handler)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    finally:
        transformers_logger.removeHandler(caplog.handler)
    assert not any(report.values()), report
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], caplog.text
    with torch.no_grad():
        logits = model(data.tensors["input_ids"]).logits
    torch.testing.assert_close(logits, data.tensors["logits"], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_the_configuration_of_a_published_folder_is_read_and_saved_as_ours(case, tmp_path):
    write_folder(tmp_path, {"a": torch.ones(1)}, golden(case).config)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is RetNetConfig
    config.save_pretrained(tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").to_diff_dict() == config.to_diff_dict()


@pytest.mark.parametrize("dialect", FOREIGN)
def test_what_was_read_is_saved_under_our_names_bit_for_bit(dialect, tmp_path):
    model, state_dict, config = foreign(dialect)
    loaded = AutoModelForCausalLM.from_pretrained(write_folder(tmp_path, state_dict, config))
    loaded.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    expected = model.state_dict()
    assert set(saved) == set(expected)
    for name, value in saved.items():
        assert torch.equal(value, expected[name]), name
    again = RetNetForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(torch.arange(9)[None]).logits, loaded(torch.arange(9)[None]).logits)


@pytest.mark.parametrize("dialect", FOREIGN)
def test_the_base_model_reads_the_published_folder_too(dialect, tmp_path):
    model, state_dict, config = foreign(dialect)
    base = AutoModel.from_pretrained(write_folder(tmp_path, state_dict, config))
    for name, value in base.state_dict().items():
        assert torch.equal(value, model.state_dict()[f"model.{name}"]), name


@pytest.mark.parametrize("dialect", FOREIGN)
def test_half_precision_and_device_maps(dialect, tmp_path):
    model, state_dict, config = foreign(dialect)
    write_folder(tmp_path, state_dict, config, "sharded")
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="auto")
    assert half.dtype == torch.bfloat16
    for name, value in half.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].bfloat16()), name

    homes = {name: "cpu" for name, _ in model.model.named_children()}
    homes = {f"model.{name}": home for name, home in homes.items() if name != "layers"} | {"lm_head": "cpu"}
    homes |= {"model.layers.0": "disk", "model.layers.1": "cpu"}
    offloaded = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=homes, offload_folder=tmp_path / "offload")
    ids = torch.arange(7)[None]
    with torch.no_grad():
        assert torch.equal(offloaded(ids).logits, model(ids).logits)


def test_a_state_dict_given_directly_is_understood():
    model, state_dict, config = foreign("fla of 2024")
    loaded = RetNetForCausalLM.from_pretrained(None, config=RetNetConfig(**config), state_dict=state_dict)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name


@pytest.mark.parametrize("dialect", FOREIGN)
def test_trainer_resumes_a_fine_tuned_published_model_to_the_same_weights(dialect, tmp_path):
    _, state_dict, config = foreign(dialect)
    folder = write_folder(tmp_path / "published", state_dict, config)
    rows = [{"input_ids": torch.randint(96, (12,)), "labels": torch.randint(96, (12,))} for _ in range(8)]

    def train(steps: int, resume: bool) -> dict[str, torch.Tensor]:
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "run"), max_steps=steps, save_steps=2, per_device_train_batch_size=2,
            learning_rate=1e-2, lr_scheduler_type="constant", report_to=[], disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        trainer = Trainer(AutoModelForCausalLM.from_pretrained(folder), arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.state_dict()

    straight = train(4, resume=False)
    resumed = train(4, resume=str(tmp_path / "run" / "checkpoint-2"))
    for name, value in straight.items():
        assert torch.equal(resumed[name], value), name


@pytest.mark.parametrize("layout", ["ours", *FOREIGN])
@pytest.mark.parametrize("headless", [False, True])
def test_the_plugin_for_vllm_reads_the_same_names_and_values(layout, headless):
    model, state_dict, config = foreign("fla" if layout == "ours" else layout)
    expected = model.state_dict()
    if layout == "ours":
        state_dict = expected
    if headless:
        state_dict = {name.removeprefix("model."): value for name, value in state_dict.items() if "lm_head" not in name}
        expected = {name: value for name, value in expected.items() if name != "lm_head.weight"}
    found = list(canonical_weights(state_dict.items(), RetNetConfig(**config)))
    assert len(found) == len(expected) == len(dict(found))
    for name, value in found:
        assert torch.equal(value, expected[name]), name


def test_a_published_config_may_name_remote_code_that_is_not_needed(tmp_path):
    _, state_dict, config = foreign("syncdoth")
    remote = {"AutoConfig": "configuration_retnet.RetNetConfig", "AutoModelForCausalLM": "modeling_retnet.RetNetForCausalLM"}
    write_folder(tmp_path, state_dict, config | {"auto_map": remote, "transformers_version": "4.38.0"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(model) is RetNetForCausalLM
    model.save_pretrained(tmp_path / "saved")
    assert "auto_map" not in json.loads((tmp_path / "saved" / "config.json").read_text()), "that code is not beside it"


def test_defaults_of_an_old_transformers_are_not_saved_again(tmp_path):
    data = golden("syncdoth/published_options")  # its config.json was written in full
    assert data.config["max_length"] == 20
    model = AutoModelForCausalLM.from_pretrained(write_folder(tmp_path, data.state_dict, data.config))
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert not {"max_length", "torchscript", "pruned_heads", "is_decoder", "tokenizer_class"} & set(saved)


def test_a_folder_of_ours_loads_without_what_only_dialects_need_of_transformers(tmp_path, monkeypatch):
    model = small_model()
    model.save_pretrained(tmp_path)
    monkeypatch.setattr("retnet_hf.hub.loading.conversion", None)  # nobody asks
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name


def test_transformers_still_loads_by_the_function_that_we_extend():
    parameters = list(inspect.signature(PreTrainedModel._load_pretrained_model).parameters)
    assert parameters[:4] == ["model", "state_dict", "checkpoint_files", "load_config"], (
        "PreTrainedModel._load_pretrained_model takes other arguments: `load` and the model's method pass them on."
    )
    assert isinstance(inspect.getattr_static(PreTrainedModel, "_load_pretrained_model"), staticmethod), (
        "PreTrainedModel._load_pretrained_model is no static method any more: nor may the model's be."
    )


def test_transformers_still_has_the_settings_of_a_loading_that_we_read():
    fields = {field.name for field in dataclasses.fields(LoadStateDictConfig)}
    for field, function in (("weight_mapping", "with_transforms"), ("device_mesh", "tensor_parallel_share")):
        assert field in fields, f"LoadStateDictConfig.{field} has another name: loading.{function} must use that."


def test_transformers_still_keeps_the_transforms_of_a_loading_where_we_remove_them(tmp_path, monkeypatch):
    _, state_dict, config = foreign("fla of 2024")
    kept = []
    monkeypatch.setattr(
        dialect_loading, "forget_transforms", lambda model, transforms: kept.extend(model._weight_conversions)
    )
    AutoModelForCausalLM.from_pretrained(write_folder(tmp_path, state_dict, config))
    assert kept, "transformers keeps its transforms elsewhere: unless forget_transforms removes them, saving reverses them."


def test_transformers_still_reads_names_alone_where_we_ask_for_them(tmp_path):
    _, state_dict, config = foreign("fla")
    for layout in ("safetensors", "sharded", "bin"):
        folder = write_folder(tmp_path / layout, state_dict, config, layout)
        files = [str(file) for file in folder.iterdir() if file.suffix in (".safetensors", ".bin")]
        assert names_in(files) == set(state_dict), "load_state_dict takes or gives something else: see names_in."


class Mesh(SimpleNamespace):
    """What of a device mesh is read."""

    def __getitem__(self, name):
        return self.inner[name]

    def get_local_rank(self):
        return self.rank

    def size(self):
        return self.ranks


def test_the_share_of_tensor_parallelism_is_this_rank_and_their_number():
    alone = Mesh(mesh_dim_names=None, rank=1, ranks=4)
    tp = Mesh(mesh_dim_names=("tp",), rank=2, ranks=3)
    both = Mesh(mesh_dim_names=("fsdp", "tp"), inner={"tp": tp}, rank=0, ranks=6)
    other = Mesh(mesh_dim_names=("fsdp",), rank=0, ranks=6)
    found = [tensor_parallel_share(SimpleNamespace(device_mesh=mesh)) for mesh in (None, alone, both, other)]
    assert found == [None, (1, 4), (2, 3), None]
    assert tensor_parallel_share(SimpleNamespace()) is None
