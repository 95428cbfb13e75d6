"""The file of ratings, `<out>/<recipe>/<version>/ab/<a>-vs-<b>.jsonl`.

Lines are only ever appended. The last line of a rater about a pair counts, and `undo` takes it back. A line names its
pair by index and hash, so it never counts for other answers.
"""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.rating.pairs import Pair

JUDGE = "judge:"  # begins the name of a model that rates
WORTH = {"a": 0.0, "b": 1.0, "tie": 0.5}  # of a verdict to b
VERDICTS = (*WORTH, "skip", "undo")


def rating(pair: Pair, rater: str, verdict: str, shown: str, **more: Any) -> dict[str, Any]:
    """A line of the file. `shown` is the order: "ab", or "ba" where b came first."""
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    ours = {"item": pair.item, "sha256": pair.digest, "rater": rater, "verdict": verdict, "shown": shown}
    return ours | more | {"time": when}


def append(file: Path, row: Mapping[str, Any]) -> None:
    """Add a line that a crash cannot take back; several processes may do so at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        handle.seek(0)
        whole = handle.read().rfind(b"\n") + 1
        handle.truncate(whole)  # what follows was cut by a crash and never acknowledged
        handle.write(json.dumps(row).encode() + b"\n")
        handle.flush()
        os.fsync(handle.fileno())


def standing(file: Path) -> list[dict[str, Any]]:
    """The ratings that count, oldest first. Raises UserError for a line that is none."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            key = (row["rater"], row["item"], row["sha256"])
            known = [*map(type, key)] == [str, int, str] and row["verdict"] in VERDICTS and row["shown"] in ("ab", "ba")
        except (ValueError, TypeError, KeyError, RecursionError):
            known = False
        if not known:
            raise UserError(f"{file}:{number}: not a rating; take that line out")
        rows.pop(key, None)
        if row["verdict"] != "undo":
            rows[key] = row
    return list(rows.values())
