"""The progress of work while it goes on: a bar with the time left on a terminal, an occasional line elsewhere."""

import datetime
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.text import Text

from rlhf.terminal import screen

_LOOP_SECONDS = 20  # between two lines of progress of a loop without a terminal
_WORKING_SECONDS = 10  # the same for work of unknown length


class Bar:
    """Progress of a loop: on a terminal a bar with the time left, elsewhere an occasional line."""

    def __init__(self, title: str, total: int | None = None):
        self.title, self.total = title, total
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            _Times(self),
            TextColumn("{task.fields[note]}", style="dim", markup=False),
            console=screen.ERR,
            transient=True,
        )
        self._task = self._progress.add_task(title, total=total, note="")
        self._live = screen.ERR.is_terminal
        self._start = self._printed = self._updated = time.monotonic()
        self._begun: int | None = None  # steps done before: a resumed run does not begin at 0
        self._done = 0

    def update(self, done: int, note: str = "", total: int | None = None) -> None:
        """Show that `done` steps are done. `note` is shown beside them; `total` replaces the number of all steps."""
        self.total = total or self.total
        now = self._updated = time.monotonic()
        self._begun = max(done - 1, 0) if self._begun is None else self._begun
        self._done = done
        self._progress.update(self._task, completed=done, note=note, total=self.total)
        left = self.left()
        if not self._live and left is not None and now - self._printed > _LOOP_SECONDS:
            time_left = datetime.timedelta(seconds=int(left))
            screen.ERR.print(f"{self.title} {done}/{self.total}, about {time_left} left  {note}", soft_wrap=True)
            self._printed = now

    def left(self) -> float | None:
        """Return the seconds left at the mean pace since the bar began; None before the first step."""
        if self._begun is None or self._done == self._begun or not self.total:
            return None
        pace = (self._updated - self._start) / (self._done - self._begun)
        return max(0.0, pace * (self.total - self._done) - (time.monotonic() - self._updated))

    def __enter__(self) -> "Bar":
        if self._live:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._progress.stop()


class _Times(ProgressColumn):
    """A column with the time that a loop has taken and about how long it will still take."""

    def __init__(self, bar: Bar):
        super().__init__()
        self.bar = bar

    def render(self, task: Task) -> Text:
        """Return the time so far and the time left as text."""
        passed, left = datetime.timedelta(seconds=int(task.elapsed or 0)), self.bar.left()
        remaining = "" if left is None else f", about {datetime.timedelta(seconds=int(left))} left"
        return Text(f"{passed} so far{remaining}")


class Work:
    """Work that goes on: what is being done and, where the work tells it, how much of it is done and the time left."""

    def __init__(self, task: str, show: Callable[[str], None]):
        self._show, self.started = show, time.monotonic()
        self._task, self._begun, self._share = task, self.started, 0.0

    def __call__(self, task: str) -> None:
        """Show what is being done now."""
        self._task, self._begun, self._share = task, time.monotonic(), 0.0
        self._show(str(self))

    def done(self, share: float) -> None:
        """Tell which share of what is being done is done, from 0 to 1."""
        self._share = share
        self._show(str(self))

    def __str__(self) -> str:
        if not self._share:
            return self._task
        left = (time.monotonic() - self._begun) * (1 / self._share - 1)
        return f"{self._task}, {self._share:.0%}, about {datetime.timedelta(seconds=int(left))} left"

    def so_far(self) -> str:
        """Return what is being done, with the time left, or else with the time that all has taken."""
        passed = datetime.timedelta(seconds=int(time.monotonic() - self.started))
        return str(self) if self._share else f"{self}, {passed} so far"


@contextmanager
def working(task: str) -> Iterator[Work]:
    """Show what is being done. Yields what changes the text, and what may tell how much is done.

    Without a terminal a new text is printed as a line of its own now and then, and work that goes on for long is named
    again and again with the time that is left or that it has taken.
    """
    if screen.ERR.is_terminal:
        with screen.ERR.status(Text(task)) as status:
            yield Work(task, lambda text: status.update(Text(text)))
        return
    printed = time.monotonic()
    ended = threading.Event()

    def tell(text: str) -> None:
        nonlocal printed
        if time.monotonic() - printed > _WORKING_SECONDS:
            printed = time.monotonic()
            screen.ERR.print(text, soft_wrap=True)

    work = Work(task, tell)

    def repeat() -> None:
        nonlocal printed
        while not ended.wait(_LOOP_SECONDS):
            printed = time.monotonic()
            screen.ERR.print(work.so_far(), soft_wrap=True)

    repeater = threading.Thread(target=repeat, daemon=True)  # the work itself may be one call of a library
    repeater.start()
    try:
        yield work
    finally:
        ended.set()
        repeater.join()
