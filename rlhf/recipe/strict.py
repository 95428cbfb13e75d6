"""Parsed YAML as frozen, strictly typed objects. Every mistake becomes one line: file, key and the way out."""

import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from rlhf.errors import UserError
from rlhf.files import JsonObject, JsonValue
from rlhf.recipe import moved
from rlhf.recipe.plain_yaml import line_of, parse
from rlhf.terminal import shortened


class Section(BaseModel):
    """A section of a recipe: frozen, strictly typed, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())
    documented_in: ClassVar[str] = "docs/recipes.md"  # the page that explains its keys


Problem = Mapping[str, Any]  # an error that pydantic lists, with its input of any type
Changes = dict[str, JsonValue]  # of a recipe: dotted key -> new value
SectionT = TypeVar("SectionT", bound=Section)
# Names in use elsewhere, and the keys that they mean.
COMMON_NAMES = {
    "lr": ("learning_rate",),
    "epochs": ("num_train_epochs", "num_ppo_epochs"),
    "batch_size": ("per_device_train_batch_size",),
}
# Types that a key may take beside others, as pydantic names them after the key, and in words.
PLAIN_TYPES = {"bool": "true or false", "int": "a number", "float": "a number", "str": "text"}
MAX_KEY = 200  # characters of a dotted key
AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)  # YAML has only lists


def validate(
    kind: type[SectionT], content: object, file: Path, overrides: Collection[str], prefix: str = ""
) -> SectionT:
    """Return `content` as a section. Raises UserError.

    The message names `--set` where one of `overrides` is at fault, and puts `prefix` before every key.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        raise UserError(_one_line(kind, error, file, overrides, prefix)) from None


def _one_line(kind: type[Section], error: ValidationError, file: Path, overrides: Collection[str], prefix: str) -> str:
    """Describe the first problem in one line.

    An unknown key comes before any other problem: a misspelt key is also reported as missing. What is wrong with a
    number comes before the words that its key takes too.
    """
    problems = sorted(
        error.errors(),
        key=lambda e: (e["type"] != "extra_forbidden", e["type"] == "literal_error" and type(e["input"]) is int),
    )
    problem = problems[0]
    location = _location(problem)
    key = (prefix + ".".join(location)).rstrip(".")  # of the whole object: the prefix alone
    overridden = any(f"{o}.".startswith(f"{key}.") or f"{key}.".startswith(f"{o}.") for o in overrides)
    line = None if overridden or not key else line_of(file, key.split("."))
    place = str(file) if line is None else f"{file}:{line}"
    source = f"{file} with --set" if overrides and (overridden or not key) else place
    if problem["type"] == "extra_forbidden":
        if moved.is_moved(key):
            return f"{source}: key '{key}': {moved.in_words(key)}"
        others = [prefix + ".".join(_location(p)) for p in problems[1:] if p["type"] == "extra_forbidden"]
        also_unknown = f" (also unknown: {', '.join(others[:3])})" if others else ""
        return f"{source}: unknown key '{key}'{also_unknown}; {_nearest(kind, location, prefix)}"
    if absent := next(filter(None, (_absent_section(kind, p, file, overrides) for p in problems)), None):
        return absent
    other_keys = list(dict.fromkeys(prefix + ".".join(_location(other)) for other in problems[1:] if other["loc"]))
    other_keys = [o for o in other_keys if not f"{o}.".startswith(f"{key}.") and not f"{key}.".startswith(f"{o}.")]
    more = f" and {len(other_keys) - 3} more" if len(other_keys) > 3 else ""
    also_wrong = f" (also wrong: {', '.join(other_keys[:3])}{more})" if other_keys else ""
    if problem["type"] == "missing":
        page = _section_at(kind, location[:-1]).documented_in
        return f"{source}: key '{key}' is missing{also_wrong}; add it ({page} explains it)"
    message = str(problem["msg"]).removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if problem["type"] == "value_error":
        return f"{source}: {key + ': ' if key else ''}{message}"
    if problem["type"] == "model_type":
        message = f"a section is written {'.'.join([*location, 'KEY'])}=VALUE, or with its keys below it"
    if problem["type"] in ("tuple_type", "literal_error"):
        message = _message_of_several_types(kind, problems, location) or message
    if problem["loc"][-1:] and problem["loc"][-1] in PLAIN_TYPES:
        types = [PLAIN_TYPES.get(str(p["loc"][-1]), "") for p in problems if p["loc"] and _location(p) == location]
        message = f"input should be {', or '.join(dict.fromkeys(filter(None, types)))}"
    given = "null" if problem["input"] is None else repr(problem["input"])
    return f"{source}: {key}{key and ' = '}{shortened(given, 200)}: {message}{_left_out(kind, location)}{also_wrong}"


def _left_out(kind: type[Section], location: list[str]) -> str:
    """Return that a key without a default may be left out, and what there is then if its `description` says so.

    A value that switches something off elsewhere, such as 0, 1 or -1, is often none that the key takes.
    """
    if ".".join(location) not in dotted_keys(kind):  # a value in a mapping, or the whole object
        return ""
    field = _section_at(kind, location[:-1]).model_fields[location[-1]]
    if field.is_required() or field.default is not None or section_types(field.annotation):
        return ""
    return f"; leave the key out for {field.description}" if field.description else "; the key may be left out"


