"""The command that makes rows of a known kind of columns that show none: which column is what, by its name or place."""

import itertools
import re
import shlex
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rlhf.data.fields import is_free, words
from rlhf.data.raw import Malformed
from rlhf.data.verdicts import answer_words
from rlhf.recipe.choices import RowKind

# What says which answer is better: a name's only word but for those of an answer. One more may turn it round
# (`not_accepted`, `least_preferred_answer`).
PREFERRED = {
    "rejected": "rejected|bad|worse|worst|loser|losing|negative|dispreferred",
    "chosen": "chosen|good|better|best|winner|winning|preferred|accepted|positive",
}
SAYING = {  # parts of words that say what a column is, in this order
    "prompt": "prompt|question|query|instruct|input|problem|human|user|ask",
    "completion": "completion|response|answer|output|reply|assistant|agent|model|solution",
}
ROLES: dict[RowKind, tuple[str, ...]] = {
    "preference": ("prompt", "chosen", "rejected"),
    "completion": ("prompt", "completion"),
    "question": ("prompt", "answer"),
    "prompt": ("prompt",),
}
Usable = Callable[[dict[str, object], RowKind, bool], None]  # row, kind, whether it is named; raises Malformed


class _Reading(NamedTuple):
    """A row with its columns renamed."""

    kind: RowKind
    rename: dict[str, str]
    left_out: list[str]  # texts that are none of them


def command(file: str, row: Mapping[str, object], usable: Usable) -> str | None:
    """Return what the columns of a file may be, and the command that then rewrites it; None where no one can tell.

    The command works for this row: `usable` has tried it.
    """
    reading = _reading(row)
    if reading is None:
        return None
    renamed = {reading.rename.get(name, name): value for name, value in row.items()}
    named = False
    try:
        usable(renamed, reading.kind, named)
    except Malformed:
        named = True
        try:
            usable(renamed, reading.kind, named)
        except Malformed:
            return None
    parts = ["rlhf", "data", "convert", file]
    for old, new in reading.rename.items():
        parts += ["--rename", f"{old}={new}"]
    parts += [*(["--format", reading.kind] if named else []), "--to", "new.jsonl"]
    meaning = ", ".join(f"'{old}' is {new}" for old, new in reading.rename.items())
    without = f" (without {', '.join(map(repr, reading.left_out))})" if named and reading.left_out else ""
    return f"If {meaning}: `{shlex.join(parts)}`{without}"


def _role(name: str) -> str | None:
    """Return what a column is by its name: the answer that is better or worse, a prompt, an answer; None for others."""
    own = [word for word in words(name) if word not in answer_words(name)]
    preferred = (role for role, pattern in PREFERRED.items() if len(own) == 1 and re.fullmatch(pattern, own[0]))
    others = (role for role, pattern in SAYING.items() if re.search(pattern, name.lower()))
    return next(itertools.chain(preferred, others), None)


def _reading(row: Mapping[str, object]) -> _Reading | None:
    """Return what the columns with texts may be, by what a name says, and then in their order; None for no reading.

    Which of two answers is better no order says: one of the two has to say it.
    """
    texts = [name for name, value in row.items() if isinstance(value, str) and not is_free(name, value)]
    texts = [name for name in texts if any(map(str.isalpha, str(row[name])))]
    long = [name for name in texts if len(str(row[name]).split()) > 1]
    texts = long if len(long) > 2 else texts  # a word beside them may say which answer is better
    said: dict[str, str] = {}
    for name in texts:
        if (role := _role(name)) is not None:
            said.setdefault(role, name)
    if PREFERRED.keys() & said.keys():
        kind: RowKind = "preference"
    elif "answer" in texts:  # which rewards compare with, too
        kind, said["answer"] = "question", "answer"
    else:
        kind = "completion" if len(texts) > 1 else "prompt"
    found = {role: said[role] for role in ROLES[kind] if role in said}
    missing = [role for role in ROLES[kind] if role not in found]
    others = [name for name in texts if name not in found.values()] if missing else []
    if len(others) != len(missing):
        return None
    found |= dict(zip(missing, others, strict=True))
    names = {"prompt": "question"} if kind == "question" else {}
    rename = {found[role]: names.get(role, role) for role in ROLES[kind] if found[role] != names.get(role, role)}
    return _Reading(kind, rename, [name for name in texts if name not in found.values()])
