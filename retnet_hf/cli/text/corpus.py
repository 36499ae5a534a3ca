# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""Reading texts, splitting them into training and held-out text, and tokenizing them."""

import functools
import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retnet_hf.conversion.errors import first_line

from ..errors import InputError
from ..named_inputs import TEXT_SUFFIXES, load, load_data, looks_like_path, require_data


if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


SAMPLE_TEXT = Path(__file__).parent.parent / "data" / "kjv_sample.txt"
END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"
CHAT_TEMPLATE = (  # of tokenizers that have none
    "{% for message in messages %}{{ '' if loop.first else '\n' }}{{ message.role.capitalize() }}: "
    "{{ message.content | trim }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\nAssistant:' }}{% endif %}"
)
TABLES = {  # readers of `datasets`, and their options
    ".csv": ("csv", {"keep_default_na": False}),
    ".tsv": ("csv", {"keep_default_na": False, "delimiter": "\t"}),
    ".parquet": ("parquet", {}),
    ".json": ("json", {}),
}
MOST_CHARACTERS = 32  # upper bound of the characters per token in running text


def read_documents(
    sources: Sequence[str],
    field: str = "text",
    split: str = "train",
    subset: str | None = None,
    apart_from: Collection[Path] = (),
) -> list[str] | list[list[dict[str, str]]]:
    """Returns the documents of text files, folders, files with a document in each row, and data sets.

    Rows of "messages", or "prompt" and "completion", instead of the `field` of a text are conversations, lists of messages.
    `split` and `subset` are the part and the configuration of a data set. Files in the resolved folders `apart_from`, for
    example of a model, are not read. Raises InputError for a source that is missing, empty, not UTF-8 or of a wrong format.
    """
    documents = list(itertools.chain(*_read(sources, field, apart_from, chats=True, split=split, subset=subset)))
    if not documents:
        raise InputError(f"there is no text in {', '.join(sources)}")
    if len({type(document) for document in documents}) > 1:
        raise InputError(f"there are conversations and other texts in {', '.join(sources)}: give one of both")
    return documents


def read_enough(
    sources: Sequence[str], tokenizer: "PreTrainedTokenizerBase", tokens: int, **options: Any
) -> tuple[list[str], list[str]]:
    """Returns documents, alternately from each source, up to a number of tokens, and the source of each document."""
    readers = map(zip, _read(sources, **options, streaming=True), map(itertools.repeat, sources))
    found: list[tuple[str, str]] = []
    for each in itertools.chain.from_iterable(itertools.zip_longest(*readers)):
        if each is not None and tokens > 0:
            document, source = each
            beginning = document[: MOST_CHARACTERS * tokens]
            count = len(ids_of(beginning, tokenizer))
            document = document if count < tokens else beginning[: math.ceil(len(beginning) * tokens / count)]
            found.append((document, source))
            tokens -= count
        if tokens <= 0:
            break
    if not found:
        raise InputError(f"there is no text in {', '.join(sources)}")
    documents, origins = zip(*found)
    return list(documents), list(origins)


def digest_of(documents: Iterable[Any]) -> str:
    """Returns the SHA-256 of the documents, to detect another text when a run is resumed. It does not join them."""
    digest = hashlib.sha256()
    for number, document in enumerate(documents):
        text = document if isinstance(document, str) else json.dumps(document)
        digest.update(b"\0" * (number > 0) + text.encode())
    return digest.hexdigest()


