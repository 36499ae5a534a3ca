# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What is raised for a checkpoint that cannot be converted, and how the errors of other libraries are quoted in it."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be converted. The message is a sentence that names the tensor."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its name where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
