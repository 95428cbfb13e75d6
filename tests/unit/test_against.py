"""The comparison with another commit: what is counted, what is worse, and which commit a change is held against."""

import ast
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest
import torch
from click.testing import CliRunner

from bench.against import __main__ as against
from bench.against import checkout, compare, judge, micro, table
from bench.against.judge import Bounds, Change
from bench.against.sides import Cost, Counts, Predicted, SideFailed
from bench.against.worker import MEASURED_PHASES, Clock, Counter
from bench.kinds import SameRecord, SameRow
from bench.paths import ROOT
from rlhf import recipe
from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.plan import phases
from rlhf.recipe import StageName
from rlhf.recipe.stages import TRAINING_STAGES
from tests.helpers import RECIPE


def counts(flops: int = 1000, moved: int = 1000, launched: int = 100, reads: int = 10, peak: int = 1000) -> Counts:
    return {"flops": flops, "moved": moved, "launched": launched, "reads": reads, "peak_bytes": peak}


def cost(
    cpu: float = 10.0, score: float = 4.0, held: tuple[int, ...] = (100_000, 100_000), in_score: Counts | None = None
) -> Cost:
    """A stage of 10 s with a phase of 4 s; a whole stage counts 1,000 of each."""
    return {
        "seconds": {"": {"cpu": cpu, "wall": cpu}, "score": {"cpu": score, "wall": score}},
        "counts": {"": counts()} | ({"score": in_score} if in_score else {}),
        "held": [*held],
        "tokens": 100,
        "card_peak_bytes": {},
        "peak_rss_bytes": 0,
    }


# -- what is counted --------------------------------------------------------------------------------------------------


def test_products_bytes_launches_reads_and_peaks_are_counted_by_phase():
    with Counter() as counter:
        x = torch.ones(10, 20)  # writes 800 bytes
        with torch.profiler.record_function("train"):
            y = x @ x.T  # 2 * 10 * 20 * 10 operations, 400 bytes
            with torch.profiler.record_function("a name that is no phase"):
                y.sum().item()  # reads 400 bytes and writes 4
            del y
        z = x + 1  # reads and writes 800 bytes
    whole, train = counter.counts()[""], counter.counts()["train"]
    assert (train["flops"], train["moved"], train["launched"], train["reads"]) == (4000, 404, 2, 1)
    assert (whole["flops"], whole["moved"], whole["launched"], whole["reads"]) == (4000, 404 + 1600 + 800, 4, 1)
    assert (train["peak_bytes"], whole["peak_bytes"]) == (1024 + 512 + 512, 1024 + 1024), "in blocks of 512"
    del z


def test_what_is_held_in_each_step_is_counted_once_however_often_an_optimizer_steps():
    """A tensor that is kept in every step grows it; a backward pass is counted too."""
    kept = []
    with Counter() as counter:
        weight = torch.ones(5, 5, requires_grad=True)
        optimizer = torch.optim.SGD([weight])
        optimizer.step()  # outside of the steps
        for _ in range(3):
            with torch.profiler.record_function("update"):
                for _ in range(2):
                    (weight @ weight).sum().backward()
                    optimizer.step()
            kept.append(torch.ones(25))
        with torch.profiler.record_function("train"):
            optimizer.step()
            optimizer.step()
    assert counter.held == [2 * 512, 3 * 512, 4 * 512, 5 * 512, 5 * 512], "blocks: weight, gradient, what is kept"
    assert counter.counts()[""]["flops"] == 6 * 3 * 2 * 5**3


def test_seconds_of_a_phase_inside_another_count_for_both():
    clock = Clock()
    with clock.running(), torch.profiler.record_function("rollout"), torch.profiler.record_function("decode"):
        sum(range(300_000))
    assert clock.seconds["rollout"][0] >= clock.seconds["rollout/decode"][0] > 0
    with torch.profiler.record_function("score"):
        pass
    assert "score" not in clock.seconds, "the class is as it was before"


