"""What a person sees: progress with the time left, tables, and no flood of library warnings."""

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
from typing import Any

from rich.console import Console, ConsoleOptions, JustifyMethod, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rlhf.recipe import POLICIES, Recipe, published
from rlhf.recipe.published import Figure, Verdict
from rlhf.terminal import harmless as harmless

WIDTH = 140  # of tables where there is no terminal
_TERMINAL = sys.stdout is not None and sys.stdout.isatty()


class Screen(Console):
    """A console on which only rich's own control codes reach the terminal, none of what is printed."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=harmless(segment.text))


OUT = Screen(highlight=False, soft_wrap=not _TERMINAL, width=None if _TERMINAL else WIDTH)
ERR = Screen(stderr=True, highlight=False)
_PLAIN_SECONDS = 20  # between two lines of progress where there is no terminal


class Bar:
    """Progress of one loop: on a terminal a bar with the time left, elsewhere a line now and then."""

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
        self._begun: int | None = None  # what was done before: a run that is resumed does not begin at 0
        self._done = 0

    def update(self, done: int, note: str = "", total: int | None = None) -> None:
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
        """Seconds that are left at the mean pace since the bar began, however long a step takes; None before one."""
        if self._begun is None or self._done == self._begun or not self.total:
            return None
        pace = (self._updated - self._start) / (self._done - self._begun)
        return max(0.0, pace * (self.total - self._done) - (time.monotonic() - self._updated))

    def __enter__(self) -> "Bar":
        if self._live:
            self._progress.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self._live:
            self._progress.stop()


class _Times(ProgressColumn):
    """How long a loop has taken, and about how long it will still take."""

    def __init__(self, bar: Bar):
        super().__init__()
        self.bar = bar

    def render(self, task: Task) -> Text:
        passed, left = datetime.timedelta(seconds=int(task.elapsed or 0)), self.bar.left()
        rest = "" if left is None else f", about {datetime.timedelta(seconds=int(left))} left"
        return Text(f"{passed} so far{rest}")


def install_command(extra: str) -> str:
    """The command that installs an optional part: of the checkout, or by its packages where there is none."""
    if (Path(__file__).parents[2] / "pyproject.toml").is_file():
        return f"pip install '.[{extra}]'"
    try:
        known = importlib.metadata.requires("rlhf-one-gpu") or []
    except importlib.metadata.PackageNotFoundError:
        known = []
    needed = [line.partition(";")[0].strip() for line in known if re.search(rf"extra == .{extra}\b", line)]
    return f"pip install {shlex.join(needed)}" if needed else f"pip install 'rlhf-one-gpu[{extra}]'"


def number(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or (abs(value) >= 1000 and value == int(value)):
        return f"{int(value):,}"
    return f"{value:.4g}"


def span(low: float | None, high: float | None) -> str:
    """A target's range in words: `≤ 5`, `≥ 0.6`, `0.05 – 0.3`."""
    if low is not None and low == high:
        return number(low)
    if low is not None and high is not None:
        return f"{number(low)} – {number(high)}"
    return f"≥ {number(low)}" if low is not None else f"≤ {number(high)}" if high is not None else "-"


def asked(figure: Figure, in_full: bool = False) -> str:
    """What a figure says, in words: `about 61 GB`, `≤ 5`, `18 – 24 GB`; `in_full`: with every unit."""
    text = ("about " if figure.about else "") + span(*figure.printed)
    return f"{text} {figure.unit}" if in_full or figure.unit in ("GB", "hours", "USD") else text


def verdict(found: Verdict) -> str:
    """A verdict with its colour on a terminal."""
    colour = "green" if found.word in published.GOOD else "red" if found.word in published.BAD else ""
    return f"[{colour}]{escape(str(found))}[/]" if colour else escape(str(found))


def summary_table(summary: Mapping[str, Any], where: Any) -> None:
    """Figures and targets first, then every other metric of a finished stage."""
    title = f"{summary['recipe']} {summary['version']}: {summary['stage']}, seed {summary['seed']}"
    table = Table(title=title + (", modified recipe" if summary["modified"] else ""), title_justify="left")
    columns: tuple[tuple[str, JustifyMethod], ...] = (
        ("metric", "left"),
        (_asking(summary["targets"]), "left"),
        ("measured", "right"),
        ("verdict", "left"),
    )
    for column, side in columns:
        table.add_column(column, justify=side)
    for entry in summary["targets"]:
        figure = published.recorded(entry)
        found = verdict(published.verdict_of(entry))
        table.add_row(escape(figure.title), asked(figure, in_full=True), number(entry["measured"]), found)
    shown = {key for entry in summary["targets"] for key in (entry["name"], entry.get("metric"))}
    compared = summary["stage"] == "evaluate"  # several policies, and the reward model: a table of their own
    for name, value in summary["metrics"].items():
        if name not in shown and not compared:
            table.add_row(escape(name.replace("_", " ")), "", number(value), _better(name))
    speed = summary["tokens_per_second"]
    table.add_row("wall time", "", f"{summary['wall_seconds']:.0f} s", "")
    table.add_row("tokens per second", "", number(round(speed)) if speed else "-", "")
    if summary["peak_vram_bytes"]:
        table.add_row("peak VRAM", "", f"{summary['peak_vram_bytes'] / 1e9:.2f} GB", "")
    table.add_row("peak memory of the process", "", f"{summary['peak_rss_bytes'] / 1e9:.2f} GB", "")
    OUT.print(table)
    if compared:
        _side_by_side(summary["metrics"])
    if summary.get("findings"):
        OUT.print(f"looked wrong: {', '.join(summary['findings'])} (findings.jsonl has what to try)", markup=False)
    OUT.print(f"written to {where}", style="dim", markup=False)


