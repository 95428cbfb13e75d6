"""Rows of a data set for reading in a terminal: the prompt above, the two answers of a pair side by side."""

import difflib
import itertools
import random
import re
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rlhf.data.formats import Rows
from rlhf.data.quality.flaws import FLAWS
from rlhf.data.rows import Document, Example, PreferencePair, PromptOnly, Row

LONGEST = 4000  # characters of a text that are shown
DIFFERENT = "bold"


def choose(rows: Rows, count: int, *, seed: int | None, only: str | None = None) -> tuple[list[Row], int]:
    """Return `count` rows in the order of the files, and the number of rows to choose from.

    They are the first rows, or drawn at random with a `seed`. `only`: the name of a flaw (rlhf/data/quality/flaws.py)
    that each of them has.
    """
    candidates: list[Row] = [*rows.documents, *rows.examples, *rows.pairs, *rows.prompts]
    if only:
        flawed = {id(row) for row in FLAWS[only](candidates)}
        candidates = [row for row in candidates if id(row) in flawed]
    if seed is None or count >= len(candidates):
        return candidates[:count], len(candidates)
    places = random.Random(seed).sample(range(len(candidates)), count)
    return [candidates[place] for place in sorted(places)], len(candidates)


def render(row: Row) -> RenderableType:
    """Return a row for a rich console of any width."""
    parts: list[RenderableType] = [Rule(visible(row.source), align="left", style="dim")]
    if isinstance(row, Document):
        return Group(*parts, visible(row.text))
    parts.append(_beside((message.role, visible(message.content.strip())) for message in row.prompt))
    if isinstance(row, Example):
        return Group(*parts, _beside([("response", visible(row.response))]))
    if isinstance(row, PromptOnly):
        return Group(*parts)
    table = Table(expand=True)
    for side in ("chosen", "rejected"):
        table.add_column(side, ratio=1, overflow="fold")
    table.add_row(*_marked(row))
    return Group(*parts, table)


def visible(text: str) -> Text:
    """Return the text with control and invisible characters as escapes, so that none hides or reaches the terminal."""
    shown = Text(overflow="fold")
    for plain, characters in itertools.groupby(text[:LONGEST], _plain):
        run = "".join(characters)
        shown.append(run) if plain else shown.append(run.encode("unicode_escape").decode(), "reverse")
    return shown.append_text(_rest(text))


def _plain(character: str) -> bool:
    return character in "\n\t" or character.isprintable() or character == "\u200d"  # U+200D joins emoji


def _beside(rows: Iterable[tuple[str, Text]]) -> Table:
    """Return a table with each text beside its name."""
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim")
    table.add_column(ratio=1, overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    return table


def _marked(pair: PreferencePair) -> tuple[Text, Text]:
    """Return both answers; words that the other one does not have at that place are bold."""
    whole = pair.chosen, pair.rejected
    words = [re.findall(r"\S+\s*|\s+", text[:LONGEST]) for text in whole]
    shown = Text(overflow="fold"), Text(overflow="fold")
    for tag, *places in difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        for side, (start, end) in enumerate((places[:2], places[2:])):
            part = visible("".join(words[side][start:end]))
            if tag != "equal":
                part.stylize(DIFFERENT)
            shown[side].append_text(part)
    for text, full_text in zip(shown, whole, strict=True):
        text.append_text(_rest(full_text))
    return shown


def _rest(text: str) -> Text:
    hidden = len(text) - LONGEST
    return Text(f"… ({hidden:,} more characters)" if hidden > 0 else "", "dim")
