"""What the base answers before anything is trained: how long responses have to be, and how often they are rewarded."""

import math
import time
from collections.abc import Callable, Sequence
from statistics import mean
from typing import TYPE_CHECKING, NamedTuple

from rlhf.new.data import Asked
from rlhf.recipe.base import BaseSpec
from rlhf.stages.online.rewards import RewardFunction, json_messages

if TYPE_CHECKING:
    from rlhf.data.tokenize import DialogueTokenizer

LARGEST = 500e6  # parameters of a base that is asked: it takes seconds
SHORTEST = 16  # tokens of a response


class Probe(NamedTuple):
    """Rewards of a base's responses by the tokens to which they were cut; the length that is enough."""

    rewards: dict[int, float]  # without those of lengths that it had no time for
    prompts: int
    most: int  # tokens that a response may have

    @property
    def tokens(self) -> int:
        """Return the fewest tokens with which the base gets half of what it gets with any number of them.

        The time of a step grows with them, and what is learned first is to answer within them. Where longer responses
        had no time, and none of the shorter ones was rewarded, it is as many as there may be.
        """
        best = max(self.rewards.values())
        if self.most not in self.rewards and best <= 0:
            return self.most
        return min(tokens for tokens, reward in self.rewards.items() if reward >= best - abs(best) / 2)

    @property
    def words(self) -> str:
        """Return in words what was seen."""
        found = ", ".join(f"{reward:.2g} in {tokens} tokens" for tokens, reward in self.rewards.items())
        nothing = "" if any(self.rewards.values()) else "; nothing is learned where no response is ever rewarded"
        if self.most not in self.rewards:
            nothing = f"; it had no time for responses of {self.most} tokens"
        return f"the base was asked {self.prompts} prompts, and its mean reward was {found}{nothing}"


def ask(
    spec: BaseSpec,
    tokenizer: "DialogueTokenizer",
    functions: Sequence[RewardFunction],
    asked: Sequence[Asked],
    prompt_tokens: int,
    most: int,
    seconds: float = math.inf,
    done: Callable[[float], None] = lambda share: None,
) -> Probe | None:
    """Return what the base gets for responses of up to `most` tokens, also cut to half of them, a quarter, and so on.

    seconds: in which it is asked, from loading it on; None is returned where that is too little for the shortest.
    done: told the share of the answers that is there, from 0 to 1.

    Raises what loading the base raises, and UserError where a function fails.
    """
    import torch

    from rlhf.models.loading import load_base
    from rlhf.rollout.decoding import Sampling
    from rlhf.rollout.engine import sample

    end, answered = time.monotonic() + seconds, most

    def told(share: float) -> bool:
        nonlocal answered
        done(share)
        if too_late := time.monotonic() > end:
            answered = round(share * most) + 1  # the first token is there before the first step
        return too_late

    base = load_base(spec, torch.device("cpu"))
    prompts, _ = tokenizer.encode_prompts([each.prompt for each in asked], prompt_tokens)
    given: dict[str, Sequence[object]] = {
        "prompts": [tokenizer.prompt_text(each.prompt) for each in asked],
        "messages": [json_messages(each.prompt) for each in asked],
        "answer": [each.answer for each in asked],
    }
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        sampling = Sampling(prompt_tokens, most, 1.0, len(asked))
        responses = sample(base, prompts, tokenizer, sampling, done=told).response_ids
    rewards = {}
    for tokens in (tokens for tokens in _lengths(most) if tokens <= answered):
        cut = [[i for i in ids[:tokens] if i != tokenizer.eos_id] for ids in responses]
        completions = [tokenizer.decode(ids) for ids in cut]
        lists = given | {"completions": completions, "completion_ids": cut}
        numbers = [function(lists) for function in functions]
        rewards[tokens] = mean(sum(number or 0.0 for number in of_one) for of_one in zip(*numbers, strict=True))
    return Probe(rewards, len(asked), most) if rewards else None


def _lengths(most: int) -> list[int]:
    """Return numbers of tokens from SHORTEST on, each twice the one before, and `most`."""
    lengths = [min(SHORTEST, most)]
    while lengths[-1] < most:
        lengths.append(min(2 * lengths[-1], most))
    return lengths
