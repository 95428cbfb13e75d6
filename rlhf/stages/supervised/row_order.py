"""The order in which SFT, reward model, DPO and KTO take their rows, and each rank's share of it."""

import math
import random
from collections.abc import Iterator, Sequence

from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import Sampler

from rlhf.process import distributed


class LengthBuckets(Sampler[int]):
    """Sampler in which rows of similar length share an optimizer's batch; the batches come in random order.

    The order is a function of seed and epoch. Micro-batches are slices of such a batch, shortest rows first, so that
    their size changes no result. transformers' own grouping orders each of its large windows from long rows to short
    ones, so that training always ends on the shortest.
    """

    WINDOW = 16  # batches that are sorted together

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int):
        self.lengths, self.batch_size, self.seed = lengths, batch_size, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        rng = random.Random(f"{self.seed}:{self.epoch}")
        rows = list(range(len(self.lengths)))
        rng.shuffle(rows)
        batches: list[list[int]] = []
        for start in range(0, len(rows), self.batch_size * self.WINDOW):
            window = sorted(rows[start : start + self.batch_size * self.WINDOW], key=lambda row: self.lengths[row])
            batches += [window[i : i + self.batch_size] for i in range(0, len(window), self.batch_size)]
        short = [batch for batch in batches if len(batch) < self.batch_size]  # must come last, or it shifts the others
        full = [batch for batch in batches if len(batch) == self.batch_size]
        rng.shuffle(full)
        return (row for batch in (*full, *short) for row in batch)


class ShardedBatches(Sampler[list[int]]):
    """Micro-batches of one rank: the rows of each optimizer's batch are assigned to the ranks in turn.

    All ranks together make the steps that one process makes. A short last batch gives every rank the same number of
    rows; the few rows left over, fewer than there are ranks, are not used in this epoch.
    """

    def __init__(self, order: LengthBuckets | SeedableRandomSampler, micro_batch: int, accumulated: int):
        self.order, self.micro_batch, self.accumulated = order, micro_batch, accumulated

    def set_epoch(self, epoch: int) -> None:
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return math.ceil(len(self.order) // distributed.world() / self.micro_batch)

    def __iter__(self) -> Iterator[list[int]]:
        order, world = list(self.order), distributed.world()
        size = self.micro_batch * self.accumulated * world
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            own_batch = distributed.own_rows(batch[: len(batch) // world * world])
            yield from (own_batch[i : i + self.micro_batch] for i in range(0, len(own_batch), self.micro_batch))
