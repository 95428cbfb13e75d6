"""Messages about a finished stage whose settings are not those that are asked for."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.recipe import as_yaml
from rlhf.terminal import shortened

MOST = 3  # keys in a message
LONGEST = 100  # characters of a value
DATA = ("data.source", "data.files", "data.format")  # keys that --data sets


def in_words(keys: Sequence[str], made: Mapping[str, object], asked: Mapping[str, object]) -> str:
    """Return the differing keys with both values: `ppo.kl_coef 0.1 (asked for: 0.11)`.

    `made` and `asked` are nested settings, as `rlhf.recipe.deciding_settings` returns them. A section that only one of
    them has comes last, without its values.
    """
    ordered = sorted(keys, key=lambda key: _is_section(made, key) or _is_section(asked, key))
    differing = [_difference(key, made, asked) for key in ordered[:MOST]]
    more = f" and {len(keys) - MOST} more keys" if len(keys) > MOST else ""
    return ", ".join(differing) + more


def way_back(keys: Sequence[str], made: Mapping[str, object], path: Path) -> str:
    """Return the options with which a command asks for the settings that the stage in `path` was made with."""
    if len([key for key in keys if key not in DATA]) > MOST:
        return f"{path}/manifest.json has its command (argv)"
    words = []
    for key in (key for key in keys if key not in DATA):
        words += ["--seed", str(value(made, key))] if key == "seed" else ["--set", f"{key}={_typed(made, key)}"]
    if set(DATA) & {*keys}:
        own = value(made, "data.files") if value(made, "data.source") == "files" else None
        words += [word for file in own or () for word in ("--data", file)]
        if not own:
            return " ".join(filter(None, [shlex.join(words), "without --data"]))
    return shlex.join(words)


def _typed(made: Mapping[str, object], key: str) -> str:
    """Return the value of a key as a user types it. Of `vllm_url` settings keep only whether there is one."""
    if key.endswith(".vllm_url"):
        return "ADDRESS" if value(made, key) else "null"
    return as_yaml(value(made, key))


def value(settings: Mapping[str, object], key: str) -> Any:
    """Return the value of a dotted key; None where a section on the way is absent."""
    inner: object = settings
    for name in key.split("."):
        inner = inner.get(name) if isinstance(inner, Mapping) else None
    return inner


def _difference(key: str, made: Mapping[str, object], asked: Mapping[str, object]) -> str:
    if _is_section(made, key):
        return f"a section {key} (asked for: none)"
    if _is_section(asked, key):
        return f"no section {key} (asked for: one)"
    return f"{key} {_text(made, key)} (asked for: {_text(asked, key)})"


def _is_section(settings: Mapping[str, object], key: str) -> bool:
    return isinstance(value(settings, key), Mapping)


def _text(settings: Mapping[str, object], key: str) -> str:
    return shortened(as_yaml(value(settings, key)), LONGEST)
