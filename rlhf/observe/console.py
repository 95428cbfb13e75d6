"""Output for people: progress with the time left, tables, and silenced library warnings."""

import datetime
import importlib.metadata
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rlhf.recipe import published
from rlhf.recipe.published import Figure, Verdict
from rlhf.run.finished import totals
from rlhf.run.records import Comparison, Summary
from rlhf.terminal import harmless

WIDTH = 140  # of tables without a terminal
_TERMINAL = sys.stdout is not None and sys.stdout.isatty()


class Screen(Console):
    """A console that passes rich's own control codes to the terminal, but none of the printed text."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the segments of `renderable`, with control characters removed from their text."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


OUT = Screen(highlight=False, soft_wrap=not _TERMINAL, width=None if _TERMINAL else WIDTH)
ERR = Screen(stderr=True, highlight=False)
_PLAIN_SECONDS = 20  # between two lines of progress of a loop without a terminal
_WORKING_SECONDS = 10  # the same for work of unknown length


class Bar:
    """Progress of a loop: on a terminal a bar with the time left, elsewhere an occasional line."""

    def __init__(self, title: str, total: int | None = None):
        self.title, self.total = title, total
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            _Times(self),
            TextColumn("[dim]{task.fields[note]}"),
            console=ERR,
            transient=True,
        )
        self._task = self._progress.add_task(title, total=total, note="")
        self._live = ERR.is_terminal
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
        if not self._live and left is not None and now - self._printed > _PLAIN_SECONDS:
            ERR.print(f"{self.title} {done}/{self.total}, about {left:.0f} s left  {note}")
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


def install_command(extra: str) -> str:
    """Return the command that installs an optional part: from the checkout, or by its packages without one."""
    if (Path(__file__).parents[2] / "pyproject.toml").is_file():
        return f"pip install '.[{extra}]'"
    try:
        requirements = importlib.metadata.requires("rlhf-one-gpu") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    needed = [line.partition(";")[0].strip() for line in requirements if re.search(rf"extra == .{extra}\b", line)]
    return f"pip install {shlex.join(needed)}" if needed else f"pip install 'rlhf-one-gpu[{extra}]'"


def number(value: object) -> str:
    """Return a value as text: 4 significant digits, whole numbers with separators, - for None."""
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (abs(value) >= 1000 and value == int(value)):
        return f"{int(value):,}"
    return f"{value:.4g}"


def span(low: float | None, high: float | None) -> str:
    """Return a range in words: `≤ 5`, `≥ 0.6`, `0.05 – 0.3`."""
    if low is not None and low == high:
        return number(low)
    if low is not None and high is not None:
        return f"{number(low)} – {number(high)}"
    return f"≥ {number(low)}" if low is not None else f"≤ {number(high)}" if high is not None else "-"


def figure_text(figure: Figure, in_full: bool = False) -> str:
    """Return a figure's range in words: `about 61 GB`, `≤ 5`, `18 – 24 GB`; `in_full` adds every unit."""
    text = ("about " if figure.about else "") + span(*figure.printed)
    return f"{text} {figure.unit}" if in_full or figure.unit in ("GB", "hours", "USD") else text


def verdict(outcome: Verdict) -> str:
    """Return a verdict as markup, with its colour."""
    colour = "green" if outcome.word in published.GOOD else "red" if outcome.word in published.BAD else ""
    return f"[{colour}]{escape(str(outcome))}[/]" if colour else escape(str(outcome))


def summary_table(summary: Summary) -> None:
    """Print the table of a finished stage: figures and targets first, then all other metrics and costs."""
    title = f"{summary.recipe} {summary.version}: {summary.stage}, seed {summary.seed}"
    table = Table(title=title + (", modified recipe" if summary.modified else ""), title_justify="left")
    columns: tuple[tuple[str, JustifyMethod], ...] = (
        ("metric", "left"),
        (_figures_heading(summary.targets), "left"),
        ("measured", "right"),
        ("verdict", "left"),
    )
    for column, alignment in columns:
        table.add_column(column, justify=alignment)
    for target in summary.targets:
        figure, outcome = target.figure, verdict(target.outcome)
        table.add_row(escape(figure.title), figure_text(figure, in_full=True), number(target.measured), outcome)
    listed = {key for target in summary.targets for key in (target.name, target.metric)}
    is_evaluation = summary.stage == "evaluate"  # policies and reward model have tables of their own
    for name, value in summary.metrics.items():
        if name not in listed and not is_evaluation:
            table.add_row(escape(_words(name)) + _better(name), "", number(value), "")
    speed = summary.tokens_per_second
    table.add_row("wall time", "", f"{summary.wall_seconds:.0f} s", "")
    table.add_row("tokens per second", "", number(round(speed)) if speed else "-", "")
    if summary.peak_vram_bytes:
        table.add_row("peak VRAM", "", f"{summary.peak_vram_bytes / 1e9:.2f} GB", "")
    table.add_row("peak memory of the process", "", f"{summary.peak_rss_bytes / 1e9:.2f} GB", "")
    OUT.print(table)
    if is_evaluation:
        _side_by_side(summary.metrics)
    if summary.findings:
        OUT.print(f"findings: {', '.join(summary.findings)} (findings.jsonl has settings to try)", markup=False)


