"""`make fuzz`: run generated cases and kills, print a table, keep what failed. Exit code 1 for any flaw."""

import os
import sys

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: bytes are compared

import argparse
import importlib
import json
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rlhf.run.provenance import git_environment
from tests.fuzz import kills, sandbox
from tests.fuzz.oracle import Case, Verdict, hashes, judge
from tests.fuzz.reference import STAGES, Reference
from tests.fuzz.sandbox import Outcome

# Groups and their share of the cases.
GROUPS = {
    "data_files": 22,
    "recipes": 18,
    "options": 12,
    "run_dirs": 22,
    "checkpoints": 9,
    "adapters": 7,
    "models": 7,
    "records": 3,
}
NEEDED: list[tuple[float, int]] = []  # CPU seconds and bytes of each case
COLUMNS = ("cases", "refused", "accepted", "tracebacks", "hangs", "other failures")
FAILURES = Path(".fuzz")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of every case and every kill")
    parser.add_argument(
        "--cases", type=int, default=1050, help="malformed inputs over all groups, about: each group's share is rounded"
    )
    parser.add_argument(
        "--kills", type=int, default=119, help="kills and faults over all stages, about: some runs end before theirs"
    )
    parser.add_argument("--only", metavar="GROUP[:INDEX]", help=f"one group, or one case of it: {', '.join(GROUPS)}")
    parser.add_argument("--quick", action="store_true", help="the share that `make test` runs")
    options = parser.parse_args()
    if options.quick:
        options.cases, options.kills = 20, 2
    started, used = time.monotonic(), _children()
    group, _, index = (options.only or "").partition(":")
    if group not in ("", "kills", *GROUPS):
        parser.error(f"--only {group}: one of kills, {', '.join(GROUPS)}")

    table = os.fdopen(os.dup(1), "w", encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="rlhf-fuzz-") as folder:
        print("importing, and training the reference", file=sys.stderr)
        with open(os.devnull, "w") as nowhere:  # what is imported must not take this for its terminal
            os.dup2(nowhere.fileno(), 1)
        sandbox.warm()
        reference = Reference(Path(folder, "reference"))
        reference.make()
        counts: dict[str, Counter[str]] = {}
        for name in GROUPS if not group else [group] if group != "kills" else []:
            indices = [int(index)] if index else range(share(name, options.cases, whole=bool(group)))
            counts[name] = run_group(name, indices, options.seed, Path(folder), reference)
        killed = []
        if group in ("", "kills") and options.kills:
            stages = ("sft", "ppo") if options.quick else STAGES
            killed = kills.run(options.kills, options.seed, Path(folder), reference, stages)
    flaws = sum(row["flaws"] for row in counts.values()) + sum(row.flaws for row in killed)
    cpu = _children() - used
    if counts:
        print(cases_table(counts), file=table)
    if killed:
        print(kills.table(killed), file=table)
    said = [
        f"Seed {options.seed}, {time.strftime('%Y-%m-%d', time.gmtime())}, commit {_commit()}: "
        f"{cpu:.0f} s of CPU, {time.monotonic() - started:.0f} s of wall time."
    ]
    if NEEDED:
        said.append(f"A case took at most {max(NEEDED)[0]:.1f} s of CPU and {max(m for _, m in NEEDED) / 1e9:.2f} GB.")
    said.append(f"{flaws or 'No'} flaw{'s' * (flaws != 1)}{f', kept in {FAILURES}' * bool(flaws)}.")
    print(*said, file=table, flush=True)
    return 1 if flaws else 0


def share(group: str, cases: int, whole: bool = False) -> int:
    """How many of all cases a group has; at least one."""
    return cases if whole else max(1, round(cases * GROUPS[group] / sum(GROUPS.values())))


def run_group(group: str, indices: Iterable[int], seed: int, folder: Path, reference: Reference) -> Counter[str]:
    counts: Counter[str] = Counter()
    for index in indices:
        place = folder / f"{group}-{index}"
        case, outcome, verdict = run_case(group, index, seed, place, reference)
        counts["cases"] += 1
        counts["accepted" if verdict.accepted else "refused"] += 1
        counts["tracebacks"] += "traceback" in verdict.flaws
        counts["hangs"] += bool({"hang", "memory"} & set(verdict.flaws))
        counts["other failures"] += bool({"wrong", "lost", "message"} & set(verdict.flaws))
        counts["flaws"] += bool(verdict.flaws)
        NEEDED.append((outcome.cpu, outcome.peak))
        if verdict.flaws:
            keep(group, index, seed, place, case, outcome, verdict)
        shutil.rmtree(place, ignore_errors=True)
    return counts


def run_case(group: str, index: int, seed: int, place: Path, reference: Reference) -> tuple[Case, Outcome, Verdict]:
    """One case, which depends on seed, group and index alone."""
    place.mkdir(parents=True)
    make = importlib.import_module(f"tests.fuzz.groups.{group}").case
    case = make(random.Random(f"{seed}:{group}:{index}"), place, reference)
    before = hashes(case.kept)
    outcome = sandbox.run(case.arguments, place, stdin=case.stdin)
    return case, outcome, judge(case, outcome, before)


def keep(group: str, index: int, seed: int, place: Path, case: Case, outcome: Outcome, verdict: Verdict) -> None:
    """Write a failing case with the command that replays it."""
    folder = FAILURES / f"{seed}-{group}-{index}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    replay = f"make fuzz SEED={seed} ONLY={group}:{index}"
    (folder / "case.json").write_text(
        json.dumps(
            {"replay": replay, "case": case.name, "arguments": case.arguments, "code": outcome.code}
            | {"cpu_seconds": round(outcome.cpu, 2), "peak_bytes": outcome.peak, "flaws": verdict.flaws},
            indent=1,
        )
    )
    (folder / "stdout").write_bytes(outcome.out)
    (folder / "stderr").write_bytes(outcome.err)
    for kind, seen in verdict.flaws.items():
        print(f"{kind}: {ascii(case.name)[:200]}: {ascii(seen)[:400]}\n    {replay}", file=sys.stderr)


def cases_table(counts: dict[str, Counter[str]]) -> str:
    rows = [(name.replace("_", " "), *(row[column] for column in COLUMNS)) for name, row in counts.items()]
    rows.append(("all", *(sum(row[column] for row in counts.values()) for column in COLUMNS)))
    return markdown(("group", *COLUMNS), rows)


def markdown(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"| --- |{' ---: |' * (len(columns) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows), ""])


def _children() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, env=git_environment()).stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
