"""Pairs of two policies' answers to the same held-out prompts, as raters see them."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rlhf.data.transcripts import parse_hh
from rlhf.errors import UserError
from rlhf.recipe.stages import EVALUATE, POLICIES, SFT
from rlhf.run.finished import finished_evaluation
from rlhf.run.layout import SAMPLES
from rlhf.run.reader import read_lines
from rlhf.run.records import SampleLine
from rlhf.terminal import harmless

SPEAKERS = {"system": "Instructions", "user": "Person", "assistant": "Assistant"}

AnswerOrder = Literal["ab", "ba"]  # in which the two answers are shown


class Pair(NamedTuple):
    """Two answers to the prompt of row `item`, as they are shown; `digest` is a hash of the three texts.

    `values`: what a judge or a reward function gave a and b, by its name.
    """

    item: int
    digest: str
    prompt: str
    a: str
    b: str
    values: dict[str, tuple[float, float]]
    turns: Sequence[tuple[str, str]] = ()  # the prompt as a dialogue: speaker and text

    def in_order(self, order: AnswerOrder) -> tuple[str, str]:
        """Return the two answers as they are shown."""
        return (self.a, self.b) if order == "ab" else (self.b, self.a)


class PairedAnswers(NamedTuple):
    """Pairs of two policies' answers that differ, the number of `equal` ones, and the file of ratings."""

    a: str
    b: str
    pairs: list[Pair]
    equal: int
    file: Path


def pair_answers(run_directory: Path, a: str | None = None, b: str | None = None) -> PairedAnswers:
    """Return pairs of two policies' answers, from the evaluation in the run directory `<out>/<recipe>/<version>`.

    The policies are sft (base where there is none) and the first trained one of POLICIES by default. If each policy
    gave several answers to a prompt, the first ones are paired: a prompt counts once. Raises UserError without a
    finished evaluation, without such policies, and if all answers are equal.
    """
    folder = run_directory / EVALUATE
    finished_evaluation(run_directory)
    rows = read_lines(folder / SAMPLES, SampleLine)
    names = [name for name in (rows[0].answers if rows else ()) if all(name in row.answers for row in rows)]
    a = a or (SFT if SFT in names else "base")
    b = b or next((name for name in POLICIES if name in names and name != a), None)
    if a not in names or b not in names or a == b:
        raise UserError(f"{folder / SAMPLES}: no two policies {a} and {b}; name --a and --b out of {', '.join(names)}")
    pairs = [_pair(index, row, a, b) for index, row in enumerate(rows) if row.sample == 0]
    differing = [pair for pair in pairs if pair.a != pair.b]
    if not differing:
        raise UserError(f"{folder / SAMPLES}: {a} and {b} gave equal answers to all {len(pairs)} prompts")
    return PairedAnswers(a, b, differing, len(pairs) - len(differing), run_directory / "ab" / f"{a}-vs-{b}.jsonl")


def _pair(index: int, row: SampleLine, a: str, b: str) -> Pair:
    """Return the answers of policies `a` and `b` in row `index` as a pair."""
    first, second = row.answers[a], row.answers[b]
    values = {key: (x, second.given[key]) for key, x in first.given.items() if key in second.given}
    texts = row.prompt, first.response, second.response
    digest = hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]
    prompt, response_a, response_b = (harmless(text).strip() for text in texts)
    return Pair(index, digest, prompt, response_a, response_b, values, turns(row.prompt, row.messages))


def turns(prompt: str, messages: Sequence[object] = ()) -> list[tuple[str, str]]:
    """Return a prompt as a dialogue, (speaker, text) for each turn, safe to be shown.

    `messages` are used if there are any. Otherwise the prompt is read as a transcript; any other text is one turn of
    the speaker "Prompt".
    """
    known = [message for message in messages if isinstance(message, dict)]
    if known:
        dialogue = [(SPEAKERS.get(str(m.get("role")), "Prompt"), str(m.get("content", ""))) for m in known]
    else:
        dialogue = [(SPEAKERS[turn.role], turn.content) for turn in parse_hh(prompt) if turn.content.strip()]
        if not any(speaker == SPEAKERS["user"] for speaker, _ in dialogue):
            dialogue = [("Prompt", prompt)]
    return [(speaker, harmless(text).strip()) for speaker, text in dialogue]
