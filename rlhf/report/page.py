"""`report.html` of a run, and the templates that all pages are made from."""

import shlex
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from rlhf.files import write_output
from rlhf.recipe.stages import EVALUATE, POLICIES
from rlhf.report import charts, learned, tables
from rlhf.report.records import TITLES, RunRecords, load
from rlhf.terminal import counted, harmless

REPORT = "report.html"  # in the run directory
TEXT_CHARACTERS = 2000  # characters of a text that is shown


def write(directory: Path, file: Path, price: float | None = None) -> list[str]:
    """Write the page of a run, and return what it leaves out because a record is damaged or has changed since.

    `price` is in dollars per hour of one card. Raises UserError if the directory holds no run, and for a damaged log.
    """
    run = load(directory)
    write_output(file, page(run, price))
    return run.problems


def page(run: RunRecords, price: float | None = None) -> str:
    """Return the page of a run as HTML."""
    found, unchecked = tables.findings(run)
    return render(
        "report.html",
        title=run.title,
        problems=run.problems,
        learned=learned.sentences(run),
        meanings=learned.meanings(run),
        notes=_notes(run, price),
        samples=learned.samples(run),
        charts=charts.learned(run),
        figures=tables.figures(run.summaries, price),
        costs=tables.costs(run),
        findings=found,
        unchecked=unchecked,
        policies=tables.policies(run.summaries),
        training=charts.training(run),
        provenance=tables.provenance(run),
    )


def _notes(run: RunRecords, price: float | None) -> list[str]:
    """Return what is not finished or not evaluated, the time and cost, and whether the recipe was changed."""
    unfinished = [TITLES[stage] for stage in run.manifests if stage not in run.summaries]
    seen = run.manifests[EVALUATE].parents if EVALUATE in run.summaries else {}
    missing = [TITLES[stage] for stage in POLICIES if seen and stage in run.summaries and stage not in seen]
    again = f"`rlhf run {EVALUATE} {shlex.quote(str(run.directory))}`"
    seconds = sum(summary.wall_seconds for summary in run.summaries.values())
    cost = "" if price is None else f", {seconds / 3600 * price:.2f} USD for each card"
    notes = [
        f"Not finished: {', '.join(unfinished)}." if unfinished else "",
        f"Not in the evaluation: {', '.join(missing)}; {again} has them." if missing else "",
        f"{counted(len(run.summaries), 'stage')} in {tables.duration(seconds)}{cost}.",
        "The recipe was changed." if any(m.overrides or m.released_sha256 for m in run.manifests.values()) else "",
    ]
    return [note for note in notes if note]


def render(template: str, **content: object) -> str:
    """Return a template of this package, filled with the content."""
    return _ENVIRONMENT.get_template(template).render(content)


def _printable(value: object) -> object:
    """Return a text without control characters, cut if it is very long; other values unchanged. Jinja escapes it."""
    if type(value) is not str:
        return value
    return harmless(value[:TEXT_CHARACTERS]) + ("…" if len(value) > TEXT_CHARACTERS else "")


_ENVIRONMENT = Environment(
    loader=FileSystemLoader(Path(__file__).with_name("templates"), encoding="utf-8"),
    autoescape=True,
    undefined=StrictUndefined,
    finalize=_printable,
    trim_blocks=True,
    lstrip_blocks=True,
)
