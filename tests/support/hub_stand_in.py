# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""A Hub on this machine: as much of its API as pushing a folder and loading it again takes."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import ModelCard


class HubStandIn:
    """`files` holds what was pushed: {"owner/name": {path: bytes}}; `url` is what HF_ENDPOINT is to be set to."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.cards: list[str] = []  # model cards that were sent to be checked
        self.asked: list[str] = []  # paths that were asked for
        self.url = ""

    def commit_of(self, repo: str) -> str:
        contents = b"".join(name.encode() + data for name, data in sorted(self.files[repo].items()))
        return hashlib.sha1(contents).hexdigest()

    def posted(self, parts: list[str], body: bytes) -> dict | None:
        repo = "/".join(parts[2:4])
        if parts[:3] == ["api", "repos", "create"]:
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'someone'}/{asked['name']}"
            self.files.setdefault(repo, {})
            return {"url": f"{self.url}/{repo}", "name": repo, "id": "0"}
        if parts == ["api", "validate-yaml"]:
            self.cards.append(json.loads(body)["content"])
            return {"errors": [], "warnings": []}
        if parts[:2] == ["api", "models"] and parts[4] == "preupload":
            paths = [file["path"] for file in json.loads(body)["files"]]
            return {"files": [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]}
        if parts[:2] == ["api", "models"] and parts[4] == "commit":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    assert line["value"]["encoding"] == "base64"
                    self.files[repo][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            oid = self.commit_of(repo)
            return {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repo}/commit/{oid}", "hookOutput": ""}
        return None

    def listed(self, repo: str, tree: bool) -> list | dict:
        files = {name: {"size": len(data), "oid": hashlib.sha1(data).hexdigest()} for name, data in self.files[repo].items()}
        if tree:
            return [{"type": "file", "path": name} | file for name, file in files.items()]
        card = ModelCard(self.files[repo].get("README.md", b"").decode()).data.to_dict()
        known = {name: card.get(name) for name in ("pipeline_tag", "library_name", "tags")}
        siblings = [{"rfilename": name, "size": file["size"]} for name, file in files.items()]
        return {"id": repo, "sha": self.commit_of(repo), "siblings": siblings, "private": False} | known


def handler_for(hub: HubStandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args) -> None:
            pass

        def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_POST(self) -> None:
            parts = self.path.split("?")[0].strip("/").split("/")
            found = hub.posted(parts, self.rfile.read(int(self.headers["Content-Length"])))
            self.answer(404 if found is None else 200, json.dumps(found).encode(), Content_Type="application/json")

        def do_GET(self) -> None:
            hub.asked.append(self.path)
            if "private" in self.path:
                self.answer(401)
                return
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"] and (repo := "/".join(parts[2:4])) in hub.files:
                found = hub.listed(repo, tree=parts[4:5] == ["tree"])
                self.answer(200, json.dumps(found).encode(), Content_Type="application/json")
                return
            repo = "/".join(parts[:2])
            data = hub.files.get(repo, {}).get("/".join(parts[4:])) if parts[2:3] == ["resolve"] else None
            if data is None:
                missing = "EntryNotFound" if repo in hub.files else "RepoNotFound"
                self.answer(404, X_Error_Code=missing, X_Error_Message="not here")
                return
            self.answer(200, data, ETag=f'"{hashlib.sha1(data).hexdigest()}"', X_Repo_Commit=hub.commit_of(repo))

        do_HEAD = do_GET

    return Handler


@contextmanager
def serving(hub: HubStandIn) -> Iterator[HubStandIn]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler_for(hub)) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield hub
        server.shutdown()
