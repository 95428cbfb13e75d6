"""What identifies a base and its tokenizer: every change that loading would notice, and no other."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.errors import UserError
from rlhf.run import identity
from tests.helpers import Crash, content_of, crash, run_stages
from tests.models import pretrained

TENSORS = {"model.a": torch.arange(6000, dtype=torch.float32).view(60, 100), "model.b": torch.ones(3)}


@pytest.fixture
def folder(tmp_path) -> Path:
    place: Path = tmp_path / "base"
    place.mkdir()
    save_file(TENSORS, place / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"):
        (place / name).write_text(f"{{}} {name}")
    return place


def files(folder: Path, tokenizer: Path | None = None) -> dict[str, str]:
    recipe: Any = SimpleNamespace(
        model=SimpleNamespace(source="local", name=str(folder)),
        tokenizer=SimpleNamespace(source="local", name=str(tokenizer or folder)),
    )
    return identity.files_of(recipe)


def saved(folder: Path, **changes: torch.Tensor) -> None:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    save_file(TENSORS | named, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "file"),
    [
        (lambda f: saved(f, model__a=TENSORS["model.a"].flip(0)), "model.safetensors"),
        (lambda f: saved(f, model__a=TENSORS["model.a"].index_fill(0, torch.tensor(59), 0.0)), "model.safetensors"),
        (lambda f: saved(f, model__a=TENSORS["model.a"].view(100, 60)), "model.safetensors"),
        (lambda f: (f / "chat_template.jinja").write_text("{{ messages }}"), "chat_template.jinja"),
        (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda f: (f / "generation_config.json").write_text("{}"), "generation_config.json"),
    ],
)
def test_every_change_that_loading_would_notice_has_another_hash(folder, change, file):
    before = files(folder)
    change(folder)
    after = files(folder)
    assert {name for name, _ in before.items() ^ after.items()} == {file}


def test_the_place_and_what_is_not_read_do_not_count(folder, tmp_path):
    before = files(folder)
    (folder / "README.md").write_text("other")
    (tmp_path / "link").symlink_to(folder)
    moved = tmp_path / "snapshots" / "0123"
    moved.mkdir(parents=True)
    for file in folder.iterdir():  # as in the hub's cache
        (moved / file.name).symlink_to(file)
    assert files(folder) == files(tmp_path / "link") == files(moved) == before


def test_a_tokenizer_of_its_own_folder_counts_too(folder, tmp_path):
    other = tmp_path / "tokenizer"
    shutil.copytree(folder, other)
    before = files(folder, other)
    (other / "tokenizer.json").write_text("[]")
    assert {name for name, _ in before.items() ^ files(folder, other).items()} == {"tokenizer/tokenizer.json"}


@pytest.mark.parametrize("place", [0, 5_000, 2**24 + 3 * 2**22 + 100, 2**24 + 5 * 2**22])
def test_a_gguf_file_is_told_by_its_beginning_and_by_parts_of_its_weights(tmp_path, place):
    file = tmp_path / "base.gguf"
    with open(file, "wb") as handle:
        handle.truncate(2**24 + 5 * 2**22 + 10)
    before = files(file)
    assert {*before} == {"base.gguf"} and files(file) == before
    with open(file, "r+b") as handle:
        handle.seek(place)
        handle.write(b"x")
    assert files(file) != before


@pytest.mark.parametrize("what", ["weights", "template"])
def test_a_base_that_is_saved_anew_is_refused_by_later_stages_and_by_a_resume(trained, tmp_path, monkeypatch, what):
    own = tmp_path / "own"
    shutil.copytree(trained / "cpu-tiny/v1/pretrain/model", own)
    names = {"model__name": str(own), "tokenizer__name": str(own)}
    loaded = pretrained(trained, tmp_path, sft__max_samples=32, sft__logging_steps=1, sft__save_steps=1, **names)
    with monkeypatch.context() as patch:
        crash(patch, after=2)
        with pytest.raises(Crash):
            run_stages(loaded, tmp_path / "resumed", "sft")
    run_stages(loaded, tmp_path / "out", "sft")
    kept = content_of(tmp_path / "out/cpu-tiny/v1/sft/manifest.json")["base_hashes"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {*kept}
    if what == "weights":
        tensors = load_file(own / "model.safetensors")
        save_file({name: t * 1.01 for name, t in tensors.items()}, own / "model.safetensors", {"format": "pt"})
    else:
        file = own / "tokenizer_config.json"
        file.write_text(json.dumps(content_of(file) | {"model_max_length": 77}))
    name = "model.safetensors" if what == "weights" else "tokenizer_config.json"
    with pytest.raises(UserError, match=rf"/sft was made with {own}: {name} "):
        run_stages(loaded, tmp_path / "out", "rm")
    with pytest.raises(UserError, match=rf"/sft was made with {own}: {name} "):
        run_stages(loaded, tmp_path / "resumed", "sft", resume=True)
