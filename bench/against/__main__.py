"""`python -m bench.against`: the working tree beside another commit, in operations, memory and time.

What torch's operations compute, move, launch and hold is counted, which a busy machine does not change. CPU seconds are
those of whole stages, in pairs of one side right after the other.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

from bench import options, records
from bench.steps import with_parents
from rlhf.cli import guarded
from rlhf.errors import UserError
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.stages import TRAINING_STAGES
from rlhf.run.provenance import git_environment
from rlhf.terminal import say
from rlhf.terminal.tables import rows_table

CHECKOUTS = records.ROOT / "build" / "against"  # git ignores it, and `make clean` removes it
WORKER = Path(__file__).with_name("worker.py")
LOCK = "requirements/cpu.txt"
MATERIAL = 0.01  # share of the whole stage's figure by which a phase's has to grow to count
TIME, MEMORY = "CPU s", "peak memory"
Figures = dict[StageName, dict[str, dict[str, float]]]  # stage -> phase -> what -> figure; "" is the whole stage


class Side(NamedTuple):
    """A folder with code, the interpreter that has its packages, and what it is called."""

    name: str
    root: Path
    python: str


class Change(NamedTuple):
    """A figure of a phase on both sides, with the ratios new / old of each pair; of a count there is one."""

    place: str
    what: str
    old: float
    new: float
    ratios: Sequence[float]
    share: float  # of the stage's figure, by which the phase's grew

    def worse(self, slower: float, larger: float) -> bool:
        """Return whether the median exceeds its bound, every pair is worse, and the stage feels it."""
        bound = larger if self.what == MEMORY else slower
        return median(self.ratios) > 1 + bound and min(self.ratios) > 1 and self.share >= MATERIAL

    def text(self) -> str:
        """Return the change in words."""
        between = f" [{min(self.ratios) - 1:+.1%}, {max(self.ratios) - 1:+.1%}]" if len(self.ratios) > 1 else ""
        return f"{self.place}: {self.what} {median(self.ratios) - 1:+.1%}{between}, {self.old:,.6g} to {self.new:,.6g}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rev", metavar="REV", help="Commit, branch or tag. [default: where the branch left main]")
@options.recipe
@options.stages(TRAINING_STAGES)
@click.option("--steps", "count", default=2, show_default=True, type=click.IntRange(min=1), help="Steps of a stage.")
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(min=0), help="Timed pairs; 0: count alone.")
@click.option("--shape", default="hh", show_default=True, type=click.Choice(["hh", "longest"]), help="Length of rows.")
@click.option("--slower", default=5.0, show_default=True, help="Allowed per cent of time and of what is computed.")
@click.option("--larger", default=2.0, show_default=True, help="Allowed per cent of memory.")
@click.option("--short", is_flag=True, help="One step, two pairs; only losses of a quarter; skips a REV that fails.")
@options.OUT
def main(
    rev: str | None,
    hw: str,
    guide: bool,
    directory: Path | None,
    changes: tuple[str, ...],
    stages: tuple[StageName, ...],
    count: int,
    rounds: int,
    shape: str,
    slower: float,
    larger: float,
    short: bool,
    out: Path | None,
) -> None:
    """Run a few steps of each stage with the code of REV and with this, in turn, and compare what they cost.

    Exit code 1: something is worse than is allowed, in every pair.
    """
    loaded = options.load(hw, guide, directory, changes)
    chosen = with_parents(loaded, options.stages_of(loaded, stages, TRAINING_STAGES))
    if short:
        count, rounds, slower, larger = 1, 2, 25.0, 25.0
    new = Side("working tree", records.ROOT, sys.executable)
    question = {"changes": loaded.overrides, "stages": chosen, "steps": count, "shape": shape}
    try:
        old = checkout(rev or base())
        found = [*compare(old, new, loaded, question, rounds)]
    except UserError as error:
        if not short:
            raise
        say(f"bench-against: SKIPPED, nothing was compared: {error}")
        return
    lines = [change.text() for change in found if change.worse(slower / 100, larger / 100)]
    show(f"{loaded.name} {loaded.version}: {new.name} beside {old.name}; ratios of new to old", found)
    if out:
        figures = {"against": old.name, "changes": [change._asdict() for change in found], "worse": lines}
        records.save(records.new("steps", loaded) | figures, out)
    for line in lines:
        say(f"worse than {old.name}: {line}")
    if not lines:
        print(f"nothing is worse than {old.name}")
    sys.exit(bool(lines))


def compare(old: Side, new: Side, loaded: PinnedRecipe, question: dict[str, Any], rounds: int) -> Iterator[Change]:
    """Yield the changes of what the stages count, and of their seconds in `rounds` pairs, in each order in turn."""
    say(f"counting {', '.join(question['stages'])} of both")
    before, after = (ask(side, loaded, question | {"count": True}) for side in (old, new))
    pairs: list[tuple[Figures, Figures]] = []
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}: both, in turn")
        sides = (old, new) if number % 2 == 0 else (new, old)
        taken = {side.name: ask(side, loaded, question | {"count": False}) for side in sides}
        pairs.append((taken[old.name], taken[new.name]))
    for stage, phases in before.items():
        for phase, figures in phases.items():
            for what, a in figures.items():
                b, whole = after[stage].get(phase, {}).get(what), phases[""][what]
                if b is not None:
                    ratio = b / a if a else float("inf") if b else 1.0
                    place = f"{stage}/{phase}" if phase else stage
                    yield Change(place, what, a, b, [ratio], (b - a) / whole if whole else float(b > 0))
        if pairs:
            seconds = [(one[stage][""][TIME], other[stage][""][TIME]) for one, other in pairs]
            a, b = (median(side) for side in zip(*seconds, strict=True))
            yield Change(stage, TIME, a, b, [new / old for old, new in seconds], (b - a) / a)


def ask(side: Side, loaded: PinnedRecipe, question: dict[str, Any]) -> Figures:
    """Return what the stages cost with the code of a side. Raises UserError where it cannot be measured."""
    recipe = side.root / loaded.directory.resolve().relative_to(records.ROOT)
    folder = recipe if recipe.is_dir() else loaded.directory.resolve()
    environment = {key: value for key, value in os.environ.items() if key != "RLHF_COMMIT"}
    environment |= {"PYTHONPATH": str(side.root), "TOKENIZERS_PARALLELISM": "false"}
    command = [side.python, "-P", str(WORKER), json.dumps(question | {"recipe": str(folder)})]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=side.root)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise UserError(f"{side.name}: {lines[-1][:300]}")
    answer = json.loads(done.stdout)
    if Path(answer["root"]).resolve() != side.root.resolve():
        raise UserError(f"{side.name}: its process imports {answer['root']}: unset PYTHONPATH, or reinstall rlhf")
    figures: Figures = answer["stages"]
    return figures


def show(title: str, found: Sequence[Change]) -> None:
    """Print the ratios, a row for each phase; = is exactly equal."""
    columns = list(dict.fromkeys(change.what for change in found))
    rows: dict[str, dict[str, str]] = {}
    for change in found:
        ratio = median(change.ratios)
        rows.setdefault(change.place, {})[change.what] = "=" if ratio == 1 else f"{ratio:.3f}"
    cells = [(place, *(row.get(what, "") for what in columns)) for place, row in rows.items()]
    rows_table(title, ("", *columns), cells)


def base() -> str:
    """Return the commit before the change: where the branch left main; on main the newest, or the one before it."""
    head = git("rev-parse", "--verify", "--quiet", "HEAD")
    for main in ("origin/main", "main"):
        if (left := git("merge-base", "HEAD", main)) and left != head:
            return left
    found = head if git("status", "--porcelain") else git("rev-parse", "--verify", "--quiet", "HEAD^")
    if not found:
        raise UserError("there is no commit to compare with: give REV, or fetch the history (git fetch --unshallow)")
    return found


def checkout(revision: str) -> Side:
    """Return a revision as a worktree below build/, with an environment of its own where its lock differs."""
    commit = git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if not commit:
        raise UserError(f"REV={revision}: git knows no such commit here: name one that `git log` shows, or fetch it")
    folder = CHECKOUTS / commit[:12]
    if not (folder / LOCK).is_file():
        shutil.rmtree(folder, ignore_errors=True)
        git("worktree", "prune")
        if git("worktree", "add", "--detach", str(folder), commit) is None:
            raise UserError(f"{folder}: `git worktree add` fails")
    python = sys.executable
    if (folder / LOCK).read_bytes() != (records.ROOT / LOCK).read_bytes():
        say(f"{LOCK} differs: installing the packages of {folder.name}, which takes minutes, once")
        made = subprocess.run(["make", "-C", str(folder), "setup"], capture_output=True, text=True)
        if made.returncode:
            raise UserError(f"{folder}: `make setup` fails: {made.stderr.strip()[-300:]}")
        python = str(folder / ".venv" / "bin" / "python")
    return Side(commit[:8], folder, python)


def git(*arguments: str) -> str | None:
    """Return what git prints; None where it fails."""
    command = ["git", "-C", str(records.ROOT), *arguments]
    asked = subprocess.run(command, capture_output=True, text=True, env=git_environment())
    return asked.stdout.strip() if asked.returncode == 0 else None


if __name__ == "__main__":
    guarded(main)