def text_files(sources: Sequence[str], apart_from: Collection[Path] = ()) -> tuple[list[list[Path] | None], str]:
    """Returns the text files of each source, None if it has none, and a sentence about what is read and what is not.

    In folders, files with the endings `TEXT_SUFFIXES` are read, but not .json. Hidden files and folders, backups of editors,
    links to folders, and `apart_from` are skipped, as are files that were found before, perhaps by another name.
    """
    found, read, skipped = [], {}, []
    for source in sources:
        path = Path(source).expanduser()
        entries = [(path, "")] if path.is_file() else list(_searched(path, apart_from))
        texts = [file for file, reason in entries if not reason]
        skipped += [reason for _, reason in entries if reason] if texts else []  # of a data set, these files are read
        new = {file.stat()[1:3]: file for file in texts if file.stat()[1:3] not in read}  # number of the file and device
        skipped += ["repeated"] * (len(texts) - len(new))
        read |= new
        found.append(list(new.values()) if texts else None)

    def few(names: list[str]) -> str:
        different = sorted(set(names))
        return ", ".join(different[:6] + ["…"] * (len(different) > 6))

    kinds = [file.suffix.lower() or "no ending" for file in read.values()]
    said = [f"read {len(kinds):,} file{'s' * (len(kinds) > 1)} ({few(kinds)})"] if kinds else ["read a data set"]
    return found, ", ".join(said + [f"skipped {len(skipped):,} ({few(skipped)})"] * bool(skipped))


