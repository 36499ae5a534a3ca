# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Location of a checkpoint: on this machine, or in a repository of the Hugging Face Hub."""

from pathlib import Path

from .errors import CheckpointError, first_line


SAFETENSORS = (".safetensors",)
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pth.tar")


def repository_of(name: str) -> tuple[str, str | None]:
    """Returns the repository and the revision of a name on the Hub, such as "owner/name@v2". A path has no revision."""
    repository, _, revision = name.partition("@")
    return (name, None) if Path(name).expanduser().exists() else (repository, revision or None)


def is_repository_name(source: str) -> bool:
    """Returns whether `source` can be the name of a repository, such as "owner/name" or "owner/name@revision"."""
    return source.partition("@")[0].count("/") == 1 and not source.startswith((".", "~", "/"))


def require_no_adapter(folder: Path) -> None:
    """Raises CheckpointError for a folder that holds an adapter, such as LoRA, without its model."""
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        then = "call its merge_and_unload(), and save the result and the tokenizer in another folder"
        advice = f"load it with peft's AutoPeftModelForCausalLM, {then}"
        raise CheckpointError(f"{folder} holds an adapter of PEFT, not a model: {advice}")


def locate(source: str) -> Path:
    """Returns the path, or downloads the repository of that name and revision. Raises CheckpointError if that fails."""
    path = Path(source).expanduser()
    if path.exists() or not is_repository_name(source):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    weights = [f"*{ending}" for ending in SAFETENSORS + PICKLES]
    patterns = [*weights, "*.json", "*.model", "*.txt", "*.jinja", "README.md", "LICENSE*"]
    try:
        repository, revision = repository_of(source)
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError, HFValidationError) as error:
        said = f"no repository of this name can be downloaded: {first_line(error)}"
        raise CheckpointError(f"{source} does not exist here, and {said}") from error
