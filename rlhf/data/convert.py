"""Rewrite rows of any known kind as JSON lines of one plain form each; columns may be renamed on the way.

    documents          {"text"}
    examples           {"prompt": [messages], "completion": text}
    preference pairs   {"prompt": [messages], "chosen": text, "rejected": text}

Answers that are labelled good or bad one by one (KTO: `prompt`, `completion`, `label`) become pairs: the first good and
the first bad answer to a prompt, then the second ones.
"""

import dataclasses
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlhf.data import formats, raw
from rlhf.data.formats import Document, Example, OnBadRow, Row
from rlhf.data.raw import DataError

RawRow = tuple[str, object]  # source and row


def convert(files: Sequence[Path], names: Mapping[str, str], on_bad_row: OnBadRow = "stop") -> formats.Rows:
    """Read files, their columns renamed (`names`: old -> new). Raises DataError as `formats.read` does."""
    sources = []
    for file in files:
        rows = _renamed(raw.rows(file), names)
        first = next(rows, None)
        rows = itertools.chain([] if first is None else [first], rows)
        if first is not None and _is_labelled(first[1]):
            rows = _paired(str(file), rows)
        sources.append((str(file), rows, partial(raw.sha256, file)))
    return formats.parse(sources, on_bad_row=on_bad_row)


def write(rows: formats.Rows, file: Path) -> int:
    """Write rows as JSON lines; returns their number. Raises DataError when the file is there already."""
    kept: list[Row] = [*rows.documents, *rows.examples, *rows.pairs]
    try:
        with file.open("x", encoding="utf-8") as out:
            out.writelines(json.dumps(_plain(row), ensure_ascii=False) + "\n" for row in kept)
    except FileExistsError:
        raise DataError(f"{file}: is there already and is not overwritten; choose another --to") from None
    return len(kept)


def _plain(row: Row) -> dict[str, Any]:
    if isinstance(row, Document):
        return {"text": row.text}
    prompt = [dataclasses.asdict(message) for message in row.prompt]
    if isinstance(row, Example):
        return {"prompt": prompt, "completion": row.response}
    return {"prompt": prompt, "chosen": row.chosen, "rejected": row.rejected}


def _renamed(rows: Iterable[RawRow], names: Mapping[str, str]) -> Iterator[RawRow]:
    for source, row in rows:
        if isinstance(row, dict):
            row = {names.get(key, key): value for key, value in row.items()}
        yield source, row


def _is_labelled(row: object) -> bool:
    return isinstance(row, dict) and isinstance(row.get("label"), bool) and "prompt" in row


def _paired(name: str, rows: Iterable[RawRow]) -> Iterator[RawRow]:
    """Yield preference rows from labelled answers. Raises DataError when no prompt has both kinds of answers."""
    answers: dict[str, tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    prompts: dict[str, Any] = {}
    for source, row in rows:
        if not _is_labelled(row) or not isinstance(row, dict):
            raise DataError(f"{source}: no 'prompt' with a 'label' of true or false, as the first row has them")
        key = json.dumps(row["prompt"], sort_keys=True)
        prompts[key] = row["prompt"]
        answers[key][not row["label"]].append(row.get("completion", row.get("response")))
    found = False
    for key, (good, bad) in answers.items():
        for number, (chosen, rejected) in enumerate(zip(good, bad, strict=False), 1):
            found = True
            source = f"{name}: pair {number} of prompt {prompts[key]!r:.40}"
            yield source, {"prompt": prompts[key], "chosen": chosen, "rejected": rejected}
    if not found:
        raise DataError(f"{name}: no prompt has a good and a bad answer, so there is nothing to pair")


def parse_names(pairs: Sequence[str]) -> dict[str, str]:
    """Column names as they are given on the command line: `question=prompt`. Raises DataError for anything else."""
    names = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not (old and equals and new):
            raise DataError(f"--rename {pair}: write OLD=NEW, for example question=prompt")
        names[old] = new
    return names
