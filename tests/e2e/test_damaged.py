"""Runs that are damaged, edited, foreign or half written: one line that names the file, from every stage that reads it.

Where a file is changed, its hash in the record beside it is made to fit again: hashes find what changed by accident,
the checks behind them what would still be wrong.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlhf.errors import UserError
from rlhf.evaluation import compare
from rlhf.files import sha256
from rlhf.rating.pairs import pair_answers
from rlhf.run.finished import result_hash
from tests.helpers import Crash, beside, content_of, crash, one_line_of, run_stages, small, toy_pairs
from tests.records import write_records

ROOT = Path("cpu-tiny/v1")
WEIGHTS, CONFIG = "adapter/adapter_model.safetensors", "adapter/adapter_config.json"
Damage = Callable[[Path], object]


def copied(trained: Path, out: Path, *stages: str) -> Path:
    """A root of its own with copies of finished stages; returns `<out>/<recipe>/<version>`."""
    for name in ("data", *stages):
        shutil.copytree(trained / ROOT / name, out / ROOT / name)
    return out / ROOT


def rehash(stage: Path) -> None:
    """Make the summary name the result as it is now, and later stages the summary."""
    summary = content_of(stage / "summary.json")
    summary["result_sha256"] = {name: result_hash(stage / name) for name in summary["result_sha256"]}
    (stage / "summary.json").write_text(json.dumps(summary))
    for manifest in stage.parent.glob("*/manifest.json"):
        content = content_of(manifest)
        if stage.name in content["parents"]:
            content["parents"][stage.name] = sha256(stage / "summary.json")
            manifest.write_text(json.dumps(content))


def tensors(name: str, change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the tensors of a file."""

    def damage(folder: Path) -> None:
        held = load_file(folder / name)
        change(held)
        save_file(held, folder / name, {"format": "pt"})

    return damage


def keys(name: str, **values: object) -> Damage:
    """Change keys of an object in a JSON file."""
    return lambda folder: (folder / name).write_text(json.dumps(content_of(folder / name) | values))


def put(name: str, content: object) -> Damage:
    """Write bytes as they are, or an object with torch.save."""

    def damage(folder: Path) -> None:
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            torch.save(content, folder / name)

    return damage


def first(held: dict[Any, Any]) -> Any:
    return held[sorted(held)[0]]


# -- results -----------------------------------------------------------------------------------------------------------


def with_nan(held: dict[str, Any]) -> None:
    first(held).fill_(float("nan"))


RESULTS: list[tuple[str, str, str, Damage, str]] = [
    ("sft, nan", "sft", "dpo", tensors(WEIGHTS, with_nan), "sft/adapter"),
    ("rm, nan", "rm", "ppo", tensors(WEIGHTS, with_nan), "rm/adapter"),
    ("sft, bytes", "sft", "rm", put(WEIGHTS, b"\xff" * 100), "adapter_model.safetensors"),
    ("base, nan", "pretrain", "sft",
     tensors("model/model.safetensors", lambda held: held["model.norm.weight"].fill_(float("nan"))), "model.norm"),
]  # fmt: skip


@pytest.mark.parametrize(("stage", "reader", "damage", "named"), [pytest.param(*r[1:], id=r[0]) for r in RESULTS])
def test_a_result_that_cannot_be_used_stops_the_stage_that_reads_it(trained, tmp_path, stage, reader, damage, named):
    root = copied(trained, tmp_path, *{"pretrain": ["pretrain"], "sft": ["pretrain", "sft"]}.get(stage, PARENTS))
    damage(root / stage)
    rehash(root / stage)
    with pytest.raises(UserError) as caught:
        run_stages(small(), tmp_path, reader)
    assert named in one_line_of(caught)


# -- parents and records -----------------------------------------------------------------------------------------------

PARENTS = ("pretrain", "sft", "rm")


def made_anew(stage: Path) -> None:
    """Another run under the same name: other weights, a summary of its own."""
    weights = next(stage.glob("*/*.safetensors"))
    save_file({name: tensor * 1.01 for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})
    summary = content_of(stage / "summary.json")
    summary["result_sha256"] = {name: result_hash(stage / name) for name in summary["result_sha256"]}
    (stage / "summary.json").write_text(json.dumps(summary))


