"""Fields that no stage reads: refused, named in a report, or known to be without influence.

A row with a field that an answer may depend on is refused, with the one option that leaves all such fields of the file
out. Fields with one and the same word in all rows of a file are named.
"""

import itertools
from collections.abc import Iterable

from rlhf.data.columns import MESSAGE_COLUMNS, unread_columns
from rlhf.data.fields import FileFacts, Unread, boolean
from rlhf.data.messages import unread_fields
from rlhf.data.raw import Malformed
from rlhf.data.verdicts import names_verdict
from rlhf.recipe.choices import RowKind


class UnknownColumn(Malformed):
    """A row with a column that no stage reads. The message says what to do."""


def refuse_unread(
    row: dict[str, object], kind: RowKind, facts: FileFacts, columns: bool, unused: dict[str, None]
) -> None:
    """Raise UnknownColumn for a row with a field that no stage reads and that an answer may depend on.

    Fields of messages are looked at always, columns only where asked. Others that are not read are added to `unused`.
    """
    unread = _unread(row, kind, facts, columns)
    unused |= dict.fromkeys(unread.named)
    if not unread.refused:
        return
    place, name, value = unread.refused[0]
    if names_verdict(place):
        raise UnknownColumn(
            f"'{place}' is {str(value)[:40]!r}, which does not say whether chosen or rejected is better: write one of "
            f"the two, or leave it out: {ignoring([name])}"
        )
    switch = "; a switch of training is written as train: true or false, a verdict on an answer (KTO) as label"
    asks = "" if boolean(value) is None else switch
    others = (field for sampled in facts.sample for field in _unread(sampled, kind, facts, columns).refused)
    names = dict.fromkeys(field.name for field in [*unread.refused, *others])
    raise UnknownColumn(
        f"'{place[:60]}' is not used in training, and the answer may depend on it{asks}. Write it into the prompt, "
        f"name it as a column that is read (data.rename, --rename), or say that no answer needs it: {ignoring(names)}"
    )


def _unread(row: dict[str, object], kind: RowKind, facts: FileFacts, columns: bool) -> Unread:
    """Return the fields of a row that no stage reads."""
    found = [unread_fields(row[key], key, facts) for key in MESSAGE_COLUMNS if isinstance(row.get(key), list)]
    found += [unread_columns(row, kind, facts)] if columns else []
    refused, named = ([*itertools.chain(*parts)] for parts in zip(*found, strict=True)) if found else ([], [])
    return Unread(refused, named)


def ignoring(names: Iterable[str]) -> str:
    """Return how to say that columns or fields are to be ignored, in a recipe and in a command about a file."""
    listed = ",".join(names)
    return f"--set data.ignore=[{listed}] (`rlhf data`, `rlhf new`: --ignore {listed})"
