"""The file of ratings, `<out>/<recipe>/<version>/ab/<a>-vs-<b>.jsonl`.

Lines are only ever appended. A rater's last line about a pair counts, and `undo` takes it back. A line names its pair
by index and hash, so it never counts for other answers.
"""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypedDict, Unpack

from pydantic import AliasChoices, Field

from rlhf.errors import UserError
from rlhf.rating.pairs import AnswerOrder, Pair
from rlhf.run import reader
from rlhf.run.records import Record

JUDGE = "judge:"  # begins the name of a model that rates
Choice = Literal["a", "b", "tie", "skip", "undo"]
WIN_OF_B = {"a": 0.0, "b": 1.0, "tie": 0.5}  # by choice


InBothOrders = Annotated[dict[AnswerOrder, str | None], Field(min_length=2)]  # there are two orders: neither is missing


class Rating(Record):
    """A line of the file. `shown` is the order of the answers: "ab", or "ba" if b came first."""

    item: int
    sha256: str
    rater: str
    choice: Choice = Field(
        validation_alias=AliasChoices("choice", "verdict")  # the latter in files before 0.2.0
    )
    shown: AnswerOrder
    said: InBothOrders | None = None  # what a judge chose; None for a reply without a choice

    @property
    def pair(self) -> tuple[int, str]:
        """Return the index and the hash of the pair."""
        return self.item, self.sha256


class Reasons(TypedDict, total=False):
    """What a judge said about a pair, in each order of the answers."""

    said: dict[AnswerOrder, Choice | None]  # its choice; None for a reply without one
    replies: dict[AnswerOrder, str]


class RatingLine(Reasons):
    """A line that is written."""

    item: int
    sha256: str
    rater: str
    choice: Choice
    shown: AnswerOrder
    time: str  # UTC, ISO 8601


def new_line(pair: Pair, rater: str, choice: Choice, shown: AnswerOrder, **reasons: Unpack[Reasons]) -> RatingLine:
    """Return a line to append to the file, with the present time. `reasons` are added to it."""
    return {
        "item": pair.item,
        "sha256": pair.digest,
        "rater": rater,
        "choice": choice,
        "shown": shown,
        **reasons,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def append(file: Path, row: Mapping[str, object]) -> None:
    """Append a line and flush it to disk. Several processes may append at the same time."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        handle.seek(0)
        content = handle.read()
        *_, rest = content.split(b"\n")
        if _rating(rest):  # somebody edited the file and left out the last line's end
            handle.write(b"\n")
        else:
            handle.truncate(len(content) - len(rest))  # a crash cut it off; it was never acknowledged
        handle.write(json.dumps(row).encode() + b"\n")
        handle.flush()
        os.fsync(handle.fileno())


def _rating(line: bytes) -> Rating | None:
    """Return the rating in a line; None if it holds none."""
    try:
        return reader.check(json.loads(line), Rating, "")
    except (UserError, ValueError, RecursionError):
        return None


def current_ratings(file: Path) -> list[Rating]:
    """Return the ratings that count, oldest first. Raises UserError for a line that is not a rating."""
    ratings: dict[tuple[str, int, str], Rating] = {}
    with reader.reading(file):
        *lines, rest = file.read_bytes().split(b"\n") if file.exists() else [b""]
    lines += [rest] if _rating(rest) else []  # or a line that a crash cut off
    for number, line in enumerate(lines, 1):
        row = _rating(line)
        if row is None:
            raise UserError(f"{file}:{number}: not a rating; take that line out")
        key = (row.rater, row.item, row.sha256)
        ratings.pop(key, None)
        if row.choice != "undo":
            ratings[key] = row
    return list(ratings.values())