RECORDS: list[tuple[str, str, Damage, str]] = [
    ("another base", "pretrain", made_anew, "another pretrain"),
    ("another sft", "sft", made_anew, "another sft"),
    ("no parents", "sft", keys("manifest.json", parents={}), "sft was made with another pretrain"),
    ("summary cut", "sft", put("summary.json", b'{"schema": 1, "rec'), "sft/summary.json"),
    ("summary of another stage", "sft", keys("summary.json", stage="rm"), "summary.json"),
    ("a pickle beside it", "sft", put("adapter/adapter_model.bin", b"a pickle"), "adapter_model.bin"),
    ("cut", "sft", lambda stage: (stage / WEIGHTS).write_bytes((stage / WEIGHTS).read_bytes()[:-10]), WEIGHTS),
    ("gone", "sft", lambda stage: shutil.rmtree(stage / "adapter"), "sft/adapter"),
]


@pytest.mark.parametrize("reader", ["ppo", "evaluate"])
@pytest.mark.parametrize(("stage", "damage", "named"), [pytest.param(*r[1:], id=r[0]) for r in RECORDS])
def test_a_parent_that_is_not_what_its_records_say_is_refused(trained, tmp_path, reader, stage, damage, named):
    root = copied(trained, tmp_path, *PARENTS)
    damage(root / stage)
    with pytest.raises(UserError) as caught:
        run_stages(small(), tmp_path, reader)
    assert named in one_line_of(caught)
    assert not (root / reader / "summary.json").exists()


def test_a_damaged_summary_is_not_taken_for_an_unfinished_run(trained, tmp_path):
    root = copied(trained, tmp_path, "pretrain", "sft")
    (root / "sft/summary.json").write_text("{")
    with pytest.raises(UserError, match=r"sft/summary\.json"):
        run_stages(small(), tmp_path, "sft")


def test_a_policy_that_is_evaluated_is_verified_too(trained, tmp_path):
    folder = beside(trained, tmp_path, *PARENTS) / ROOT / "ppo"
    shutil.copytree(trained / ROOT / "sft/adapter", folder / "adapter")
    write_records(folder, {"parents": {"rm": "0" * 64}})
    with pytest.raises(UserError, match="another rm"):
        run_stages(small(), tmp_path, "evaluate")
    (folder / WEIGHTS).write_bytes(b"other")
    with pytest.raises(UserError, match=r"ppo/adapter/adapter_model\.safetensors"):
        run_stages(small(), tmp_path, "evaluate")


def test_an_evaluation_is_verified_before_it_is_rated_or_compared(tmp_path):
    folder = tmp_path / ROOT / "evaluate"
    folder.mkdir(parents=True)
    samples = folder / "samples.jsonl"
    answers = {"sft": {"response": "a"}, "ppo": {"response": "b"}}
    samples.write_text(json.dumps({"step": 0, "prompt": "p", **answers}) + "\n")
    write_records(folder)
    assert len(pair_answers(tmp_path / ROOT).pairs) == 1
    samples.write_text(samples.read_text().replace('"b"', '"c"'))
    for reader in (lambda: pair_answers(tmp_path / ROOT), lambda: compare.load(tmp_path / ROOT, "ppo")):
        with pytest.raises(UserError, match=r"evaluate/samples\.jsonl"):
            reader()


# -- generated data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["pretrain", "sft"])
def test_generated_data_that_was_changed_is_refused(trained, tmp_path, stage):
    """Also where no parent has read it before."""
    root = copied(trained, tmp_path, *(["pretrain"] if stage == "sft" else []))
    file = root / "data" / toy_pairs(trained).parent.name / "pairs.jsonl"
    file.write_text(file.read_text().replace(" the ", " teh ", 1))
    with pytest.raises(UserError, match=r"pairs\.jsonl") as caught:
        run_stages(small(), tmp_path, stage)
    one_line_of(caught)


