# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Expressions for the whole names of files and folders that the commands, `save_pretrained` and `Trainer` write."""

import re
from importlib.util import find_spec
from pathlib import Path


TOKENIZER = (
    *("added_tokens.json", "chat_template.jinja", "merges.txt", "sentencepiece.bpe.model", "special_tokens_map.json"),
    *("spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
)
_MODULES = [path.stem for path in Path(find_spec("retnet_hf").submodule_search_locations[0]).rglob("*.py")]
_CODE = "|".join(name for name in _MODULES if name.startswith(("configuration_", "modeling_", "image_processing_")))
_CODE += "|retnet_gpu|retnet_mlx"  # with a model, or an export
_SHARD, _PARTIAL = r"(-\d{5}-of-\d{5})?", r"(\.[0-9a-f]{16}\.partial)?"  # the second is of `whole_files`
_ONNX = r"model(_quantized|_q4)?\.onnx(\.data)?"
_STAGE = r"((align|distill|long)(\.partial)?|\.(align|distill|long)\.replaced|finished)"
MODEL = (
    *map(re.escape, TOKENIZER),
    r"README\.md|(config|generation_config|preprocessor_config|processor_config|adapter_config)\.json|\.DS_Store",
    rf"(model{_SHARD}|adapter_model)\.safetensors|model\.safetensors\.index\.json",
    r"(training|eval_results|linearization|export|genai_config)\.json|training_args\.bin",
    rf"training_run\.json{_PARTIAL}|(loss_curve|align|distill|long|positions)\.png",
    rf"({_CODE})\.py|index\.html|(app|model|state_file)\.js|style\.css",
)
CHECKPOINT = (*MODEL, r"(optimizer|scheduler|scaler)\.pt|rng_state(_\d+)?\.pth|trainer_state\.json")

# The names in each folder, which is a path below the model's.
FINISHED = {
    r"\.": MODEL,
    r"checkpoint-\d+": CHECKPOINT,
    r"((checkpoint-\d+|finished)/)?additional_chat_templates": (r"[\w-]+\.jinja",),
    "onnx": (_ONNX,),
    "model": (_ONNX, r"(tokenizer|tokenizer_config|info)\.json|initial_state\.safetensors"),  # of a page, as the next line
    "vendor": (
        r"ort\.wasm\.bundle\.min\.mjs|ort-wasm-simd-threaded\.wasm|onnxruntime-web-\d+\.\d+\.\d+\.package\.json",
        r"tokenizers\.min\.mjs|huggingface-tokenizers-\d+\.\d+\.\d+\.LICENSE",
    ),
    "__pycache__": (rf"({_CODE})\.cpython-\d+\.pyc",),
}
UNFINISHED = {  # folders of stages of a linearization, too
    r"\.": (*MODEL, rf"(layer_costs|divergence)\.json{_PARTIAL}"),
    _STAGE: MODEL,
    rf"{_STAGE}/checkpoint-\d+": CHECKPOINT,
    r"teacher-(training|evaluation)": (rf"part-\d{{6}}\.safetensors{_PARTIAL}|index\.json{_PARTIAL}",),
}
MARKS = ("config.json", "model/info.json")  # a folder of a model, or of a page, has one of these
