"""`rlhf reproduce`: what it starts for each seed, what it records and what it refuses to put into one table."""

import re
from pathlib import Path

import pytest

from rlhf import recipe
from rlhf.errors import UserError
from rlhf.evaluation import reproduce
from rlhf.process import children
from rlhf.process.exhaustion import EXHAUSTED
from rlhf.process.task import Task
from rlhf.run import reader
from rlhf.run.records import Reproduction
from tests.helpers import RECIPE, noted, task_of
from tests.records import write_records

LOADED = recipe.load(RECIPE)
PACKAGES = dict.fromkeys(("torch", "transformers", "trl", "peft"), "1")


def measured(out: Path, seed: int, **manifest: object) -> None:
    """A finished SFT of one seed."""
    folder = reproduce.runs_root(out, seed) / LOADED.name / LOADED.version / "sft"
    write_records(folder, {"python": "3.11.9", "packages": PACKAGES} | manifest)


def test_each_seed_and_stage_is_a_run_that_keeps_and_resumes_what_is_there(tmp_path, monkeypatch):
    run: list[Task] = []
    monkeypatch.setattr(children, "run_child", lambda words: noted(run, task_of(words), 0))
    changed = LOADED.with_changes({"ppo.steps": 3})
    reproduce.run_seeds(changed, ["sft", "rm"], [0, 7], tmp_path)
    assert [(task.stage, task.out) for task in run] == [
        (stage, str(tmp_path / f"seed-{seed}")) for seed in (0, 7) for stage in ("sft", "rm")
    ]
    for task in run:
        assert task.if_needed and task.resume
        assert task.load() == recipe.load(RECIPE, {"ppo.steps": 3}, int(task.out[-1]))


def test_a_stage_is_not_begun_by_another_code_than_a_finished_one_had(tmp_path, monkeypatch):
    measured(tmp_path, 0)
    run: list[Task] = []
    monkeypatch.setattr(children, "run_child", lambda words: noted(run, task_of(words), 0))
    with pytest.raises(UserError, match=r"seed-0/.*sft: (python|packages|code)"):
        reproduce.run_seeds(LOADED, ["sft"], [0, 7], tmp_path)
    assert [task.out for task in run] == [str(tmp_path / "seed-0")], "which is done, as its process says"


def test_a_seed_that_stops_names_its_command_and_keeps_its_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(children, "run_child", lambda *_: EXHAUSTED)
    with pytest.raises(SystemExit) as stopped:
        reproduce.run_seeds(LOADED, ["sft"], [0], tmp_path)
    assert stopped.value.code == EXHAUSTED
    assert re.match(
        r"error: seed 0 stopped in sft; .*repeat this .*\(.*: `rlhf run sft .*/seed-0/cpu-tiny/v1 --resume`",
        capsys.readouterr().err,
    )


def test_a_record_holds_every_seed_and_is_read_back(tmp_path):
    for seed in (0, 1):
        measured(tmp_path, seed)
    record = reproduce.write_record(LOADED, ["sft"], [0, 1], tmp_path, price=2.0)
    assert record.seeds.keys() == {"0", "1"} and record.price_per_hour == 2.0
    assert reader.read(tmp_path / "cpu-tiny-v1.json", Reproduction) == record


@pytest.mark.parametrize(
    "other",
    [
        {"python": "3.12.1"},
        {"code": {"commit": "abc", "dirty": None}},
        {"packages": PACKAGES | {"torch": "2"}},
        {"device": {"name": "another", "type": "cpu"}},
    ],
    ids=lambda other: next(iter(other)),
)
def test_seeds_of_another_code_python_package_or_device_are_in_no_table(tmp_path, other):
    measured(tmp_path, 0)
    measured(tmp_path, 1, **other)
    key, folder = next(iter(other)), tmp_path / "seed-1/cpu-tiny/v1/sft"
    with pytest.raises(UserError, match=rf"^{folder}: {key}\S* is .*, and .* in {tmp_path}/seed-0/cpu-tiny/v1/sft; "):
        reproduce.write_record(LOADED, ["sft"], [0, 1], tmp_path)
    assert not (tmp_path / "cpu-tiny-v1.json").exists()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([1.0, 2.0, 3.0], "2 ± 1"),
        ([1.0, float("nan"), 3.0, float("inf"), None], "2 ± 1.414"),
        ([2.0, None], "2"),
        ([None, float("nan")], "-"),
    ],
)
def test_mean_and_deviation_are_those_of_the_finite_values(values, text):
    assert reproduce.mean_sd(values) == text
