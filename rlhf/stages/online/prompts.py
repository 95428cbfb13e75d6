"""Prompts of a stage that learns from its own samples: those of each step, and the held-out ones."""

import torch

from rlhf.data.corpus import Prompt, Split
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.recipe.schema_online import OnlineOptions


class OnlinePrompts:
    """Training prompts with their token ids, and held-out prompts.

    train: prompts to sample responses to; `ids` are their token ids, `cut` of them shortened.
    validation: prompts that choose checkpoints.
    test: prompts on which the result is reported; the same ones unless the recipe sets validation apart.
    """

    def __init__(self, split: Split[Prompt], tokenizer: DialogueTokenizer, options: OnlineOptions, seed: int):
        self.options, self.seed = options, seed
        self.train = split.train[: options.max_samples]
        self.ids, self.cut = tokenizer.encode_prompts(self.train, options.max_prompt_length)
        self.validation = split.validation[: options.max_eval_samples]
        self.test = split.test[: options.max_eval_samples]
        self.has_validation = split.has_validation

    def of_step(self, step: int) -> list[int]:
        """Return the indices of the training prompts of a step."""
        count = self.options.batch_size // self.options.samples_per_prompt
        return prompt_order(len(self.train), step, count, self.seed)


def prompt_order(total: int, step: int, per_step: int, seed: int) -> list[int]:
    """Return the indices of one step's prompts among `total`: epoch after epoch, each in an order of its own.

    The order is a function of seed and step, so that a resumed run continues with the same prompts. It is one of
    places: the second epoch of a seed has the places of the first one of the next seed, and released results depend on
    it. Prompts still come in another order, because the seed has shuffled the rows before (`divide_rows`).
    """
    orders: dict[int, list[int]] = {}

    def at(position: int) -> int:
        epoch = position // total
        if epoch not in orders:
            orders[epoch] = torch.randperm(total, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        return orders[epoch][position % total]

    return [at(position) for position in range(step * per_step, (step + 1) * per_step)]
