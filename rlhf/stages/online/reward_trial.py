"""What rewards give before anything is trained on them: real answers beside junk that a policy may find first.

Junk says nothing about the prompt, and each kind of it has won in some training: an empty answer, one that does not
end, repetition, the prompt copied, an answer's form without its content, another language, many numbers, and the answer
to another prompt. Where it gets as much as real answers do, a policy learns it, because it is easier to say.
"""

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from statistics import fmean
from typing import NamedTuple

from rlhf.data.corpus import Prompt
from rlhf.data.rows import Document, Example, PreferencePair, PromptOnly, Row
from rlhf.data.scripts import script, words
from rlhf.data.worlds import gym
from rlhf.stages.online import reward_guest
from rlhf.stages.online.reward_call import JsonMessages, RewardFunction

LONG = 400  # words of junk that does not end
COURTESY = "I am happy to help you with that. "
OTHER_LANGUAGES = {"CJK": "I do not know how to answer that question."}  # by the script of the real answer
CHINESE = "我不知道如何回答这个问题。"  # to answers in any other script
# What is form and not content: tags, commands of TeX, keys of JSON, marks of headings and of GSM8K's answers.
FORM = re.compile(r"<[^<>]*>|\\[A-Za-z]+|\"[^\"]*\"(?=\s*:)|#+|(?P<number>\d+)|(?P<word>[^\W\d_]+)")


RowWithPrompt = Example | PreferencePair | PromptOnly
SUM = "sum"  # of several rewards, among their names


class Answer(NamedTuple):
    """An answer that rewards are tried on."""

    row: int  # index of the prompt
    kind: str  # chosen, rejected, response, right answer, or a kind of junk
    text: str
    junk: bool


class Tried(NamedTuple):
    """What one reward gives: a number for each answer, None without a verdict; and the time of its longest call."""

    name: str
    numbers: list[float | None]
    seconds: float = 0.0
    slowest: str = ""  # the kind of answers in that call
    responses: int = 0  # in that call


class Means(NamedTuple):
    """The mean of a reward over its verdicts on each kind of answers, and the kinds of junk that win."""

    by_kind: dict[str, float | None]
    best: float | None  # mean of the real answers that get most; None where the rows have none
    winning: list[str]  # junk that gets at least as much


def drawn(rows: Sequence[Row], count: int, with_answer: bool) -> list[RowWithPrompt]:
    """Return at most `count` rows with a prompt, drawn by a fixed seed; `with_answer`: those with a right answer."""
    usable: list[RowWithPrompt] = [
        row
        for row in rows
        if not isinstance(row, Document)
        and not (with_answer and (isinstance(row, PreferencePair) or row.right_answer is None))
    ]
    return random.Random(0).sample(usable, min(count, len(usable)))


def right_answer(row: Row) -> str | None:
    """Return what rewards compare responses to a row's prompt with; None where there is nothing."""
    return row.right_answer if isinstance(row, Example | PromptOnly) else None


def answers_to(rows: Sequence[RowWithPrompt]) -> list[Answer]:
    """Return the real answers to each row's prompt and the junk, all of one kind together."""
    real = [_real(row) for row in rows]
    best = [next(iter(answers.values()), None) for answers in real]
    listed = [Answer(i, kind, text, False) for i, answers in enumerate(real) for kind, text in answers.items()]
    for i, row in enumerate(rows):
        listed += [Answer(i, kind, text, True) for kind, text in _junk(row.prompt, best, i)]
    kinds = list(dict.fromkeys(answer.kind for answer in listed))
    return sorted(listed, key=lambda answer: kinds.index(answer.kind))


def _real(row: RowWithPrompt) -> dict[str, str]:
    """Return the answers of a row by their kind, the best one first."""
    match row:
        case PreferencePair():
            return {"chosen": row.chosen, "rejected": row.rejected}
        case Example():
            named = "rejected" if row.good is False else "response"
            return {named: row.response} | ({} if row.right_answer is None else {"right answer": row.right_answer})
        case PromptOnly():
            plain = gym.right_answer(row.right_answer or "")
            return {"right answer": plain} if plain else {}


