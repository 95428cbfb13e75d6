"""The scores of responses: the reward model's number, those of reward functions, and their weighted sum."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.data.batch import Rollout, on_device
from rlhf.errors import UserError
from rlhf.models.shared_base import SharedBase, check_scores
from rlhf.objectives.masked import masked_mean
from rlhf.objectives.rewards import shape_scores
from rlhf.process import distributed
from rlhf.recipe.schema_online import MODEL_REWARD, OnlineOptions, Ppo

ByName = dict[str, Tensor]  # a number (B,) for each response, by the name of the reward; NaN without a verdict


class ScoreNorm(NamedTuple):
    """Normalisation of scores: (score - mean) / sd."""

    mean: float = 0.0
    sd: float = 1.0


class FunctionRewards(NamedTuple):
    """What reward functions give responses, on the CPU."""

    by_name: ByName
    total: Tensor  # (B,) their weighted sum; NaN without a verdict of every function that counts


class Scores(NamedTuple):
    """The scores (B,) of responses."""

    by_name: ByName  # raw, of the reward model and of each function
    raw: Tensor  # their weighted sum; NaN where a response is not judged
    shaped: Tensor  # as they enter the rewards

    @property
    def judged(self) -> Tensor:
        """Return (B,) bool: which responses have a verdict of every reward that counts."""
        return ~self.raw.isnan()


@torch.no_grad()
def score(
    shared: SharedBase, rollout: Rollout, options: OnlineOptions, norm: ScoreNorm, functions: FunctionRewards | None
) -> Scores:
    """Return the weighted sum of the rewards, raw and shaped.

    Shaped, the reward model's part is normalised or squashed, and a response without EOS loses the penalty.
    """
    by_name: ByName = {}
    raw = shaped = torch.zeros(len(rollout.ids), device=rollout.ids.device)
    if options.model_scores:
        of_model = by_name[MODEL_REWARD] = reward_scores(shared, rollout, options.score_rows)
        squashed = isinstance(options, Ppo) and options.sigmoid_scores
        shaped_model = shape_scores(of_model, mean=norm.mean, sd=norm.sd, sigmoid=squashed)
        raw, shaped = options.model_weight * of_model, options.model_weight * shaped_model
    if functions is not None:
        by_name |= functions.by_name
        added = functions.total.to(raw.device)
        raw, shaped = raw + added, shaped + added
    shaped = shaped - (options.missing_eos_penalty or 0.0) * ~rollout.ended
    return Scores(by_name, raw, shaped)


def reward_scores(shared: SharedBase, rollout: Rollout, rows_at_once: int) -> Tensor:
    """Return the raw scores (B,) of the reward model. Each rank scores its share of the rows.

    Raises UserError unless all scores are finite.
    """
    scores = torch.zeros(len(rollout.ids), device=shared.device)
    with shared.role("reward"):
        for rows in rollout.sharded_by_length(rows_at_once):
            scores[on_device(rows, scores.device)] = shared.scores(rollout.rows(rows))
    distributed.all_sum(scores)
    check_scores(scores)
    return scores


def measure_score_norm(shared: SharedBase, sample_step: Callable[[int], Rollout], options: OnlineOptions) -> ScoreNorm:
    """Return mean and standard deviation of the reward model's scores of SFT's responses to training prompts.

    At least `norm_responses` responses are scored, in whole rollouts.
    Raises UserError when the scores are not finite, or do not differ: such a reward model has nothing to teach.
    """
    parts = []
    for step in range(math.ceil(options.norm_responses / options.batch_size)):
        rollout = sample_step(step)
        # keep the order of scoring: another would change the last bits of released results
        by_length = torch.cat(rollout.by_length(options.rollout_batch_size))
        parts.append(reward_scores(shared, rollout, options.rollout_batch_size)[by_length])
    scores = torch.cat(parts)
    norm = ScoreNorm(scores.mean().item(), scores.std().item())
    if not norm.sd > 0:
        raise UserError(
            f"the reward model gives every response the same score ({norm.mean:.4g}): look at rm/summary.json"
        )
    return norm


def mean_rewards(by_name: ByName) -> dict[str, Tensor]:
    """Return the mean of each reward over its verdicts, by the key of its metric; a reward without any has none."""
    means: dict[str, Tensor] = {}
    for name, raw in by_name.items():
        means |= mean_judged({f"rewards/{name}": raw}, ~raw.isnan())
    return means


def mean_judged(numbers: dict[str, Tensor], judged: Tensor) -> dict[str, Tensor]:
    """Return the mean of each number (B,) over the judged responses (B,) bool; no mean where none is judged."""
    return {key: masked_mean(x, judged) for key, x in numbers.items()} if judged.any() else {}
