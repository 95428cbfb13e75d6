"""Rollouts and the tensors that belong to them, cut to some of their rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.data.batch import Rollout, TrainingBatch


@dataclass(kw_only=True)
class Batch(TrainingBatch):
    scores: Tensor  # (B,)
    logp: Tensor  # (B, R)
    absent: Tensor | None = None


ROLLOUT = Rollout(
    ids=torch.arange(21).view(3, 7),
    prompt_length=torch.tensor([2, 1, 3]),
    response_length=torch.tensor([2, 4, 1]),
    ended=torch.tensor([True, False, True]),
)
BATCH = Batch(
    rollout=ROLLOUT,
    judged=torch.tensor([True, True, False]),
    mask=ROLLOUT.mask,
    scores=torch.tensor([0.5, 1.5, 2.5]),
    logp=torch.arange(12.0).view(3, 4),
)


def test_rows_are_as_wide_as_the_longest_among_them():
    part = BATCH.rows(torch.tensor([2, 0]))
    assert part.scores.tolist() == [2.5, 0.5] and part.absent is None
    assert part.judged.tolist() == [False, True] and part.mask.sum(1).tolist() == [1, 2]
    assert BATCH.counted.tolist() == [2, 4, 0]
    assert part.logp.tolist() == [[8, 9], [0, 1]]
    assert part.rollout.ids.tolist() == [[14, 15, 16, 17], [0, 1, 2, 3]]
    assert part.rollout.mask.tolist() == [[True, False], [True, True]]
    assert BATCH.logp.shape == (3, 4), "the batch stays as it is"


def test_with_fewer_rows_than_ranks_some_ranks_have_none(monkeypatch):
    shares = []
    for rank in range(4):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 4)):
            monkeypatch.setenv(name, str(value))
        shares.append([rows.tolist() for rows in ROLLOUT.sharded_by_length(2)])
    assert shares == [[[0]], [[2]], [[1]], []]


def test_tokens_and_their_predictors_follow_the_prompt_of_each_row():
    assert ROLLOUT.mask.sum(1).tolist() == [2, 4, 1]
    assert [row[real].tolist() for row, real in zip(ROLLOUT.tokens, ROLLOUT.mask, strict=True)] == [
        [2, 3],
        [8, 9, 10, 11],
        [17],
    ]
    assert [row[real].tolist() for row, real in zip(ROLLOUT.predictors, ROLLOUT.mask, strict=True)] == [
        [1, 2],
        [0, 1, 2, 3],
        [2],
    ]