def _junk(prompt: Prompt, best: Sequence[str | None], index: int) -> Iterator[tuple[str, str]]:
    """Yield junk for a prompt, by its kind. `best` are the best answers to all prompts, that of this one at `index`."""
    answer, asked = best[index], prompt[-1].content
    plain = [word for text in (asked, answer or "") for word in words(text) if not re.search(r"\d", word)] or ["and"]
    yield "empty", ""
    yield "endless", " ".join(islice(cycle(dict.fromkeys(plain)), LONG))
    yield "repeated", COURTESY * (LONG // len(COURTESY.split()))
    yield "prompt copied", asked
    if answer is not None:
        yield "form without content", FORM.sub(_emptied, answer)
    yield "another language", OTHER_LANGUAGES.get(script(answer or asked) or "", CHINESE)
    yield "many numbers", " ".join(map(str, range(1, LONG // 2)))
    others = (text for text in (*best[index + 1 :], *best[:index]) if text not in (None, answer))
    if (other := next(others, None)) is not None:
        yield "answer to another prompt", other


def _emptied(found: re.Match[str]) -> str:
    return "0" if found["number"] else "x" if found["word"] else found[0]


def tried(
    function: RewardFunction,
    prompts: Sequence[str],
    right_answers: Sequence[str | None],
    answers: Sequence[Answer],
    tokens: Callable[[str], list[int]] | None,
    messages: Sequence[JsonMessages] | None = None,
) -> Tried:
    """Return what a function gives, called once for each kind of answers. Raises UserError as training would."""
    function.guest.ask(reward_guest.describe, target=function.target)  # imports it, which is no part of a call
    numbers: list[float | None] = []
    longest = (0.0, "", 0)
    for kind in dict.fromkeys(answer.kind for answer in answers):
        called = [answer for answer in answers if answer.kind == kind]
        ids = None if tokens is None else [tokens(answer.text) for answer in called]
        begun = time.perf_counter()
        numbers += function(
            [prompts[answer.row] for answer in called],
            [answer.text for answer in called],
            [right_answers[answer.row] for answer in called],
            ids,
            seed=0,
            messages=None if messages is None else [messages[answer.row] for answer in called],
        )
        longest = max(longest, (time.perf_counter() - begun, kind, len(called)))
    return Tried(function.name, numbers, *longest)


def total(rewards: Sequence[Tried], weights: Mapping[str, float]) -> Tried:
    """Return the weighted sum of rewards; none where a reward that counts has no verdict, as in training."""
    counted = [reward for reward in rewards if weights[reward.name]]
    parts = ([None if n is None else weights[reward.name] * n for n in reward.numbers] for reward in counted)
    columns = [[n for n in column if n is not None] for column in zip(*parts, strict=True)]
    return Tried(SUM, [sum(column) if len(column) == len(counted) else None for column in columns])


def means(reward: Tried, answers: Sequence[Answer]) -> Means:
    """Return the means of a reward over each kind of answers, and which junk gets as much as the best real kind."""
    by_kind: dict[str, float | None] = {}
    for kind in dict.fromkeys(answer.kind for answer in answers):
        verdicts = [
            n for n, answer in zip(reward.numbers, answers, strict=True) if answer.kind == kind and n is not None
        ]
        by_kind[kind] = fmean(verdicts) if verdicts else None
    junk = {answer.kind: answer.junk for answer in answers}
    best = max((mean for kind, mean in by_kind.items() if mean is not None and not junk[kind]), default=None)
    junk_means = {kind: mean for kind, mean in by_kind.items() if mean is not None and junk[kind]}
    winning = [kind for kind, mean in junk_means.items() if best is not None and mean >= best]
    return Means(by_kind, best, winning)
