"""Rows of a data set for reading in a terminal: the prompt above, the two answers of a pair side by side."""

import difflib
import itertools
import random
import re
from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from rlhf.data.formats import ParsedRows
from rlhf.data.quality.flaws import FLAWS
from rlhf.data.rows import Document, Example, PreferencePair, PromptOnly, Row
from rlhf.data.worlds import gym
from rlhf.terminal import prints

LONGEST = 4000  # characters of a text that are shown
DIFFERENCE_STYLE = "bold"


def choose(rows: ParsedRows, count: int, *, seed: int | None, only: str | None = None) -> tuple[list[Row], int, int]:
    """Return `count` rows in the order of the files, the number of rows to choose from, and that of all rows.

    They are the first rows, or drawn at random with a `seed`. `only`: the name of a flaw (rlhf/data/quality/flaws.py)
    that each of them has.
    """
    candidates = [*rows.rows]
    total = len(candidates)
    if only:
        flawed = {id(row) for row in FLAWS[only](candidates)}
        candidates = [row for row in candidates if id(row) in flawed]
    if seed is None or count >= len(candidates):
        return candidates[:count], len(candidates), total
    indices = random.Random(seed).sample(range(len(candidates)), count)
    return [candidates[index] for index in sorted(indices)], len(candidates), total


def render(row: Row) -> RenderableType:
    """Return a row for a rich console of any width."""
    parts: list[RenderableType] = [Rule(visible(row.source), align="left", style="dim")]
    if isinstance(row, Document):
        return Group(*parts, visible(row.text))
    parts.append(_named_texts((message.role, visible(message.content.strip())) for message in row.prompt))
    if isinstance(row, Example | PromptOnly):
        texts = [("response", row.response)] if isinstance(row, Example) else []
        if row.right_answer is not None and ("response", row.right_answer) not in texts:  # a worked answer is both
            texts.append(("right answer", gym.right_answer(row.right_answer)))
        return Group(*parts, _named_texts((name, visible(text)) for name, text in texts))
    return Group(*parts, side_by_side(("chosen", "rejected"), [_marked_answers(row)]))


def side_by_side(names: Sequence[str], rows: Iterable[Sequence[Text]]) -> Table:
    """Return a table with a column of answers for each name."""
    table = Table(expand=True, show_lines=True)
    for name in names:
        table.add_column(name, ratio=1, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def visible(text: str) -> Text:
    """Return the text with control and invisible characters as escapes, so that none hides or reaches the terminal."""
    visible_text = Text(overflow="fold")
    for printable, characters in itertools.groupby(text[:LONGEST], prints):
        characters_text = "".join(characters)
        visible_text.append(characters_text) if printable else visible_text.append(
            characters_text.encode("unicode_escape").decode(), "reverse"
        )
    return visible_text.append_text(_omission(text))


def _named_texts(rows: Iterable[tuple[str, Text]]) -> Table:
    """Return a table with each text beside its name."""
    table = Table.grid(padding=(0, 1))
    table.add_column(style="dim")
    table.add_column(ratio=1, overflow="fold")
    for name, text in rows:
        table.add_row(name, text)
    return table


def _marked_answers(pair: PreferencePair) -> tuple[Text, Text]:
    """Return both answers; words that the other one does not have at that place are bold."""
    answers = pair.chosen, pair.rejected
    words = [re.findall(r"\S+\s*|\s+", text[:LONGEST]) for text in answers]
    marked = Text(overflow="fold"), Text(overflow="fold")
    for tag, *ranges in difflib.SequenceMatcher(None, words[0], words[1], autojunk=False).get_opcodes():
        for side, (start, end) in enumerate((ranges[:2], ranges[2:])):
            segment = visible("".join(words[side][start:end]))
            if tag != "equal":
                segment.stylize(DIFFERENCE_STYLE)
            marked[side].append_text(segment)
    for text, full_text in zip(marked, answers, strict=True):
        text.append_text(_omission(full_text))
    return marked


def _omission(text: str) -> Text:
    """Return a note on the characters that are not shown; empty if all are."""
    hidden = len(text) - LONGEST
    return Text(f"… ({hidden:,} more characters)" if hidden > 0 else "", "dim")
