"""The quick share of `make fuzz`, and what its figures rest on: the judge, the limits, the seeds, the page."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fuzz import __main__ as fuzz
from tests.fuzz import sandbox
from tests.fuzz.groups import data_files, recipes
from tests.fuzz.oracle import Case, hashes, judge
from tests.fuzz.reference import Reference
from tests.fuzz.sandbox import Outcome

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"


@pytest.mark.slow
def test_the_quick_share_finds_no_flaw():
    """In a process of its own: a fork of this one would have whatever other tests have left in it."""
    command = [sys.executable, "-m", "tests.fuzz", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "No flaws." in done.stdout
    assert len(_tables(done.stdout)) == 2


def outcome(code: int, err: str = "", out: str = "", stopped: str = "") -> Outcome:
    return Outcome(code, out.encode(), err.encode(), 0.1, 1, stopped)


@pytest.mark.parametrize(
    ("found", "flaw"),
    [
        (outcome(1, "error: no such file\n"), None),
        (outcome(2, "Usage: rlhf run\n\nError: no such option\n"), "message"),
        (outcome(2, "Usage: rlhf [OPTIONS] COMMAND\n\nCommands:\n  run\n"), None),
        (outcome(1), "message"),
        (outcome(1, "error: one\nerror: two\n"), "message"),
        (outcome(1, f"error: {'x' * 3000}\n"), "message"),
        (outcome(1, "error: a file named \x1b[31mred\n"), "message"),
        (outcome(0, out="an answer with \u202e in it\n"), "message"),
        (outcome(1, "error: x\n" + "a line\n" * 50), "message"),
        (outcome(0, "error: and yet it went on\n"), "message"),
        (outcome(1, 'Traceback (most recent call last):\n  File "x"\nKeyError: 3\n'), "traceback"),
        (outcome(70, "error: this is a bug in rlhf and not your mistake\n"), "traceback"),
        (outcome(-signal.SIGSEGV), "traceback"),
        (outcome(-signal.SIGKILL, stopped="time"), "hang"),
        (outcome(-signal.SIGKILL, stopped="memory"), "memory"),
    ],
)
def test_the_judge_sees_what_a_command_owes(tmp_path, found, flaw):
    assert list(judge(Case("", [], tmp_path), found, {}).flaws) == ([flaw] if flaw else [])


def test_the_judge_sees_what_was_accepted_lost_or_executed(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("1\n")
    before = hashes(tmp_path)
    refused, accepted = outcome(1, "error: no\n"), outcome(0)

    def flaws(found: Outcome, **more) -> dict[str, str]:
        return judge(Case("", [], tmp_path, **more), found, before).flaws

    assert flaws(refused) == flaws(accepted) == flaws(refused, must="refuse") == flaws(accepted, must="accept") == {}
    assert flaws(accepted, must="refuse") == {"wrong": "accepted"}
    assert flaws(accepted, valid=lambda found: "NaN") == {"wrong": "accepted, and NaN"}
    assert "wrong" in flaws(refused, must="accept")
    aside = tmp_path / "aside"
    aside.mkdir()
    (tmp_path / "summary.json").rename(aside / "summary.json")
    assert flaws(refused) == {}, "set aside is not lost"
    (tmp_path / "metrics.jsonl").write_text("")
    assert flaws(refused) == {"lost": "refused, and gone: metrics.jsonl"}
    assert flaws(refused, rewritten=("metrics.jsonl",)) == {}
    (aside / "fuzz-canary").touch()
    assert "wrong" in flaws(refused, rewritten=("metrics.jsonl",))


def test_limits_end_what_waits_what_computes_and_what_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox, "IDLE_SECONDS", 0.5)
    assert sandbox.run([], tmp_path, inside=lambda: time.sleep(60)).stopped == "time"
    monkeypatch.setattr(sandbox, "IDLE_SECONDS", 60)
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 0.2)

    def compute() -> None:
        while True:
            pass

    assert sandbox.run([], tmp_path, inside=compute).stopped == "time"
    monkeypatch.setattr(sandbox, "CPU_SECONDS", 30)
    monkeypatch.setattr(sandbox, "MEMORY_BYTES", 50_000_000)
    assert sandbox.run([], tmp_path, inside=lambda: time.sleep(60 * len(b"x" * 200_000_000))).stopped == "memory"
    monkeypatch.undo()
    die = sandbox.run([], tmp_path, inside=lambda: os.kill(os.getpid(), signal.SIGUSR2))
    assert die.code == -signal.SIGUSR2
    assert not list(tmp_path.iterdir()), "the sandbox takes its own files away"


@pytest.mark.parametrize("group", [data_files, recipes], ids=lambda module: module.__name__.rpartition(".")[2])
def test_a_case_depends_on_its_seed_alone(tmp_path, group):
    class Stand(Reference):
        """A reference without runs: cases that need some are left out."""

        def before(self, out: Path, stage: str) -> Path:
            raise LookupError

    reference = Stand(tmp_path / "reference")

    def made(index: int, seed: int, name: str) -> tuple[str, list[str], dict[str, str]] | None:
        place = tmp_path / name
        place.mkdir()
        try:
            case = group.case(random.Random(f"{seed}:x:{index}"), place, reference)
        except LookupError:
            return None
        arguments = [word.replace(str(place), "") for word in case.arguments]
        special = any(not path.is_file() for path in place.rglob("recipe.yaml"))  # a pipe has no bytes to compare
        return case.name, arguments, {} if special else hashes(place)

    first = [made(index, 3, f"a{index}") for index in range(12)]
    assert first == [made(index, 3, f"b{index}") for index in range(12)]
    assert first != [made(index, 4, f"c{index}") for index in range(12)]


def _tables(text: str, last: str = "all") -> list[dict[str, list[str]]]:
    """Markdown tables whose last row begins with `last`: each row's cells by its first."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.M):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        if rows[-1][0] == last:
            found.append({row[0]: row[1:] for row in rows})
    return found


def test_the_page_has_the_figures_of_a_whole_run():
    """What must be zero stands in one column, and in one sentence for what interrupts stages."""
    page = PAGE.read_text()
    groups = [name.replace("_", " ") for name in fuzz.GROUPS]
    (table,) = _tables(page, groups[-1])
    assert table.pop("group") == [*fuzz.COLUMNS[:3], ", ".join(fuzz.COLUMNS[3:])] and table.pop("---")
    rows = [list(map(int, row)) for row in table.values()]
    assert [*table] == groups and sum(row[0] for row in rows) >= 1000
    assert all(cases == refused + accepted and faults == 0 for cases, refused, accepted, faults in rows)
    counts = re.search(r"interrupted by (\d+) kills, (\d+) power cuts, (\d+) SIGTERM\s+and \d+ failed writes", page)
    assert counts and sum(map(int, counts.groups())) >= 100
    assert "had the right bytes, no extra files and no bad message" in page
