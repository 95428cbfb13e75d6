"""Scores of encoded answers, and the accuracy of a reward model on pairs."""

from collections.abc import Callable
from statistics import fmean

import torch

from rlhf.data.tokenize import Encoded, pad_right
from rlhf.stats import outcomes


def scores_of(
    answers: list[Encoded], score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], pad_id: int, batch_size: int
) -> torch.Tensor:
    """Return scores (N,) float32 on the CPU, in the order given; batches are made by length.

    `score` takes right-padded ids (B, T) and the place of the last real token (B,), on the CPU, and returns (B,).
    """
    sequences = [side.prompt + side.response for side in answers]
    order = sorted(range(len(sequences)), key=lambda i: len(sequences[i]))
    scores = torch.empty(len(sequences))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        last = torch.tensor([len(sequences[i]) - 1 for i in rows])
        scores[rows] = score(pad_right([sequences[i] for i in rows], pad_id), last).float().cpu()
    return scores


def accuracy(differences: torch.Tensor) -> float:
    """Return the share of pairs with a positive score difference; a tie counts one half."""
    return fmean(outcomes(differences.tolist()))
