# Copyright 2026 The retnet_hf authors. SPDX-License-Identifier: Apache-2.0
"""push_to_hub and from_pretrained through the real clients, against a stand-in of the Hub on this machine."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from places import ROOT, SUPPORT
from safetensors.torch import load
from small_models import PACKAGE_ABSENT, greedy, small_model
from small_vision_models import VISION_FAMILIES

from retnet_hf.hub.cards import model_card


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


PUSH = """
import gc; gc.disable()
from small_models import small_config, small_model, word_tokenizer
from retnet_hf import RetNetConfig, RetNetForCausalLM, RetNetModel

plain = small_model()
plain.push_to_hub("someone/plain")

RetNetConfig.register_for_auto_class()
RetNetForCausalLM.register_for_auto_class("AutoModelForCausalLM")
model = small_model("torchscale")
model.push_to_hub("someone/with-code", max_shard_size="20KB", commit_message="A first upload", tags=["tiny"])
word_tokenizer().push_to_hub("someone/with-code")
small_model(model_class=RetNetModel).push_to_hub("someone/base")
model.save_pretrained("folder", push_to_hub=True, repo_id="someone/saved-and-pushed")
small_config().push_to_hub("someone/configuration")
small_model().push_to_hub("someone/own-card")

from small_vision_models import VISION_FAMILIES

for name, family in VISION_FAMILIES.items():
    family.model().push_to_hub(f"someone/{name}", tags=["tiny"])
VISION_FAMILIES["rmt"].model(VISION_FAMILIES["rmt"].backbone_class).push_to_hub("someone/backbone")
VISION_FAMILIES["vir"].model().push_to_hub("someone/own-image-card")
"""

LOAD = f"""{PACKAGE_ABSENT}
import json
from transformers import pipeline

generator = pipeline(model="someone/with-code", trust_remote_code=True)  # the task is in the model card
[tokens] = generator("w5 w6 w7", max_new_tokens=8, do_sample=False, return_tensors=True)
print(json.dumps([type(generator).__name__, type(generator.model).__module__, tokens["generated_token_ids"]]))
"""


def run(script: str, hub: HubStandIn, folder: Path) -> str:
    """Runs the script in a process whose Hub is the stand-in; nothing else is reached, as there is no other address."""
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in offline}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf_home"), "HF_TOKEN": "hf_stand_in"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(SUPPORT)])
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def card_of(hub: HubStandIn, repo: str, loads: str) -> ModelCard:
    """The card, which names the model itself, and whose code is Python that a reader can run."""
    card = ModelCard(hub.files[repo]["README.md"].decode())
    assert card.data.library_name == "transformers"
    assert f"# {repo}\n" in card.text
    code = card.text.split("```python")[1].split("```")[0]
    compile(code, repo, "exec")
    assert loads in code
    assert ("trust_remote_code=True" in code) == ("modeling_retnet.py" in hub.files[repo])
    return card


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    with serving(HubStandIn()) as hub:
        for repo in ("someone/own-card", "someone/own-image-card"):
            hub.files[repo] = {"README.md": b"---\nlicense: mit\n---\n\n# Written by hand\n"}
        run(PUSH, hub, tmp_path_factory.mktemp("push"))
        yield hub


def test_push_to_hub_uploads_weights_and_configuration(hub):
    files = hub.files["someone/plain"]
    assert files.keys() == {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    config = json.loads(files["config.json"])
    assert config["architectures"] == ["RetNetForCausalLM"]
    assert "auto_map" not in config
    expected, uploaded = small_model().state_dict(), load(files["model.safetensors"])
    assert uploaded.keys() == expected.keys()
    assert all(uploaded[name].equal(weight) for name, weight in expected.items())
    assert json.loads(hub.files["someone/configuration"]["config.json"])["model_type"] == "retnet"


CAUSAL = 'AutoModelForCausalLM.from_pretrained("someone/{}"'
IMAGES = 'pipeline("image-classification", model="someone/{}")'
CARDS = {  # how the model is loaded, its task and tags
    "plain": (CAUSAL, "text-generation", {"retnet"}),
    "with-code": (CAUSAL, "text-generation", {"retnet", "tiny"}),
    "saved-and-pushed": (CAUSAL, "text-generation", {"retnet"}),
    "base": ('AutoModel.from_pretrained("someone/{}"', "feature-extraction", {"retnet"}),
    "backbone": ('RMTBackbone.from_pretrained("someone/{}")', "image-feature-extraction", set()),
    **{name: (IMAGES, "image-classification", {name, "retention", "tiny"}) for name in VISION_FAMILIES},
}


@pytest.mark.parametrize("repo", CARDS)
def test_push_to_hub_writes_a_model_card(hub, repo):
    loads, task, tags = CARDS[repo]
    card = card_of(hub, f"someone/{repo}", loads.format(repo))
    assert card.data.pipeline_tag == task
    assert tags <= set(card.data.tags)
    if repo == "plain":
        assert f"{small_model().num_parameters():,} parameters" in card.text
    elif repo in VISION_FAMILIES:
        parameters = VISION_FAMILIES[repo].model().num_parameters()
        assert f"{parameters:,} parameters that distinguishes 5 classes of images.\n" in card.text


def test_push_to_hub_carries_code_and_shards(hub):
    for repo in ("someone/with-code", "someone/saved-and-pushed"):
        assert {"configuration_retnet.py", "modeling_retnet.py"} <= hub.files[repo].keys()
    files = hub.files["someone/with-code"]
    assert sum(name.endswith(".safetensors") for name in files) > 2
    assert json.loads(files["config.json"])["auto_map"]["AutoConfig"] == "configuration_retnet.RetNetConfig"
    assert "tokenizer.json" in files


def test_push_to_hub_then_trust_remote_code(hub, tmp_path):
    kind, module, tokens = json.loads(run(LOAD, hub, tmp_path).splitlines()[-1])
    assert (kind, module.partition(".")[0]) == ("TextGenerationPipeline", "transformers_modules")
    assert tokens == greedy(small_model("torchscale"), torch.tensor([[5, 6, 7]]), 8)[0].tolist()


def test_commands_take_a_revision_of_a_repository(hub, tmp_path):
    script = """
