"""Scores of encoded answers, and figures of a reward model: accuracy, margin, length bias."""

from collections.abc import Callable, Hashable, Sequence
from statistics import correlation, fmean

import torch

from rlhf.data.tokenize import Encoded, pad_right
from rlhf.models.shared_base import SharedBase
from rlhf.recipe.stages import RM, SECOND_RM, RewardModelName, ScoreRole
from rlhf.run.directory import StageRun
from rlhf.run.layout import ADAPTER, SUMMARY
from rlhf.stats import clustered_share, outcomes

SCORE_ROLES: dict[RewardModelName, ScoreRole] = {RM: "reward", SECOND_RM: "second_reward"}


def add_reward_models(shared: SharedBase, run: StageRun) -> None:
    """Add the finished reward models that the recipe has, each as its role, with its head."""
    for stage, role in SCORE_ROLES.items():
        if run.loaded.recipe.section(stage) is not None and (run.folder(stage) / SUMMARY).exists():
            shared.add_reward(run.folder(stage) / ADAPTER, role)


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


def reward_model_figures(
    margins: Sequence[float], length_differences: Sequence[int], prompts: Sequence[Hashable]
) -> dict[str, float]:
    """Return metrics of a reward model from its margins on held-out pairs: scores of chosen less rejected answers.

    `length_differences`: tokens of the chosen answer less those of the rejected one. Pairs of one prompt may depend on
    each other.
    """
    correct = outcomes(margins)
    share = clustered_share(correct, prompts)
    metrics = {
        "accuracy": fmean(correct),
        "accuracy_low": share.low,
        "accuracy_high": share.high,
        "margin": fmean(margins),
    }
    for name, sign in (("longer", 1), ("shorter", -1)):
        rows = [r for r, d in zip(correct, length_differences, strict=True) if d * sign > 0]
        if rows:
            metrics[f"accuracy_chosen_{name}"] = fmean(rows)
    if len(set(length_differences)) > 1 and len(set(margins)) > 1:
        metrics["margin_length_correlation"] = correlation(margins, length_differences)
    return metrics
