"""`rlhf reproduce`: what it starts for each seed, what it records and what it refuses to put into one table."""

import re
import sys
from pathlib import Path

import pytest

from rlhf import recipe
from rlhf.commands import reproduce
from rlhf.errors import UserError
from rlhf.process import children
from rlhf.process.exhaustion import EXHAUSTED
from rlhf.run import reader
from rlhf.run.outcomes import Reproduction
from tests.helpers import RECIPE, noted
from tests.records import write_records

LOADED = recipe.load(RECIPE)
PACKAGES = dict.fromkeys(("torch", "transformers", "trl", "peft"), "1")


def measured(out: Path, seed: int, **manifest: object) -> None:
    """A finished SFT of one seed."""
    folder = reproduce.runs_root(out, seed) / LOADED.name / LOADED.version / "sft"
    write_records(folder, {"python": "3.11.9", "packages": PACKAGES} | manifest)


def test_each_seed_and_stage_is_a_run_that_keeps_and_resumes_what_is_there(tmp_path, monkeypatch):
    commands: list[list[str]] = []
    monkeypatch.setattr(children, "run_child", lambda command: noted(commands, command, 0))
    reproduce.run_seeds(["sft", "rm"], [0, 7], tmp_path, ["--hw", "cpu"])
    kept = ["--if-needed", "--resume"]
    assert commands == [
        [sys.executable, "-m", "rlhf.cli", "run", stage, *kept, "--seed", seed, "--out", str(root), "--hw", "cpu"]
        for seed, root in (("0", tmp_path / "seed-0"), ("7", tmp_path / "seed-7"))
        for stage in ("sft", "rm")
    ]


def test_a_seed_that_stops_names_its_command_and_keeps_its_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(children, "run_child", lambda command: EXHAUSTED)
    with pytest.raises(SystemExit) as stopped:
        reproduce.run_seeds(["sft"], [0], tmp_path, [])
    assert stopped.value.code == EXHAUSTED
    assert re.match(
        r"error: seed 0 stopped in sft; .*repeat this .*\(.*: rlhf run sft .*--resume", capsys.readouterr().err
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
    with pytest.raises(UserError, match="not all stages were run by the same code, packages and device"):
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
