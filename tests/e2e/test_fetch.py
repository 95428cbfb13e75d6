"""`rlhf fetch` against a hub of our own on this machine, and a run without network from what it left."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rlhf.recipe.plain_yaml import Yaml
from rlhf.recipe.strict import with_overrides
from tests.helpers import RECIPE, SMALL, toy_pairs
from tests.hub import COMMIT, Hub

ROOT = Path(__file__).parents[2]


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
    pairs = toy_pairs(trained).read_bytes()
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
    assert "org/tiny" in done.stdout and "org/pairs" in done.stdout and "apache-2.0" in done.stdout
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
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: cannot load the tokenizer org/tiny: ")
    assert "rlhf fetch" in done.stderr


def test_a_gated_model_says_where_to_get_access(hub, from_hub, tmp_path):
    repos, address = hub
    repos.gated.add("models/org/tiny")
    done = rlhf(tmp_path, "fetch", "--recipe", from_hub, HF_ENDPOINT=address)
    assert done.returncode == 1
    assert "https://huggingface.co/org/tiny" in done.stderr and "HF_TOKEN" in done.stderr


def test_a_revision_that_is_not_there_is_named(hub, from_hub, tmp_path):
    _, address = hub
    other = "f" * 40
    changes = ("--set", f"model.revision={other}", "--set", f"tokenizer.revision={other}")
    done = rlhf(tmp_path, "fetch", "--recipe", from_hub, *changes, HF_ENDPOINT=address)
    assert done.returncode == 1
    assert f"org/tiny at {other}: " in done.stderr


def test_pickled_weights_are_refused_before_they_are_downloaded(hub, from_hub, tmp_path):
    repos, address = hub
    model = repos.repos["models/org/tiny"]
    repos.repos["models/org/tiny"] = {name: file for name, file in model.items() if not name.endswith("safetensors")}
    done = rlhf(tmp_path, "fetch", "--recipe", from_hub, HF_ENDPOINT=address)
    assert done.returncode == 1
    assert "org/tiny has no weights as *.safetensors" in " ".join(done.stderr.split())
    assert not [*tmp_path.rglob("pytorch_model.bin")]
