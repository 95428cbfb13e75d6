"""Answers to held-out prompts for reading: the rows of samples.jsonl."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rlhf.data.corpus import Corpus, Prompt
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.data.worlds import gym
from rlhf.evaluation.policies import PolicySamples
from rlhf.files import JsonObject
from rlhf.run.evidence import OF_FUNCTION

LabelT = TypeVar("LabelT", bound=str)  # names of policies


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
        row: JsonObject = {"prompt": tokenizer.prompt_text(prompt)}
        if tokenizer.template != "hh":  # only a transcript can be parsed back into messages
            row["messages"] = [{"role": message.role, "content": message.content} for message in prompt]
        if copies > 1:
            row["sample"] = i % copies
        if expected and prompt in expected:
            row["expected"] = expected[prompt]
        rows.append(row | {name: _answer(policy, i) for name, policy in samples.items()})
    return rows


def _answer(policy: PolicySamples, i: int) -> JsonObject:
    """Return an answer of a policy with all that has a verdict on it, reward functions under `rewards`."""
    answer: JsonObject = {"response": policy.texts[i]}
    rewards: JsonObject = {}
    for name, numbers in policy.judged.items():
        if not numbers[i].isnan():
            given = rewards if name.startswith(OF_FUNCTION) else answer
            given[name.removeprefix(OF_FUNCTION)] = numbers[i].item()
    return answer | ({"rewards": rewards} if policy.functions() else {})


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
