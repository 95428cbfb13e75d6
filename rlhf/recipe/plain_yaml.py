"""The only reader of YAML. It accepts text, numbers, lists and keys, within stated bounds.

It reads every YAML file of the project (recipes, published figures, accelerate's settings) and every value after
`--set`. A mistake is a `UserError` of one line that names the file, its line and the way out. Aliases and merge keys
are allowed; the bounds apply to what they expand to, so that a small file cannot fill the memory.

PyYAML parses. Its own safe loader would not do: it takes the last of two equal keys without a word, reads 1:30 as 90,
010 as 8 and 1e-4 as text, and bounds nothing.
"""

import copy
import functools
import re
import stat
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlhf.errors import UserError, no_such
from rlhf.files import JsonValue

MAX_BYTES = 2**18  # of a file; the largest one here has 14,208
MAX_NODES = 20_000  # keys, values and collections, after aliases
MAX_CHARACTERS = 2**20  # of all texts, after aliases
MAX_DEPTH = 32  # collections inside of each other
MAX_DIGITS = 40  # characters of a number


class _Size(NamedTuple):
    """The number of nodes and characters, and the depth, that a node expands to."""

    nodes: int = 0
    characters: int = 0
    depth: int = 0


class Yaml(yaml.SafeLoader):
    """A loader of YAML 1.1 with three changes.

    A number is written in decimals, 1e-4 and -.5 too, and 1:30, 010 and a date are text; keys are text and may not
    repeat; sizes are bounded.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self._open: list[tuple[str | None, _Size]] = []  # the open collections with their anchors
        self._named: dict[str, _Size] = {}  # the size that each anchor expands to

    def get_event(self) -> yaml.Event | None:
        """Return the next event. Raises ConstructorError beyond the bounds, before anything is composed."""
        event: yaml.Event | None = super().get_event()  # type: ignore[no-untyped-call]  # its stubs do not annotate it
        if (tag := getattr(event, "tag", None)) is not None:
            raise _problem(f"the tag {tag.replace(_TAG, '!!')} is not used here; leave it out", event)
        if isinstance(event, yaml.CollectionStartEvent):
            self._open.append((event.anchor, _Size(nodes=1)))
            self._add(_Size(), event)
        elif isinstance(event, yaml.ScalarEvent):
            size = _Size(1, len(event.value))
            if event.anchor:
                self._named[event.anchor] = size
            self._add(size, event)
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor in (anchor for anchor, _ in self._open):
                raise _problem(f"*{event.anchor} stands inside of what it names", event)
            # the composer refuses an unknown anchor
            self._add(self._named.get(str(event.anchor), _Size()), event)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, size = self._open.pop()
            size = size._replace(depth=size.depth + 1)
            if anchor:
                self._named[anchor] = size
            if self._open:
                self._add(size, event)
        return event

    def _add(self, size: _Size, event: yaml.Event) -> None:
        """Add a node's size to the collection around it. Raises ConstructorError beyond the bounds."""
        open_nodes = sum(parent.nodes for _, parent in self._open)
        if open_nodes + size.nodes > MAX_NODES:
            raise _problem(f"more than {MAX_NODES:,} values; split the file", event)
        if len(self._open) + size.depth > MAX_DEPTH:
            raise _problem(f"more than {MAX_DEPTH} levels of lists and keys inside of each other", event)
        if sum(parent.characters for _, parent in self._open) + size.characters > MAX_CHARACTERS:
            raise _problem(f"more than {MAX_CHARACTERS:,} characters of text; shorten it", event)
        if self._open:
            anchor, parent = self._open[-1]
            nodes, characters = parent.nodes + size.nodes, parent.characters + size.characters
            self._open[-1] = anchor, _Size(nodes, characters, max(parent.depth, size.depth))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        """Return a mapping node as a dictionary. Raises ConstructorError if a key repeats or is not text."""
        keys: set[str] = set()
        for key_node, _ in node.value:
            if key_node.tag not in (_TAG + "str", _TAG + "merge"):
                label = f"key {key_node.value}" if isinstance(key_node, yaml.ScalarNode) else "a key"
                raise _problem(f"{label} is not text; a key is a name, in quotes where it looks like a value", key_node)
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                raise _problem(f"key '{key}' is given twice", key_node)
            keys.add(key)
        return super().construct_mapping(node, deep)


