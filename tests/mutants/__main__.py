"""Whether tests find faults: `python -m tests.mutants [--suite] [WORD …]`.

Each fault of faults.py is made in a copy of the working tree, where its test must fail; without a fault it must pass.
With --suite all tests run instead of that one. WORDs choose faults by their names.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.faults import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]


def main() -> None:
    """Print a line for each fault. The exit code is 1 where one is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="a part of a fault's name [all faults]")
    parser.add_argument("--suite", action="store_true", help="run all tests against each fault")
    options = parser.parse_args()
    chosen = [m for m in MUTANTS if not options.words or any(word in m.name for word in options.words)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        root = copied(Path(folder))
        broken = failures(root, [*dict.fromkeys(mutant.test for mutant in chosen)])
        survived = [mutant.name for mutant in chosen if not found(root, mutant, options.suite)]
    for test in broken:
        print(f"fails without a fault: {test}")
    print(f"{len(chosen) - len(survived)} of {len(chosen)} faults are found")
    sys.exit(bool(broken or survived))


def copied(folder: Path) -> Path:
    """Return a copy of the files that git knows of the working tree, beside the folder of real data."""
    root = folder / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, stdout=subprocess.PIPE
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    return root


def found(root: Path, mutant: Mutant, suite: bool) -> bool:
    """Make a fault in the tree, and return whether the tests find it; a line says so."""
    with made(root, mutant):
        failed = failures(root, ["-x", *([] if suite else [mutant.test])])
    print(f"{'killed' if failed else 'SURVIVED':8}  {mutant.name}: {next(iter(failed), mutant.test)}", flush=True)
    return bool(failed)


@contextmanager
def made(root: Path, mutant: Mutant) -> Iterator[None]:
    """Change the one place of a fault inside the block. Ends the program where there is none, or are several."""
    places = [file for file in files(root / mutant.room) for _ in range(file.read_text().count(mutant.old))]
    if len(places) != 1:
        sys.exit(f"{mutant.name}: {mutant.room} has {len(places)} places with {mutant.old!r}; tests/mutants/faults.py")
    before = places[0].read_text()
    places[0].write_text(before.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        places[0].write_text(before)


def files(room: Path) -> Iterable[Path]:
    """The Python files of a room."""
    return sorted(room.rglob("*.py")) if room.is_dir() else [room]


def failures(root: Path, tests: list[str]) -> list[str]:
    """Return the tests that fail in the tree. Ends the program where pytest runs none."""
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *tests]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"pytest {' '.join(tests)} ended with {done.returncode}:\n{done.stdout[-2000:]}")
    return [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]


if __name__ == "__main__":
    main()
