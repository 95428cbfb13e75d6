"""Tables on stdout."""

from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from rlhf.terminal import screen


def rows_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], numbers: bool = False) -> None:
    """Print a table. With `numbers`, all columns but the first, which are names, are aligned at the right."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if numbers and index else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    screen.OUT.print(table)
