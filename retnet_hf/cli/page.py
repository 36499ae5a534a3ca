# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A page of a model: written next to the model's folder, and served on this machine until Ctrl-C."""

import functools
import http.server
import webbrowser
from pathlib import Path

from rich.console import Console

from retnet_hf.export import export_web

from .text.generation import load_model


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without logging requests."""

    def log_message(self, *args: object) -> None:
        pass


def make_page(folder: Path) -> Path:
    """Writes the page of a model next to its folder and returns the page's folder. Raises ExportError on failure."""
    page = folder.with_name(f"{folder.name}-page")
    model, tokenizer = load_model(str(folder))
    export_web(model, page, tokenizer, name=folder.name, overwrite=True)
    return page


def serve_page(page: Path, console: Console) -> None:
    """Opens a page and serves it, only to this machine, until Ctrl-C."""
    handler = functools.partial(Quiet, directory=str(page))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        address = f"http://localhost:{server.server_port}"
        console.print(f"\nthe model in a page: {address}   (Ctrl-C ends it; the folder is {page})", soft_wrap=True)
        webbrowser.open(address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console.print("ended")
