"""Data files: bytes, JSON, structure, encodings, gzip, tables and Parquet, read by `rlhf data …` and by training."""

import csv
import gzip
import io
import json
import zlib
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import damage, deep_text, json_case, nasty
from tests.fuzz.oracle import SOUND, Case
from tests.fuzz.reference import Reference, finite_result
from tests.fuzz.sandbox import Outcome

SUBJECTS = ("the sea", "größere Zahlen", "日本語", "a \U0001f600", 'tabs\tand \\ and "quotes"', "numbers 1, 2, 3")


def rows_of(kind: str, count: int = 24) -> list[dict[str, Any]]:
    """Rows of a known kind, all different."""
    rows: list[dict[str, Any]] = []
    for n in range(count):
        ask, good, bad = f"Tell me about {SUBJECTS[n % len(SUBJECTS)]}, number {n}.", f"Answer {n}: yes.", f"No {n}."
        before = f"\n\nHuman: {ask}\n\nAssistant:"
        user, reply = {"role": "user", "content": ask}, {"role": "assistant", "content": good}
        kinds: dict[str, dict[str, Any]] = {
            "text": {"text": f"{ask} {good}"},
            "hh": {"chosen": f"{before} {good}", "rejected": f"{before} {bad}"},
            "instruction": {"instruction": ask, "input": "" if n % 2 else "in short", "output": good},
            "preference": {"prompt": ask, "chosen": good, "rejected": bad},
            "chats": {"prompt": [user], "chosen": [reply], "rejected": [{"role": "assistant", "content": bad}]},
            "completion": {"prompt": ask, "completion": good},
            "messages": {"messages": [user, reply]},
            "sharegpt": {"conversations": [{"from": "human", "value": ask}, {"from": "gpt", "value": good}]},
        }
        rows.append(kinds[kind])
    return rows


KINDS = ("text", "hh", "instruction", "preference", "chats", "completion", "messages", "sharegpt")
FLAT = ("text", "hh", "instruction", "preference", "completion")


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _table(rows: list[dict[str, Any]], delimiter: str) -> bytes:
    out = io.StringIO()
    table = csv.DictWriter(out, rows[0], delimiter=delimiter)
    table.writeheader()
    table.writerows(rows)
    return out.getvalue().encode()


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


def case(random: Random, place: Path, reference: Reference) -> Case:
    form = random.choice(("jsonl",) * 5 + ("json", "json", "wrapped", "csv", "tsv", "parquet"))
    kind = random.choice(FLAT if form in ("csv", "tsv", "parquet") else KINDS)
    rows = rows_of(kind)
    suffix, must = form, "either"
    sound = random.random() < SOUND
    if not sound and form == "jsonl" and random.random() < 0.6:
        name, content, must = _wrong_line(random, rows)
    elif not sound and form in ("json", "wrapped") and random.random() < 0.6:
        name, text = json_case(random, rows if form == "json" else {"data": rows})
        content = text.encode()
    else:
        content = {
            "jsonl": lines,
            "json": lambda r: json.dumps(r, ensure_ascii=False).encode(),
            "wrapped": lambda r: json.dumps({"data": r}, indent=1).encode(),
            "csv": lambda r: _table(r, ","),
            "tsv": lambda r: _table(r, "\t"),
            "parquet": _parquet,
        }[form](rows)
        name, content = ("as it should be", content) if sound else damage(random, content)
    if not sound and random.random() < 0.2 and form != "parquet":
        packed, content, whole = _packed(random, content)
        name, suffix = f"{name}; {packed}", f"{suffix}.gz"
        must = must if whole else "either"
    file = place / f"rows.{'json' if form == 'wrapped' else suffix}"
    file.write_bytes(content)
    return _read(random, place, reference, file, f"{form} of {kind}: {name}", "accept" if sound else must)


def _read(random: Random, place: Path, reference: Reference, file: Path, name: str, must: Any) -> Case:
    """A command that reads `file`, and what its success would have to mean."""
    command = random.choice(("check", "check", "check", "convert", "convert", "show", "train"))
    if command == "check":
        made = Case(f"data check, {name}", ["data", "check", file.name, "--json"], place, must=must, reports=(1, 3))
        made.valid = lambda outcome: _counted(outcome, file)
    elif command == "convert":
        arguments = ["data", "convert", file.name, "--to", "converted.jsonl"]
        made = Case(f"data convert, {name}", arguments, place, must=must)
        made.valid = lambda outcome: _nothing_invented(place / "converted.jsonl", file)
    elif command == "show":
        made = Case(f"data show, {name}", ["data", "show", file.name], place)  # shows what it can read
    else:
        weights = ["--weights", str(reference.root / "pretrain" / "model")]
        arguments = ["run", "sft", *reference.options(), *weights, "--data", file.name]
        made = Case(f"run sft, {name}", arguments, place, must=must)
        made.valid = lambda outcome: finite_result(next(place.glob("out/*/v*/sft")))
    return made


