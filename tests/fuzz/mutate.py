"""Mutations of bytes and of JSON values, each a function of a `random.Random` alone."""

import copy
import json
import math
from collections.abc import Iterator
from random import Random
from typing import Any

Path_ = tuple[str | int, ...]

# Text that could take over a page, a terminal, a file name or a reader.
TEXTS = (
    "",
    " ",
    "\x00",
    "\x1b]0;owned\x07\x1b[31m",
    "\u009b31m",
    "\u202egnp.exe",
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[bold red]markup[/]",
    "../../../../no/such/place",
    "/dev/zero",
    "-",
    "--help",
    "nan",
    "null",
    "é\u0301\U0001f600\u200d",
    "\ud800",
    "x" * 100_000,
    "a\nerror: another line\rb",
    "{{ ''.__class__ }}",
    "%s%n{0}",
)
NUMBERS = (0, -1, 1, 2**31, 2**32, 2**53 + 1, 2**63, 10**20, -(10**20), 1e300, -1e300, 5e-324, -0.0, 0.5)
NOT_FINITE = (math.nan, math.inf, -math.inf)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [None], {"": None}, [[]], {"a": {"b": []}})
DELETE = object()


def damage(random: Random, content: bytes) -> tuple[str, bytes]:
    """What was done in words, and the damaged bytes, which differ from `content`."""
    for _ in range(20):
        name, changed = _damage(random, content)
        if changed != content:
            return name, changed
    return "emptied", b"" if content else b"\x00"


def _damage(random: Random, content: bytes) -> tuple[str, bytes]:
    at, end = sorted((random.randrange(len(content) + 1), random.randrange(len(content) + 1)))
    kind = random.randrange(13)
    if kind == 0:
        return "emptied", b""
    if kind == 1:
        return f"cut off at byte {at}", content[:at]
    if kind == 2:
        return f"bytes {at} to {end} removed", content[:at] + content[end:]
    if kind == 3:
        return f"bytes {at} to {end} twice", content[:end] + content[at:]
    if kind == 4 and content:
        changed = bytearray(content)
        places = [random.randrange(len(content)) for _ in range(random.choice((1, 1, 2, 8)))]
        for place in places:
            changed[place] ^= 1 << random.randrange(8)
        return f"bits flipped in bytes {places}", bytes(changed)
    if kind == 5:
        return f"garbage at byte {at}", content[:at] + random.randbytes(random.choice((1, 3, 64))) + content[at:]
    if kind == 6:
        return "nothing but garbage", random.randbytes(random.choice((1, 17, 512)))
    if kind == 7:
        return f"zeros in bytes {at} to {end}", content[:at] + bytes(end - at) + content[end:]
    if kind == 8:
        return f"a NUL at byte {at}", content[:at] + b"\x00" + content[at:]
    if kind == 9:
        return "a byte order mark in front", b"\xef\xbb\xbf" + content
    if kind == 10:
        return "read as Latin-1, written as UTF-16", content.decode("latin-1").encode("utf-16")
    if kind == 11:
        return "garbage at the end", content + random.randbytes(random.choice((1, 8, 300)))
    return f"an invalid byte at {at}", content[:at] + b"\xff" + content[at:]


def leaves(value: Any, at: Path_ = ()) -> Iterator[Path_]:
    """The path of every value inside `value`, containers included, the root excluded."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield (*at, key)
        yield from leaves(inner, (*at, key))


def get(value: Any, path: Path_) -> Any:
    for key in path:
        value = value[key]
    return value


def changed(value: Any, path: Path_, new: Any) -> Any:
    """A copy of `value` with another value at `path`, or without it (`DELETE`)."""
    result = copy.deepcopy(value)
    inner = get(result, path[:-1])
    if new is DELETE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return result


def nasty(random: Random, old: Any = None) -> tuple[str, Any]:
    """A value that somebody did not mean, often near the old one; its description is short and printable."""
    kinds = ["text", "number", "not finite", "other", "deep", "big"]
    if isinstance(old, bool | None):
        kinds += ["other"]
    elif isinstance(old, int | float):
        kinds += ["near"] * 3
    elif isinstance(old, str):
        kinds += ["near text"] * 2
    kind = random.choice(kinds)
    if kind == "text":
        new: Any = random.choice(TEXTS)
    elif kind == "number":
        new = random.choice(NUMBERS)
    elif kind == "not finite":
        new = random.choice(NOT_FINITE)
    elif kind == "other":
        new = copy.deepcopy(random.choice(OTHERS))
    elif kind == "near":
        new = random.choice((-old, old * 1000, str(old), [old], float(old), old + 0.5))
    elif kind == "near text":
        cut = random.randrange(len(old) + 1)
        new = random.choice((old[:cut], old + random.choice(TEXTS), old[::-1], [old], old.upper()))
    elif kind == "deep":
        new = []
        for _ in range(60):  # deeper ones are written as text: `deep_text`
            new = [new]
    else:
        new = [0] * 10_000
    return f"{json.dumps(new)[:60]}", new


def deep_text(random: Random) -> str:
    """JSON, and YAML, that is nested deeper than a parser that calls itself can go."""
    depth = random.choice((2_000, 100_000))
    return random.choice(("[" * depth, "[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth))


def json_case(random: Random, value: Any) -> tuple[str, str]:
    """A JSON value with one thing wrong: what was done, and its text."""
    paths = list(leaves(value))
    if not paths or random.random() < 0.06:
        if random.randrange(4) == 0:
            return "nested without end", deep_text(random)
        whole = random.choice((None, [], "text", 3, [value], {"": value}))
        return f"the whole replaced by {json.dumps(whole)[:40]}", json.dumps(whole)
    path = random.choice(paths)
    where = ".".join(map(str, path))[:80]
    kind = random.random()
    if kind < 0.2:
        return f"{where} deleted", json.dumps(changed(value, path, DELETE))
    if kind < 0.25 and isinstance(get(value, path[:-1]), dict):
        parent = get(value, path[:-1])
        key = random.choice((f"{path[-1]}x", "", "__proto__", str(path[-1]).upper(), "\x1b[31m"))
        renamed = {key if name == path[-1] else name: inner for name, inner in parent.items()}
        return f"{where} renamed", json.dumps(changed(value, path[:-1], renamed) if path[:-1] else renamed)
    said, new = nasty(random, get(value, path))
    return f"{where} = {said}", json.dumps(changed(value, path, new))
