"""Rows of a data set as a person reads them: the prompt above, the two answers of a pair side by side."""

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
    """The first `count` rows, or with a `seed` as many drawn at random, in the order of the files; and how many there
    were to choose from. `only`: the name of a flaw (rlhf/data/quality/flaws.py) that each of them has."""
    found: list[Row] = [*rows.documents, *rows.examples, *rows.pairs, *rows.prompts]
    if only:
        flawed = {id(row) for row in FLAWS[only](found)}
        found = [row for row in found if id(row) in flawed]
    if seed is None or count >= len(found):
        return found[:count], len(found)
    places = random.Random(seed).sample(range(len(found)), count)
    return [found[place] for place in sorted(places)], len(found)


def render(row: Row) -> RenderableType:
    """A row for a rich console of any width."""
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
    """The text with control and invisible characters written as escapes: none reaches the terminal, none is hidden."""
    shown = Text(overflow="fold")
    for plain, characters in itertools.groupby(text[:LONGEST], _plain):
        run = "".join(characters)
        shown.append(run) if plain else shown.append(run.encode("unicode_escape").decode(), "reverse")
    return shown.append_text(_rest(text))


def _plain(character: str) -> bool:
    return character in "\n\t" or character.isprintable() or character == "\u200d"  # the last joins emoji


def _beside(rows: Iterable[tuple[str, Text]]) -> Table:
    """Each text beside its name."""
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim")
    table.add_column(ratio=1, overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    return table


def _marked(pair: PreferencePair) -> tuple[Text, Text]:
    """Both answers; words that the other one does not have at that place are bold."""
    whole = pair.chosen, pair.rejected
    words = [re.findall(r"\S+\s*|\s+", text[:LONGEST]) for text in whole]
    shown = Text(overflow="fold"), Text(overflow="fold")
    for tag, *places in difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        for side, (start, end) in enumerate((places[:2], places[2:])):
            part = visible("".join(words[side][start:end]))
            if tag != "equal":
                part.stylize(DIFFERENT)
            shown[side].append_text(part)
    for text, all_of_it in zip(shown, whole, strict=True):
        text.append_text(_rest(all_of_it))
    return shown


def _rest(text: str) -> Text:
    more = len(text) - LONGEST
    return Text(f"… ({more:,} more characters)" if more > 0 else "", "dim")