def _wrong_line(random: Random, rows: list[dict[str, Any]]) -> tuple[str, bytes, Any]:
    """JSON lines of which one is wrong."""
    at = random.randrange(len(rows))
    texts = lines(rows).decode().splitlines()
    kind = random.randrange(7)
    if kind == 0:
        texts[at] = deep_text(random)
        return f"line {at + 1} nested without end", "\n".join(texts).encode() + b"\n", "refuse"
    if kind == 1:
        mistake, texts[at] = json_case(random, rows[at])
    elif kind == 2:
        key = random.choice(list(rows[at]))
        mistake, value = nasty(random, rows[at][key])
        texts[at] = json.dumps({**rows[at], key: value})
        mistake = f"{key} = {mistake}"
    elif kind == 3:
        mistake, texts[at] = "cut in the middle", texts[at][: len(texts[at]) // 2]
        return f"line {at + 1}: {mistake}", "\n".join(texts).encode() + b"\n", "refuse"
    elif kind == 4:
        mistake, texts[at] = "two objects", texts[at] * 2
        return f"line {at + 1}: {mistake}", "\n".join(texts).encode() + b"\n", "refuse"
    elif kind == 5:
        other = random.choice([k for k in KINDS if k not in ("text",)])
        mistake, texts[at] = f"a row of {other}", json.dumps(rows_of(other)[at])
    else:
        text = random.choice(("\\ud800", "\\u0000", "\\u001b[2J", "\\u202e", "\\udfff\\ud800"))
        mistake = f"{text} in a text"
        texts[at] = texts[at].replace("number", f"number {text}") if "number" in texts[at] else texts[at]
    return f"line {at + 1}: {mistake}", "\n".join(texts).encode() + b"\n", "either"


def _packed(random: Random, content: bytes) -> tuple[str, bytes, bool]:
    """The content gzipped, perhaps badly; whether what was said about the content still holds."""
    packed = gzip.compress(content, mtime=0)
    kind = random.randrange(7)
    if kind == 0:
        return "gzipped", packed, True
    if kind == 1:
        return "gzip cut off", packed[: random.randrange(10, len(packed))], False
    if kind == 2:
        changed = bytearray(packed)
        changed[-random.randint(1, 8)] ^= 0x10
        return "gzip with a wrong checksum", bytes(changed), False
    if kind == 3:
        return "gzip of two members", packed + gzip.compress(b"", mtime=0), True
    if kind == 4:
        damaged, changed_ = damage(random, packed)
        return f"gzip, {damaged}", changed_, False
    if kind == 5:
        size = random.choice((1, 20, 80)) << 20
        return f"gzip of {size >> 20} MiB of blanks on one line", gzip.compress(b" " * size, 1, mtime=0), False
    return "gzip inside gzip", gzip.compress(packed, mtime=0), False


def _independent(file: Path) -> tuple[int, list[Any]] | None:
    """Rows of a file as a reader of twenty lines sees them: their number, and JSON values; None where it cannot.

    Of tables and Parquet it knows an upper bound of the number only, and no values.
    """
    content = file.read_bytes()
    try:
        while content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
            if ".gz" in file.suffixes and content[:2] == b"\x1f\x8b":
                return None
        if content[:4] == b"PAR1":
            return len(content), []
        text = content.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError):
        return None
    if file.suffixes[0] in (".csv", ".tsv"):
        return text.count("\n") + 1, []
    for whole in (True, False):
        try:
            values = [json.loads(text)] if whole else [json.loads(part) for part in text.split("\n") if part.strip()]
        except (ValueError, RecursionError):
            continue
        if whole and isinstance(values[0], list):
            return len(values[0]), values
        if whole and isinstance(values[0], dict) and isinstance(values[0].get("data"), list):
            return len(values[0]["data"]), values
        return len(values), values
    return None


def _counted(outcome: Outcome, file: Path) -> str | None:
    """Whether `data check` counted the rows that are there."""
    try:
        report = json.loads(outcome.out, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return "the report is not strict JSON"
    there = _independent(file)
    if there is None:
        return "the file cannot be read by another reader"
    count, values = there
    if report["rows"] != count if values else report["rows"] > count:
        return f"{report['rows']} rows were counted of {count}"
    kept = report["documents"] + report["examples"] + report["pairs"]
    left = report["malformed"] + report["prompts_differ"] + report["identical"] + report["empty"] + report["untrained"]
    return None if kept + left == report["rows"] else f"{kept} rows kept and {left} left out of {report['rows']}"


def _nothing_invented(converted: Path, file: Path) -> str | None:
    """Whether every text that `data convert` wrote stands in the file that it read."""
    there = _independent(file)
    if there is None:
        return "the file cannot be read by another reader"
    known = "\n".join(_texts(there[1]))
    for number, line in enumerate(converted.read_bytes().splitlines(), 1):
        for text in _texts(json.loads(line)):
            roles = ("user", "assistant", "system")
            if there[1] and text not in roles and not all(part in known for part in text.split("\n")):
                return f"row {number} has a text that the file has not: {text[:60]!r}"
    return None


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in inner for text in _texts(part)]
