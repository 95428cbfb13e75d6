"""Recipes and `--set`: values, keys, YAML constructs, damaged bytes, and files that are none."""

import copy
import json
import math
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.fuzz.mutate import DELETE, Path_, changed, damage, deep_text, get, leaves, nasty
from tests.fuzz.oracle import SOUND, Case, Must
from tests.fuzz.reference import ROOT, STAGES, Reference, finite_result

ABSURD = 10**15  # no key of a recipe can mean a whole number as large
SMALL = (0, 1, 2, 3, 5, 7, 63)  # legal in places, and seldom tried

# Text that is put in place of a recipe's value or around the recipe; all of it must be refused.
CONSTRUCTS = {
    "a circular list": "seed: &a [*a]",
    "a circular mapping": "seed: &a {b: *a}",
    "an alias to nothing": "seed: *nothing",
    "a bomb of aliases": "seed:\n"
    + "".join(f"  - &a{i} [{', '.join([f'*a{i - 1}'] * 10) if i else '0, 0'}]\n" for i in range(9)),
    "a bomb of mappings": "seed:\n"
    + "".join(
        f"  k{i}: &m{i} {{{', '.join(f'x{j}: *m{i - 1}' for j in range(10)) if i else 'y: 0'}}}\n" for i in range(9)
    ),
    "a Python object": "seed: !!python/object/apply:os.system ['touch fuzz-canary']",
    "a Python name": "seed: !!python/name:os.system",
    "an unknown tag": "seed: !evil 3",
    "binary": "description: !!binary aGVsbG8=",
    "a set": "seed: !!set {a, b}",
    "a date": "description: 2001-12-14",
    "a timestamp": "seed: 2001-12-14t21:59:43.10-05:00",
    "an ordered map": "seed: !!omap [a: 1]",
    "a list as a key": "[a, b]: 1",
    "a mapping as a key": "{a: b}: 1",
    "an explicit key": "? [a]\n: 1",
    "a number as a key": "3: 1",
    "a float as a key": ".5: 1",
    "a date as a key": "2001-12-14: 1",
    "null as a key": "null: 1",
    "a control character in a key": '"\\e[31m": 1',
    "a newline in a key": '"a\\nerror: b": 1',
    "a surrogate in a key": '"\\ud800": 1',
    "a long key": f'"{"k" * 200_000}": 1',
    "a merge of nothing": "<<: 3",
    "a key given twice": "seed: 0\nseed: 1",
    "two documents": "---\nseed: 0",
    "a tab for an indent": "\tseed: 0",
    "an open quote": 'description: "never closed',
    "an open list": "seed: [1, 2",
    "an octal number": "seed: 0o19",
    "a directive": "%YAML 9.9\n---\n",
    "a NUL": "description: a\x00b",
    "a lone surrogate": 'description: "\\ud800"',
    "an escape sequence": 'status: "\\e]0;owned\\a"',
    "a number of 100,000 digits": f"seed: {'9' * 100_000}",
}

# What is no KEY=VALUE, and values and keys that are none.
WORDS = ("", "=", "==", "=1", "ppo", "ppo.steps", ".=1", "..=1", ".ppo=1", "ppo.=1", "ppo=1", " = ", "ppo.steps==1")
VALUES: tuple[str, ...] = (
    "? [a]\n: b",
    "&a [*a]",
    "!!set {a}",
    "[1",
    "*x",
    "{a: 1, a: 2}",
    "\x00",
    "!!python/name:os.system",
)
VALUES += ("2001-01-01", "!!binary aa==", "'", "1\n2")
KEYS = ("\x1b[31m", "a.b.c.d.e", "__class__", "ppo.__class__", "x" * 100_000)


def case(random: Random, place: Path, reference: Reference) -> Case:
    directory = place / "recipes" / ROOT
    shutil.copytree(reference.recipe, directory)
    file = directory / "recipe.yaml"
    if random.random() < SOUND:
        return Case("recipe as it should be", ["fetch", "--recipe", str(directory)], place, must="accept")
    kind = random.random()
    if kind < 0.35:
        return _value(random, place, reference, file, by_option=False)
    if kind < 0.6:
        return _value(random, place, reference, file, by_option=True)
    if kind < 0.75:
        name, text = random.choice(list(CONSTRUCTS.items()))
        if random.random() < 0.12:
            name, text = "nested without end", f"seed: {deep_text(random)}"
        content = file.read_text()
        key = text.partition(":")[0]
        kept = [line for line in content.splitlines(True) if not line.startswith(f"{key}:")]
        file.write_text("".join(kept) + text + "\n", errors="surrogatepass")
        return Case(f"recipe.yaml with {name}", ["fetch", "--recipe", str(directory)], place, must="refuse")
    if kind < 0.8:
        return _option(random, place, directory)
    if kind < 0.93:
        target = random.choice((file, directory / "published.yaml"))
        name, damaged = damage(random, target.read_bytes())
        target.write_bytes(damaged)
        found = Case(f"{target.name}: {name}", ["fetch", "--recipe", str(directory)], place)
        found.valid = lambda outcome: _readable(target)
        return found
    return _no_file(random, place, file)


