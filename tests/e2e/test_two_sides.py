"""The comparison of two sides from end to end: nothing in equal code, and what was planted."""

import shutil
import sys
from pathlib import Path

import pytest

from bench.against import judge
from bench.against.checkout import Checkout
from bench.against.compare import Comparison
from bench.against.judge import Bounds, Change
from bench.against.plants import plant
from bench.paths import ROOT
from bench.steps import with_parents
from rlhf import recipe
from tests.helpers import RECIPE, SMALL

SIZES = {key: value for key, value in SMALL.items() if not key.startswith(("pretrain.", "data.toy."))}


def code(folder: Path) -> Checkout:
    """A copy of the code that runs."""
    shutil.copytree(ROOT / "rlhf", folder / "rlhf", ignore=shutil.ignore_patterns("__pycache__"))
    return Checkout("the same", folder, sys.executable)


def compared(tmp_path: Path, planted: str = "", rounds: int = 0) -> list[Change]:
    """The changes of SFT, reward model and PPO as counted; SFT and PPO are also timed in `rounds` pairs."""
    loaded = recipe.load(RECIPE, SIZES)
    old = code(tmp_path / "old")
    new = plant(planted, old, tmp_path) if planted else code(tmp_path / "new")
    with Comparison(old, new, loaded, steps=2, shape="hh", bounds=Bounds(), say=lambda line: None) as comparison:
        stages = with_parents(loaded, ["ppo"])
        assert stages == ["sft", "rm", "ppo"]
        changes = comparison.counted(stages)
        return changes + (comparison.timed(["sft", "ppo"], rounds) if rounds else [])


@pytest.mark.slow
def test_equal_code_has_equal_counts(tmp_path):
    changes = compared(tmp_path, rounds=2)
    counted = [change for change in changes if change.what not in judge.MEASURED]
    assert {change.stage for change in counted} == {"sft", "rm", "ppo"} and len(counted) > 50
    assert [change.text() for change in counted if change.old != change.new] == []
    assert {change.phase for change in changes if change.what == judge.CPU} >= {"train", "load", judge.REST}
    assert not [change for change in changes if change.what == judge.CPU and change.old <= 0]
    timed = {change.stage for change in changes if change.what == judge.CPU}
    assert timed == {"sft", "ppo"}, "a stage between them is not made anew"


@pytest.mark.slow
def test_a_role_that_is_scored_twice_is_found_and_nothing_else(tmp_path):
    changes = compared(tmp_path, "role scored twice")
    worse = {(change.place, change.what) for change in changes if change.worse}
    assert {("ppo/score", "operations"), ("ppo/score", "bytes moved")} <= worse
    assert not [place for place, _ in worse if place not in ("ppo", "ppo/score")]
    (line,) = judge.verdicts(changes)
    assert line.startswith("ppo/score: ")
