"""Made-up rollouts for tests of PPO, RLOO and GRPO, and what a policy says of them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rlhf.data.batch import Rollout, collate
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.models.shared_base import SharedBase

LENGTHS = [1, 12, 5, 3, 9, 2, 7, 4]  # tokens of the responses
GROUP = 4  # responses to a prompt


def made_up_rollout(prompts: Sequence[list[int]], tokenizer: DialogueTokenizer, generator: torch.Generator) -> Rollout:
    """Responses of LENGTHS tokens: the first has EOS only, the second is cut off without EOS."""
    responses = [[*torch.randint(10, 300, (n - 1,), generator=generator).tolist(), tokenizer.eos_id] for n in LENGTHS]
    responses[1][-1] = 11
    return collate(prompts, responses, tokenizer.pad_id, tokenizer.eos_id)


def varied_rollout(tokenizer: DialogueTokenizer, generator: torch.Generator) -> Rollout:
    """Made-up dialogues with prompts of many lengths too."""
    prompts = [torch.randint(10, 300, (n,), generator=generator).tolist() for n in (4, 3, 6, 2, 5, 2, 3, 4)]
    return made_up_rollout(prompts, tokenizer, generator)


def grouped_rollout(tokenizer: DialogueTokenizer, generator: torch.Generator) -> Rollout:
    """Two prompts with GROUP made-up responses each."""
    return made_up_rollout([[1, 7, 8, 9]] * GROUP + [[1, 40, 41, 42, 43, 44]] * GROUP, tokenizer, generator)


def sampler_weight(old: Tensor, sampled: Tensor, correction: str, cap: float) -> Tensor:
    """Weights (n,) of a response's tokens for a sampler that differs, written again: a bounded p / q."""
    if correction == "none":
        return torch.ones(len(old))
    d = [a - b for a, b in zip(old.tolist(), sampled.tolist(), strict=True)]
    ratios = [math.exp(sum(d))] * len(d) if correction.startswith("sequence") else [math.exp(x) for x in d]
    return torch.tensor([r if r <= cap else 0.0 if correction.endswith("mask") else cap for r in ratios])


@torch.no_grad()
def mean_entropy(shared: SharedBase, rollout: Rollout, temperature: float) -> float:
    """Mean entropy of the policy over the real response tokens, from whole logits, row by row."""
    entropies: list[float] = []
    with shared.role("policy"):
        for ids, start, count in zip(rollout.ids, rollout.prompt_length, rollout.response_length, strict=True):
            logits = shared.base(input_ids=ids[None, : start + count]).logits[0, start - 1 : -1]
            logp = (logits / temperature).log_softmax(-1)
            entropies += (-(logp.exp() * logp).sum(-1)).tolist()
    return sum(entropies) / len(entropies)