def _searched(folder: Path, apart_from: Collection[Path]) -> Iterator[tuple[Path, str]]:
    """Yields what is in a folder and below, in order, with the reason why it is not read; an empty one for texts."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_folder, suffix = path.is_dir() and not path.is_symlink(), path.suffix.lower()
        if path.name.startswith((".", "~$")) or path.name.endswith("~"):
            yield path, "hidden"
        elif not is_folder and not path.is_file():
            yield path, "links"
        elif any(path.resolve().is_relative_to(other) for other in apart_from):
            yield path, "of the model"
        elif is_folder:
            yield from _searched(path, apart_from)
        else:
            yield path, "" if suffix in TEXT_SUFFIXES[:-1] else suffix or "no ending"


def _read(
    sources: Sequence[str],
    field: str = "text",
    apart_from: Collection[Path] = (),
    chats: bool = False,
    split: str = "train",
    subset: str | None = None,
    streaming: bool = False,
) -> list[Iterator[Any]]:
    """Returns the documents of each source that are not empty. `streaming`: data sets are not downloaded first."""
    for source in sources:
        require_data(source)
    readers = []
    for source, files in zip(sources, text_files(sources, apart_from)[0]):
        parts: list[Iterator[Any]] = []
        for file in files or ():
            name, options = TABLES.get(file.suffix.lower(), (None, {}))
            options = options | {"data_files": str(file), "split": "train", "streaming": True}
            if name is not None:
                parts.append(_read_rows(str(file), field, chats, functools.partial(load_data, name, **options)))
            else:
                parts.append(_read_lines(file, field, chats) if file.suffix.lower() == ".jsonl" else _read_text(file))
        if files is None:
            load = functools.partial(load_data, source, subset, split=split, streaming=streaming)
            parts = [_read_rows(source, field, chats, load, split)]
        texts = itertools.chain.from_iterable(parts)
        readers.append(text for text in texts if text and not (isinstance(text, str) and text.isspace()))
    return readers


def _read_text(file: Path) -> Iterator[str]:
    try:
        yield file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text (byte 0x{error.object[error.start]:02x} at {error.start})") from error


def _read_lines(file: Path, field: str, chats: bool) -> Iterator[Any]:
    """Yields the document in each line of JSON. `datasets` refuses large files if later lines have additional fields."""
    for number, line in enumerate(next(_read_text(file)).split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{file}, line {number} is not JSON: {error}") from error
            yield _document_of(row, field, chats, f"{file}, line {number}")


def _read_rows(place: str, field: str, chats: bool, load: Callable[[], Any], split: str = "train") -> Iterator[Any]:
    """Yields the document in each row of a data set."""
    try:
        dataset = load()
        dataset = dataset[split] if isinstance(dataset, dict) else dataset
        if dataset.column_names is not None:  # None for some streams: only their rows tell the columns
            dataset = dataset.select_columns(_columns_of(dataset.column_names, field, chats, place))
        for row in dataset:
            yield _document_of(row, field, chats, place)
    except (InputError, ModuleNotFoundError):
        raise
    except Exception as error:  # load_dataset and streams may raise any error of readers and the network
        raise InputError(f"{place} holds no text, and no data set that can be loaded: {first_line(error)}") from error


def _columns_of(names: Collection[str], field: str, chats: bool, place: str) -> list[str]:
    """Returns the columns of a document: the field of a text, or those of a conversation. Raises InputError without them."""
    for columns in ([field], ["messages"], ["prompt", "completion"])[: 3 if chats else 1]:
        if all(name in names for name in columns):
            return columns
    raise InputError(f'{place} has no field "{field}" (it has: {", ".join(names)}); --field names the field of all texts')


def _document_of(row: Any, field: str, chats: bool, place: str) -> str | list[dict[str, str]] | None:
    """Returns the text or the conversation in a row. Raises InputError with the place of the row if it has none."""
    if not isinstance(row, dict):
        raise InputError(f'{place} holds a {type(row).__name__}, not an object with the field "{field}"')
    columns = _columns_of(row, field, chats, place)
    document = row[field] if columns == [field] else row.get("messages")
    if columns == ["prompt", "completion"]:
        turns = list(zip(("user", "assistant"), (row[name] for name in columns)))
        plain = all(isinstance(text, str) for _, text in turns)
        document = [{"role": role, "content": text} for role, text in turns] if plain else row["prompt"] + row["completion"]
    if columns == [field] and not isinstance(document, str | None):
        raise InputError(f'{place} has {type(document).__name__} in the field "{field}", not text')
    texts = [document or ""]
    if columns != [field]:
        try:
            document = [{name: message[name] for name in ("role", "content")} for message in document]
            texts = [text for message in document for text in message.values()]
        except (TypeError, KeyError):
            texts = [None]
        if not all(isinstance(text, str) for text in texts):
            raise InputError(f"{place} has a message whose role or content is not text, in {' and '.join(columns)}")
        if "assistant" not in texts:
            raise InputError(f"{place} has no conversation with an answer of the assistant in {' and '.join(columns)}")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as error:  # JSON can contain half a surrogate pair
        raise InputError(f"{place} holds text that is not Unicode") from error
    return document


def held_out_whole(documents: int, fraction: float, seed: int = 0) -> list[int]:
    """Returns the numbers of the documents that are held out whole; none if they would be too few for a fair sample."""
    count = round(documents * fraction)
    return sorted(random.Random(seed).sample(range(documents), count)) if count >= 10 else []


def hold_out(documents: list[Any], fraction: float, seed: int = 0) -> tuple[list[Any], list[Any]]:
    """Splits documents into training and held-out ones: whole documents, or the end of each if there are few."""
    held_out = held_out_whole(len(documents), fraction, seed)
    if not isinstance(documents[0], str):  # no conversation is cut
        count = max(1, round(len(documents) * fraction))
        held_out = held_out or sorted(random.Random(seed).sample(range(len(documents)), count))
    if held_out:
        others = set(range(len(documents))) - set(held_out)
        return [documents[index] for index in sorted(others)], [documents[index] for index in held_out]

    training, evaluation = [], []
    for document in documents:
        target = round(len(document) * (1 - fraction))
        line, word = document.rfind("\n", 0, target) + 1, document.rfind(" ", 0, target)
        cut = line if line > 0.98 * target else word if word > 0 else target
        training.append(document[:cut])
        evaluation.append(document[cut:])
    return training, evaluation


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> "PreTrainedTokenizerFast":
    """Trains and returns a byte-level BPE tokenizer. One token separates documents: it is both bos and eos."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    trained = ByteLevelBPETokenizer()
    options = {"vocab_size": vocab_size, "special_tokens": [END_OF_TEXT, PADDING], "show_progress": False}
    trained.train_from_iterator(documents, **options)
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained.to_str()),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def load_tokenizer(name: str) -> "PreTrainedTokenizerBase":
    """Returns the tokenizer of a folder or a repository of the Hub. Raises InputError if it cannot be loaded."""
    from transformers import AutoTokenizer

    if Path(name).is_dir() and not any(any(Path(name).glob(pattern)) for pattern in ("tokenizer*", "vocab.*", "*.model")):
        advice = "copy tokenizer.json and tokenizer_config.json of the model's tokenizer into this folder"
        raise InputError(f"there is no tokenizer in {name}, which is needed to read and write text: {advice}")
    if not Path(name).is_dir() and looks_like_path(name):
        raise InputError(f"no such folder: {name}")
    return ending_no_text(load(AutoTokenizer, name, "tokenizer"))


