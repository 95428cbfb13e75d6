"""Messages about a finished stage whose settings are not those that are asked for."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlhf.recipe import as_yaml
from rlhf.terminal import shortened

MOST = 3  # keys in a message
LONGEST = 100  # characters of a value


def in_words(keys: Sequence[str], made: Mapping[str, object], asked: Mapping[str, object]) -> str:
    """Return the differing keys with both values: `ppo.kl_coef 0.1 (asked for: 0.11)`.

    `made` and `asked` are nested settings, as `rlhf.recipe.deciding_settings` returns them. A section that only one of
    them has comes last, without its values.
    """
    ordered = sorted(keys, key=lambda key: _is_section(made, key) or _is_section(asked, key))
    differing = [_difference(key, made, asked) for key in ordered[:MOST]]
    more = f" and {len(keys) - MOST} more keys" if len(keys) > MOST else ""
    return ", ".join(differing) + more


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
