"""The comparison of two sides from end to end: nothing in equal code, and each of several planted losses."""

import shutil
import sys
from pathlib import Path

import pytest

from bench.against import judge
from bench.against.checkout import Checkout
from bench.against.compare import Comparison
from bench.against.judge import Bounds, Change
from bench.paths import ROOT
from bench.steps import with_parents
from rlhf import recipe
from tests.helpers import RECIPE, SMALL

SIZES = {key: value for key, value in SMALL.items() if not key.startswith(("pretrain.", "data.toy."))}


# What a commit might do by accident: code that is put behind a module, and the figure that has to find it.
PLANTS = {
    "half of the responses are scored again": (
        "rlhf/stages/online/role_passes.py",
        """
_scores = reward_scores

def reward_scores(shared, rollout, rows_at_once):
    _scores(shared, rollout.rows(torch.arange(len(rollout.ids) // 2)), rows_at_once)
    return _scores(shared, rollout, rows_at_once)
""",
        ("ppo/score", "operations"),
    ),
    "the host reads a value in every step of decoding": (
        "rlhf/rollout/library_decoding.py",
        """
_advance = LibraryDecoding.advance

def advance(self):
    self.position.sum().item()
    _advance(self)

LibraryDecoding.advance = advance
""",
        ("ppo/rollout/decode", "host reads"),
    ),
    "40 kB are kept in every update": (
        "rlhf/objectives/masked.py",
        """
_kept, _whiten = [], whiten

def whiten(*arguments, **options):
    _kept.append(torch.ones(10_000))
    return _whiten(*arguments, **options)
""",
        ("ppo", "held memory"),
    ),
    "8 MB more in every pass over responses": (
        "rlhf/models/shared_base.py",
        """
_hidden = SharedBase.response_hidden

def response_hidden(self, rollout):
    more = torch.empty(2_000_000)
    return _hidden(self, rollout)

SharedBase.response_hidden = response_hidden
""",
        ("ppo/update", "peak memory"),
    ),
}


def code(folder: Path) -> Checkout:
    """A copy of the code that runs."""
    shutil.copytree(ROOT / "rlhf", folder / "rlhf", ignore=shutil.ignore_patterns("__pycache__"))
    return Checkout("the same", folder, sys.executable)


def compared(tmp_path: Path, planted: bool = False, rounds: int = 0) -> list[Change]:
    """The changes of SFT, reward model and PPO as counted; SFT and PPO are also timed in `rounds` pairs."""
    loaded = recipe.load(RECIPE, SIZES)
    old, new = code(tmp_path / "old"), code(tmp_path / "new")
    for file, lines, _ in PLANTS.values() if planted else ():
        with (new.root / file).open("a") as module:
            module.write(lines)
    with Comparison(old, new, loaded, steps=2, shape="hh", bounds=Bounds(), say=lambda line: None) as comparison:
        stages = with_parents(loaded, ["ppo"])
        assert stages == ["sft", "rm", "ppo"]
        changes = comparison.counted(stages)
        return changes + (comparison.timed(["sft", "ppo"], rounds) if rounds else [])


MEASURED = {judge.CPU, judge.WALL, judge.RATE, judge.PROCESS}  # the others are the same in every run of the same code


@pytest.mark.slow
def test_equal_code_has_equal_counts(tmp_path):
    changes = compared(tmp_path, rounds=2)
    counted = [change for change in changes if change.what not in MEASURED]
    assert {change.stage for change in counted} == {"sft", "rm", "ppo"} and len(counted) > 50
    assert [change.text() for change in counted if change.old != change.new] == []
    assert {change.phase for change in changes if change.what == judge.CPU} >= {"train", "load", judge.REST}
    assert not [change for change in changes if change.what == judge.CPU and change.old <= 0]
    timed = {change.stage for change in changes if change.what == judge.CPU}
    assert timed == {"sft", "ppo"}, "a stage between them is not made anew"


@pytest.mark.slow
def test_each_planted_loss_is_found_in_its_place_and_nothing_in_a_stage_without_one(tmp_path):
    changes = compared(tmp_path, planted=True)
    worse = {(change.place, change.what) for change in changes if change.worse}
    assert {place for *_, place in PLANTS.values()} <= worse
    assert not [place for place, _ in worse if place.startswith("rm")]
    assert [line.partition("/")[0] for line in judge.verdicts(changes)] == ["sft", "ppo"], "SFT's policy samples, too"