def test_generated_data_that_was_cut_off_is_made_again(trained, tmp_path):
    """Killed while it was written: there is no made.json yet."""
    root = beside(trained, tmp_path, "pretrain") / ROOT
    (root / "data").unlink()
    folder = toy_pairs(trained).parent.name
    (root / "data" / folder).mkdir(parents=True)
    for name in ("corpus.jsonl", "pairs.jsonl"):
        whole = (trained / ROOT / "data" / folder / name).read_bytes()
        (root / "data" / folder / name).write_bytes(whole[: len(whole) // 2])
    run_stages(small(sft__max_steps=1), tmp_path, "sft")
    ours, theirs = (content_of(r / "manifest.json")["data"] for r in (root / "sft", trained / ROOT / "pretrain"))
    assert ours["sha256"] == theirs["sha256"]


# -- runs that move ----------------------------------------------------------------------------------------------------


def test_a_run_that_was_moved_goes_on(trained, tmp_path):
    """Trained in one place, then moved: its stages are done there, later ones read them."""
    root = copied(trained, tmp_path, *PARENTS)
    for stage in ("sft", "rm"):
        keys(CONFIG, base_model_name_or_path="/where/it/was/pretrain/model")(root / stage)
    for stage in PARENTS:
        assert run_stages(small(), tmp_path, stage) == content_of(trained / ROOT / stage / "summary.json")
    assert run_stages(small(dpo__max_steps=1), tmp_path, "dpo")["status"] == "done"


# -- checkpoints -------------------------------------------------------------------------------------------------------

STEP = 2


@pytest.fixture(scope="module")
def interrupted(trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose PPO stopped behind the checkpoint of STEP."""
    out: Path = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Crash):
        crash(patch, STEP)
        run_stages(small(), beside(trained, out, *PARENTS), "ppo")
    return out


def resumable(interrupted: Path, out: Path) -> Path:
    """A copy of an interrupted run; returns the folder of its newest checkpoint."""
    shutil.copytree(interrupted, out, symlinks=True, dirs_exist_ok=True)
    return out / ROOT / "ppo/checkpoints" / f"step-{STEP:06d}"


def seal(folder: Path) -> None:
    files = [file for file in folder.rglob("*") if file.is_file() and file.name != "checkpoint.json"]
    hashes = {str(file.relative_to(folder)): sha256(file) for file in files}
    keys("checkpoint.json", sha256=hashes)(folder)


class Harmful:
    def __reduce__(self):
        return (Path.touch, (Path("unpickled"),))


STATE = "state.pt"
CHECKPOINTS: list[tuple[str, Damage]] = [
    ("bytes", put(STATE, b"\xff" * 99)),
    ("harmful", put(STATE, {"x": Harmful()})),
]


@pytest.mark.parametrize("damage", [pytest.param(damage, id=name) for name, damage in CHECKPOINTS])
def test_a_checkpoint_that_cannot_be_read_is_one_line(interrupted, tmp_path, monkeypatch, damage):
    """Sealed as if our own process had written it: what is read of it runs no code, and fails in one line."""
    monkeypatch.chdir(tmp_path)
    folder = resumable(interrupted, tmp_path / "out")
    damage(folder)
    seal(folder)
    with pytest.raises(UserError) as caught:
        run_stages(small(), tmp_path / "out", "ppo", resume=True)
    assert str(folder) in one_line_of(caught) and "--resume" in one_line_of(caught)
    assert not (tmp_path / "unpickled").exists()


def test_a_checkpoint_with_a_file_too_many_is_passed_over(interrupted, tmp_path, capsys):
    """transformers would load it instead of the adapter. The checkpoint before it is taken."""
    folder = resumable(interrupted, tmp_path)
    put("pytorch_model.bin", b"x")(folder)
    run_stages(small(), tmp_path, "ppo", resume=True)
    assert "pytorch_model.bin" in capsys.readouterr().err
    assert content_of(tmp_path / ROOT / "ppo/manifest.json")["resumed_from"] == "step-000001"
