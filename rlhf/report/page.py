"""The page of a report: its sections in order, and the templates that render them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from rlhf.files import write_output
from rlhf.report.data import sections_of_data
from rlhf.report.evaluation import (
    sections_of_best_of_n,
    sections_of_policies,
    sections_of_reward_model,
)
from rlhf.report.learned import sections_of_learned
from rlhf.report.overview import sections_of_overview, sections_of_stages
from rlhf.report.parts import LINE_COLOURS, Charts, Section, sections_or_problem
from rlhf.report.runs import RunRecords, load
from rlhf.report.samples import sections_of_samples
from rlhf.report.tables import (
    sections_of_findings,
    sections_of_provenance,
    sections_of_rewards,
    sections_of_verdicts,
)
from rlhf.report.training import sections_of_curves, sections_of_frontier, sections_of_memory, sections_of_time
from rlhf.run.finished import data_file
from rlhf.terminal import harmless

TEXT_CHARACTERS = 2000  # characters of a text that is shown

Builder = Callable[[Sequence[RunRecords], Charts], list[Section]]  # a function `sections_of_<topic>`
TOP: tuple[Builder, ...] = (sections_of_overview, sections_of_learned)  # above the contents
SECTIONS: tuple[Builder, ...] = (
    sections_of_verdicts,
    sections_of_samples,
    sections_of_policies,
    sections_of_best_of_n,
    sections_of_reward_model,
    sections_of_frontier,
    sections_of_curves,
    sections_of_stages,
    sections_of_time,
    sections_of_memory,
    sections_of_findings,
    sections_of_rewards,
    sections_of_data,
    sections_of_provenance,
)


class Page(NamedTuple):
    """A page as HTML, and a reason for each part that it leaves out because a file is damaged or has changed."""

    html: str
    left_out: list[str]


def write(run_directories: Sequence[Path], file: Path, price: float | None = None) -> list[str]:
    """Write the page of the run directories `<out>/<recipe>/<version>`, and return the reasons for what it leaves out.

    `price` is in dollars per hour of one card. Raises UserError if a directory holds no run.
    """
    runs = [load(run_directory)._replace(price=price) for run_directory in run_directories]
    if len({run.name for run in runs}) < len(runs):
        runs = [run._replace(name=str(run.run_directory)) for run in runs]
    made = page(runs)
    write_output(file, made.html)
    return made.left_out


def data_files(run_directories: Sequence[Path]) -> list[Path]:
    """Return the data files that the runs were trained on. Raises UserError if a directory holds no run."""
    return [
        data_file(run_directory, file.name)
        for run_directory in run_directories
        for manifest in load(run_directory).manifests.values()
        if manifest.data
        for file in manifest.data.files
    ]


def page(runs: Sequence[RunRecords]) -> Page:
    """Return the page of the runs, which share its charts."""
    charts = Charts()
    top = [section for build in TOP for section in _sections(build, runs, charts)]
    sections = [section for build in SECTIONS for section in _sections(build, runs, charts)]
    first = next(iter(runs[0].manifests.values()))
    from plotly.offline import get_plotlyjs  # megabytes; only a report needs it

    problems = [problem for run in runs for problem in run.problems]
    html = render(
        "page.html",
        title=f"{first.recipe} {first.version}" + (f" and {len(runs) - 1} more" if len(runs) > 1 else ""),
        top=top,
        problems=problems,
        sections=sections,
        charts=charts.all,
        colours=LINE_COLOURS,
        library=Markup(get_plotlyjs()),
    )
    return Page(html, problems + [section.problem for section in (*top, *sections) if section.problem])


def _sections(build: Builder, runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return the sections that a builder makes. A damaged file costs only the sections that read it."""
    topic = build.__name__.removeprefix("sections_of_").replace("_", " ")
    return sections_or_problem(topic, lambda: build(runs, charts), charts)


def render(template: str, **content: object) -> str:
    """Return a template of this package, filled with the content."""
    return _ENVIRONMENT.get_template(template).render(content)


def _printable(value: object) -> object:
    """Return a text without control characters, cut if it is very long; other values unchanged.

    Jinja escapes it afterwards.
    """
    if not isinstance(value, str) or isinstance(value, Markup):
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
_ENVIRONMENT.policies["json.dumps_kwargs"] = {"allow_nan": False}
