"""The only reader of YAML: PyYAML's safe loader, with decimal numbers, and without repeated keys and aliases.

1e-4 and -.5 are numbers, which YAML 1.1 takes for text; 1:30, 010 and a date are text, which a key for numbers refuses.
"""

import copy
import functools
import json
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlhf.errors import UserError, no_such
from rlhf.files import JsonValue

_TAG = "tag:yaml.org,2002:"


class Yaml(yaml.SafeLoader):
    """The loader."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node. Raises ConstructorError for an alias: a change of one place would change both."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]  # its stubs do not annotate it
            raise _problem("an alias (*name) is not used here; write its value", event)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """Return a mapping. Raises ConstructorError for a key that is given twice or is not text."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != _TAG + "str":
                raise _problem("a key is not text; put it in quotes", key)
            if key.value in seen:
                raise _problem(f"key '{key.value}' is given twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _problem(text: str, node: Any) -> yaml.constructor.ConstructorError:
    """Return an error at the place of a node or event."""
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


KINDS = ("seq", "map", "str", "bool", "int", "float", "null")  # other tags are refused: their values are not JSON's
Yaml.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix(_TAG) in KINDS
}
Yaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in patterns if tag.removeprefix(_TAG) not in ("timestamp", "int", "float")]
    for first, patterns in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")
_EXPONENT = r"(?:[eE][-+]?[0-9]+)"
_FLOAT = re.compile(
    rf"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*{_EXPONENT}?|{_EXPONENT})|\.[0-9]+{_EXPONENT}?|\.(?:inf|Inf|INF))$"
    r"|\.(?:nan|NaN|NAN)$"
)
Yaml.add_implicit_resolver(_TAG + "int", _INTEGER, list("-+0123456789"))
Yaml.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))


def parse(text: str, source: str, lines: bool = True) -> JsonValue:
    """Return the value of YAML text. Raises UserError that begins with `source` and, with `lines`, the line."""
    try:
        value: JsonValue = yaml.load(text, Yaml)
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is a ValueError
        return value
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: a number of thousands of digits
        mark = getattr(error, "problem_mark", None)
        place = f"{source}:{mark.line + 1}" if lines and mark else source
        problem = getattr(error, "problem", None) or f"not valid YAML ({' '.join(str(error).split())})"
    raise UserError(f"{place}: {problem}")


# Planning reads the same recipe dozens of times, and `rlhf recipes` all of them again and again: more than there are.
_parse_cached = functools.lru_cache(maxsize=128)(parse)


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file. Raises UserError."""
    try:
        content = copy.deepcopy(_parse_cached(file.read_text(encoding="utf-8-sig"), str(file)))
    except FileNotFoundError:
        raise UserError(no_such("file", file, "`rlhf recipes` lists the recipes")) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: holds no keys with values; restore the file, or copy another recipe's")
    return content


def line_of(file: Path, path: Sequence[str]) -> int | None:
    """Return the line of a YAML file with the key, or the place in a list, at `path`; None if there is none."""
    node = yaml.compose(file.read_text(encoding="utf-8-sig"), Yaml) if file.is_file() else None
    line = None
    for part in path:
        if isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
        elif isinstance(node, yaml.MappingNode) and (found := [pair for pair in node.value if pair[0].value == part]):
            line, node = found[0][0].start_mark.line + 1, found[0][1]
        else:
            return None
    return line
