"""Ratings of pairs: their file, `<out>/<recipe>/<version>/ab/<a>-vs-<b>.jsonl`, and what they say.

Lines are only ever appended, and a rater's last line about a pair counts. A line names its pair by index and hash, so
it never counts for other answers.
"""

import fcntl
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rlhf import stats
from rlhf.rating.pairs import AnswerOrder, Pair, PairedAnswers
from rlhf.run import reader
from rlhf.run.records import Record
from rlhf.terminal import harmless, screen
from rlhf.terminal.tables import rows_table

JUDGE = "judge:"  # begins the name of a model that rates
WIN_OF_B = {"a": 0.0, "b": 1.0, "tie": 0.5}  # by choice


class Rating(Record):
    """A line of the file. `shown` is the order of the answers: "ab", or "ba" if b came first."""

    item: int
    sha256: str
    rater: str
    choice: str  # a, b or tie; any other word is no choice
    shown: AnswerOrder
    said: dict[AnswerOrder, str | None] | None = None  # a judge's choice in each order; None: no clear one


def rate(file: Path, pair: Pair, rater: str, choice: str, shown: AnswerOrder, **reasons: Any) -> None:
    """Append a rating and flush it to disk. `reasons` are further keys. Several processes may append at a time."""
    line = {"item": pair.item, "sha256": pair.digest, "rater": rater, "choice": choice, "shown": shown, **reasons}
    line["time"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "ab+") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        handle.seek(0)
        content = handle.read()
        handle.truncate(content.rfind(b"\n") + 1)  # a line that a crash cut off was never acknowledged
        handle.write(json.dumps(line).encode() + b"\n")
        handle.flush()
        os.fsync(handle.fileno())


def current_ratings(file: Path) -> list[Rating]:
    """Return the ratings that count, oldest first. Raises UserError for a line that is not a rating."""
    ratings: dict[tuple[str, int, str], Rating] = {}
    for row in reader.read_lines(file, Rating):
        ratings.pop((row.rater, row.item, row.sha256), None)
        ratings[row.rater, row.item, row.sha256] = row
    return list(ratings.values())


class Figures(NamedTuple):
    """Statistics of one rater, or of several, whose choices on a pair are averaged and count once. Wins are b's.

    `agrees`: of the ratings that prefer an answer, the share whose answer also has the higher score (or true reward),
    and their number. `order_decided`: the share of pairs on which the order of the answers changed a judge's choice.
    """

    wins: int
    losses: int
    ties: int
    skips: int
    win_rate: stats.Estimate | None
    length_controlled_win_rate: stats.Estimate | None
    agrees: dict[str, tuple[float, int]]
    order_decided: float | None


def summarize(paired: PairedAnswers) -> dict[str, Figures]:
    """Return the statistics of each rater's ratings of these pairs, and those of all people if there are several."""
    pairs = {(pair.item, pair.digest): pair for pair in paired.pairs}
    votes: dict[str, list[tuple[Rating, Pair]]] = {}
    for rating in current_ratings(paired.file):
        if pair := pairs.get((rating.item, rating.sha256)):
            votes.setdefault(rating.rater, []).append((rating, pair))
    people = sorted(name for name in votes if not name.startswith(JUDGE))
    figures = {name: _figures(votes[name]) for name in (*people, *sorted({*votes} - {*people}))}
    if len(people) > 1:
        figures["people"] = _figures([vote for name in people for vote in votes[name]])
    return figures


def _figures(votes: Sequence[tuple[Rating, Pair]]) -> Figures:
    """Return the statistics of ratings, each with its pair."""
    choices: dict[int, list[float]] = {}
    lengths: dict[int, float] = {}
    preferred: dict[str, list[bool]] = {}  # whether the better answer has the higher value, by the value's name
    for rating, pair in votes:
        if rating.choice in WIN_OF_B:
            choices.setdefault(pair.item, []).append(WIN_OF_B[rating.choice])
            lengths[pair.item] = float(len(pair.b.split()) - len(pair.a.split()))
        for key, (a, b) in pair.values.items():
            if rating.choice in ("a", "b") and a != b:
                preferred.setdefault(key, []).append((b > a) == (rating.choice == "b"))
    won = [fmean(of_pair) for of_pair in choices.values()]
    said = [rating.said for rating, _ in votes if rating.said and None not in rating.said.values()]
    return Figures(
        wins=sum(outcome > 0.5 for outcome in won),
        losses=sum(outcome < 0.5 for outcome in won),
        ties=sum(outcome == 0.5 for outcome in won),
        skips=sum(rating.choice not in WIN_OF_B for rating, _ in votes),
        win_rate=stats.wilson(sum(won), len(won)) if won else None,
        length_controlled_win_rate=stats.length_controlled_win_rate(won, [*lengths.values()]),
        agrees={key: (fmean(verdicts), len(verdicts)) for key, verdicts in preferred.items()},
        order_decided=fmean(len({*of_pair.values()}) > 1 for of_pair in said) if said else None,
    )


def show_summary(paired: PairedAnswers) -> None:
    """Print the statistics of the ratings as a table."""
    figures = summarize(paired)
    if not figures:
        screen.OUT.print(f"{paired.b} against {paired.a}: nothing of {len(paired.pairs)} rated yet")
        return
    columns = ("rater", "won", "lost", "tied", "skipped", "win rate", "at equal length", "agrees", "order decided")
    rows = []
    for name, f in figures.items():
        rates = [
            f"{r.value:.0%} ({100 * r.low:.0f}–{100 * r.high:.0f})" if r else ""
            for r in (f.win_rate, f.length_controlled_win_rate)
        ]
        agrees = ", ".join(f"{key.replace('_', ' ')} {x:.0%} of {n}" for key, (x, n) in f.agrees.items())
        decided = "" if f.order_decided is None else f"{f.order_decided:.0%}"
        rows.append((harmless(name), *map(str, f[:4]), *rates, agrees, decided))
    equal = f", {paired.equal} more with equal answers left out" if paired.equal else ""
    rows_table(f"{paired.b} against {paired.a}: {len(paired.pairs)} pairs{equal}", columns, rows)
    screen.OUT.print(f"ratings in {paired.file}", style="dim")
