# Copyright 2026 The retnet_hf authors.
# Licensed under the Apache License, Version 2.0: http://www.apache.org/licenses/LICENSE-2.0
"""A model in a page of this machine: made beside the model, and served until Ctrl-C."""

import functools
import http.server
import webbrowser
from pathlib import Path

from rich.console import Console

from retnet_hf_export import export_web

from .text.generation import load_model


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files, and says nothing of each."""

    def log_message(self, *args: object) -> None:
        pass


def make_page(folder: Path) -> Path:
    """The folder of the page of a model, beside it. Raises ExportError where none can be made."""
    page = folder.with_name(f"{folder.name}-page")
    model, tokenizer = load_model(str(folder))
    export_web(model, page, tokenizer, name=folder.name, overwrite=True)
    return page


def serve_page(page: Path, console: Console) -> None:
    """Serves a page to this machine alone, and opens it, until Ctrl-C."""
    handler = functools.partial(Quiet, directory=str(page))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        address = f"http://localhost:{server.server_port}"
        console.print(f"\nthe model in a page: {address}   (Ctrl-C ends it; the folder is {page})", soft_wrap=True)
        webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("ended")
