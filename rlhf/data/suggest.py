"""The command that makes rows of a known kind of columns that show none: which column is what, by its name or place."""

import re
import shlex
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rlhf.data.fields import is_free
from rlhf.data.raw import Malformed
from rlhf.recipe.choices import RowKind

# What names of columns say, in this order: a `bad_answer` is rejected, and a `dispreferred` one is not preferred.
SAYING = {
    "rejected": "reject|bad|worse|worst|los[et]|negative|dispref",
    "chosen": "chosen|good|better|best|win|prefer|accept|positive",
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
    words = ["rlhf", "data", "convert", file]
    for old, new in reading.rename.items():
        words += ["--rename", f"{old}={new}"]
    words += [*(["--format", reading.kind] if named else []), "--to", "new.jsonl"]
    meaning = ", ".join(f"'{old}' is {new}" for old, new in reading.rename.items())
    without = f" (without {', '.join(map(repr, reading.left_out))})" if named and reading.left_out else ""
    return f"If {meaning}: `{shlex.join(words)}`{without}"


def _reading(row: Mapping[str, object]) -> _Reading | None:
    """Return what the columns with texts may be: what a name says, else the next one in order; None for no reading."""
    texts = [name for name, value in row.items() if isinstance(value, str) and not is_free(name, value)]
    texts = [name for name in texts if any(map(str.isalpha, str(row[name])))]
    long = [name for name in texts if len(str(row[name]).split()) > 1]
    texts = long if len(long) > 2 else texts  # a word beside them may say which answer is better
    said: dict[str, str] = {}
    for name in texts:
        role = next((role for role, pattern in SAYING.items() if re.search(pattern, name.lower())), None)
        if role is not None:
            said.setdefault(role, name)
    if "chosen" in said or "rejected" in said or (len(texts) == 3 and "completion" not in said):
        kind: RowKind = "preference"
    elif "answer" in texts:  # which rewards compare with, too
        kind, said["answer"] = "question", "answer"
    else:
        kind = "completion" if len(texts) > 1 else "prompt"
    others_say = any(name not in texts and not is_free(name, value) for name, value in row.items())
    if kind == "preference" and not {"chosen", "rejected"} & said.keys() and others_say:
        return None  # of two answers side by side such a column may say which is better
    found = {role: said[role] for role in ROLES[kind] if role in said}
    others = (name for name in texts if name not in found.values())
    for role in ROLES[kind]:
        if role not in found and (other := next(others, None)) is not None:
            found[role] = other
    if len(found) < len(ROLES[kind]):
        return None
    names = {"prompt": "question"} if kind == "question" else {}
    rename = {found[role]: names.get(role, role) for role in ROLES[kind] if found[role] != names.get(role, role)}
    return _Reading(kind, rename, [name for name in texts if name not in found.values()])
