"""Parsed YAML as frozen, strictly typed objects. Every mistake becomes one line: file, key and the way out."""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator

from rlhf.errors import UserError
from rlhf.files import JsonObject, JsonValue
from rlhf.recipe import moved
from rlhf.recipe.plain_yaml import line_of, parse
from rlhf.terminal import excerpt


class Section(BaseModel):
    """A section of a recipe: frozen, strictly typed, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())
    documented_in: ClassVar[str] = "docs/keys.yaml"  # the page that explains its keys

    def problems(self) -> Iterator[str]:
        """Yield in words which of its keys do not go together."""
        yield from ()

    @model_validator(mode="after")
    def _check_problems(self) -> Self:
        """Raise ValueError for the first problem."""
        for problem in self.problems():
            raise ValueError(problem)
        return self

    def not_multiple(self, key: str, of: str) -> Iterator[str]:
        """Yield the problem of a number that is no multiple of the one at another key."""
        number, base = getattr(self, key), getattr(self, of)
        if number % base:
            yield f"{key}: {number} must be a multiple of {of}: {base}"


Changes = dict[str, JsonValue]  # of a recipe: dotted key -> new value
SectionT = TypeVar("SectionT", bound=Section)
# Names in use elsewhere, and the keys that they mean.
COMMON_NAMES = {"lr": "learning_rate", "epochs": "num_train_epochs", "batch_size": "per_device_train_batch_size"}
PLAIN_TYPES = ("bool", "int", "float", "str")  # that a key may take beside others, as pydantic names them after the key
MAX_KEY = 200  # characters of a dotted key
AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)  # YAML has only lists


def validate(
    kind: type[SectionT], content: object, file: Path, overrides: Collection[str], prefix: str = ""
) -> SectionT:
    """Return `content` as a section. Raises UserError about the first problem; an unknown key comes before any other.

    The message names the line of the key, or `--set` where one of `overrides` may be at fault; `prefix` stands before
    every key.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        problem = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    parts = [str(p) for p in problem["loc"] if re.fullmatch(r"\w+", str(p)) and p not in PLAIN_TYPES]
    key = (prefix + ".".join(parts)).rstrip(".")  # of the whole object: the prefix alone
    by_option = any(f"{o}.".startswith(f"{key}.") or f"{key}.".startswith(f"{o}.") for o in overrides)
    line = None if by_option or not key else line_of(file, key.split("."))
    place = f"{file}:{line}" if line else f"{file} with --set" if overrides else str(file)
    raise UserError(f"{place}: {_in_words(kind, problem, key, prefix)}")


def _in_words(kind: type[Section], problem: Mapping[str, Any], key: str, prefix: str) -> str:
    """Describe a problem of pydantic's at a key, with the way out."""
    if problem["type"] == "extra_forbidden":
        return f"unknown key '{key}': {moved.way_out(key) or _nearest(kind, key, prefix)}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key else message
    if problem["type"] == "missing":
        return f"key '{key}' is missing; add it, or use a recipe that has it ({kind.documented_in})"
    given = "null" if problem["input"] is None else repr(problem["input"])
    return f"{key or 'content'} = {excerpt(given, 200)}: {message} ({kind.documented_in})"


def _nearest(kind: type[Section], key: str, prefix: str) -> str:
    """Name the keys that were probably meant, alike or of the same name elsewhere, and the page that lists all."""
    keys = dotted_keys(kind)
    section, dot, name = key.removeprefix(prefix).rpartition(".")
    name = COMMON_NAMES.get(name, name)
    near = get_close_matches(section + dot + name, keys, 3, 0.7) or [k for k in keys if k.rpartition(".")[2] == name]
    named = f"nearest: {', '.join(prefix + key for key in near[:3])}; " if near else ""
    return f"{named}{kind.documented_in} lists all"


def problems_of_source(
    section: Any, needs: Mapping[str, Sequence[str]], only: Mapping[str, Sequence[str]]
) -> Iterator[str]:
    """Yield the problems of a section whose `source` lacks a key that it needs, or has one that only others read.

    needs: source -> keys; only: key -> sources that read it. A hub's revision is a commit.
    """
    source = section.source
    for key in needs.get(source, ()):
        if not getattr(section, key):
            yield f"source: {source} needs {key}"
    if source == "hub" and not is_commit(section.revision):
        yield "source: hub needs revision: the 40-digit commit, so that nothing can change"
    for key, sources in only.items():
        if getattr(section, key) and source not in sources:
            yield f"{key} is set, but source is {source}: remove it, or set source: {' or '.join(sources)}"


def is_commit(text: str | None) -> bool:
    """Return whether `text` is a commit, 40 hexadecimal digits, and not a branch or tag, which can move."""
    return re.fullmatch(r"[0-9a-f]{40}", text or "") is not None


def dotted_keys(kind: type[Section], prefix: str = "") -> list[str]:
    """Return every key of a section and of the sections in it, as dotted names."""
    keys = []
    for name, field in kind.model_fields.items():
        keys.append(prefix + name)
        for inner in section_types(field.annotation)[:1]:
            keys += dotted_keys(inner, f"{prefix}{name}.")
    return keys


def section_types(annotation: object) -> list[type[Section]]:
    """Return the sections that a type annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in getattr(annotation, "__args__", ()) for section in section_types(part)]


def parse_overrides(items: Iterable[str]) -> Changes:
    """Convert ["ppo.kl_coef=0.1"] to {"ppo.kl_coef": 0.1}. Raises UserError.

    Values are YAML, so lists and null work as in the file. Of a key given twice the last counts.
    """
    overrides: Changes = {}
    for item in items:
        key, sign, value = item.partition("=")
        key = key.strip()
        if not sign or len(key) > MAX_KEY or not re.fullmatch(r"\w+(\.\w+)*", key):
            raise UserError(f"--set {item}: write it as key=value, for example ppo.kl_coef=0.1")
        if value.endswith(",") or re.search(r",\s*\w+(\.\w+)+=", value):
            raise UserError(f"--set {item}: several changes are separated by spaces, without commas")
        overrides = joined(overrides, {key: parse(value, f"--set {item}", lines=False)})
    return overrides


def as_yaml(value: object) -> str:
    """Return a value as it is written after `--set KEY=`; lists have no spaces, which separate the changes in SET."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w./-]*", value) and parse(value, "") == value:
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))  # what YAML can hold reads back from JSON


def joined(overrides: Mapping[str, JsonValue], later: Mapping[str, JsonValue]) -> Changes:
    """Return both, in the order in which they are applied: the later ones last, also those of a key given before."""
    return {key: value for key, value in overrides.items() if key not in later} | dict(later)


def with_overrides(content: JsonObject, overrides: Mapping[str, JsonValue]) -> JsonObject:
    """Return a copy of parsed YAML in which each dotted key of `overrides` has its value, the later one of two."""
    changed: JsonObject = deepcopy(content)
    for key, value in overrides.items():
        *path, last = key.split(".")
        node = changed
        for section in path:
            inner = node.get(section)
            if not isinstance(inner, dict):
                inner = node[section] = {}  # validation reports a section that does not exist
            node = inner
        node[last] = deepcopy(value)  # a later key may lie in it
    return changed
