# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Models as ONNX files: what they compute in ONNX Runtime and onnxruntime-genai, and what is refused."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import onnx
import pytest
import torch
from small_models import COVERING, FAMILIES, LATENT, ONE_OF_EACH_KIND, greedy, random_ids, small_model
from small_vision_models import VISION_FAMILIES
from transformers import AutoConfig

from retnet_hf import RetNetForMaskedLM
from retnet_hf.conversion.errors import CheckpointError
from retnet_hf.export import ExportError, export_onnx, onnx_folder
from retnet_hf.export.causal_graph import CausalGraph, in_float32
from retnet_hf.export.digit_rotation import DigitRotation
from retnet_hf.export.onnx_file import Runner, check, check_classifier, sides_of, size_options, write_causal
from retnet_hf.export.onnx_folder import genai_config


pytestmark = pytest.mark.usefixtures("no_gradients")


def in_pieces(read, ids):
    return torch.cat([read(part) for part in ids.split((7, 1, 1, 12, 1, 8), dim=1)], dim=1)


@pytest.mark.parametrize("dialect", [*COVERING, "sinks", *FAMILIES])
def test_the_graph_computes_what_the_model_does(dialect):
    """Before anything is exported: for every option of the model, in pieces and steps of two rows."""
    model, ids = small_model(dialect), random_ids(2, 30)
    graph = CausalGraph(model)
    state, position = graph.empty_state(2), torch.arange(30).expand(2, -1)

    def read(part):
        nonlocal state, position
        logits, *state = graph(part, position[:, : part.shape[1]], *state)
        position = position[:, part.shape[1] :]
        return logits

    torch.testing.assert_close(in_pieces(read, ids), model(ids).logits, rtol=1e-4, atol=1e-4)
    for tensor, found in zip(graph.tensors, state, strict=True):
        assert all(size in (None, held) for size, held in zip(tensor.shape, found.shape[1:], strict=True))


@pytest.mark.parametrize("dialect", ["grouped", "sinks", "ring"])
def test_a_file_computes_what_the_model_does(dialect, tmp_path):
    model, ids = small_model(dialect, **ONE_OF_EACH_KIND.get(dialect, {})), random_ids(2, 30)
    write_causal(CausalGraph(model), tmp_path / "model.onnx")
    runner = Runner(tmp_path / "model.onnx", threads=1)
    for batch in (2, 1):
        runner.reset(batch)
        torch.testing.assert_close(in_pieces(runner.read, ids[:batch]), model(ids[:batch]).logits, rtol=1e-4, atol=2e-4)
    assert runner.position == 30
    held = [value.shape[2] for name, value in runner.state.items() if name.endswith(".key")]
    assert max(held, default=0) == {"grouped": 0, "sinks": 6, "ring": 30}[dialect]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    model, folder = small_model("fla", tie_word_embeddings=True, eos_token_id=2), tmp_path_factory.mktemp("exported")
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.2)
        return model, folder / "model", export_onnx(model, folder / "model", kinds=["float32", "int8", "int4"])


def test_a_folder_holds_files_of_every_kind_and_a_report(exported):
    model, folder, files = exported
    assert [file.name for file in files] == ["onnx/model.onnx", "onnx/model_quantized.onnx", "onnx/model_q4.onnx"]
    assert [file.size for file in files] == [(folder / file.name).stat().st_size for file in files]
    assert json.loads((folder / "export.json").read_text())[0]["equal_tokens"] == 64
    assert files[0].error < 1e-5 < files[1].error < files[2].error < 2
    assert AutoConfig.from_pretrained(folder).state_fingerprint == model.config.state_fingerprint
    assert not [path for path in folder.parent.iterdir() if path != folder]
    for file in files[1:]:  # every product is quantised, and the head that has the weights of the embeddings
        weights = onnx.load(folder / file.name).graph.initializer
        sizes = [tuple(weight.dims) for weight in weights if weight.data_type == onnx.TensorProto.FLOAT]
        assert not [size for size in sizes if np.prod(size) >= 1024 and 256 not in size]  # 256 rows are of the rotation


def test_states_and_outputs_have_the_names_that_runtimes_know(exported):
    graph = onnx.load(exported[1] / "onnx" / "model.onnx").graph

    def axes(value):
        return [size.dim_param or size.dim_value for size in value.type.tensor_type.shape.dim]

    inputs, outputs = ({value.name: axes(value) for value in values} for values in (graph.input, graph.output))
    names = [f"{layer}.{kind}" for kind in ("recurrent_state", "conv_state") for layer in range(2)]
    sizes = {f"past_key_values.{name}": [4, 8, 16] if "recurrent" in name else [1, 1] for name in names}
    text = ["batch_size", "sequence_length"]
    text_inputs = dict.fromkeys(("input_ids", "position_ids"), text)
    assert inputs == {name: ["batch_size", *size] for name, size in sizes.items()} | text_inputs
    assert list(outputs) == ["logits", *(f"present.{name}" for name in names)]
    assert outputs["logits"] == [*text, exported[0].config.vocab_size]


