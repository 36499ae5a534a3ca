# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A GGUF file as the source of a linearization: what it computes, and what is said about files that are none."""

import copy
import importlib.metadata
import json
from pathlib import Path

import gguf
import pytest
import torch
from small_models import close, random_ids
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from retnet_hf.cli.text.corpus import document_end, train_tokenizer
from retnet_hf.linearization import SourceError, transfer
from retnet_hf.linearization.gguf import end_of_turn, gguf_file, unpacked


TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.o_proj": "attn_output"}
LAYER |= {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"}
LAYER |= {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
KIND = gguf.GGMLQuantizationType.Q8_0


def write_gguf(model: LlamaForCausalLM, path: Path, without: str = "lm_head.weight") -> None:
    """A model of tied embeddings in 8 bits, with a chat template whose turns end with a token of their own."""
    config, control = model.config, ["<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = train_tokenizer(["the quick brown fox jumps over the lazy dog " * 20], config.vocab_size - 2)
    names = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    names += [f"<unused{number}>" for number in range(config.vocab_size - 2 - len(names))] + control[2:]
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer = gguf.GGUFWriter(path, "llama")
    fields = {"block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings}
    fields |= {"embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size}
    fields |= {"head_count": config.num_attention_heads, "head_count_kv": config.num_key_value_heads}
    fields |= {"layer_norm_rms_eps": config.rms_norm_eps, "rope_freq_base": config.rope_parameters["rope_theta"]}
    fields |= {"vocab_size": config.vocab_size, "license": "apache-2.0", "tokenizer_model": "gpt2", "token_list": names}
    fields |= {"tokenizer_pre": "default", "token_types": [3 if name in control else 1 for name in names]}
    fields |= {"token_merges": [" ".join(pair) for pair in merges], "bos_token_id": names.index("<|im_start|>")}
    fields |= {"eos_token_id": names.index("<|endoftext|>"), "chat_template": TEMPLATE}
    for field, value in fields.items():
        getattr(writer, f"add_{field}")(value)
    targets = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    for name, weight in model.state_dict().items():
        if name in ("lm_head.weight", without):
            continue
        numbers, own = weight.numpy(), name.removesuffix(".weight")
        if own.startswith("model.layers."):
            _, _, layer, part = own.split(".", 3)
            if part.endswith(("q_proj", "k_proj")):  # llama.cpp rotates numbers side by side
                heads = config.num_attention_heads if part.endswith("q_proj") else config.num_key_value_heads
                numbers = numbers.reshape(heads, 2, -1, numbers.shape[1]).swapaxes(1, 2).reshape(numbers.shape)
            targets[own] = f"blk.{layer}.{LAYER[part]}"
        quantised = {"tensor": gguf.quants.quantize(numbers, KIND), "raw_dtype": KIND} if numbers.ndim == 2 else {}
        writer.add_tensor(f"{targets[own]}.weight", **({"tensor": numbers} | quantised))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def source():
    """A model whose weights are what its file holds."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 320}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2, tie_word_embeddings=True)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                eight_bits = gguf.quants.quantize(parameter.numpy(), KIND)
                parameter.copy_(torch.from_numpy(gguf.quants.dequantize(eight_bits, KIND)))
    return model


@pytest.fixture
def file(source, tmp_path, monkeypatch):
    monkeypatch.setattr("retnet_hf.linearization.gguf.constants.HF_HOME", str(tmp_path / "home"))
    write_gguf(source, tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_a_file_becomes_a_folder_that_computes_what_it_holds(source, file, monkeypatch):
    folder = unpacked(gguf_file(str(file)))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    assert not hasattr(model.config, "quantization_config")
    weights = {name: weight.to(torch.bfloat16) for name, weight in source.state_dict().items()}
    assert all(weight.equal(weights[name]) for name, weight in model.state_dict().items())
    rounded, ids = copy.deepcopy(source), random_ids(2, 30)
    rounded.load_state_dict(weights)
    with torch.no_grad():
        expected = rounded(ids).logits
        close(model.float()(ids).logits, expected)
        close(transfer(model)(ids).logits, expected)
    assert "license: apache-2.0" in (folder / "README.md").read_text()
    turn, between = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert (end_of_turn(tokenizer), model.generation_config.eos_token_id) == (turn, sorted({turn, between}))
    assert document_end(tokenizer) == between
    monkeypatch.setattr("retnet_hf.linearization.gguf._unpack", None)  # the file is read once
    assert (unpacked(file), [entry.name for entry in folder.parent.iterdir()]) == (folder, [folder.name])


def test_a_package_names_the_file_inside_it(file, tmp_path, monkeypatch):
    class Inside(type(Path("x"))):
        def locate(self):
            return tmp_path / self

    files = [Inside("tiny.gguf"), Inside("code.py")]
    monkeypatch.setattr(importlib.metadata, "files", lambda name: {"with-model": files, "without": files[1:]}.get(name))
    assert gguf_file("package:with-model") == file
    with pytest.raises(SourceError, match=r"the package without must contain exactly one .gguf file, got 0"):
        gguf_file("package:without")


def test_what_is_no_such_file_is_said_and_leaves_nothing(source, file, tmp_path):
    assert gguf_file("owner/name") is None
    with pytest.raises(SourceError, match="the package no-such-package-here is not installed: pip install no-such"):
        gguf_file("package:no-such-package-here")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(SourceError, match="cut.gguf cannot be read as a GGUF file of a language model"):
        unpacked(cut)
    assert list((tmp_path / "home" / "retnet_hf" / "gguf").iterdir()) == []
    write_gguf(source, tmp_path / "hole.gguf", without="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(SourceError, match="hole.gguf is incomplete: 1 weights of its model are missing, as model.lay"):
        unpacked(tmp_path / "hole.gguf")
    with pytest.raises(SourceError, match="the package  is not installed"):
        gguf_file("package:")