_TAG = "tag:yaml.org,2002:"


def _problem(text: str, node: Any) -> yaml.constructor.ConstructorError:
    """Return an error with the message `text` at the place of a node or event."""
    return yaml.constructor.ConstructorError(None, None, text, node.start_mark)


def _text(loader: Yaml, node: yaml.ScalarNode) -> str:
    """Return the text of a scalar. Raises ConstructorError for a control character or half of a surrogate pair."""
    value = loader.construct_scalar(node)
    for character in value:
        if character not in "\n\t" and (character < " " or "\x7f" <= character <= "\x9f" or _is_surrogate(character)):
            raise _problem(f"a text holds U+{ord(character):04X}, which is no character of a text; leave it out", node)
    return value


def _is_surrogate(character: str) -> bool:
    """Return whether a character is half of a surrogate pair."""
    return "\ud800" <= character <= "\udfff"


def _number(kind: str) -> Callable[[Yaml, yaml.ScalarNode], float]:
    """Return a constructor of `kind` (int or float) that refuses long numbers."""
    construct: Callable[[Yaml, yaml.ScalarNode], float] = yaml.SafeLoader.yaml_constructors[_TAG + kind]

    def bounded(loader: Yaml, node: yaml.ScalarNode) -> float:
        if len(node.value) > MAX_DIGITS:
            raise _problem(f"a number of {len(node.value):,} characters; write it with {MAX_DIGITS} at most", node)
        return construct(loader, node)

    return bounded


Yaml.yaml_constructors = {
    **{_TAG + kind: yaml.SafeLoader.yaml_constructors[_TAG + kind] for kind in ("seq", "map", "bool", "null")},
    **{_TAG + kind: _number(kind) for kind in ("int", "float")},
    **{_TAG + kind: _text for kind in ("str", "merge", "value")},
}
# A number is decimal; anything else, such as 1:30, 010 or a date, is text, which a key for numbers refuses.
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
        loader = Yaml(text)
        try:
            value: JsonValue = loader.get_single_data()
            return value
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        line, problem = error.problem_mark.line + 1 if error.problem_mark else 1, str(error.problem)
        if not isinstance(error, yaml.constructor.ConstructorError):
            problem = f"not valid YAML ({problem})"
    except yaml.reader.ReaderError as error:  # a control character or half of a pair
        line, problem = text[: error.position].count("\n") + 1, f"the character U+{error.character:04X} is not text"
    raise UserError(f"{source}:{line}: {problem}" if lines else f"{source}: {problem}")


# Planning reads the same recipe dozens of times, and `rlhf recipes` all of them again and again: more than there are.
_parse_cached = functools.lru_cache(maxsize=128)(parse)


def read_yaml(file: Path) -> dict[str, Any]:
    """Return the keys and values of a YAML file. Raises UserError."""
    try:
        if not stat.S_ISREG(file.stat().st_mode) and not file.is_dir():
            raise UserError(f"{file}: a pipe or a device, which may never end; write it to a file first")
        with file.open("rb") as handle:
            data = handle.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise UserError(f"{file}: more than {MAX_BYTES >> 10} KiB; no recipe needs that: is it the right file?")
        content = copy.deepcopy(_parse_cached(data.decode("utf-8").removeprefix("\ufeff"), str(file)))
    except FileNotFoundError:
        raise UserError(no_such("file", file, "`rlhf recipes` lists the recipes")) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: not UTF-8 at byte {error.start}; save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror})") from None
    if not isinstance(content, dict):
        held = "a list" if isinstance(content, list) else "nothing" if content is None else "a single value"
        raise UserError(f"{file}: holds {held} instead of keys with values; restore the file, or copy another recipe's")
    return content


def line_of(file: Path, path: Sequence[str]) -> int | None:
    """Return the line of a YAML file with the key, or the place in a list, at `path`; None if there is none."""
    if not file.is_file():
        return None
    loader = Yaml(file.read_text(encoding="utf-8"))
    node: yaml.Node | None = loader.get_single_node()
    loader.dispose()
    line = None
    for part in path:
        if isinstance(node, yaml.MappingNode):
            key, node = next(((k, v) for k, v in node.value if k.value == part), (None, None))
        elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            key = node = node.value[int(part)]
        else:
            return None
        if key is None:
            return None
        line = key.start_mark.line + 1
    return line
