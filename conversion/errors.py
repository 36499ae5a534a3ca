# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What is raised for a checkpoint that cannot be converted, and how the errors of other libraries are quoted in it."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be converted. The message is a sentence that names the tensor."""


def printable(text: object) -> str:
    """Returns a text with its control characters escaped, which would otherwise steer the terminal."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in str(text))


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its name where it has none.

    Torch's advice to load a file with `weights_only=False`, which would run whatever code is in it, is not passed on.
    """
    if "weights_only" in str(error):
        return "the file is damaged, or could only be read by running code in it"
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line if line and not isinstance(error, KeyError) else f"{type(error).__name__} {line}".strip()
