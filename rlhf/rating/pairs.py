"""Pairs of two policies' answers to the same held-out prompts, as raters see them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.data.transcripts import parse_hh
from rlhf.errors import UserError
from rlhf.observe.console import harmless
from rlhf.recipe import POLICIES
from rlhf.run.finished import verified
from rlhf.run.reader import read_lines
from rlhf.run.records import SampleLine

LONGEST = 20_000  # characters of a text that is shown
SPEAKERS = {"system": "Instructions", "user": "Person", "assistant": "Assistant"}


class Pair(NamedTuple):
    """Two answers to the prompt of row `item`, as they are shown; `worth` holds what is known of both, by name."""

    item: int
    digest: str
    prompt: str
    a: str
    b: str
    worth: dict[str, tuple[float, float]]
    turns: Sequence[tuple[str, str]] = ()  # the prompt as a dialogue: who speaks, and what


class Comparison(NamedTuple):
    """The pairs of two policies whose answers differ, how many do not, and the file of their ratings."""

    a: str
    b: str
    pairs: list[Pair]
    equal: int
    file: Path


def compare(root: Path, a: str | None = None, b: str | None = None) -> Comparison:
    """Pair two policies' answers of the evaluation below `<out>/<recipe>/<version>`; sft and ppo, or dpo, unless named.

    Raises UserError without a finished evaluation, without such policies, and where all answers are equal.
    """
    if not (root / "evaluate" / "summary.json").is_file():
        raise UserError(f"{root / 'evaluate'}: no finished evaluation; first `rlhf run evaluate` (make: eval)")
    verified(root, "evaluate")
    rows = read_lines(root / "evaluate" / "samples.jsonl", SampleLine)
    if not rows:
        raise UserError(f"{root / 'evaluate' / 'samples.jsonl'}: no samples there")
    names = [name for name in rows[0] if all(_answered(row.get(name)) for row in rows)]
    a = a or "sft"
    policies = [name for name in POLICIES if name in names and name != a]
    if b is None and not policies:
        raise UserError(
            f"{root / 'evaluate'}: no trained policy to compare with {a}; it has answers of {', '.join(names)}"
        )
    b = b or policies[0]
    for name in (a, b):
        if name not in names:
            raise UserError(f"{root / 'evaluate'}: no answers of {name!r}; it has those of {', '.join(names)}")
    if a == b:
        raise UserError(f"{a} against itself: choose another --a or --b")
    # Where each policy gave several answers to a prompt, the first ones are rated: a prompt counts once.
    pairs = [_pair(index, row, a, b) for index, row in enumerate(rows) if row.get("sample", 0) == 0]
    differing = [pair for pair in pairs if pair.a != pair.b]
    if not differing:
        raise UserError(f"{a} and {b} gave equal answers to all {len(pairs)} prompts: there is nothing to rate")
    return Comparison(a, b, differing, len(pairs) - len(differing), root / "ab" / f"{a}-vs-{b}.jsonl")


def _answered(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("response"), str)


def _pair(index: int, row: Mapping[str, Any], a: str, b: str) -> Pair:
    said = (row["prompt"], row[a]["response"], row[b]["response"])
    known = [key for key in ("score", "true_reward") if all(row[name].get(key) is not None for name in (a, b))]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]
    prompt, first, second = map(_shown, said)
    worth = {key: (row[a][key], row[b][key]) for key in known}
    return Pair(index, digest, prompt, first, second, worth, turns(row))


def turns(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The prompt of a sample as a dialogue: who speaks, and what, safe to be shown.

    From `messages` where the row has them, otherwise from a transcript; any other text is one turn of a "Prompt".
    """
    messages = row.get("messages")
    if isinstance(messages, list) and all(isinstance(m, dict) for m in messages):
        said = [(SPEAKERS.get(str(m.get("role")), "Prompt"), str(m.get("content", ""))) for m in messages]
    else:
        text = str(row.get("prompt", ""))
        said = [(SPEAKERS[message.role], message.content) for message in parse_hh(text) if message.content.strip()]
        if not any(who == SPEAKERS["user"] for who, _ in said):
            said = [("Prompt", text)]
    return [(who, _shown(text)) for who, text in said]


def _shown(text: str) -> str:
    """Without what could take over a page or a terminal, cut where it is very long."""
    kept = harmless(text).strip()
    more = len(kept) - LONGEST
    return f"{kept[:LONGEST]}… ({more:,} more characters)" if more > 0 else kept
