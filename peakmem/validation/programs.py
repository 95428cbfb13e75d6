"""`python -m peakmem.validation.programs FOLDER`: programs that nobody here wrote, each as it is.

FOLDER has a checkout of each repository at the commit of `programs.json`, as `owner+name`, with the small files of data
that `needs` names. A program works, or is refused with a line of its own; an exit code of 5 is a fault of peakmem, and
4 is one of the program. Nothing of theirs is in this repository.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LIST = Path(__file__).with_name("programs.json")
OUTCOMES = {0: "works", 1: "works", 3: "refused", 4: "failed", 5: "crashed"}


def programs() -> list[dict[str, Any]]:
    """Return the list; `outcome` is what the last run gave."""
    found: list[dict[str, Any]] = json.loads(LIST.read_text())["programs"]
    return found


def run(one: dict[str, Any], folder: Path) -> tuple[str, str]:
    """Return what became of a program, and the line that says why."""
    where = folder / one["repository"].replace("/", "+") / one.get("within", "")
    command = [sys.executable, "-P", "-m", "peakmem", "--card", "4090", "--batches", "50", *one.get("options", ())]
    done = subprocess.run([*command, one["path"], *one["arguments"]], cwd=where, capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if line.startswith("peakmem: ")]
    return OUTCOMES.get(done.returncode, f"exit {done.returncode}"), said[-1] if said else ""


def main() -> None:
    """Run each program whose checkout is there; exit with 1 if one of them crashes or differs from the list."""
    folder, wrong = Path(sys.argv[1]).resolve(), 0
    for one in programs():
        if "arguments" not in one or not (folder / one.get("repository", "").replace("/", "+")).is_dir():
            continue
        outcome, why = run(one, folder)
        wrong += outcome != one["outcome"]
        print(f"{one['name']}: {outcome}{'' if outcome == one['outcome'] else ' (not so in the list)'} {why}")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
