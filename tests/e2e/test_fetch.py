"""`rlhf fetch` against a hub of our own on this machine, and a run without network from what it left."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlparse

import pytest
import yaml

from rlhf.recipe.plain_yaml import Yaml
from rlhf.recipe.strict import with_overrides
from tests.conftest import RECIPE, SMALL

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).parents[2]


class Hub:
    """Repositories by `models/org/name`: {file: content}; `gated` ones refuse, files in `damaged` arrive changed."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        self.gated: set[str] = set()
        self.damaged: set[str] = set()
        self.requests: list[str] = []

    def serve(self) -> ThreadingHTTPServer:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                status, headers, body = hub.answer(unquote(urlparse(self.path).path), self.rfile, self.headers)
                self.send_response(status)
                for key, value in ({"Content-Length": str(len(body))} | headers).items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_HEAD = do_GET
            do_POST = do_GET

            def log_message(self, *_) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server

    def answer(self, path, body, headers) -> tuple[int, dict[str, str], bytes]:
        sent = body.read(int(headers.get("Content-Length") or 0))
        self.requests.append(path)
        parts = path.strip("/").split("/")
        if parts[0] == "api":
            repo, rest = "/".join(parts[1:4]), parts[4:]
        else:
            kind = parts[0] if parts[0] == "datasets" else "models"
            parts = parts[1:] if parts[0] == "datasets" else parts
            repo, rest = f"{kind}/{'/'.join(parts[:2])}", parts[2:]
        files = self.repos.get(repo)
        if files is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        if repo in self.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"}, b"{}"
        if rest[:2] == ["revision", COMMIT] or rest == []:
            card = {"license": "apache-2.0"}
            names = [{"rfilename": name} for name in files]
            found = {"id": repo.partition("/")[2], "sha": COMMIT, "siblings": names, "cardData": card, "gated": False}
            return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()
        if rest[:1] in (["tree"], ["paths-info"]):
            listed = {name: entry(name, content) for name, content in files.items()}
            folders = {str(parent) for name in files for parent in Path(name).parents if str(parent) != "."}
            listed |= {name: {"type": "directory", "path": name, "size": 0, "oid": "0" * 40} for name in folders}
            if rest[0] == "paths-info":
                asked = parse_qs(sent.decode())["paths"] if b"paths=" in sent else json.loads(sent)["paths"]
                entries = [listed[name] for name in asked if name in listed]
            else:
                below = "".join(f"{part}/" for part in rest[2:])
                entries = [listed[name] for name in listed if name.startswith(below)]
            return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()
        name = "/".join(rest[2:])
        if rest[:2] != ["resolve", COMMIT] or name not in files:
            code = "EntryNotFound" if rest[1:2] == [COMMIT] else "RevisionNotFound"
            return 404, {"X-Error-Code": code}, b"{}"
        content = files[name]
        tag = hashlib.sha256(content).hexdigest() if lfs(name) else git_hash(content)
        if name in self.damaged:
            content = b"x" * len(content)
        return 200, {"ETag": f'"{tag}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "none"}, content


def entry(name: str, content: bytes) -> dict[str, object]:
    """A file as the hub lists it."""
    found: dict[str, object] = {"type": "file", "path": name, "size": len(content), "oid": git_hash(content)}
    if lfs(name):
        found["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 1}
    return found


def lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".gz", ".bin"))


