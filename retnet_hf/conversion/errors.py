# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""The error for checkpoints that cannot be converted, and functions that quote the errors of other libraries in it."""


class CheckpointError(ValueError):
    """Raised for a checkpoint that cannot be converted. The message names the tensor, file or option."""


def printable(text: object) -> str:
    """Returns a text with escaped control characters, since they could control the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the error's name if it has no message.

    torch's advice to load a file with `weights_only=False` is replaced, since that would run any code in the file. Where the
    Hub does not know the user, the way to log in follows.
    """
    text = str(error)
    if "weights_only" in text:
        return "the file is damaged, or could only be read by running code in it"
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    if "401 Unauthorized" in text or "401 Client Error" in text or "private repository" in text:
        return f"{line.rstrip(':')}; if it is private, log in with `hf auth login`"
    return line if line and not isinstance(error, KeyError) else f"{type(error).__name__} {line}".strip()
