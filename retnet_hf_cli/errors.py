# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What the command tells its user in one line, instead of a traceback."""


class InputError(Exception):
    """What the user gave cannot be used. The message is one sentence that says why."""


class Interrupted(Exception):
    """A signal ended the work before it was done. The message says what is left of it."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.signal_number = signal_number