from retnet_hf.cli.main import app
for command in ("generate someone/with-code@v2 w5 -n 3", "inspect someone/plain@branch"):
    app(command.split(), standalone_mode=False)
"""
    hub.asked.clear()
    assert "format   retnet_hf" in run(script, hub, tmp_path)
    for repo, revision in (("with-code", "v2"), ("plain", "branch")):
        paths = [path for path in hub.asked if f"someone/{repo}" in path]
        assert any(f"/{revision}" in path for path in paths)
        assert not any("/main" in path for path in paths)


@pytest.mark.parametrize("call", ["load(AutoConfig, 'someone/private')", "locate('someone/private')"])
def test_a_refusal_of_the_hub_says_how_to_log_in(hub, tmp_path, call):
    imports = "from transformers import AutoConfig; from retnet_hf.cli.named_inputs import load"
    imports += "; from retnet_hf.conversion.checkpoint_location import locate"
    said = run(f"{imports}\ntry: {call}\nexcept Exception as error: print(error)", hub, tmp_path)
    assert "someone/private" in said
    assert "log in with `hf auth login`" in said


@pytest.mark.parametrize("repo", ["someone/own-card", "someone/own-image-card"])
def test_push_to_hub_leaves_a_card_of_one_s_own_alone(hub, repo):
    card = ModelCard(hub.files[repo]["README.md"].decode())
    assert card.data.license == "mit"
    assert "# Written by hand" in card.text
    assert "model.safetensors" in hub.files[repo]


def test_a_card_names_the_classes():
    family = VISION_FAMILIES["vir"]

    def text(names: list[str]) -> str:
        return model_card(family.model(num_labels=len(names), id2label=dict(enumerate(names))), "some-model").text

    assert "that distinguishes 3 classes of images: cat, dog, owl.\n" in text(["cat", "dog", "owl"])
    many = text([str(number) for number in range(23)])
    assert "that distinguishes 23 classes of images: 0, 1," in many
    assert ", 19 and 3 more.\n" in many
    assert "distinguishes" not in text(["height"])
    subclass = type("Renamed", (family.classifier_class,), {})
    assert "image-classification" in model_card(subclass(family.config()), "some-model").text