def _message_of_several_types(kind: type[Section], problems: Sequence[Problem], location: list[str]) -> str | None:
    """Return the message about a value at a key that takes words and numbers, or a list; None at any other key.

    The words come first where a key takes both.
    """
    field = _section_at(kind, location[:-1]).model_fields.get(location[-1])
    tuples = _tuple_types(field.annotation) if field else []
    problem = next((p for p in problems if p["type"] == "literal_error" and _location(p) == location), None)
    if not tuples and problem and any(p["type"] == "int_type" and _location(p) == location for p in problems):
        return f"input should be {problem['ctx']['expected']}, or a whole number"
    if not tuples:
        return None
    if problem is None:
        return f"a list is written [{problems[0]['input']}]"
    what = "a list" if Ellipsis in tuples[0] else "a list of two numbers"  # no key takes another number of values
    return f"input should be {problem['ctx']['expected']}, or {what} ({kind.documented_in} explains it)"


def _location(problem: Problem) -> list[str]:
    """Return the place of a problem as the parts of a dotted key, without the types' names that pydantic adds."""
    *above, last = problem["loc"] or ("",)
    location = [str(part) for part in above if re.fullmatch(r"\w+", str(part))]
    if problem["type"] == "extra_forbidden" or (re.fullmatch(r"\w+", str(last)) and last not in PLAIN_TYPES):
        location.append(str(last))
    return location


def _nearest(kind: type[Section], location: list[str], prefix: str) -> str:
    """Name the keys that were probably meant, and the page that lists all.

    They are siblings that are spelt alike or begin alike; else keys of other sections with the same or a similar name.
    """
    *section, name = location
    siblings, everywhere = _keys_at(kind, section), dotted_keys(kind)
    alike = [key for key in (name.lower(), *COMMON_NAMES.get(name, ())) if key in siblings]
    alike = alike or difflib.get_close_matches(name, siblings, n=3, cutoff=0.7)
    alike = alike or difflib.get_close_matches(name, siblings, n=1, cutoff=0.6)  # `pop` for `ppo`
    begun = difflib.get_close_matches(name, [key for key in siblings if key.startswith(name)], n=3, cutoff=0)
    elsewhere = [key for key in everywhere if key.rpartition(".")[2] == name]
    candidates = (
        [".".join([*section, key]) for key in alike or begun]
        or elsewhere
        or difflib.get_close_matches(".".join(location), {*everywhere} - {".".join(section)}, n=1, cutoff=0.8)
    )
    page = _section_at(kind, section).documented_in
    if not candidates:
        return f"{page} lists the keys"
    return f"nearest: {', '.join(prefix + key for key in candidates)} ({page} lists all)"


def dotted_keys(kind: type[Section], prefix: str = "") -> list[str]:
    """Return every key of a section and of the sections in it, as dotted names."""
    keys = []
    for name, field in kind.model_fields.items():
        keys.append(prefix + name)
        for inner in section_types(field.annotation)[:1]:
            keys += dotted_keys(inner, f"{prefix}{name}.")
    return keys


def _keys_at(kind: type[Section], path: list[str]) -> list[str]:
    """Return the keys of the section at `path`."""
    return list(_section_at(kind, path).model_fields)


def _section_at(kind: type[Section], path: Sequence[str]) -> type[Section]:
    """Return the type of the section at `path`, or of the last section on the way."""
    for key in path:
        field = kind.model_fields.get(key)
        inner = section_types(field.annotation) if field else []
        if not inner:
            return kind
        kind = inner[0]
    return kind


def _absent_section(kind: type[Section], problem: Problem, file: Path, overrides: Collection[str]) -> str | None:
    """Return the message where a key is missing in a section that only overrides have made; otherwise None.

    Such a section may be left out of a recipe.
    """
    path = _location(problem)[:-1]
    if problem["type"] != "missing" or not path:
        return None
    field = _section_at(kind, path[:-1]).model_fields.get(path[-1])
    if field is None or field.is_required():
        return None
    section = ".".join(path)
    keys = [f"{section}.{key}." for key in problem["input"]]
    overriding = [next((o for o in overrides if f"{o}.".startswith(key)), "") for key in keys]
    if not overriding or not all(overriding):
        return None
    page = _section_at(kind, path).documented_in
    way_out = f"use a recipe that has one, or add it to this one with all its keys ({page})"
    return f"--set {overriding[0]}: {file.parent} has no section {section}; {way_out}"


def section_types(annotation: object) -> list[type[Section]]:
    """Return the sections that a type annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in getattr(annotation, "__args__", ()) for section in section_types(part)]


def _tuple_types(annotation: object) -> list[tuple[object, ...]]:
    """Return the types of the values of each tuple that a type annotation names."""
    if get_origin(annotation) is tuple:
        return [get_args(annotation)]
    return [values for part in getattr(annotation, "__args__", ()) for values in _tuple_types(part)]


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
