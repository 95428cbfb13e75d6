"""Tables and samples on stdout."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import JustifyMethod, OverflowMethod
from rich.table import Table

from rlhf.terminal import screen

LONGEST_NAME = 30  # characters of a word that is not broken


def rows_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False, whole: bool = False
) -> None:
    """Print a table.

    With `numbers`, all columns but the first are aligned at the right. With `whole`, no cell is broken into lines: a
    terminal that is too narrow cuts it off. Words of the first column, which are names, are never broken.
    """
    table = Table(title=title, title_justify="left")
    rows = list(rows)
    longest = max((len(word) for row in rows for word in row[0].split()), default=0)
    for i, column in enumerate(columns):
        justify: JustifyMethod = "right" if numbers and i else "left"
        overflow: OverflowMethod = "ellipsis" if whole else "fold"
        least = None if i or whole else min(longest, LONGEST_NAME)
        table.add_column(column, justify=justify, overflow=overflow, no_wrap=whole, min_width=least)
    for row in rows:
        table.add_row(*row)
    screen.OUT.print(table)


def show_sample(title: str, prompt: str, answers: Mapping[str, str]) -> None:
    """Print a prompt and each policy's answer to it, under a title unless that is ""."""
    if title:
        screen.OUT.print(f"\n{title}", style="bold")
    screen.OUT.print(prompt.strip(), style="dim")
    width = max(map(len, answers))
    for name, answer in answers.items():
        screen.OUT.print(f"{name:>{width}}: {answer}")