def test_genai_writes_what_the_model_writes(exported):
    genai = pytest.importorskip("onnxruntime_genai", reason="onnxruntime-genai has no package for this platform")
    model, folder, _ = exported
    prompt = random_ids(1, 7)
    parameters = genai.GeneratorParams(loaded := genai.Model(str(folder)))
    parameters.set_search_options(max_length=7 + 40, do_sample=False)
    generator = genai.Generator(loaded, parameters)
    generator.append_tokens(prompt.numpy().astype(np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    expected = greedy(model, prompt, 40, eos_token_id=None)[0].tolist()
    assert len(found := list(generator.get_sequence(0))) >= 8
    assert found == expected[: len(found)]
    model = small_model("fla", eos_token_id=None)  # without an end of text
    assert genai_config(model, "model.onnx")["model"]["eos_token_id"] is None
    assert genai_config(model, "model.onnx", 7)["model"]["eos_token_id"] == 7


def test_digits_rotate_as_integers_do_and_weights_in_float32_are_shared():
    rotary = small_model("grouped").model.rotary
    digits, position = DigitRotation(rotary), torch.tensor([[0, 1, 255, 256, 65_535, 10**6, 2**31 - 1, 2**32 - 1]])
    for found, expected in zip(digits(position, torch.float32), rotary(position, torch.float64)):
        torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)
    assert found.shape == expected.shape
    shared, half = in_float32(model := small_model("fla")), small_model("fla").bfloat16()
    assert shared.model.embed_tokens.weight is model.model.embed_tokens.weight
    assert (in_float32(half).dtype, half.dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("vir", {"pooling": "class_token", "retention_form": "recurrent"}),
        ("vir", {"pooling": "mean", "bidirectional": True, "patch_size": [8, 4], "retention_form": "chunkwise"}),
        ("vir", {"pooling": "mean_but_first", "mirror_sequence": True, "use_per_head_projections": True}),
        ("vir", {"pooling": "last_patch", "use_retention_norm": True, "chunk_size": 4}),
        ("rmt", {}),  # decomposed and whole attention
        ("metaformer", {"token_mixers": ["retention"]}),
        ("metaformer", {"token_mixers": ["attention"]}),
    ],
)
def test_an_image_classifier_for_pictures_of_any_size(family, fields, tmp_path):
    """In every form of retention, and for sizes that neither the export nor its check has seen."""
    import onnxruntime

    vision = VISION_FAMILIES[family]
    model = vision.model(**vision.smallest | fields)
    [file] = export_onnx(model, tmp_path / "out", any_size=True)
    session = onnxruntime.InferenceSession(tmp_path / "out" / file.name)
    (down, across), options = sides_of(model, "patch_size"), size_options(model, any_size=True)
    for batch, rows, columns in ((2, 4, 4), (1, 9, 11), (3, 1, 2), (1, 6, 1)):
        pixels = torch.randn(batch, 3, rows * down, columns * across)
        [found] = session.run(None, {"pixel_values": pixels.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), model(pixels, **options).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_an_image_classifier_for_any_batch(family, tmp_path):
    vision = VISION_FAMILIES[family]
    [file] = export_onnx(model := vision.model(), tmp_path / "out", vision.processor())
    assert file.equal_tokens is None
    assert check_classifier(model, tmp_path / "out" / file.name) < 1e-5
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


REFUSED = {
    "a RetNetForMaskedLM cannot be exported: only RetNetForCausalLM, ViR": ("fla", {"model_class": RetNetForMaskedLM}, {}),
    "attention_max_length must be None: an exported model cannot": ("hybrid", {"attention_max_length": 400}, {}),
    "kv_lora_rank must be None: latent attention cannot be exported": ("fla", LATENT, {}),
    "weights can be float32, int8 or int4, not 'int2'": ("fla", {}, {"kinds": ["int2"]}),
    "an ONNX file can hold 0.0 GB of weights in float32": ("fla", {}, {}),
}


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(onnx_folder, "MOST_BYTES", 10_000)
    for said, (dialect, fields, options) in REFUSED.items():
        fields = fields | ({"bidirectional": True} if "model_class" in fields else {})
        with pytest.raises(ExportError, match=said):
            export_onnx(small_model(dialect, **fields), tmp_path / "out", **options)
    monkeypatch.undo()
    monkeypatch.setattr(onnx_folder, "write_classifier", lambda model, file, any_size: file.write_bytes(b"no graph"))
    with pytest.raises(ExportError, match=r"out could not be exported: \[ONNXRuntimeError\][^\n]*\Z"):
        export_onnx(VISION_FAMILIES["vir"].model(), tmp_path / "out")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "letter.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        export_onnx(small_model("fla"), tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_a_file_that_computes_something_else_is_not_published(exported, tmp_path, monkeypatch, kind):
    other = exported[1] / "onnx" / "model.onnx"
    monkeypatch.setattr(onnx_folder, "write_causal", lambda _, file: shutil.copy(other, file))
    with pytest.raises(ExportError, match="the exported model is wrong: its logits differ from the model's by"):
        export_onnx(small_model("fla", seed=1), tmp_path / "out", kinds=[kind])
    assert not list(tmp_path.iterdir())


def test_a_window_that_hides_nothing_in_the_file_is_noticed(tmp_path):
    """The check reads more tokens than a window has."""
    fields = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    model = small_model("fla", sliding_window=200, **fields)
    write_causal(CausalGraph(small_model("fla", sliding_window=4000, **fields)), tmp_path / "model.onnx")
    assert check(model, tmp_path / "model.onnx")[0] > 1e-2


def test_onnx_runtime_reports_to_nobody(tmp_path):
    """Its official packages begin to when they are loaded, and leave a file with a mark of the session."""
    code = "from retnet_hf.export import export_onnx; import os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"TMPDIR": str(tmp_path)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).split() == ["1"]
    assert not (tmp_path / ".ses").exists()
