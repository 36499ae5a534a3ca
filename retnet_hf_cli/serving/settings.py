# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""What a server is told, and what it tells whoever started it."""

import json
import shlex
import threading
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console


@dataclass(frozen=True)
class Settings:
    """What every engine is told.

    Attributes:
        model: a folder, or a name on the Hub, and what requests call it.
        requests: answered at once, at the most. length: tokens of a request, prompt and answer; None as the engine has it.
        dtype: of weights, one that torch names.
    """

    model: str
    host: str
    port: int
    requests: int
    length: int | None
    dtype: str

    @property
    def address(self) -> str:
        """By which it is reached from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def example(self, *headers: str) -> str:
        """A command that is answered, for a shell."""
        body = json.dumps({"model": self.model, "prompt": "In the beginning", "max_tokens": 32, "stream": True})
        command = ["curl", "-N", f"{self.address}/v1/completions"]
        for header in ("Content-Type: application/json", *headers):
            command += ["-H", header]
        return shlex.join([*command, "-d", body])


def announce(settings: Settings, console: Console, *headers: str) -> None:
    """Prints, once the server answers, where it is and how to ask it; in the background, until the process ends."""

    def wait() -> None:
        pause = threading.Event()
        while not is_up(settings.address):
            pause.wait(0.2)
        console.print(f"{Path(settings.model).name} is served at {settings.address}; Ctrl-C ends it. Try:", highlight=False)
        console.print(settings.example(*headers), markup=False, highlight=False, soft_wrap=True)

    threading.Thread(target=wait, daemon=True).start()


def is_up(address: str) -> bool:
    """Whether a server answers there."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy is between this machine and itself
    try:
        with opener.open(f"{address}/health", timeout=5):
            return True
    except OSError:
        return False
