"""The page of `rlhf sample`: prompts, and below each the answers of several policies side by side."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rlhf.files import write_output
from rlhf.report.evaluation import answer_turns
from rlhf.report.page import render
from rlhf.report.parts import LINE_COLOURS, Section, Turn, dialogue
from rlhf.run.outcomes import SampleLine, by_prompt


class AnsweredPrompt(NamedTuple):
    """A prompt turn by turn, and its answers row by row: in each row one of every policy, in `columns` columns."""

    turns: list[Turn]
    columns: int
    answers: list[Turn]


def write_answers(title: str, lines: Sequence[SampleLine], file: Path) -> None:
    """Write the page of lines of samples."""
    prompts = [
        AnsweredPrompt(
            dialogue(same[0].prompt, same[0].messages),
            len(same[0].answers),
            [turn for line in same for turn in answer_turns(line)],
        )
        for same in by_prompt(lines).values()
    ]
    html = render(
        "page.html",
        title=title,
        top=[],
        problems=[],
        sections=[Section("Answers", "answers.html", prompts)],
        charts=[],
        colours=LINE_COLOURS,
        library="",
    )
    write_output(file, html)
