"""Seeds that follow from the recipe's, for draws that must not repeat what training draws.

Orders of rows need none: Python's `random.Random` takes a text such as `shuffle:3`, and no two texts share a stream.
"""

from typing import Final, Literal

from rlhf.recipe.bounds import SEED_COUNT

SeedName = Literal["heldout_answers", "second_model"]

# Recorded results were drawn with these offsets. They are so far apart that recipes with seeds below 7,000 never meet.
SEED_OFFSETS: Final[dict[SeedName, int]] = {
    "heldout_answers": 7_000,  # sampled answers to held-out prompts
    "second_model": 1_000_000,  # the reward model that only measures
}


def derived_seed(seed: int, name: SeedName, number: int = 1) -> int:
    """Return the seed of the draws that are called `name`, or of the `number`-th such draws; it is below 2^32 too."""
    return (seed + number * SEED_OFFSETS[name]) % SEED_COUNT