def test_the_phases_are_those_of_a_prediction_and_the_references():
    """An older checkout may lack one: the worker has its own list."""
    assert {*MEASURED_PHASES} == {*phases.PHASES, "references"}


# -- what is worse ----------------------------------------------------------------------------------------------------


def worse(*changes: Change) -> list[str]:
    return [f"{change.place} {change.what}" for change in changes if change.worse]


def test_equal_counts_are_no_change_and_a_fifth_more_is():
    same = cost(in_score=counts(400))
    assert worse(*judge.counted("ppo", same, same, Bounds())) == []
    more = cost(in_score=counts(480, peak=1021, reads=11))
    assert worse(*judge.counted("ppo", same, more, Bounds())) == [
        "ppo/score operations",
        "ppo/score host reads",
        "ppo/score peak memory",
    ]
    gross = Bounds(0.25, 0.25, gross=True)
    assert worse(*judge.counted("ppo", same, more, gross)) == []


def test_a_change_that_is_nothing_to_the_stage_is_not_judged():
    """Twice the operations of a phase that has half a per cent of them."""
    before, after = cost(in_score=counts(5, 5, 1, 0, 5)), cost(in_score=counts(10, 5, 1, 0, 5))
    assert worse(*judge.counted("ppo", before, after, Bounds())) == []


def test_what_is_kept_in_every_step_is_found_while_it_is_small():
    """150 bytes more in a step of 100 kB are too much; 50 are not, nor is what the first step alone adds for both."""
    before = cost(held=(50_000, 100_000))
    assert worse(*judge.counted("ppo", before, cost(held=(50_000, 100_150)), Bounds())) == ["ppo held memory"]
    assert worse(*judge.counted("ppo", before, cost(held=(50_000, 100_050)), Bounds())) == []


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ([(4.0, 4.6), (4.4, 5.0), (4.1, 4.7)], ["ppo/score CPU s"]),
        ([(4.0, 4.6), (4.4, 5.0), (4.9, 4.9)], []),  # a pair that does not say so
        ([(4.4, 4.7), (4.0, 4.5), (4.6, 5.1)], ["ppo/score CPU s"]),
        ([(4.0, 4.9), (4.4, 4.7), (4.0, 4.15)], []),  # the least of both sides hardly differ
    ],
)
def test_seconds_are_worse_where_every_pair_and_the_least_of_each_side_say_so(seconds, expected):
    pairs = [(cost(20.0, old), cost(20.0, new)) for old, new in seconds]
    assert worse(*(c for c in judge.timed("ppo", pairs, Bounds()) if c.phase == "score")) == expected


def test_one_pair_of_many_may_be_an_outlier():
    pairs = [(cost(20.0, 4.0), cost(20.0, 4.6))] * 5 + [(cost(20.0, 6.0), cost(20.0, 4.6))]
    assert "ppo/score CPU s" in worse(*judge.timed("ppo", pairs, Bounds()))
    assert "ppo/score CPU s" not in worse(*judge.timed("ppo", pairs[3:], Bounds()))


@pytest.mark.parametrize(("slower", "found"), [(1.14, True), (1.0, False)])
def test_more_pairs_find_what_a_busy_machine_hides_in_a_few(slower, found):
    """Pairs whose ratios differ by a fifth: a seventh more time is seen in 60 of them, no change in none."""
    chance = random.Random(0)
    seen = {}
    for rounds in (6, 60):
        cases = [
            [(chance.lognormvariate(0, 0.15), slower * chance.lognormvariate(0, 0.15)) for _ in range(rounds)]
            for _ in range(50)
        ]
        seen[rounds] = sum(judge.spread("ppo", "score", judge.CPU, pairs, Bounds(), 1.0).worse for pairs in cases)
    assert seen[6] <= 20 < 30 <= seen[60] if found else max(seen.values()) <= 2, seen


