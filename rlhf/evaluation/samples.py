"""Answers to held-out prompts for reading: the rows of samples.jsonl, and the few that a command shows at its end."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor

from rlhf.data.corpus import Corpus, Prompt
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.data.worlds import gym
from rlhf.evaluation.policies import PolicySamples
from rlhf.files import JsonObject
from rlhf.run.evidence import judgements
from rlhf.run.outcomes import Example, Examples

LabelT = TypeVar("LabelT", bound=str)  # names of policies
SHOWN_AT = (1 / 4, 1 / 2, 3 / 4)  # of all gains, from the least to the largest


def sample_rows(
    tokenizer: DialogueTokenizer,
    prompts: Sequence[Prompt],
    samples: Mapping[LabelT, PolicySamples],
    expected: Mapping[Prompt, str] | None = None,
) -> list[JsonObject]:
    """Return a row for each prompt with the answer of every policy; with several samples a numbered row for each.

    `expected`: the answer that a prompt should get, where the data have one.
    """
    rows = []
    copies = next(iter(samples.values())).samples_per_prompt
    for i in range(len(prompts) * copies):
        prompt = prompts[i // copies]
        row = written(tokenizer, prompt)
        if copies > 1:
            row["sample"] = i % copies
        if expected and prompt in expected:
            row["expected"] = expected[prompt]
        rows.append(row | {name: _answer(policy, i) for name, policy in samples.items()})
    return rows


def written(tokenizer: DialogueTokenizer, prompt: Prompt) -> JsonObject:
    """Return a prompt as text, and its messages where the text cannot be parsed back into them."""
    row: JsonObject = {"prompt": tokenizer.prompt_text(prompt)}
    if tokenizer.template != "hh":
        row["messages"] = [{"role": message.role, "content": message.content} for message in prompt]
    return row


def _answer(policy: PolicySamples, i: int) -> JsonObject:
    """Return an answer of a policy with all that judges it."""
    answer: JsonObject = {"response": policy.texts[i]}
    answer |= _given(policy.judgements, i)
    if policy.rewards:
        answer["rewards"] = _given(policy.rewards, i)
    return answer


def _given(by_name: Mapping[str, Tensor], i: int) -> dict[str, float]:
    """Return the numbers of an answer by name, of those that have a verdict on it."""
    given = {name: numbers[i].item() for name, numbers in by_name.items()}
    return {name: number for name, number in given.items() if not math.isnan(number)}


def expected_answers(corpus: Corpus) -> dict[Prompt, str]:
    """Return the right answer to each prompt that has one in the data, as text.

    Of several right answers it is the first: only a reward that compares with them refuses such data. What people chose
    of two answers is none: it may be wrong.
    """
    expected: dict[Prompt, str] = {}
    for row in (*corpus.bare_prompts, *corpus.examples):
        if row.right_answer is not None and (right := gym.right_answer(row.right_answer)):
            expected.setdefault(row.prompt, right)
    return expected


def examples(prompts: Sequence[Prompt], samples: Mapping[LabelT, PolicySamples]) -> Examples:
    """Return three prompts with the answers of every policy, chosen so that they are typical of the gain.

    `samples` begins with the start; the gain is that of the second policy over it, in the judgement that counts most.
    Prompts are those at a quarter, half and three quarters of all gains; of equal gains the first whose answer changed.
    Without a judgement they are the first whose answer changed.
    """
    policies = list(samples.values())
    before, after = policies[0], policies[min(1, len(policies) - 1)]
    changed = [a != b for a, b in zip(before.texts, after.texts, strict=True)]
    old, new = _judged(before), _judged(after)
    name = next((name for name in judgements(after.rewards) if name in old and name in new), None)
    if name is None:
        order = sorted(range(len(changed)), key=lambda i: (not changed[i], i))
        chosen, rule = order[: len(SHOWN_AT)], "the first whose answer changed"
    else:
        gains = (new[name] - old[name]).tolist()
        judged = sorted((i for i, gain in enumerate(gains) if not math.isnan(gain)), key=lambda i: gains[i])
        chosen, rule = [], f"at a quarter, half and three quarters of the gains in {_words(name)}"
        for share in SHOWN_AT if judged else ():
            gain = gains[judged[int(share * len(judged))]]
            equal = [i for i in judged if gains[i] == gain and i not in chosen]
            chosen += sorted(equal, key=lambda i: (not changed[i], i))[:1]
    return Examples(rule, [_example(prompts[i // before.samples_per_prompt], samples, i, name) for i in chosen])


def _judged(policy: PolicySamples) -> dict[str, Tensor]:
    """Return the numbers (N,) of each judge and reward function."""
    return {**policy.rewards, **policy.judgements}


def _words(judgement: str) -> str:
    return judgement.replace("_", " ")


def _example(prompt: Prompt, samples: Mapping[LabelT, PolicySamples], i: int, judgement: str | None) -> Example:
    """Return the last turn of the user, and each policy's answer under its name and judgement."""
    question = next((message.content for message in reversed(prompt) if message.role == "user"), prompt[-1].content)
    shown = {}
    for name, policy in samples.items():
        given = _given(_judged(policy), i).get(judgement or "")
        number = "" if judgement is None or given is None else f" ({_words(judgement)} {given:.2f})"
        shown[name + number] = policy.texts[i]
    return Example(question, shown)
