# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A Hub on this machine: as much of its API as pushing a folder and loading it again takes."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import ModelCard


class HubStandIn:
    """`files` holds what was pushed: {"owner/name": {path: bytes}}; `url` is what HF_ENDPOINT is to be set to."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.cards: list[str] = []  # model cards that were sent to be checked
        self.requests: list[str] = []
        self.url = ""

    def commit_of(self, repo: str) -> str:
        contents = b"".join(name.encode() + data for name, data in sorted(self.files[repo].items()))
        return hashlib.sha1(contents).hexdigest()

    def create(self, body: dict) -> dict:
        repo = f"{body.get('organization') or 'someone'}/{body['name']}"
        self.files.setdefault(repo, {})
        return {"url": f"{self.url}/{repo}", "name": repo, "id": "0"}

    def preupload(self, body: dict) -> dict:
        files = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in body["files"]]
        return {"files": files}

    def commit(self, repo: str, lines: list[dict]) -> dict:
        for line in lines:
            if line["key"] == "file":
                assert line["value"]["encoding"] == "base64"
                self.files[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        oid = self.commit_of(repo)
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repo}/commit/{oid}", "hookOutput": ""}

    def info(self, repo: str) -> dict:
        siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files[repo].items()]
        card = ModelCard(self.files[repo].get("README.md", b"").decode()).data.to_dict()
        known = {name: card.get(name) for name in ("pipeline_tag", "library_name", "tags")}
        return {"id": repo, "sha": self.commit_of(repo), "siblings": siblings, "private": False} | known

    def tree(self, repo: str) -> list[dict]:
        return [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in self.files[repo].items()
        ]


def handler_for(hub: HubStandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            for name, value in headers.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def answer_json(self, value) -> None:
            self.answer(200, json.dumps(value).encode(), Content_Type="application/json")

        def do_POST(self) -> None:
            hub.requests.append(f"POST {self.path}")
            body = self.rfile.read(int(self.headers["Content-Length"]))
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:3] == ["api", "repos", "create"]:
                self.answer_json(hub.create(json.loads(body)))
            elif parts == ["api", "validate-yaml"]:
                hub.cards.append(json.loads(body)["content"])
                self.answer_json({"errors": [], "warnings": []})
            elif parts[:2] == ["api", "models"] and parts[4] == "preupload":
                self.answer_json(hub.preupload(json.loads(body)))
            elif parts[:2] == ["api", "models"] and parts[4] == "commit":
                self.answer_json(hub.commit("/".join(parts[2:4]), [json.loads(line) for line in body.splitlines()]))
            else:
                self.answer(404)

        def do_GET(self) -> None:
            hub.requests.append(f"{self.command} {self.path}")
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"] and "/".join(parts[2:4]) in hub.files:
                repo = "/".join(parts[2:4])
                self.answer_json(hub.tree(repo) if parts[4:5] == ["tree"] else hub.info(repo))
                return
            repo, data = "/".join(parts[:2]), None
            if parts[2:3] == ["resolve"]:
                data = hub.files.get(repo, {}).get("/".join(parts[4:]))
            if data is None:
                missing = "EntryNotFound" if repo in hub.files else "RepoNotFound"
                self.answer(404, X_Error_Code=missing, X_Error_Message="not here")
                return
            self.answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=hub.commit_of(repo))

        do_HEAD = do_GET

    return Handler


@contextmanager
def serving(hub: HubStandIn):
    """Serves `hub` on a free port of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_for(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