def test_the_time_between_phases_counts_as_the_rest():
    pairs = [(cost(5.0, 4.0), cost(6.0, 4.0))] * 3
    changes = {(c.phase, c.what): c for c in judge.timed("sft", pairs, Bounds())}
    assert changes[judge.REST, judge.CPU].ratio == 2.0 and changes[judge.REST, judge.CPU].worse
    assert changes["", judge.RATE].old == 0.05 and not changes["", judge.WALL].worse


def test_the_line_names_stage_phase_and_the_largest_change():
    before, after = cost(in_score=counts(400)), cost(in_score=counts(600, 1100))
    (line,) = judge.verdicts([*judge.counted("ppo", before, after, Bounds())])
    assert line == "ppo/score: operations +50.0%, 400 to 600 (and 1 more)"
    columns, rows = table.rows([*judge.counted("ppo", before, after, Bounds())])
    assert columns[:2] == ["", "operations"] and rows[1][:3] == ["ppo/score", "1.5000 !", "1.1000 !"]
    text = table.markdown("title", [], [line])
    assert "- worse: ppo/score: operations +50.0%" in text


def test_predictions_of_a_card_are_compared():
    before: Predicted = {"flops": 100, "moved": 100, "launched": 100, "peak_bytes": 100}
    found = judge.predicted(
        "card v1", {"ppo": {"update": before}}, {"ppo": {"update": before | {"peak_bytes": 115}}}, Bounds()
    )
    assert worse(*found) == ["card v1 ppo/update peak memory"]
    assert [*judge.predicted("card v1", {"ppo": {"update": before}}, {}, Bounds())] == []


def test_small_functions_are_compared_by_name():
    runs = [({"test_a": 1.0, "test_gone": 1.0}, {"test_a": 1.2, "test_new": 1.0})] * 3
    (change,) = micro.changes(runs, Bounds(slower=0.1))
    assert worse(change) == ["micro/a CPU s"]


