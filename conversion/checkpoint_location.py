# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""Where a checkpoint is: on this machine, or in a repository of the Hugging Face Hub."""

from pathlib import Path

from .errors import CheckpointError, first_line


SAFETENSORS = (".safetensors",)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pth.tar")


def is_repository_name(source: str) -> bool:
    """Whether this can be the name of a repository, as "owner/name"."""
    return source.count("/") == 1 and not source.startswith((".", "~", "/"))


def require_no_adapter(folder: Path) -> None:
    """Raises CheckpointError for a folder that holds an adapter, as LoRA, and not the model that it belongs to."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder} holds an adapter of PEFT, not a model: load it with peft's AutoPeftModelForCausalLM, and save what "
            "its merge_and_unload() returns, and the tokenizer, in another folder"
        )


def locate(source: str) -> Path:
    """The path `source` names; if there is none, the Hugging Face repository of that name, downloaded.

    Raises:
        CheckpointError: where neither is to be had.
    """
    path = Path(source).expanduser()
    if path.exists() or not is_repository_name(source):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    weights = [f"*{ending}" for ending in SAFETENSORS + PICKLES]
    patterns = [*weights, "*.json", "*.model", "*.txt", "*.jinja", "README.md", "LICENSE*"]
    try:
        return Path(snapshot_download(source, allow_patterns=patterns))
    except (OSError, ValueError, HFValidationError) as error:
        raise CheckpointError(
            f"{source} does not exist here, and as a repository it cannot be downloaded: {first_line(error)}"
        ) from error
