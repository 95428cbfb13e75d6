"""Role passes over a rollout: log-probabilities, values, scores and their metrics."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf.data.batch import Rollout, on_device
from rlhf.errors import UserError
from rlhf.models.shared_base import SharedBase, check_scores
from rlhf.objectives.importance import importance_weights
from rlhf.objectives.masked import masked_mean, zero_pads
from rlhf.process import distributed
from rlhf.recipe.schema_online import OnlineOptions, Ppo
from rlhf.recipe.stages import SharedRole

# (b rows of a rollout, their hidden states (b, r, H)) -> (b, r), 0 after the end of a response
TokenFn = Callable[[Rollout, Tensor], Tensor]


class ScoreNorm(NamedTuple):
    """Normalisation of scores: (score - mean) / sd."""

    mean: float = 0.0
    sd: float = 1.0


def old_logprobs_and_values(shared: SharedBase, rollout: Rollout, options: Ppo) -> tuple[Tensor, Tensor]:
    """Return log-probabilities under the policy that sampled and the critic's values, each (B, R).

    Those of a policy with a head that is the critic come from one pass.
    """
    if options.value_model == "adapter":
        return logprobs(shared, "policy", rollout, options), values(shared, rollout, options)
    return logprobs_and_values(shared, rollout, options)


def logprobs(shared: SharedBase, role: SharedRole, rollout: Rollout, options: OnlineOptions) -> Tensor:
    """Return the log-probabilities (B, R) of the response tokens under a role, in nats."""
    (logp,) = _per_token(shared, role, rollout, options.score_rows, _logprobs_of_tokens(shared, options))
    return logp


def values(shared: SharedBase, rollout: Rollout, options: OnlineOptions) -> Tensor:
    """Return the values (B, R) before each response token, of a critic with an adapter."""
    (result,) = _per_token(shared, "value", rollout, options.score_rows, _values_of_tokens(shared))
    return result


def logprobs_and_values(shared: SharedBase, rollout: Rollout, options: OnlineOptions) -> tuple[Tensor, Tensor]:
    """Return log-probabilities under the policy and the values of a head on it, each (B, R), from one pass."""
    fns = _logprobs_of_tokens(shared, options), _values_of_tokens(shared)
    logp, result = _per_token(shared, "policy", rollout, options.score_rows, *fns)
    return logp, result


def _per_token(
    shared: SharedBase, role: SharedRole, rollout: Rollout, rows_at_once: int, *fns: TokenFn
) -> list[Tensor]:
    """Run `role` over the rollout, `rows_at_once` rows at a time, and apply each function to its hidden states.

    Return one (B, R) float32 tensor per function. Each rank works on its share of the rows.
    """
    mask = rollout.mask
    results = [torch.zeros(mask.shape, device=mask.device) for _ in fns]
    with shared.role(role):
        for rows in rollout.sharded_by_length(rows_at_once):
            micro_batch = rollout.rows(rows)
            hidden = shared.response_hidden(micro_batch)
            for result, fn in zip(results, fns, strict=True):
                result[on_device(rows, mask.device), : micro_batch.longest_response] = fn(micro_batch, hidden)
    distributed.all_sum(*results)
    return results


def _logprobs_of_tokens(shared: SharedBase, options: OnlineOptions) -> TokenFn:
    return lambda micro_batch, hidden: shared.logprobs(hidden, micro_batch, options.temperature)


def _values_of_tokens(shared: SharedBase) -> TokenFn:
    return lambda micro_batch, hidden: zero_pads(shared.values(hidden), micro_batch.mask)


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


def sampling_weights(
    rollout: Rollout, logp: Tensor, options: OnlineOptions
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the weights by which the recipe corrects a sampler that differs from `logp` (B, R); None: it does not."""
    if options.correction == "none":
        return None, None
    assert rollout.logprobs is not None  # sampling keeps them
    cap = options.sampling_correction_cap
    return importance_weights(logp, rollout.logprobs, rollout.mask, options.correction, cap)


def sampling_mismatch(
    rollout: Rollout, logp: Tensor, weights: Tensor | None = None, over_cap: Tensor | None = None
) -> dict[str, Tensor]:
    """Return how far the log-probabilities of sampling are from `logp` (B, R), those that training uses.

    The dict is empty if the rollout has no log-probabilities. With the weights of
    `sampling_weights` it has their mean and the share of the tokens over the cap too.
    """
    if rollout.logprobs is None:
        return {}
    mismatch = (zero_pads(rollout.logprobs, rollout.mask) - logp).abs()
    metrics = {
        "rollout/logprob_diff_avg": masked_mean(mismatch, rollout.mask),
        "rollout/logprob_diff_max": mismatch.max(),
    }
    if weights is not None and over_cap is not None:
        metrics["rollout/weight_avg"] = masked_mean(weights, rollout.mask)
        metrics["rollout/over_cap"] = masked_mean(over_cap, rollout.mask)
    return metrics
