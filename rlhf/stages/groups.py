"""RLOO and GRPO: the policy gradient without a critic. Each step:

    1 sample     num_generations responses to each prompt, from the policy
    2 score      weighted sum of the rewards, of the reward model or of functions. Shaped: the reward model's
                 part is normalised, and a response without EOS loses the penalty
    3 reward     log-probabilities under policy and reference; with `kl_penalty: reward`, shaped score minus beta * KL
    4 advantage  compare each reward with those of the prompt's other responses
    5 update     clipped policy loss, with `kl_penalty: loss` plus beta * KL, in minibatches

The two methods differ in steps 4 and 5 and in their defaults: rlhf/objectives/groups.py has the formulas and their
sources, docs/methods.md the choices. A loss is a weighted sum over tokens; the denominator, in the weights, is that of
the whole minibatch (PPO's loss is a mean times a share of the tokens). So the micro-batch size and the number of
ranks change the result by rounding only.

Shapes: P prompts, k responses to each, B = P * k rows, R response slots.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf.data.batch import Rollout, TrainingBatch, on_device
from rlhf.models.shared_base import SharedBase
from rlhf.objectives.groups import (
    ADVANTAGES,
    LossTerms,
    group_sd,
    has_signal,
    policy_loss,
    standardize,
    token_weights,
)
from rlhf.objectives.importance import log_ratios, pool_log_ratios
from rlhf.objectives.kl import estimate_kl
from rlhf.objectives.losses import Stats
from rlhf.objectives.masked import masked_mean, zero_pads
from rlhf.process import distributed
from rlhf.recipe import StageName
from rlhf.recipe.schema_online import GroupOptions
from rlhf.stages.online import role_passes
from rlhf.stages.online.loop import Loop
from rlhf.stages.online.scores import ScoreNorm, Scores, mean_judged, mean_rewards, score
from rlhf.stages.online.train_state import TrainState, as_floats
from rlhf.terminal.progress import Bar


@dataclass(kw_only=True)
class Batch(TrainingBatch):
    """Responses of one step and their tensors: (B, R) unless noted, with 0 after the end of a response."""

    old_logp: Tensor  # in nats, under the policy before the update; with `updates_once` the update fills them in
    sampling_weights: Tensor | None  # of each token in the policy loss, where the sampler differs from the policy
    ref_logp: Tensor | None  # under the reference; None where beta is 0
    kl: Tensor | None  # from the reference, in nats
    rewards: Tensor  # (B,) with the KL where it is in the reward
    advantages: Tensor  # (B,)

    @property
    def kl_per_token(self) -> float | None:
        """Return the mean KL from the reference in nats per token; None without a reference."""
        return None if self.kl is None else masked_mean(self.kl, self.rollout.mask).item()


# -- the loop ----------------------------------------------------------------------------------------------------------


def run_stage(loop: Loop) -> dict[str, float]:
    """Train the policy adapter with RLOO or GRPO, and measure it against its start on held-out prompts."""
    options = loop.options
    assert isinstance(options, GroupOptions)
    learner = Learner(loop.stage, loop.shared, options, loop.score_norm)
    loop.restore(learner)  # from the checkpoint of a resumed run
    with Bar(loop.stage, options.steps) as bar:
        for step in range(learner.step, options.steps):
            with loop.phase("rollout"):
                rollout = loop.sample(step)  # 1
            with loop.phase("score"):
                functions = loop.function_rewards(step, rollout)  # 2
                scores = score(loop.shared, rollout, options, loop.score_norm, functions)  # 2
                batch = make_batch(learner, rollout, scores)  # 3, 4
            with loop.phase("update"):
                statistics = learner.update(batch)  # 5
            metrics = batch_metrics(batch, scores, learner) | statistics
            learner.advance(batch.kl_per_token)
            loop.end_step(learner, rollout, metrics, bar)
    return loop.finish(learner)


# -- 3 reward, 4 advantage ---------------------------------------------------------------------------------------------


@torch.no_grad()
def make_batch(learner: "Learner", rollout: Rollout, scores: Scores) -> Batch:
    """Do steps 3 and 4: log-probabilities, rewards with the KL, advantages."""
    shared, options = learner.shared, learner.options
    if options.updates_once:
        old_logp = torch.zeros(rollout.mask.shape, device=shared.device)
    else:
        old_logp = role_passes.logprobs(shared, "policy", rollout, options)
    weights = role_passes.sampling_weights(rollout, old_logp, options)
    ref_logp, kl, rewards = None, None, scores.shaped
    if options.beta:
        ref_logp = role_passes.logprobs(shared, "reference", rollout, options)
        kl = estimate_kl(old_logp, ref_logp, options.kl_estimator)
        rewards = rewards - learner.reward_kl_coef * kl.sum(1)
    return Batch(
        rollout=rollout,
        judged=scores.judged,
        mask=rollout.mask & rollout.ended[:, None] if options.mask_truncated_completions else rollout.mask,
        old_logp=old_logp,
        sampling_weights=weights,
        ref_logp=ref_logp,
        kl=kl,
        rewards=rewards,
        advantages=learner.advantages(rewards, scores.judged),
    )


# -- 5 update ----------------------------------------------------------------------------------------------------------


class Learner(TrainState[Batch]):
    """The policy, its loss and its training."""

    options: GroupOptions

    def __init__(self, stage: StageName, shared: SharedBase, options: GroupOptions, score_norm: ScoreNorm):
        super().__init__(stage, shared, options, score_norm, {"policy": shared.roles.parameters("policy")})

    def grouped(self, x: Tensor) -> Tensor:
        """Return numbers (B,) as (P, k)."""
        return x.view(-1, self.options.num_generations)

    def advantages(self, rewards: Tensor, judged: Tensor) -> Tensor:
        """Return the advantage (B,) of each response; 0 for those without a verdict."""
        groups, judged = self.grouped(rewards), self.grouped(judged)
        advantages = ADVANTAGES[self.options.advantage](groups, judged)
        if self.options.normalize_advantages:  # a response that is alone in its group was compared with none
            advantages = standardize(advantages, judged & (judged.sum(1, keepdim=True) > 1))
        return advantages.flatten()

    def update(self, batch: Batch) -> dict[str, float]:
        """Pass over the batch as `TrainState.update`. With `updates_once` its log-probabilities are known then."""
        statistics = super().update(batch)
        if self.options.updates_once and statistics["update/optimizer_steps"]:
            distributed.all_sum(batch.old_logp)
        elif self.options.updates_once:  # nothing was learned: the policy is still the one that sampled
            batch.old_logp = role_passes.logprobs(self.shared, "policy", batch.rollout, self.options)
        return statistics

    def add_gradients(self, batch: Batch, mini_rows: Tensor) -> dict[str, float]:
        """Add the gradients of a minibatch, of all its micro-batches in turn. Return its statistics."""
        tokens = batch.mask[on_device(mini_rows, self.shared.device)].sum()
        parts = []
        with self.shared.role("policy"):
            for rows, micro in self.micro_batches(batch, mini_rows):
                logp, part = self._add_gradient(micro, len(mini_rows), tokens)
                if self.options.updates_once:
                    batch.old_logp[on_device(rows, self.shared.device), : logp.shape[1]] = logp
                parts.append(part)
        return self.sums_of(parts)

    def _add_gradient(self, micro: Batch, responses: int, tokens: Tensor) -> tuple[Tensor, dict[str, float]]:
        """Add the gradient of one micro-batch of a minibatch, which has so many `responses` and `tokens` that count.

        Return its log-probabilities (b, r), and its part of the minibatch's statistics.
        """
        logp, entropy = self.shared.logprobs_and_entropies(
            self.shared.response_hidden(micro.rollout),
            micro.rollout,
            self.options.temperature,
            differentiable=self.options.entropy_coef > 0,
        )
        loss, stats = self._policy_loss(micro, logp, entropy, responses, tokens)
        loss.backward()
        return logp.detach(), as_floats(stats)

    def _policy_loss(
        self, micro: Batch, logp: Tensor, entropy: Tensor, responses: int, tokens: Tensor
    ) -> tuple[Tensor, Stats]:
        """Return the clipped loss, with the KL and the entropy bonus where the recipe asks for them.

        It is the micro-batch's part of a sum over the minibatch. So are the statistics that come with it.
        """
        options, mask = self.options, micro.mask
        old_logp = logp.detach() if options.updates_once else micro.old_logp
        token_log_ratio = log_ratios(logp, old_logp, mask)
        log_ratio = pool_log_ratios(token_log_ratio, mask, options.importance_sampling_level)
        weights = token_weights(mask, options.loss_type, responses, tokens, options.max_completion_length)
        policy_weights = weights if micro.sampling_weights is None else weights * micro.sampling_weights
        terms = LossTerms(
            logp, log_ratio, micro.advantages, policy_weights, mask, options.epsilon, options.upper_epsilon
        )
        loss, is_clipped = policy_loss(options.loss_type, terms)
        per_token = 1 / tokens.clamp(min=1)  # sums over tokens times this add up to means over the minibatch
        entropy_part = zero_pads(entropy, mask).sum() * per_token
        half_squares = (token_log_ratio.detach() ** 2).sum() / 2
        stats = {
            "loss/policy_avg": loss,
            "policy/entropy_avg": entropy_part,
            "policy/clipfrac_avg": is_clipped.sum() * per_token,
            "policy/approxkl_avg": half_squares * per_token,
            "val/ratio": zero_pads(log_ratio.detach().exp(), mask).sum() * per_token,
        }
        if options.kl_penalty == "loss" and micro.ref_logp is not None:
            kl = zero_pads(estimate_kl(logp, micro.ref_logp, options.kl_estimator), mask)
            if options.corrects_kl:  # with the token's ratio: a sequence's would divide the correction by its length
                kl = kl * token_log_ratio.exp()
            kl_part = (weights * kl).sum()
            stats["loss/kl_avg"] = kl_part
            loss = loss + self.kl_coef * kl_part
        if options.entropy_coef:
            loss = loss - options.entropy_coef * entropy_part
        return loss, stats


# -- metrics -----------------------------------------------------------------------------------------------------------


def batch_metrics(batch: Batch, scores: Scores, learner: Learner) -> dict[str, float]:
    """Return the batch's metrics before the update; docs/metrics.yaml explains each key."""
    rollout, mask, judged = batch.rollout, batch.rollout.mask, batch.judged
    groups, judged_groups = learner.grouped(scores.shaped), learner.grouped(judged)
    numbers = {
        "objective/scores": scores.raw,
        "objective/scores_shaped": scores.shaped,
        "objective/rlhf_reward": batch.rewards,
    }
    metrics = {
        **mean_judged(numbers, judged),
        **mean_rewards(scores.by_name),
        "groups/reward_sd": group_sd(groups, judged_groups).mean(),
        "groups/no_signal": (~has_signal(groups, judged_groups)).float().mean(),
        "groups/no_verdict": (~judged).float().mean(),
        "policy/entropy_estimate": -masked_mean(batch.old_logp, mask),
        **role_passes.rollout_metrics(rollout, batch.old_logp, batch.sampling_weights),
    }
    if batch.kl is not None:
        metrics |= {
            "objective/kl": batch.kl.sum(1).mean(),
            "objective/kl_per_token": masked_mean(batch.kl, mask),
            "objective/non_score_reward": -learner.reward_kl_coef * batch.kl.sum(1).mean(),
        }
    return {name: value.item() for name, value in metrics.items()} | {"objective/kl_coef": learner.kl_coef}