def ending_no_text(tokenizer: "PreTrainedTokenizerBase") -> "PreTrainedTokenizerBase":
    """Returns the tokenizer, changed to add nothing after a text: a prompt that ends with eos would begin a new text."""
    begin = prefix(tokenizer)
    if tokenizer.is_fast and tokenizer("a")["input_ids"] != [*begin, *ids_of("a", tokenizer)]:
        from tokenizers.processors import TemplateProcessing

        names = tokenizer.convert_ids_to_tokens(begin)
        tokenizer.add_eos_token = False  # some classes make the next line from it when they are loaded again
        processor = TemplateProcessing(single=[*names, "$A"], special_tokens=[*zip(names, begin)])
        tokenizer.backend_tokenizer.post_processor = processor
    return tokenizer


def prefix(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Returns the tokens that the tokenizer puts before every text: bos, or none."""
    whole, own = tokenizer("a")["input_ids"], ids_of("a", tokenizer)
    return whole[: whole.index(own[0])] if own else []


def ids_of(text: Any, tokenizer: "PreTrainedTokenizerBase") -> Any:
    """Returns the ids of one text or of each of several. A special token that a text spells out is text as any other."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


def document_end(tokenizer: "PreTrainedTokenizerBase") -> int:
    """Returns the token between documents that a pretrained model knows. In chat models, this is not the end of a turn."""
    special = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return next((special[name] for name in (END_OF_TEXT, "<|end_of_text|>") if name in special), tokenizer.eos_token_id)


def streams(
    parts: Iterable[list[str]], tokenizer: "PreTrainedTokenizerBase", size: int, option: str, end: int | None = None
) -> "list[np.ndarray]":
    """Returns each part as in `encode`. Raises InputError, which names the option, if a part is shorter than a block."""
    encoded = [encode(part, tokenizer, end) for part in parts]
    if min(map(len, encoded)) < size:
        need = f"a block of {size} tokens for training and one for evaluation"
        raise InputError(f"the text is too short to fill {need}; give more text, or a smaller {option}")
    return encoded


def encode(documents: list[str], tokenizer: "PreTrainedTokenizerBase", end: int | None = None) -> "np.ndarray":
    """Returns all documents as one stream of int32 token ids.

    Each document ends with `end` (default: eos), and begins with what the tokenizer puts before every prompt. If that is
    nothing or `end`, the stream begins with `end`. Raises InputError for a tokenizer without eos.
    """
    import numpy as np

    end = tokenizer.eos_token_id if end is None else end
    if end is None:
        raise InputError(f"the tokenizer {tokenizer.name_or_path} has no eos token, which is needed to separate documents")
    begin = prefix(tokenizer)
    begin, ending = (np.array(ids, dtype=np.int32) for ids in ([] if begin == [end] else begin, [end]))
    stream = [] if len(begin) else [ending]
    for first in range(0, len(documents), 1000):
        batch = ids_of(documents[first : first + 1000], tokenizer)
        stream += itertools.chain.from_iterable((begin, np.array(ids, dtype=np.int32), ending) for ids in batch)
    return np.concatenate(stream)
