# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Files that are written completely or not at all, and folders that replace an older one: nothing is lost if interrupted."""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import CheckpointError, printable


# Expressions for the whole names of files and folders that the commands, `save_pretrained` and `Trainer` write.
TOKENIZER = (
    *("added_tokens.json", "chat_template.jinja", "merges.txt", "sentencepiece.bpe.model", "special_tokens_map.json"),
    *("spiece.model", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt"),
)
_MODULES = [path.stem for path in Path(find_spec("retnet_hf").submodule_search_locations[0]).rglob("*.py")]
_CODE = "|".join(name for name in _MODULES if name.startswith(("configuration_", "modeling_", "image_processing_")))
_CODE += "|retnet_gpu|retnet_mlx"  # with a model, or an export
_SHARD, _PARTIAL = r"(-\d{5}-of-\d{5})?", r"(\.[0-9a-f]{16}\.partial)?"  # the second is of `whole`
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


@contextlib.contextmanager
def whole(file: Path) -> Iterator[Path]:
    """Yields a path that no other writer has. The file there replaces `file` after the block, or is removed if it fails."""
    partial = file.with_name(f"{file.name}.{secrets.token_hex(8)}.partial")
    try:
        yield partial
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def write_whole(file: Path, text: str) -> None:
    """Writes a text file."""
    with whole(file) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def locked(output: Path) -> Iterator[Path]:
    """Locks a folder for other processes within the block. Yields the locked file, which is removed after the block.

    Raises:
        CheckpointError: if another process holds the lock.
    """
    output = output.expanduser().resolve()
    output.parent.mkdir(parents=True, exist_ok=True)
    file = output.with_name(f".{output.name}.lock")
    lock = FileLock(file)
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        raise CheckpointError(
            f"another process is working in {output}: wait until it has ended, or give another folder"
        ) from error
    try:
        yield file
    finally:
        with contextlib.suppress(OSError):  # Windows removes the file with the lock
            file.unlink()
        lock.release()


def replace(output: Path, finished: Path) -> None:
    """Replaces the folder `output` with the folder `finished`. If that fails, `output` is unchanged."""
    restore(output)
    require_replaceable(output)  # checked again, since files may have been added since `claim`, hours ago
    older = output.with_name(f".{output.name}.replaced")
    shutil.rmtree(older, ignore_errors=True)
    try:
        if output.exists():
            os.replace(output, older)
        os.replace(finished, output)
    except BaseException:
        restore(output)
        raise
    shutil.rmtree(older, ignore_errors=True)


def restore(output: Path) -> None:
    """Restores the older folder if a crash happened between the two renames."""
    older = output.with_name(f".{output.name}.replaced")
    if older.exists() and not output.exists():
        os.replace(older, output)


def require_apart(output: Path, sources: Iterable[Path]) -> None:
    """Raises CheckpointError if a folder holds the files to be read, directly or behind a link, since they would be lost."""
    if not output.is_dir():
        return
    for source in sources:
        source = source.expanduser()
        files = [file for file in source.iterdir() if file.is_file()] if source.is_dir() else []
        for real in (path.resolve() for path in (source, *files) if path.exists()):
            if any(output.samefile(folder) for folder in (real, *real.parents)):
                raise CheckpointError(f"{output} holds the files to be read, which would be lost: give another folder")


def require_replaceable(folder: Path) -> None:
    """Raises CheckpointError for the first file in a folder that no command writes."""
    layout = FINISHED | (UNFINISHED if folder.suffix == ".partial" else {})
    for where, folders, files in os.walk(folder):
        inside = Path(where).relative_to(folder)
        known = next(names for path, names in layout.items() if re.fullmatch(path, inside.as_posix()))
        for name in sorted((*folders, *files)):
            is_folder = name in folders and not Path(where, name).is_symlink()
            patterns, text = (layout, (inside / name).as_posix()) if is_folder else (known, name)
            if not any(re.fullmatch(pattern, text) for pattern in patterns):
                raise CheckpointError(
                    f"{printable(Path(where, name))} is not part of a model, and would be deleted: move it away, or give "
                    "another folder"
                )


def claim(output: Path, overwrite: bool, sources: Iterable[Path] = (), other: str = "") -> Path:
    """Returns the folder next to `output` in which the new content is written.

    Args:
        sources: paths of files to be read, which must not be replaced. Paths that do not exist are ignored.
        other: alternative to --overwrite for a folder that is not empty, for the message.

    Raises:
        CheckpointError: if `output` holds something that may not be replaced.
    """
    output = output.expanduser().resolve()
    restore(output)
    require_apart(output, sources)
    if output.exists() and not output.is_dir():
        raise CheckpointError(f"{output} is a file, not a folder")
    if output.exists() and any(output.iterdir()):
        if not overwrite:
            raise CheckpointError(f"{output} is not empty: {other}--overwrite replaces it once the new model is finished")
        if not any((output / mark).exists() for mark in MARKS):
            raise CheckpointError(f"{output} holds no model, and --overwrite replaces only models")
        require_replaceable(output)
    return output.with_name(f".{output.name}.converting")
