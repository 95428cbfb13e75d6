"""Tables and samples on stdout."""

from collections.abc import Iterable, Mapping, Sequence

from rich.console import JustifyMethod
from rich.table import Table

from rlhf.terminal import screen


def rows_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False, whole: bool = False
) -> None:
    """Print a table.

    With `numbers`, all columns but the first are aligned at the right. With `whole`, no cell is broken into lines: a
    terminal that is too narrow cuts it off.
    """
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        justify: JustifyMethod = "right" if numbers and i else "left"
        table.add_column(column, justify=justify, overflow="ellipsis" if whole else "fold", no_wrap=whole)
    for row in rows:
        table.add_row(*row)
    screen.OUT.print(table)


def show_sample(title: str, prompt: str, answers: Mapping[str, str]) -> None:
    """Print a prompt and each policy's answer to it."""
    screen.OUT.print(f"\n{title}", style="bold")
    screen.OUT.print(prompt.strip(), style="dim")
    width = max(map(len, answers))
    for name, answer in answers.items():
        screen.OUT.print(f"{name:>{width}}: {answer}")