def _words(metric: str) -> str:
    return metric.replace("_", " ")


def _better(metric: str) -> str:
    """Return which way a metric is better, as markup that follows its name; "" if neither is."""
    if metric in published.LESS:
        return "[dim] (lower is better)[/]"
    return "[dim] (higher is better)[/]" if metric in published.MORE else ""


def _side_by_side(metrics: Mapping[str, float | None]) -> None:
    """Print metrics named `<policy>/<metric>`: a column for each policy and a row for each metric.

    Those of the reward model get a table of their own.
    """
    columns = list(dict.fromkeys(name.partition("/")[0] for name in metrics))
    measures = list(dict.fromkeys(name.partition("/")[2] for name in metrics if not name.startswith("rm/")))
    policies = [column for column in columns if column != "rm"]
    rows = [(_words(name), *(number(metrics.get(f"{policy}/{name}")) for policy in policies)) for name in measures]
    rows_table("on held-out prompts", ("", *policies), rows, numbers=True)
    rows_table(
        "reward model on held-out pairs",
        ("", "rm"),
        [(_words(name.partition("/")[2]), number(value)) for name, value in metrics.items() if name.startswith("rm/")],
        numbers=True,
    )


def _figures_heading(targets: Iterable[Comparison]) -> str:
    """Return the heading of the column of figures: published, or target."""
    return "published" if any(target.guide for target in targets) else "target"


def targets_table(summaries: Sequence[Summary], price: float | None = None) -> None:
    """Print a line for each figure of a recipe's finished stages, then the figures of all stages together.

    `price` is in dollars per hour of one card.
    """
    chain_figures = totals({summary.stage: summary for summary in summaries}, price)
    targets = [target for summary in summaries for target in summary.targets]
    heading = "published" if chain_figures else _figures_heading(targets)
    table = Table(title="the chain so far", title_justify="left")
    for column in ("stage", "metric", heading, "measured", "verdict", "wall"):
        table.add_column(column, justify="right" if column in ("measured", "wall") else "left")
    for summary in summaries:
        cells = [
            (
                escape(target.figure.title),
                figure_text(target.figure),
                number(target.measured),
                verdict(target.outcome),
            )
            for target in summary.targets
        ]
        for index, row in enumerate(cells or [("", "", "", "")]):
            table.add_row("" if index else summary.stage, *row, "" if index else f"{summary.wall_seconds:.0f} s")
    for index, (figure, value, outcome) in enumerate(chain_figures):
        table.add_row(
            "" if index else "all", escape(figure.title), figure_text(figure), number(value), verdict(outcome), ""
        )
    OUT.print(table)


def show_sample(title: str, prompt: str, answers: Mapping[str, str]) -> None:
    """Print a prompt and each policy's answer to it."""
    OUT.print(f"\n[bold]{title}[/bold]")
    OUT.print(prompt.strip(), style="dim", markup=False)
    width = max(map(len, answers))
    for name, answer in answers.items():
        OUT.print(f"{name:>{width}}: {answer}", markup=False)


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
        table.add_row(*map(escape, row))
    OUT.print(table)


@contextmanager
def working(task: str) -> Iterator[Callable[[str], None]]:
    """Show what is being done, for work of unknown length. Yields a function that changes the text.

    Without a terminal a new text is printed as a line of its own, now and then.
    """
    if ERR.is_terminal:
        with ERR.status(task) as status:
            yield status.update
        return
    printed = time.monotonic()

    def say(task: str) -> None:
        nonlocal printed
        if time.monotonic() - printed > _WORKING_SECONDS:
            printed = time.monotonic()
            ERR.print(task, markup=False, soft_wrap=True)

    yield say


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Switch off the libraries' bars, notices and telemetry, but not errors. Enter before importing transformers."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import logging
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        datasets.disable_progress_bars()
        for name in ("trl", "peft", "accelerate", "torch", "bitsandbytes"):
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
