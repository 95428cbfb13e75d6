"""Parsed YAML as frozen, strictly typed objects; every mistake is one line: file, key and the way out."""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from rlhf.errors import UserError
from rlhf.recipe.plain_yaml import parse
from rlhf.recipe.plain_yaml import read_yaml as read_yaml
from rlhf.terminal import shortened


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


SectionT = TypeVar("SectionT", bound=Section)
MAX_KEY = 200  # characters of a dotted key
AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)  # YAML has only lists


def validate(kind: type[SectionT], content: Any, file: Path, overrides: Mapping[str, Any], at: str = "") -> SectionT:
    """`content` as a section; `overrides` are named where they are to blame, `at` stands before every key.

    Raises UserError.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise UserError(_one_line(kind, error, file, overrides, at)) from None


def _one_line(kind: type[Section], error: ValidationError, file: Path, overrides: Mapping[str, Any], at: str) -> str:
    """The first problem, an unknown key before any other: a misspelt key is also reported as missing."""
    problems = sorted(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
    problem = problems[0]
    location = _location(problem)
    key = at + ".".join(location)
    touched = any(f"{o}.".startswith(f"{key}.") or f"{key}.".startswith(f"{o}.") for o in overrides)
    where = f"{file} with --set" if overrides and (touched or not key) else str(file)
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key '{key}'; {_nearest(kind, location, at)}"
    others = list(dict.fromkeys(at + ".".join(_location(other)) for other in problems[1:] if other["loc"]))
    others = [other for other in others if other != key]
    rest = f" and {len(others) - 3} more" if len(others) > 3 else ""
    more = f" (also wrong: {', '.join(others[:3])}{rest})" if others else ""
    if problem["type"] == "missing":
        return f"{where}: key '{key}' is missing{more}"
    message = str(problem["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if problem["type"] == "value_error":
        return f"{where}: {key + ': ' if key else ''}{message}"
    if problem["type"] == "model_type":
        message = f"a section is written {'.'.join(location)}.KEY=VALUE, or with its keys below it"
    if problem["type"] == "tuple_type":
        message = f"a list is written [{problem['input']}]"
    return f"{where}: {key} = {shortened(repr(problem['input']), 200)}: {message}{more}"


def _location(problem: Mapping[str, Any]) -> list[str]:
    """Where a problem is, as the parts of a dotted key, without the names of types that pydantic puts between."""
    *above, last = problem["loc"] or ("",)
    location = [str(part) for part in above if re.fullmatch(r"\w+", str(part))]
    if problem["type"] == "extra_forbidden" or re.fullmatch(r"\w+", str(last)):
        location.append(str(last))
    return location


def _nearest(kind: type[Section], location: list[str], at: str) -> str:
    """The key that was probably meant: a sibling spelt alike, or the keys of that name in other sections."""
    *section, name = location
    siblings = difflib.get_close_matches(name, _keys_at(kind, section), n=1, cutoff=0.7)
    if siblings:
        return f"the nearest key is '{at}{'.'.join([*section, *siblings])}'"
    known = _dotted_keys(kind)
    same = [key for key in known if key.rpartition(".")[2] == name]
    alike = same or difflib.get_close_matches(".".join(location), known, n=1, cutoff=0.8)
    if not alike:
        return f"the keys there are {', '.join(_keys_at(kind, section))}"
    named = ", ".join(f"'{at}{key}'" for key in alike)
    return f"the nearest key is {named}" if len(alike) == 1 else f"there are {named}"


def _dotted_keys(kind: type[Section], above: str = "") -> list[str]:
    """Every key of a section and of those inside it, with the names of its sections."""
    found = []
    for name, field in kind.model_fields.items():
        found.append(above + name)
        for inner in _section_types(field.annotation)[:1]:
            found += _dotted_keys(inner, f"{above}{name}.")
    return found


def _keys_at(kind: type[Section], path: list[str]) -> list[str]:
    """Valid keys of the section that `path` leads to."""
    for part in path:
        field = kind.model_fields.get(part)
        inner = _section_types(field.annotation) if field else []
        if not inner:
            return list(kind.model_fields)
        kind = inner[0]
    return list(kind.model_fields)


def _section_types(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in _section_types(part)]


def parse_overrides(items: Iterable[str]) -> dict[str, Any]:
    """["ppo.kl_coef=0.1"] -> {"ppo.kl_coef": 0.1}; values are YAML, so lists and null work as in the file.

    Raises UserError.
    """
    found: dict[str, Any] = {}
    for item in items:
        key, sign, value = item.partition("=")
        key = key.strip()
        if not sign or len(key) > MAX_KEY or not re.fullmatch(r"\w+(\.\w+)*", key):
            raise UserError(f"--set {item}: write it as key=value, for example ppo.kl_coef=0.1")
        if key in found:
            raise UserError(f"--set {item}: {key} is given twice; leave one of them out")
        found[key] = parse(value, f"--set {item}", lines=False)
    return found


def as_yaml(value: Any) -> str:
    """A value as it is written after `--set KEY=`."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z/][\w./-]*", value) and parse(value, "") == value:
        return value
    return json.dumps(value, ensure_ascii=False)  # every JSON value is YAML


def with_overrides(content: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of parsed YAML in which each dotted key of `overrides` has its value."""
    changed: dict[str, Any] = json.loads(json.dumps(content))
    for key, value in overrides.items():
        *path, last = key.split(".")
        node = changed
        for part in path:
            if not isinstance(node.get(part), dict):
                node[part] = {}  # the check names a section that does not exist
            node = node[part]
        node[last] = value
    return changed
