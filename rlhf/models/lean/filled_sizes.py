"""The few sizes up to which joined rows are filled, so that few captured graphs serve them all.

A plan reads this file, so it needs no torch.
"""

from typing import NamedTuple

# Steps from nothing to the largest micro-batch, to which others are rounded up. A step is a multiple of `UNIT`, which
# suits kernels of matrix products. A slot of a response costs a row of logits, a key hardly anything.
TOKEN_STEPS, SLOT_STEPS, KEY_STEPS, UNIT = 16, 2, 4, 16


class Sizes(NamedTuple):
    """What joined rows have in all."""

    tokens: int
    keys: int  # 0: the tokens themselves, where no prompt is shared


def filled_up(sizes: Sizes, most: Sizes) -> Sizes:
    """Return the sizes of a graph for joined rows of `sizes`, where the largest micro-batch has `most`.

    One token more is the least. Rows as long as HH-RLHF's take a tenth more, in micro-batches of four.
    """
    tokens = _rounded_up(sizes.tokens + 1, most.tokens + 1, TOKEN_STEPS)
    if not sizes.keys:
        return Sizes(tokens, 0)
    most_keys = most.keys + _rounded_up(most.tokens + 1, most.tokens + 1, TOKEN_STEPS) - most.tokens
    return Sizes(tokens, _rounded_up(sizes.keys + tokens - sizes.tokens, most_keys, KEY_STEPS))


def filled_slots(longest: int, most: int) -> int:
    """Return the slots of each response where the longest one has so many tokens, of at most `most`."""
    return min(_rounded_up(longest, most, SLOT_STEPS), most)


def _rounded_up(count: int, most: int, steps: int) -> int:
    """Return `count`, rounded up to one of so many equal steps to `most` or a little more."""
    step = -(-most // (steps * UNIT)) * UNIT
    return -(-count // step) * step
