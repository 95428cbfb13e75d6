"""Preference pairs of several answers to one prompt, ranked by a reward model's scores or by a judge.

The answers are lines of samples, as `rlhf sample`, `rlhf score` and an evaluation write them. A judge compares each two
answers in both orders; an answer's rating is then its wins, a tie counted half, as the share of its comparisons.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlhf.data import rated
from rlhf.errors import UserError
from rlhf.rating import store
from rlhf.rating.export import readable_prompt
from rlhf.rating.pairs import Pair, PairedAnswers, pair_of
from rlhf.recipe.choices import RatedPairs
from rlhf.run.outcomes import SampleLine, by_prompt
from rlhf.run.reader import read_lines
from rlhf.terminal import excerpt


class Candidate(NamedTuple):
    """An answer to a prompt, the policy that gave it, and the reward model's score where it has one."""

    policy: str
    text: str
    score: float | None


class AnsweredPrompt(NamedTuple):
    """A line with the prompt, and the different answers to it, none of which is empty."""

    line: SampleLine
    candidates: list[Candidate]


class RankedPairs(NamedTuple):
    """Rows to write, how they were made, and the number of prompts with fewer than two different rated answers."""

    rows: list[dict[str, object]]
    counted: rated.Count
    alone: int


Ratings = Callable[
    [int], Sequence[float | None]
]  # of the candidates of a prompt, by the prompt's index; more is better


def read(files: Sequence[Path], policies: Sequence[str] = ()) -> list[AnsweredPrompt]:
    """Return the prompts of files of samples with the answers of these policies, or of all.

    Raises UserError for a file without samples, a policy without answers, and scores of two reward models.
    """
    lines: list[SampleLine] = []
    for file in files:
        if not (of_file := read_lines(file, SampleLine)):
            raise UserError(f"{file}: no samples there; `rlhf sample … --to FILE` writes them")
        names = {name for line in of_file for name in line.answers}
        if missing := [policy for policy in policies if policy not in names]:
            raise UserError(f"{file}: no answers of {missing[0]!r}; it has those of {', '.join(sorted(names))}")
        lines += of_file
    models = {line.reward_model for line in lines}
    if len(models) > 1:
        raise UserError("the answers have scores of different reward models: `rlhf score` all of them with one")
    return [AnsweredPrompt(same[0], _candidates(same, policies)) for same in by_prompt(lines).values()]


def _candidates(lines: Iterable[SampleLine], policies: Sequence[str]) -> list[Candidate]:
    """Return the answers of a prompt's lines that are not empty; of equal ones the first."""
    found: dict[str, Candidate] = {}
    for line in lines:
        for policy, answer in line.answers.items():
            text = answer.response.strip()
            if text and (not policies or policy in policies):
                found.setdefault(text, Candidate(policy, text, answer.score))
    return [*found.values()]


def by_score(prompts: Sequence[AnsweredPrompt]) -> Ratings:
    """Return the ratings by the reward model's scores. Raises UserError where no answer has one."""
    if not any(candidate.score is not None for prompt in prompts for candidate in prompt.candidates):
        raise UserError(
            "no answer has a score: `rlhf score FILE --to SCORED` gives it that of a run's reward model, or name a "
            "judge: --url and --model"
        )
    return lambda index: [candidate.score for candidate in prompts[index].candidates]


def to_judge(prompts: Sequence[AnsweredPrompt], file: Path) -> PairedAnswers:
    """Return each two answers to a prompt as a pair for a judge, whose ratings go to `file`."""
    pairs: list[Pair] = []
    for prompt in prompts:
        for first, second in itertools.combinations(prompt.candidates, 2):
            pairs.append(pair_of(len(pairs), prompt.line, first.text, second.text))
    return PairedAnswers("first", "second", pairs, 0, file)


def by_judge(prompts: Sequence[AnsweredPrompt], paired: PairedAnswers, rater: str) -> Ratings:
    """Return the ratings by the comparisons that a rater has made; of an answer that was in none, None."""
    known = {rating.pair: rating.choice for rating in store.current_ratings(paired.file) if rating.rater == rater}
    choices = iter(known.get((pair.item, pair.digest)) for pair in paired.pairs)
    ratings: list[list[float | None]] = []
    for prompt in prompts:
        won: list[list[float]] = [[] for _ in prompt.candidates]
        for first, second in itertools.combinations(range(len(won)), 2):
            share = store.WIN_OF_B.get(next(choices) or "")
            if share is not None:
                won[first].append(1 - share)
                won[second].append(share)
        ratings.append([sum(shares) / len(shares) if shares else None for shares in won])
    return ratings.__getitem__


def rank(prompts: Sequence[AnsweredPrompt], ratings: Ratings, name: str, how: RatedPairs) -> RankedPairs:
    """Return preference rows of the rated answers of each prompt: of the best and the worst, or of all.

    `name` says what rated them. Raises UserError for a prompt that cannot be read back.
    """
    count, rows, alone = rated.Count(), [], 0
    for index, (line, candidates) in enumerate(prompts):
        known = [(c, value) for c, value in zip(candidates, ratings(index), strict=True) if value is not None]
        if len(known) < 2:
            alone += 1
            continue
        answers = rated.Rated(readable_prompt(line, excerpt(line.prompt)), [*known], name, {})
        rows += [_row(pair) for pair in rated.pairs(answers, how, count)]
    return RankedPairs(rows, count, alone)


def _row(pair: Mapping[str, object]) -> dict[str, object]:
    """Return a preference row with texts for candidates; it names their policies."""
    chosen, rejected = pair["chosen"], pair["rejected"]
    assert isinstance(chosen, Candidate) and isinstance(rejected, Candidate)
    texts = {"chosen": chosen.text, "rejected": rejected.text}
    return {**pair, **texts, "chosen_from": chosen.policy, "rejected_from": rejected.policy}
