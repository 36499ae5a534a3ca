# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Name patterns of the files and sub-folders that the commands, `save_pretrained` and `Trainer` write."""

TOKENIZER = (
    "added_tokens.json",
    "chat_template.jinja",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
MODEL = ("README.md", "config.json", "generation_config.json", "preprocessor_config.json", "processor_config.json")
WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "*.jinja")
CHECKPOINT = ("optimizer.pt", "rng_state*.pth", "scaler.pt", "scheduler.pt", "trainer_state.json", "training_args.bin")
TRAINING = ("training_run.json*", "training.json", "eval_results.json", "loss_curve.png")
LINEARIZING = ("linearization.json", "layer_costs.json*", "divergence.json*", "part-*", "index.json*")
CURVES = ("align.png", "distill.png", "long.png", "positions.png")
EXPORT = ("*.onnx", "*.onnx.data", "export.json", "genai_config.json", "retnet_mlx.py", "*.pyc", ".DS_Store")
PAGE = ("index.html", "app.js", "model.js", "state_file.js", "style.css", "info.json", "initial_state.safetensors")
PACKAGES = ("ort.*.mjs", "ort-*.wasm", "tokenizers.*.mjs", "onnxruntime-web-*", "huggingface-tokenizers-*")  # used by a page

FILES = TOKENIZER + MODEL + WEIGHTS + ADAPTER + CHECKPOINT + TRAINING + LINEARIZING + CURVES + EXPORT + PAGE + PACKAGES
FOLDERS = (
    *("checkpoint-*", "additional_chat_templates", "onnx", "model", "vendor", "__pycache__"),
    *("align*", "distill*", "long*", "teacher-*", "finished", ".*.replaced"),  # folders of an unfinished linearization
)
MARKS = ("config.json", "model/info.json")  # a folder of a model, or of a page, has one of these
