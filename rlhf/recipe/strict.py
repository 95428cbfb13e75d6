"""Parsed YAML as frozen, strictly typed objects. Every mistake becomes one line: file, key and the way out."""

import json
import re
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from rlhf.errors import UserError
from rlhf.files import JsonObject, JsonValue
from rlhf.recipe import moved
from rlhf.recipe.plain_yaml import line_of, parse
from rlhf.terminal import shortened


class Section(BaseModel):
    """A section of a recipe: frozen, strictly typed, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())
    documented_in: ClassVar[str] = "docs/keys.yaml"  # the page that explains its keys


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

    The message names `--set` where one of `overrides` is at fault, and puts `prefix` before every key.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        problem = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    parts = [str(p) for p in problem["loc"] if re.fullmatch(r"\w+", str(p)) and p not in PLAIN_TYPES]
    key = (prefix + ".".join(parts)).rstrip(".")  # of the whole object: the prefix alone
    by_option = any(f"{o}.".startswith(f"{key}.") or f"{key}.".startswith(f"{o}.") for o in overrides)
    if problem["type"] == "missing" and len(parts) > 1:  # in a section that is in the file, or that --set began
        by_option = line_of(file, key.split(".")[:-1]) is None
    line = None if by_option or not key else line_of(file, key.split("."))
    place = f"{file} with --set" if by_option or (overrides and not key) else f"{file}:{line}" if line else str(file)
    raise UserError(f"{place}: {_in_words(kind, problem, key, parts, prefix)}")


def _in_words(kind: type[Section], problem: Mapping[str, Any], key: str, parts: list[str], prefix: str) -> str:
    """Describe a problem of pydantic's at a key, with the way out."""
    if problem["type"] == "extra_forbidden":
        way_out = moved.in_words(key) if moved.is_moved(key) else _nearest(kind, parts, prefix)
        return f"unknown key '{key}': {way_out}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if problem["type"] == "value_error":
        return f"{key}: {message}" if key else message
    if problem["type"] == "missing":
        return f"key '{key}' is missing; add it, or use a recipe that has it ({kind.documented_in})"
    given = "null" if problem["input"] is None else repr(problem["input"])
    return f"{key or 'content'} = {shortened(given, 200)}: {message} ({kind.documented_in})"


def _nearest(kind: type[Section], parts: list[str], prefix: str) -> str:
    """Name the keys that were probably meant, or the page that lists all: alike in the section, else of that name."""
    keys = dotted_keys(kind)
    *section, name = parts or [""]
    name = COMMON_NAMES.get(name, name.lower())
    names = [key.split(".")[-1] for key in keys if key.split(".")[:-1] == section]
    alike = get_close_matches(name, names, cutoff=0.7) or [other for other in names if other.startswith(name)]
    near = [".".join([*section, other]) for other in alike]
    near = near or [key for key in keys if key.split(".")[-1] == name] or get_close_matches(".".join(parts), keys)
    named = f"nearest: {', '.join(prefix + key for key in near[:3])}; " if near else ""
    return f"{named}{kind.documented_in} lists all"


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

    Values are YAML, so lists and null work as in the file.
    """
    overrides: Changes = {}
    for item in items:
        key, sign, value = item.partition("=")
        key = key.strip()
        if not sign or len(key) > MAX_KEY or not re.fullmatch(r"\w+(\.\w+)*", key):
            raise UserError(f"--set {item}: write it as key=value, for example ppo.kl_coef=0.1")
        if key in overrides:
            raise UserError(f"--set {item}: {key} is given twice; leave one of them out")
        for other in overrides:
            if key.startswith(f"{other}.") or other.startswith(f"{key}."):
                raise UserError(f"--set {item}: {other} is given too, and one is part of the other; leave one out")
        if value.endswith(",") or re.search(r",\s*\w+(\.\w+)+=", value):
            raise UserError(f"--set {item}: several changes are separated by spaces, without commas")
        overrides[key] = parse(value, f"--set {item}", lines=False)
    return overrides


def as_yaml(value: object) -> str:
    """Return a value as it is written after `--set KEY=`; lists have no spaces, which separate the changes in SET."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w./-]*", value) and parse(value, "") == value:
        return value
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))  # what YAML can hold reads back from JSON


def without_overlap(overrides: Mapping[str, JsonValue]) -> Changes:
    """Return overrides of the same effect, none of which is part of another.

    `--set` refuses two that overlap, because their order would decide; here the later one wins. Code that adds to a
    user's overrides needs this: it may replace a section in which the user changed a key.
    """
    apart: Changes = {}
    for key, value in overrides.items():
        outer = next((other for other in apart if key.startswith(f"{other}.")), None)
        if outer is None:
            apart = {other: old for other, old in apart.items() if not other.startswith(f"{key}.")} | {key: value}
        else:
            section = apart[outer]
            inner_key = key.removeprefix(f"{outer}.")
            apart[outer] = with_overrides(section if isinstance(section, dict) else {}, {inner_key: value})
    return apart


def with_overrides(content: JsonObject, overrides: Mapping[str, JsonValue]) -> JsonObject:
    """Return a copy of parsed YAML in which each dotted key of `overrides` has its value."""
    copy: JsonObject = json.loads(json.dumps(content))
    for key, value in overrides.items():
        *path, last = key.split(".")
        node = copy
        for section in path:
            inner = node.get(section)
            if not isinstance(inner, dict):
                inner = node[section] = {}  # validation reports a section that does not exist
            node = inner
        node[last] = value
    return copy