def _value(random: Random, place: Path, reference: Reference, file: Path, by_option: bool) -> Case:
    """One key with another value, in the file or by --set; some of what may be legal is run."""
    content = yaml.safe_load(file.read_text())
    path = random.choice(list(leaves(content)))
    old = get(content, path)
    key = ".".join(map(str, path))
    small = isinstance(old, int | None) and not isinstance(old, bool) and random.random() < 0.5
    said, new = (str(value := random.choice(SMALL)), value) if small else nasty(random, old)
    must: Any = _must(path, old, new)
    kind = random.random()
    if kind < 0.08 and not by_option:
        said, new, must = "deleted", DELETE, "either"
    elif kind < 0.2:
        words = random.choice((f"{key}x", f"{key}.deeper", f".{key}", f"{key}.", key.replace(".", ".."), "\x1b[31m"))
        if by_option:
            arguments = ["fetch", "--recipe", str(file.parent), "--set", f"{words}={_as_yaml(new)}"]
            return Case(f"--set {words[:60]!r}={said}", arguments, place, must="refuse")
        parent = get(content, path[:-1])
        name = words.split(".")[-1] or "x"
        renamed = {name if k == path[-1] else k: v for k, v in parent.items()}
        file.write_text(_as_yaml(changed(content, path[:-1], renamed) if path[:-1] else renamed))
        return Case(f"{key} renamed {name[:40]!r}", ["fetch", "--recipe", str(file.parent)], place)
    stage = path[0] if path[0] in STAGES else "pretrain" if path[0] in ("tokenizer", "data", "model", "lora") else None
    runs = stage is not None and must == "either" and (small or not _large(new)) and new is not DELETE
    options: list[str] = []
    if by_option:
        options = ["--set", f"{key}={_as_yaml(new)}"]
    else:
        file.write_text(_as_yaml(changed(content, path, new)))
    if not runs:
        return Case(
            f"{'--set ' * by_option}{key}={said}", ["fetch", "--recipe", str(file.parent), *options], place, must=must
        )
    if stage != "pretrain":
        reference.before(place / "out", str(stage))
    arguments = ["run", str(stage), "--recipe", str(file.parent), "--out", "out", *options]
    found = Case(f"run {stage}, {key}={said}", arguments, place, must=must)
    found.valid = lambda outcome: _finished(place / "out" / ROOT / str(stage))
    return found


def _must(path: Path_, old: Any, new: Any) -> str:
    """Whether a value is known to be wrong by the type of the one that it replaces."""
    number = isinstance(new, int | float) and not isinstance(new, bool)
    if isinstance(new, float) and not math.isfinite(new):
        return "refuse"
    if isinstance(old, dict):
        return "refuse" if new == {} or not isinstance(new, dict) else "either"
    if isinstance(old, bool):
        return "either" if isinstance(new, bool) else "refuse"
    if isinstance(old, int | float):
        if new is None:
            return "either"
        if not number or new < 0 or (isinstance(old, int) and isinstance(new, int) and new >= ABSURD):
            return "refuse"
        return "either"
    if isinstance(old, str) and path[-1] != "target_modules":
        return "either" if isinstance(new, str) else "refuse"
    return "refuse" if number and new < 0 else "either"


def _large(value: Any) -> bool:
    """Whether a value may be legal and mean hours of work, or names a file of this machine."""
    if isinstance(value, bool | None):
        return False
    return abs(value) > max(SMALL) if isinstance(value, int | float) else True


def _finished(stage: Path) -> str | None:
    """Whether a run that was accepted ended as it should; what the watch has named is no surprise."""
    if stage.name == "evaluate":
        return None if (stage / "summary.json").is_file() else "there is no summary"
    reason = finite_result(stage)
    if reason and (stage / "summary.json").is_file() and json.loads((stage / "summary.json").read_text())["findings"]:
        return None
    return reason


def _option(random: Random, place: Path, directory: Path) -> Case:
    """A --set that is no KEY=VALUE, or whose value is a construct."""
    text = random.choice((*WORDS, *(f"ppo.steps={value}" for value in VALUES), *(f"{word}=1" for word in KEYS)))
    text = text.replace("\x00", "\\0")  # no command line can hold one
    arguments = ["fetch", "--recipe", str(directory), "--set", text]
    return Case(f"--set {text[:60]!r}", arguments, place, must="refuse")


def _no_file(random: Random, place: Path, file: Path) -> Case:
    """Something else in place of the recipe."""
    kind = random.choice(
        ("pipe", "zeros", "full", "folder", "nothing", "loop", "dangling", "large", "list", "text", "folder's name")
    )
    must: Must = "refuse"
    if kind == "folder's name":
        other = file.parent.with_name(random.choice(("v1x", "vv", "1", "\x1b[31m", "v-1", "x" * 200)))
        file.parent.rename(other)
        return Case(f"a folder named {other.name[:40]!r}", ["fetch", "--recipe", str(other)], place, must="refuse")
    target = file if random.random() < 0.7 else file.with_name("published.yaml")
    target.unlink()
    if kind == "pipe":
        os.mkfifo(target)
    elif kind == "folder":
        target.mkdir()
    elif kind == "large":
        target.write_text("key: value\n" * 3_000_000)
    elif kind in ("list", "text"):
        target.write_text("[1, 2]\n" if kind == "list" else "only text\n")
    elif kind == "nothing":
        must = "refuse" if target == file else "accept"  # published figures are optional
    else:
        links = {"zeros": "/dev/zero", "full": "/dev/full", "loop": target.name, "dangling": "nowhere"}
        target.symlink_to(links[kind])
    return Case(f"{target.name} is {kind}", ["fetch", "--recipe", str(file.parent)], place, must=must)


def _readable(file: Path) -> str | None:
    """Whether another reader of YAML finds a mapping in a file that was accepted."""
    try:
        content = yaml.safe_load(file.read_bytes())
    except yaml.YAMLError:
        return "another reader of YAML cannot read it"
    return None if isinstance(content, dict) else "it holds no mapping"


def _as_yaml(value: Any) -> str:
    """Text that YAML reads as this value: JSON, but for the numbers that JSON does not have."""
    text = json.dumps(copy.deepcopy(value))
    for ours, theirs in (("-Infinity", "-.inf"), ("Infinity", ".inf"), ("NaN", ".nan")):
        text = text.replace(ours, theirs)
    return text
