"""Times of the small functions of bench/micro on both sides, by pytest-benchmark, one run after the other."""

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from typing_extensions import TypedDict

from bench.against.checkout import Checkout
from bench.against.judge import CPU, Bounds, Change, spread
from bench.reading import read
from rlhf.errors import UserError

FOLDER = "bench/micro"
STAGE = "micro"
# Short, because every run counts the least of several calls, and the runs of both sides alternate.
OPTIONS = (
    *("--benchmark-only", "--benchmark-timer=time.process_time", "--benchmark-warmup=off"),
    *("--benchmark-max-time=0.1", "--benchmark-min-rounds=5", "-q", "-p", "no:cacheprovider"),
)


class _Stats(TypedDict):
    min: float  # CPU seconds of a call


class _Benchmark(TypedDict):
    name: str
    stats: _Stats


class _Saved(TypedDict):
    benchmarks: list[_Benchmark]


def run(side: Checkout) -> dict[str, float]:
    """Return the least CPU seconds of a call of each function, on one thread; empty where there are no benchmarks.

    Raises UserError where one of them fails.
    """
    if not (side.root / FOLDER).is_dir():
        return {}
    with tempfile.TemporaryDirectory(prefix="rlhf-micro-") as folder:
        file = Path(folder, "micro.json")
        command = [side.python, "-P", "-m", "pytest", FOLDER, *OPTIONS, f"--benchmark-json={file}"]
        environment = os.environ | {"PYTHONPATH": str(side.root), "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, capture_output=True, text=True, cwd=side.root, env=environment)
        if ran.returncode:
            lines = (ran.stdout + ran.stderr).strip().splitlines() or ["pytest printed nothing"]
            raise UserError(f"{side.name}: {FOLDER} fails: {lines[-1][:300]}")
        return {benchmark["name"]: benchmark["stats"]["min"] for benchmark in read(file, _Saved)["benchmarks"]}


def changes(runs: Sequence[tuple[dict[str, float], dict[str, float]]], bounds: Bounds) -> Iterator[Change]:
    """Yield the change of each function that both sides have, from pairs of runs."""
    for name in runs[0][0]:
        if all(name in side for pair in runs for side in pair):
            pairs = [(old[name], new[name]) for old, new in runs]
            change = spread(STAGE, name.removeprefix("test_"), CPU, pairs, bounds, min(old for old, _ in pairs))
            # A call is shorter than any phase, and is repeated until it is long enough to be judged.
            yield replace(change, bound=bounds.slower)
