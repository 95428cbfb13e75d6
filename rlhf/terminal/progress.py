"""The progress of work while it goes on: a bar with the time left on a terminal, an occasional line elsewhere."""

import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from rlhf.terminal import screen

SECONDS = 20  # between two lines of progress without a terminal


class Bar:
    """Progress of a loop: on a terminal a bar with the time left, elsewhere an occasional line."""

    def __init__(self, title: str, total: int | None = None):
        note = TextColumn("{task.fields[note]}", style="dim", markup=False)
        name = TextColumn("{task.description}", markup=False)
        columns = (name, BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), note)
        self._progress = Progress(*columns, console=screen.ERR, transient=True, speed_estimate_period=3600)
        self._progress.add_task(title, total=total, note="")
        self._task = self._progress.tasks[0]
        self._printed = time.monotonic()

    def update(self, done: int, note: str = "", total: int | None = None) -> None:
        """Show that `done` steps are done. `note` is shown beside them; `total` replaces the number of all steps."""
        self._progress.update(self._task.id, completed=done, note=note, total=total or self._task.total)
        if screen.ERR.is_terminal or time.monotonic() - self._printed < SECONDS:
            return
        self._printed = time.monotonic()
        left = self._task.time_remaining
        eta = "" if left is None else f", about {datetime.timedelta(seconds=int(left))} left"
        screen.ERR.print(f"{self._task.description} {done}/{self._task.total}{eta}  {note}", soft_wrap=True)

    def __enter__(self) -> "Bar":
        if screen.ERR.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if screen.ERR.is_terminal:
            self._progress.stop()


@contextmanager
def working(task: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done. Yields what changes the text.

    Without a terminal a new text is printed as a line of its own now and then.
    """
    if screen.ERR.is_terminal:
        with screen.ERR.status(Text(task)) as status:
            yield lambda text: status.update(Text(text))
        return
    printed = time.monotonic()

    def tell(text: str) -> None:
        nonlocal printed
        if time.monotonic() - printed > SECONDS:
            printed = time.monotonic()
            screen.ERR.print(text, soft_wrap=True)

    yield tell
