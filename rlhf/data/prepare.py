"""What is done to the rows of a file before their kind is told: columns renamed or left out, answers paired."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rlhf.data import rated
from rlhf.data.fields import is_messages
from rlhf.data.messages import quoted_keys
from rlhf.data.parsing import OtherKind
from rlhf.data.raw import Malformed
from rlhf.recipe.choices import RatedPairs

RawRows = Iterable[tuple[str, object]]  # source and row


class Preparation(NamedTuple):
    """Names of columns before and after, columns and fields of messages that go, and how rated answers are paired.

    `rating_used`: the number that `rating` names need not be in the rows, as others had it.
    """

    rename: Mapping[str, str] = {}
    ignore: Sequence[str] = ()
    rated: RatedPairs = "best_worst"
    rating: str | None = None
    option: str = "data.rename"  # where the names are given
    rating_used: bool = False


def recipe_keys(preparation: Preparation) -> dict[str, object]:
    """Return the keys of a recipe's section `data` that say the same; those with their defaults are left out."""
    keys = {"rename": {**preparation.rename}, "ignore": [*preparation.ignore], "rating": preparation.rating}
    if preparation.rated != Preparation().rated:
        keys["rated"] = preparation.rated
    return {key: value for key, value in keys.items() if value}


def prepared(rows: RawRows, preparation: Preparation) -> RawRows:
    """Return rows with the columns renamed, and then without those that are ignored."""
    if preparation.rename:
        rows = _renamed(rows, preparation.rename, preparation.option)
    return _without(rows, {*preparation.ignore}) if preparation.ignore else rows


def _renamed(rows: RawRows, names: Mapping[str, str], option: str) -> RawRows:
    """Yield rows with new column names; a row that lacks one, or has the new name already, is malformed."""
    for source, row in rows:
        if isinstance(row, dict):
            missing = [old for old in names if old not in row]
            existing = [new for new in names.values() if new in row and new not in names]
            if missing or existing:
                problem = (
                    f"no column {missing[0]!r} to rename" if missing else f"{existing[0]!r} is another column's name"
                )
                yield source, OtherKind(f"{problem} ({option}); the row has {quoted_keys(row)}")
                continue
            row = {names.get(key, key): value for key, value in row.items()}
        yield source, row


def _without(rows: RawRows, names: set[str]) -> Iterator[tuple[str, object]]:
    """Yield rows without some columns, fields of objects in them (dotted names), and fields of messages."""
    for source, row in rows:
        if isinstance(row, dict):
            row = {
                column: [_kept(turn, names) for turn in value] if is_messages(value) else value
                for column, value in _kept(row, names).items()
            }
        yield source, row


def _kept(fields: Mapping[str, object], names: set[str], prefix: str = "") -> dict[str, object]:
    """Return an object without the fields of some names, also in the objects in it."""
    kept = {name: value for name, value in fields.items() if prefix + name not in names}
    for name, value in kept.items():
        if isinstance(value, dict) and any(ignored.startswith(f"{prefix}{name}.") for ignored in names):
            kept[name] = _kept(value, names, f"{prefix}{name}.")
    return kept


def with_pairs(rows: RawRows, preparation: Preparation, count: rated.Count) -> RawRows:
    """Yield preference rows in the place of rows of rated answers, and count them; other rows as they are."""
    for source, row in rows:
        try:
            answers = rated.rated_answers(row, preparation.rating) if isinstance(row, dict) else None
        except Malformed as problem:
            yield source, problem
            continue
        if answers is None:
            yield source, row
        else:
            yield from ((source, pair) for pair in rated.pairs(answers, preparation.rated, count))