def test_every_function_of_the_objectives_and_a_step_of_every_stage_is_timed():
    functions = {
        f"{file.stem}.{node.name}"
        for file in (ROOT / "rlhf/objectives").glob("*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }
    timed = (ROOT / micro.FOLDER / "test_objectives.py").read_text()
    assert not functions - {*re.findall(r"\w+\.\w+", timed)}
    stages = (ROOT / micro.FOLDER / "test_steps.py").read_text()
    assert [stage for stage in TRAINING_STAGES if f'"{stage}"' not in stages] == ["second_rm"], "it is trained as rm is"


def test_a_function_that_became_slower_is_found_by_the_new_benchmarks_which_the_old_side_may_not_all_pass(tmp_path):
    """Each side in its own process, as in the whole comparison: a loop that takes twice as long."""
    suite = tmp_path / "new" / micro.FOLDER
    suite.mkdir(parents=True)
    (suite / "test_work.py").write_text(
        "import work\n\ndef test_slower(benchmark):\n    benchmark(work.slower)\n\n"
        "def test_only_new(benchmark):\n    benchmark(work.only_new)\n"
    )
    (tmp_path / "old").mkdir()
    function = "def {}():\n    return sum(range({}))\n\n"
    (tmp_path / "old/work.py").write_text(function.format("slower", 100_000))
    (tmp_path / "new/work.py").write_text(function.format("slower", 200_000) + function.format("only_new", 10))
    old, new = (checkout.Checkout(name, tmp_path / name, sys.executable) for name in ("old", "new"))
    pair = micro.run(old, suite, old=True), micro.run(new, suite)
    assert [*pair[0]] == ["test_slower"] and [*pair[1]] == ["test_slower", "test_only_new"]
    found = [*micro.changes([pair], Bounds(slower=0.1))]
    assert worse(*found) == ["micro/slower CPU s"]
    assert [line.partition(" +")[0] for line in judge.verdicts(found)] == ["micro/slower: CPU s"]
    with pytest.raises(UserError, match=r"^old: .*bench/micro fails: "):
        micro.run(old, suite)


# -- in turn ----------------------------------------------------------------------------------------------------------


class Answers(compare.Comparison):
    """A comparison whose pairs are given: of (old, new) seconds in turn, the last one from then on."""

    def __init__(self, *seconds: tuple[float, float], most_seconds: float = 60.0):
        tree = checkout.working_tree()
        super().__init__(
            *(tree, tree, recipe.load(RECIPE)),
            steps=1,
            shape="hh",
            bounds=Bounds(),
            say=lambda line: None,
            most_seconds=most_seconds,
        )
        self.seconds = [*seconds]
        self.starts = 0
        for side in (self.old, self.new):
            side.restart = self._start_again  # type: ignore[method-assign]
            side.wait_until_ready = lambda: None  # type: ignore[method-assign]

    def _start_again(self) -> None:
        self.starts += 1

    def _pair(self, stage: StageName, number: int) -> tuple[Cost, Cost]:
        old, new = self.seconds.pop(0) if len(self.seconds) > 1 else self.seconds[0]
        return cost(old, 4.0), cost(new, 4.0)


SLOWER, EQUAL = (10.0, 12.0), (10.0, 10.0)


@pytest.mark.parametrize(
    ("seconds", "starts", "expected"),
    [
        ([EQUAL], 0, []),
        ([SLOWER], 2, ["ppo CPU s", "ppo/the rest CPU s"]),
        ([SLOWER, SLOWER, SLOWER, SLOWER, EQUAL], 2, []),  # by chance; the fourth pair is the first of new processes
    ],
)
def test_what_looks_worse_is_measured_again_by_new_processes(seconds, starts, expected):
    answers = Answers(*seconds)
    assert worse(*answers.timed(["ppo"], 3)) == expected
    assert answers.starts == starts


def test_a_stage_is_not_judged_when_the_time_is_up():
    assert Answers(SLOWER, most_seconds=0.0).timed(["ppo"], 2) == []


# -- the other side ---------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path):
    """A function that calls git in a new repository with two commits on main."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet", "--initial-branch=main")
    (tmp_path / "requirements").mkdir()
    (tmp_path / checkout.LOCK).write_text("torch==2\n")
    for number in (1, 2):
        (tmp_path / "file").write_text(str(number))
        git("add", ".")
        git("commit", "--quiet", "--message", str(number))
    return git


def test_a_change_is_held_against_the_commit_before_it(repository, tmp_path):
    first, second = repository("rev-parse", "HEAD^"), repository("rev-parse", "HEAD")
    assert checkout.base_revision(tmp_path) == first, "on main: the commit before"
    (tmp_path / "file").write_text("3")
    assert checkout.base_revision(tmp_path) == second, "on main with changes: main"
    repository("checkout", "--quiet", "-b", "branch")
    repository("commit", "--quiet", "--all", "--message", "3")
    assert checkout.base_revision(tmp_path) == second, "on a branch: where it left main"


def test_without_history_there_is_none(tmp_path):
    assert checkout.base_revision(tmp_path) is None
    with pytest.raises(UserError, match="REV=main: git knows no such commit here"):
        checkout.unpack("main", tmp_path, tmp_path / "into")


def test_a_revision_is_unpacked_beside_the_working_tree(repository, tmp_path):
    side = checkout.unpack("HEAD^", tmp_path, tmp_path / "into")
    assert (side.root / "file").read_text() == "1" and (tmp_path / "file").read_text() == "2"
    assert side.python == checkout.working_tree().python, "the lock is the same"
    assert side.name == f"HEAD^ ({side.root.name[:8]})"


def test_variables_of_make_do_not_reach_the_setup_of_the_other_side(repository, tmp_path, monkeypatch):
    """`make bench-against REV=...` hands them on in MAKEFLAGS, and another target refuses them."""
    (tmp_path / "Makefile").write_text('setup:\n\t@test "$(origin REV)" != "command line"\n')
    repository("add", ".")
    repository("commit", "--quiet", "--message", "Makefile")
    (tmp_path / checkout.LOCK).write_text("torch==3\n")
    monkeypatch.setenv("MAKEFLAGS", " -- REV=HEAD ARGS=--short")
    monkeypatch.setenv("MAKELEVEL", "1")
    side = checkout.unpack("HEAD", tmp_path, tmp_path / "into")
    assert side.python == str(side.root / ".venv/bin/python")


def test_the_short_form_skips_loudly_where_nothing_can_be_compared(monkeypatch):
    monkeypatch.setattr(checkout, "base_revision", lambda: None)
    ran = CliRunner().invoke(against.main, ["--short"])
    assert ran.exit_code == 0 and "SKIPPED, nothing was compared: there is no commit to compare with" in ran.stderr
    with pytest.raises(UserError, match="give REV, or fetch the history"):
        CliRunner().invoke(against.main, [], catch_exceptions=False)


@pytest.mark.parametrize(("failing", "skipped"), [("other", True), ("working tree", False)])
def test_the_short_form_skips_where_the_other_side_cannot_be_measured_and_fails_for_this_one(
    monkeypatch, failing, skipped
):
    sides = {name: checkout.Checkout(name, ROOT / name, "python") for name in ("other", "working tree")}

    def compared(*arguments: object, **options: object) -> list[Change]:
        raise SideFailed(sides[failing], "it printed nothing")

    monkeypatch.setattr(checkout, "unpack", lambda revision: sides["other"])
    monkeypatch.setattr(checkout, "working_tree", lambda: sides["working tree"])
    monkeypatch.setattr(against, "compare", compared)
    ran = CliRunner().invoke(against.main, ["--short", "--rev", "HEAD"])
    assert ("SKIPPED, nothing was compared: other: it printed nothing" in ran.stderr) == skipped
    assert (ran.exit_code == 0) == skipped
    with pytest.raises(UserError, match=f"^{failing}: it printed nothing"):
        CliRunner().invoke(against.main, ["--rev", "HEAD"], catch_exceptions=False)


def test_the_short_form_fails_for_a_mistake_in_its_options(monkeypatch):
    monkeypatch.setattr(checkout, "base_revision", lambda: None)
    with pytest.raises(UserError, match="has no section kto"):
        CliRunner().invoke(against.main, ["--short", "--stage", "kto"], catch_exceptions=False)


def test_the_tables_of_experiments_have_the_newest_row_of_each_plant_and_count_alarms(tmp_path):
    worse = {"place": "ppo/score", "what": "operations", "old": 1.0, "new": 1.1, "ratio": 1.1, "low": 1.1, "high": 1.1}
    origin = json.loads(next((ROOT / "results/against").glob("planted_*.json")).read_text())
    found, missed = ({"does": "x", "worse": rows, "load": 2.0} for rows in ([worse, worse], []))
    for day, rows in enumerate([{"leak": missed, "twice": found}, {"leak": found, "slower": missed}]):
        write_json(tmp_path / f"planted_2026-01-0{day}.json", origin | {"planted": rows})
    assert table.planted(tmp_path).splitlines()[2:] == [
        "| leak | x | ppo/score: operations +10.0% (and 1 more) | 2.0 |",
        "| twice | x | ppo/score: operations +10.0% (and 1 more) | 2.0 |",
        "| slower | x | nothing | 2.0 |",
    ]
    row: SameRow = {"worse": [], "load": 2.0}
    record = cast(SameRecord, origin | {"stages_compared": ["sft", "rm"], "same": [row, row | {"load": 9.0}]})
    assert table.same([record]).endswith(" | sft, rm | 3 | 2.0 to 9.0 | 2 | 0 |")


def test_the_folder_of_checkouts_is_ignored_by_git():
    assert "/build/" in Path(ROOT / ".gitignore").read_text().splitlines()
    assert checkout.CHECKOUTS.relative_to(ROOT).parts[0] == "build"
