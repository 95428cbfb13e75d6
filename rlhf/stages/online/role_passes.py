"""Role passes over a rollout: log-probabilities, values and their metrics."""

from collections.abc import Callable

import torch
from torch import Tensor

from rlhf.data.batch import Rollout, on_device
from rlhf.models.shared_base import SharedBase
from rlhf.objectives.importance import importance_weights
from rlhf.objectives.masked import masked_mean, zero_pads
from rlhf.process import distributed
from rlhf.recipe.schema_online import OnlineOptions, Ppo
from rlhf.recipe.stages import SharedRole

# (b rows of a rollout, their hidden states (b, r, H)) -> (b, r), 0 after the end of a response
TokenFn = Callable[[Rollout, Tensor], Tensor]


def logprobs(shared: SharedBase, role: SharedRole, rollout: Rollout, options: OnlineOptions) -> Tensor:
    """Return the log-probabilities (B, R) of the response tokens under a role, in nats."""
    (logp,) = _per_token(shared, role, rollout, options, _logprobs_of_tokens(shared, options))
    return logp


def old_logprobs_and_values(shared: SharedBase, rollout: Rollout, options: Ppo) -> tuple[Tensor, Tensor]:
    """Return log-probabilities under the policy that sampled and the critic's values, each (B, R).

    Those of a policy with a head that is the critic come from one pass.
    """

    def of_tokens(micro_batch: Rollout, hidden: Tensor) -> Tensor:
        return zero_pads(shared.values(hidden), micro_batch.mask)

    if options.value_model == "head":
        logp, values = _per_token(shared, "policy", rollout, options, _logprobs_of_tokens(shared, options), of_tokens)
        return logp, values
    logp = logprobs(shared, "policy", rollout, options)
    (values,) = _per_token(shared, "value", rollout, options, of_tokens)
    return logp, values


def _logprobs_of_tokens(shared: SharedBase, options: OnlineOptions) -> TokenFn:
    return lambda micro_batch, hidden: shared.logprobs(hidden, micro_batch, options.temperature)


def _per_token(
    shared: SharedBase, role: SharedRole, rollout: Rollout, options: OnlineOptions, *fns: TokenFn
) -> list[Tensor]:
    """Run `role` over the rollout, `score_rows` rows at a time, and apply each function to its hidden states.

    Return one (B, R) float32 tensor per function. Each rank works on its share of the rows.
    """
    mask = rollout.mask
    results = [torch.zeros(mask.shape, device=mask.device) for _ in fns]
    with shared.role(role):
        for rows in rollout.sharded_by_length(options.score_rows):
            micro_batch = rollout.rows(rows)
            hidden = shared.response_hidden(micro_batch)
            for result, fn in zip(results, fns, strict=True):
                result[on_device(rows, mask.device), : micro_batch.longest_response] = fn(micro_batch, hidden)
    distributed.all_sum(*results)
    return results


def sampling_weights(rollout: Rollout, logp: Tensor, options: OnlineOptions) -> Tensor | None:
    """Return the weights by which the recipe corrects a sampler that differs from `logp` (B, R); None: it does not."""
    if options.correction == "none":
        return None
    assert rollout.logprobs is not None  # sampling keeps them
    cap = options.sampling_correction_cap
    return importance_weights(logp, rollout.logprobs, rollout.mask, options.correction, cap)


def rollout_metrics(rollout: Rollout, logp: Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """Return the responses' lengths, and how far sampling's log-probabilities are from training's, `logp` (B, R).

    The latter only if the rollout has log-probabilities. `weights` are those of `sampling_weights`.
    """
    metrics = {
        "response/length": rollout.response_length.float().mean(),
        "response/eos_rate": rollout.ended.float().mean(),
    }
    if rollout.logprobs is not None:
        mismatch = (zero_pads(rollout.logprobs, rollout.mask) - logp).abs()
        metrics["rollout/logprob_diff_avg"] = masked_mean(mismatch, rollout.mask)
        metrics["rollout/logprob_diff_max"] = mismatch.max()
    if weights is not None:
        metrics["rollout/weight_avg"] = masked_mean(weights, rollout.mask)
    return metrics
