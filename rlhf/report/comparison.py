"""The page of `rlhf compare`: what differs in words and figures, and answers of both sides."""

from pathlib import Path

from rlhf.evaluation.compare import PolicyComparison, Side
from rlhf.files import write_output
from rlhf.rating.pairs import turns
from rlhf.recipe import as_yaml
from rlhf.report.learned import SHOWN, Said, SampleRow, Sentence
from rlhf.report.page import render
from rlhf.report.tables import Table, table
from rlhf.terminal.wording import metric, number

PAGE = "comparison.html"


def write(comparisons: list[tuple[Side, Side, PolicyComparison]], file: Path) -> None:
    """Write the page of comparisons with the first side."""
    blocks = [
        {
            "names": [f"A: {found.a}", f"B: {found.b}"],
            "sentences": [Sentence(*sentence) for sentence in found.sentences()],
            "figures": figures(found),
            "settings": table(
                ("setting", "A", "B"), [(k, as_yaml(x), as_yaml(y)) for k, (x, y) in found.settings.items()]
            ),
            "samples": _samples(a, b),
        }
        for a, b, found in comparisons
    ]
    write_output(file, render("comparison.html", title="comparison", blocks=blocks))


def figures(found: PolicyComparison) -> Table | None:
    """Return the figures of both sides with their differences."""
    rows = []
    for row in found.rows:
        difference = "" if row.difference is None else f"{row.difference:+.4g}"
        ends = f"{row.interval[0]:+.4g} to {row.interval[1]:+.4g}" if row.interval else ""
        rows.append(
            (
                metric(row.name),
                number(row.a),
                number(row.b),
                difference,
                ends,
                f"B: {row.verdict}" if row.verdict else "",
            )
        )
    return table(("", "A", "B", "B − A", "95 %", "verdict"), rows)


def _samples(a: Side, b: Side) -> list[SampleRow]:
    """Return the first prompts to which the two sides gave different answers."""
    of_a, of_b = ({prompt: answers[0] for prompt, answers in side.answers.items()} for side in (a, b))
    prompts = [prompt for prompt in of_a if prompt in of_b and of_a[prompt].response != of_b[prompt].response]
    return [SampleRow(turns(p)[-1][1], [], [Said.of(of_a[p], "A"), Said.of(of_b[p], "B")], "") for p in prompts[:SHOWN]]
