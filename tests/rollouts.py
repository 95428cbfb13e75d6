"""Made-up rollouts for tests of PPO."""

from collections.abc import Sequence

import torch

from rlhf.data.batch import Rollout, collate
from rlhf.data.tokenize import Codec

LENGTHS = [1, 12, 5, 3, 9, 2, 7, 4]  # tokens of the responses


def made_up_rollout(prompts: Sequence[list[int]], codec: Codec, generator: torch.Generator) -> Rollout:
    """Responses of LENGTHS tokens: the first has EOS only, the second is cut off without EOS."""
    responses = [[*torch.randint(10, 300, (n - 1,), generator=generator).tolist(), codec.eos_id] for n in LENGTHS]
    responses[1][-1] = 11
    return collate(prompts, responses, codec.pad_id, codec.eos_id)
