"""What `rlhf run` prints of a finished stage, and of the chain so far: tables of its report, metrics and answers."""

from collections.abc import Mapping
from pathlib import Path

from rich.text import Text

from rlhf.rating.pairs import turns
from rlhf.recipe.stages import EVALUATE
from rlhf.report import tables
from rlhf.run import reader
from rlhf.run.comparisons import Cost, costs
from rlhf.run.evidence import gains_over_start
from rlhf.run.layout import SAMPLES
from rlhf.run.records import SampleLine, Summary
from rlhf.terminal import screen, wording
from rlhf.terminal.tables import rows_table
from rlhf.terminal.wording import estimate, number

SHOWN = 3  # prompts
COLOURS = {"good": "green", "bad": "red"}  # of what a cell or a sentence says


def show_stage(summary: Summary) -> None:
    """Print the metrics of a finished stage, those of an evaluation by policy; its costs, gains and findings."""
    title = f"{summary.recipe} {summary.version}: {summary.stage}, seed {summary.seed}"
    title += ", modified recipe" if summary.modified or summary.released_sha256 else ""
    if summary.stage == EVALUATE:
        show_table(f"{title} (brackets: 95 %)", tables.policies({EVALUATE: summary}))
    else:
        names = wording.without_ends(summary.metrics)
        rows = [(wording.metric(name), estimate(summary.metrics, name, "\n") or "-") for name in names]
        rows_table(title, ("metric", "measured"), rows, numbers=True)
    show_table("", tables.table(("", *Cost._fields[1:]), costs(summary), numbers=1))
    for one in gains_over_start({summary.stage: summary}):
        text = f"{one.title}: {one.name} {number(one.start)} → {number(one.end)}, {one.in_words()}"
        screen.OUT.print(text, style=COLOURS.get(one.kind, ""))
    if summary.findings:
        screen.OUT.print(f"findings: {', '.join(summary.findings)} (findings.jsonl says what to try)")


def show_chain(summaries: Mapping[str, Summary]) -> None:
    """Print the targets and published figures of a recipe's finished stages, and of all stages together."""
    show_table("the chain so far", tables.figures(summaries, None))


def show_samples(folder: Path) -> None:
    """Print the first answers to held-out prompts that a stage kept, of its last step; those that differ come first."""
    lines = reader.read_lines(folder / SAMPLES, SampleLine)
    newest = [line for line in lines if line.step == lines[-1].step]
    newest.sort(key=lambda line: len({answer.response for answer in line.answers.values()}) == 1)
    if newest:
        screen.OUT.print("\nheld-out prompts, changed answers first", style="bold")
    for line in newest[:SHOWN]:
        show_sample(line)


def show_sample(line: SampleLine) -> None:
    """Print the last turn of a prompt and each policy's answer, with the number that counts most."""
    screen.OUT.print(turns(line.prompt, line.messages)[-1][1], style="dim")
    for policy, answer in line.answers.items():
        given = next((f" ({name.replace('_', ' ')} {value:.3g})" for name, value in answer.given.items()), "")
        screen.OUT.print(f"{policy}{given}: {answer.response.strip()}")


def show_table(title: str, found: tables.Table | None) -> None:
    """Print a table of a report."""
    if found:
        rows = [[Text(cell.text, COLOURS.get(cell.kind, "")) for cell in row] for row in found.rows]
        rows_table(title, found.columns, rows, numbers=found.numbers == 1)