def git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def hub(trained) -> Iterator[tuple[Hub, str]]:
    """With a small model and a set of pairs in a folder of its own, as HH-RLHF has them."""
    found = Hub()
    model = trained / "cpu-tiny/v1/pretrain/model"
    found.repos["models/org/tiny"] = {file.name: file.read_bytes() for file in model.iterdir()} | {
        "pytorch_model.bin": b"the same weights",
        "consolidated.safetensors": b"and once more",
        "original/params.json": b"{}",
    }
    pairs = next((trained / "cpu-tiny/v1/data").rglob("pairs.jsonl")).read_bytes()
    text = gzip.compress(pairs, mtime=0)
    found.repos["datasets/org/pairs"] = {"README.md": b"# pairs\n", "part/train.jsonl.gz": text, "other/x.jsonl": b"{}"}
    server = found.serve()
    yield found, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def from_hub(tmp_path: Path) -> Path:
    """The small recipe with base, tokenizer and pairs from the hub."""
    content = yaml.load((RECIPE / "recipe.yaml").read_text(), Yaml)
    source = {"source": "hub", "name": "org/tiny", "revision": COMMIT}
    changes = SMALL | {
        "pretrain": None,
        "model": {**source, "dtype": "float32"},
        "tokenizer": {**source, "template": "hh"},
        "data.source": "hub",
        "data.toy": None,
        "data.name": "org/pairs",
        "data.revision": COMMIT,
        "data.data_dir": "part",
    }
    made_here = ("pretrain.", "model.architecture", "tokenizer.vocab_size", "data.toy.")
    changes = {key: value for key, value in changes.items() if not key.startswith(made_here)}
    folder = tmp_path / "recipes" / "from-hub" / "v1"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(with_overrides(content, changes)))
    return folder


def rlhf(tmp_path: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HTTP"))}
    keep |= {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1", **environment}
    command = [sys.executable, "-m", "rlhf.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=keep)


def test_what_was_fetched_is_enough_for_a_run_without_network(hub, from_hub, tmp_path):
    repos, address = hub
    done = rlhf(tmp_path, "fetch", "--recipe", from_hub, HF_ENDPOINT=address)
    assert done.returncode == 0, done.stderr
    assert "org/tiny" in done.stdout and "org/pairs/part" in done.stdout and "apache-2.0" in done.stdout
    asked = {path for path in repos.requests if "/resolve/" in path}
    assert not [path for path in asked if path.endswith((".bin", "consolidated.safetensors", "other/x.jsonl"))]
    assert not [path for path in asked if "original" in path]
    repos.requests.clear()
    nowhere = "http://127.0.0.1:9"
    done = rlhf(tmp_path, "run", "sft", "--recipe", from_hub, HF_HUB_OFFLINE="1", HF_ENDPOINT=nowhere)
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "runs/from-hub/v1/sft/adapter/adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/tiny", COMMIT)
    assert repos.requests == []


def test_without_network_and_nothing_fetched_the_way_out_is_named(from_hub, tmp_path):
    done = rlhf(tmp_path, "run", "sft", "--recipe", from_hub, HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    assert done.stderr.startswith("error: org/pairs/part/train: not loaded")
    assert "rlhf fetch" in done.stderr


def test_a_gated_model_says_where_to_get_access(hub, from_hub, tmp_path):
    repos, address = hub
    repos.gated.add("models/org/tiny")
    done = rlhf(tmp_path, "fetch", "--recipe", from_hub, HF_ENDPOINT=address)
    assert done.returncode == 1
    assert "org/tiny is gated: accept its licence there, then `hf auth login` or set HF_TOKEN" in done.stderr


def test_a_revision_that_is_not_there_is_named(hub, from_hub, tmp_path):
    _, address = hub
    other = "f" * 40
    changes = ("--set", f"model.revision={other}", "--set", f"tokenizer.revision={other}")
    done = rlhf(tmp_path, "fetch", "--recipe", from_hub, *changes, HF_ENDPOINT=address)
    assert done.returncode == 1
    assert f"revision {other} is not there" in done.stderr


def test_a_file_that_arrived_damaged_is_named(hub, from_hub, tmp_path):
    repos, address = hub
    repos.damaged.add("model.safetensors")
    done = rlhf(tmp_path, "fetch", "--recipe", from_hub, HF_ENDPOINT=address)
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr and len(done.stderr.strip().splitlines()) == 1