def next_step(stage: str, stages: Iterable[str]) -> str:
    """What may follow a stage, as make's targets; `stages`: those that the recipe has."""
    if stage in POLICIES:
        return f"next: make chat STAGE={stage} (talk with it), make eval (compare the policies), make report (one page)"
    if stage == "evaluate":
        return "next: make report (one page about the run), make ab (rate answers blind), make merge (one checkpoint)"
    if stage == "merge":
        return "next: make serve (an OpenAI-compatible address), make chat STAGE=merge"
    following = {"pretrain": ("sft",), "sft": ("rm", "dpo"), "rm": ("ppo", "rloo", "grpo")}.get(stage, ())
    known = [f"make {name}" for name in following if name in stages]
    return f"next: {' or '.join(known)}, make report" if known else ""


def say_next(stage: str, recipe: Recipe) -> None:
    """Print what may follow a stage of a recipe."""
    has = [name for name in ("sft", "rm", *POLICIES) if recipe.section(name) is not None]
    if following := next_step(stage, has):
        OUT.print(following, style="dim", markup=False)


def _better(metric: str) -> str:
    """Which way a metric is better, where one is; empty otherwise."""
    if metric in published.LESS or metric.startswith("heldout_loss"):
        return "[dim]less is better[/]"
    return "[dim]more is better[/]" if metric in published.MORE else ""


def _side_by_side(metrics: Mapping[str, Any]) -> None:
    """Metrics named `<who>/<what>`, a column for each who and a row for each what; the reward model's by themselves."""
    columns = list(dict.fromkeys(name.partition("/")[0] for name in metrics))
    whats = list(dict.fromkeys(name.partition("/")[2] for name in metrics if not name.startswith("rm/")))
    policies = [column for column in columns if column != "rm"]
    rows = [(what, *(number(metrics.get(f"{who}/{what}")) for who in policies)) for what in whats]
    rows_table("on held-out prompts", ("", *policies), rows, numbers=True)
    rows_table(
        "reward model on held-out pairs",
        ("", "rm"),
        [(name.partition("/")[2], number(value)) for name, value in metrics.items() if name.startswith("rm/")],
        numbers=True,
    )


def _asking(entries: Iterable[Mapping[str, Any]]) -> str:
    """Heading of the column that says what is asked for."""
    return "published" if any(entry.get("guide") for entry in entries) else "target"


def targets_table(summaries: Sequence[Mapping[str, Any]], price: float | None = None) -> None:
    """What a recipe's finished stages reached, one line per figure; then the figures of all stages together.

    `price`: dollars for an hour of one card.
    """
    of_all = published.totals({summary["stage"]: summary for summary in summaries}, price)
    entries = [entry for summary in summaries for entry in summary["targets"]]
    asking = "published" if of_all else _asking(entries)
    table = Table(title="the chain so far", title_justify="left")
    for column in ("stage", "metric", asking, "measured", "verdict", "wall"):
        table.add_column(column, justify="right" if column in ("measured", "wall") else "left")
    for summary in summaries:
        cells = [
            (escape(figure.title), asked(figure), number(entry["measured"]), verdict(published.verdict_of(entry)))
            for entry in summary["targets"]
            for figure in [published.recorded(entry)]
        ]
        for at, row in enumerate(cells or [("", "", "", "")]):
            table.add_row("" if at else summary["stage"], *row, "" if at else f"{summary['wall_seconds']:.0f} s")
    for at, (figure, value, found) in enumerate(of_all):
        table.add_row("" if at else "all", escape(figure.title), asked(figure), number(value), verdict(found), "")
    OUT.print(table)


def show_sample(title: str, prompt: str, answers: Mapping[str, str]) -> None:
    OUT.print(f"\n[bold]{title}[/bold]")
    OUT.print(prompt.strip(), style="dim", markup=False)
    for name, answer in answers.items():
        OUT.print(f"{name:>8}: {answer}", markup=False)


def rows_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: bool = False) -> None:
    """`numbers`: all columns but the first hold some and are aligned at the right."""
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if numbers and i else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    OUT.print(table)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Say what is being done, for work whose length is not known beforehand; yields what changes that.

    Without a terminal, what has changed is said in a line of its own, now and then.
    """
    if ERR.is_terminal:
        with ERR.status(what) as status:
            yield status.update
        return
    printed = time.monotonic()

    def say(what: str) -> None:
        nonlocal printed
        if time.monotonic() - printed > _PLAIN_SECONDS:
            printed = time.monotonic()
            ERR.print(what, markup=False)

    yield say


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Enter before transformers is imported: its bars, notices and telemetry are switched off, errors are not."""
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
