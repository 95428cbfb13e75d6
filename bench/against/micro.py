"""Times of small functions on both sides, by pytest-benchmark, one run after the other.

Both sides run the benchmarks of the new one, so that inputs that a change makes larger are no slower functions.
"""

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
    "--continue-on-collection-errors",
)


class _Stats(TypedDict):
    min: float  # CPU seconds of a call


class _Benchmark(TypedDict):
    name: str
    stats: _Stats


class _Saved(TypedDict):
    benchmarks: list[_Benchmark]


def run(side: Checkout, suite: Path, old: bool = False) -> dict[str, float]:
    """Return the least CPU seconds of a call of each function of a side, on one thread, by the benchmarks in `suite`.

    Of an `old` side some may fail, and are left out: it may lack a function. Otherwise that raises UserError.
    """
    if not suite.is_dir():
        return {}
    with tempfile.TemporaryDirectory(prefix="rlhf-micro-") as folder:
        file = Path(folder, "micro.json")
        command = [side.python, "-P", "-m", "pytest", str(suite), *OPTIONS, f"--benchmark-json={file}"]
        outer = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}  # of a pytest above
        environment = outer | {"PYTHONPATH": str(side.root), "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(command, capture_output=True, text=True, cwd=side.root, env=environment)
        if ran.returncode and not (old and file.exists()):
            lines = (ran.stdout + ran.stderr).strip().splitlines() or ["pytest printed nothing"]
            raise UserError(f"{side.name}: {suite} fails: {lines[-1][:300]}")
        return {benchmark["name"]: benchmark["stats"]["min"] for benchmark in read(file, _Saved)["benchmarks"]}


def changes(runs: Sequence[tuple[dict[str, float], dict[str, float]]], bounds: Bounds) -> Iterator[Change]:
    """Yield the change of each function that both sides have, from pairs of runs."""
    for name in runs[0][0]:
        if all(name in side for pair in runs for side in pair):
            pairs = [(old[name], new[name]) for old, new in runs]
            change = spread(STAGE, name.removeprefix("test_"), CPU, pairs, bounds, min(old for old, _ in pairs))
            # A call is shorter than any phase, and is repeated until it is long enough to be judged.
            yield replace(change, bound=bounds.slower)
