"""The page of `rlhf sample`: prompts, and below each the answers of several policies."""

from collections.abc import Sequence
from pathlib import Path

from rlhf.files import write_output
from rlhf.report.learned import row_of
from rlhf.report.page import render
from rlhf.run.outcomes import SampleLine


def write_answers(title: str, lines: Sequence[SampleLine], file: Path) -> None:
    """Write the page of lines of samples."""
    write_output(file, render("answers.html", title=title, rows=[row_of(line, "score") for line in lines]))
