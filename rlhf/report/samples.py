"""The section of samples: held-out prompts as a table, with what was said before and after training."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlhf.rating.pairs import SPEAKERS
from rlhf.recipe import StageName
from rlhf.recipe.stages import EVALUATE, POLICIES, SFT, STARTS
from rlhf.report.parts import STAGE_TITLES, Charts, Section, Turn, dialogue
from rlhf.report.runs import RunRecords, check_evaluation
from rlhf.run import reader
from rlhf.run.evidence import judgements
from rlhf.run.layout import SAMPLES
from rlhf.run.outcomes import Answer, SampleLine
from rlhf.terminal.wording import varying

ROWS = 200  # rows of each table, at most
OPEN = 12  # rows of the newest step that are shown at once; the others are folded


class Said(NamedTuple):
    """A cell: an answer, what it was given, and its kind: good or bad beside the start's, or right or wrong."""

    text: str
    given: str
    kind: str


class SampleRow(NamedTuple):
    """A held-out prompt: its question, its other turns, the answers in the order of the columns, the expected one."""

    step: str
    question: str
    before: list[Turn]
    answers: list[Said]
    expected: str


class SampleTable(NamedTuple):
    """The samples of one run, or of several that answered the same prompts. `name` is "" for a single run."""

    name: str
    columns: list[str]
    steps: bool
    expected: bool
    open: list[SampleRow]
    folded: list[SampleRow]
    total: int


Key = tuple[int, str, int]  # step, prompt and number of the sample
Column = tuple[str, str]  # a run and its policy


def sections_of_samples(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return held-out prompts with every policy's answer, in the order of the record.

    They are those of the evaluation; without one, of a policy's own last samples. Runs that answered the same prompts
    share a table.
    """
    lines = {run.name: kept for run in runs if (kept := _lines(run))}
    keys = {name: {_key(line) for line in of_run} for name, of_run in lines.items()}
    shared = len(lines) > 1 and all(of_run == next(iter(keys.values())) for of_run in keys.values())
    groups = [lines] if shared else [{name: of_run} for name, of_run in lines.items()]
    tables = [_table(group, "" if len(lines) == 1 or shared else next(iter(group))) for group in groups]
    return [Section("Samples", "samples.html", tables)] if tables else []


def _lines(run: RunRecords) -> list[SampleLine]:
    """Return the newest samples of a run's evaluation, or else of the first stage that has some; [] without any."""
    check_evaluation(run)
    stages: tuple[StageName, ...] = (EVALUATE, *POLICIES, SFT)
    files = [run.run_directory / stage / SAMPLES for stage in stages]
    rows = next((rows for file in files if (rows := reader.read_lines(file, SampleLine))), [])
    return sorted(rows, key=lambda row: -row.step)  # of one step they keep their order


def _key(line: SampleLine) -> Key:
    return line.step, line.prompt, line.sample


def _table(lines: Mapping[str, Sequence[SampleLine]], name: str) -> SampleTable:
    """Return the table of one run's lines, or of several runs' with the same prompts."""
    first = next(iter(lines.values()))
    said_by: dict[Column, dict[Key, str]] = {}  # a policy that said the same in an earlier run has one column
    shared: set[str] = set()
    for run, of_run in lines.items():
        for policy in dict.fromkeys(name for row in of_run for name in row.answers):
            said = {_key(row): row.answers[policy].response for row in of_run if policy in row.answers}
            if any(name == policy and said == other for (_, name), other in said_by.items()):
                shared.add(policy)
            else:
                said_by[run, policy] = said
    columns = list(said_by)
    by_key = {run: {_key(line): line for line in of_run} for run, of_run in lines.items()}
    shown = first[:ROWS]
    questions = _questions(shown)
    judged = _judgement(first)
    given = {a.given.get(judged) for r in first for a in r.answers.values()} if judged else set()
    right_or_wrong = given <= {0, 1, None}
    rows = []
    for line, (question, before) in zip(shown, questions, strict=True):
        answers = []
        for run, policy in columns:
            answered = by_key[run][_key(line)].answers if _key(line) in by_key[run] else {}
            start = next((answered[name] for name in STARTS if name in answered), None)
            answers.append(_said(answered.get(policy), start, judged, right_or_wrong))
        rows.append(SampleRow(str(line.step), question, before, answers, line.expected or ""))
    once = {policy for policy in shared if [name for _, name in columns].count(policy) == 1}
    named = [f" ({run})" if len(lines) > 1 and policy not in once else "" for run, policy in columns]
    titles = [STAGE_TITLES.get(policy, policy) + name for (_, policy), name in zip(columns, named, strict=True)]
    at_once = sum(row.step == rows[0].step for row in rows[:OPEN])
    return SampleTable(
        name,
        titles,
        len({row.step for row in rows}) > 1,
        any(row.expected for row in rows),
        rows[:at_once],
        rows[at_once:],
        len(first),
    )


def _questions(lines: Sequence[SampleLine]) -> list[tuple[str, list[Turn]]]:
    """Return the last turn of the user of each prompt, and the turns before it.

    A prompt that no template takes apart is shown from where prompts differ.
    """
    turns = [dialogue(line.prompt, line.messages) for line in lines]
    unknown = [of_line[0].text for of_line in turns if of_line[0].speaker not in SPEAKERS.values()]
    whole = iter(varying(unknown))
    found: list[tuple[str, list[Turn]]] = []
    for of_line in turns:
        if of_line[0].speaker not in SPEAKERS.values():
            found.append((next(whole), of_line[1:]))
            continue
        last = max((i for i, turn in enumerate(of_line) if turn.speaker == SPEAKERS["user"]), default=len(of_line) - 1)
        found.append((of_line[last].text, [*of_line[:last], *of_line[last + 1 :]]))
    return found


def _judgement(lines: Sequence[SampleLine]) -> str | None:
    """Return what judges the answers of a table; None where nothing does."""
    answers = [answer for line in lines for answer in line.answers.values()]
    known = {name for answer in answers for name in answer.given}
    functions = dict.fromkeys(name for answer in answers for name in answer.rewards)  # the first may have no verdict
    return next((name for name in judgements(functions) if name in known), None)


def _said(answer: Answer | None, start: Answer | None, judgement: str | None, right_or_wrong: bool) -> Said:
    """Return the cell of an answer."""
    if answer is None:
        return Said("", "", "")
    words = {"second_score": "2nd score"}
    given = " · ".join(f"{words.get(name, name.replace('_', ' '))} {value:.3g}" for name, value in answer.given.items())
    value = answer.given.get(judgement) if judgement else None
    if value is None:
        return Said(answer.response, given, "")
    if right_or_wrong:
        return Said(answer.response, ("✓ " if value else "✗ ") + given, "good" if value else "bad")
    of_start = start.given.get(judgement) if start and judgement else None
    change = 0.0 if of_start is None else value - of_start
    return Said(answer.response, given, "good" if change > 0 else "bad" if change < 0 else "")
