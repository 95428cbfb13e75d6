"""PPO on the scores of a reward model, on reward functions, or on a weighted sum of both. Each step:

    1 sample     one response per prompt, from the policy
    2 score      rewards of functions, the reward model's scores, log-probabilities under policy and reference, and the
                 critic's values
    3 reward     -kl_coef * KL at every response token (with `kl_penalty: reward`), and the shaped score at the last one
    4 advantage  GAE over the rewards, then whitening
    5 update     clipped policy and value losses, a few passes over the batch in minibatches

Policy, reference and reward model are adapters on one frozen base (rlhf/models/shared_base.py). The critic is a fourth,
which starts as the reward model's, or where there is none as the policy's with a head of zeros; or it is a head on the
policy's hidden states (`value_model`). A response that is not judged counts in no advantage, loss or mean of scores. A
micro-batch's loss is a mean over its response tokens that count, times its share of the minibatch's: the micro-batch
size and the number of ranks change the result by rounding only. `TrainState` (rlhf/stages/online/train_state.py) draws
the minibatches, clips the gradients and steps the optimizer.

Shapes: B prompts, R response slots; slot t holds the t-th generated token. docs/methods.md numbers the details, with
their sources and what each is worth; docs/metrics.yaml explains every logged key; tests/oracle/test_ppo_step.py
computes a whole step independently.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from rlhf.data.batch import Rollout, TrainingBatch, on_device
from rlhf.models.shared_base import SharedBase
from rlhf.objectives.kl import estimate_kl
from rlhf.objectives.losses import Stats, ppo_policy_loss, ppo_value_loss
from rlhf.objectives.masked import explained_variance, masked_mean, whiten, zero_pads
from rlhf.objectives.rewards import gae, shape_rewards
from rlhf.recipe.schema_online import Ppo
from rlhf.run.layout import ADAPTER
from rlhf.stages.online import role_passes
from rlhf.stages.online.loop import Loop
from rlhf.stages.online.scores import FunctionRewards, ScoreNorm, mean_judged, mean_rewards, score
from rlhf.stages.online.train_state import TrainState, as_floats
from rlhf.terminal.progress import Bar

SIGMOID_TANGENT = ScoreNorm(mean=-2.0, sd=4.0)  # σ(s) is about (s + 2) / 4 near 0


@dataclass(kw_only=True)
class Batch(TrainingBatch):
    """Responses of one step and their tensors: (B, R) unless noted, with 0 after the end of a response."""

    old_logp: Tensor  # in nats, under the policy before the update
    sampling_weights: Tensor | None  # of each token in the policy loss, where the sampler differs from the policy
    ref_logp: Tensor  # under the reference
    values: Tensor  # the critic's, before the update
    scores: Tensor  # (B,) raw: the reward model's, or the weighted sum of the rewards; NaN where it is not judged
    shaped_scores: Tensor  # (B,) as they enter the rewards; 0 where the response is not judged
    kl: Tensor  # from the reference, in nats
    rewards: Tensor
    advantages: Tensor
    returns: Tensor

    @property
    def kl_per_token(self) -> float:
        """Return the mean KL from the reference in nats per token, which `kl_target` is compared with."""
        return masked_mean(self.kl, self.rollout.mask).item()


# -- the loop ----------------------------------------------------------------------------------------------------------


def run_stage(loop: Loop) -> dict[str, float]:
    """Train the policy adapter, and measure it against its start on held-out prompts."""
    options = loop.options
    assert isinstance(options, Ppo)
    critic = new_critic(loop.shared, loop.rm_dir, options, loop.score_norm)
    learner = Learner(loop.shared, options, loop.score_norm, critic)
    loop.restore(learner)  # from the checkpoint of a resumed run
    with Bar("ppo", options.steps) as bar:
        for step in range(learner.step, options.steps):
            with loop.phase("rollout"):
                rollout = loop.sample(step)  # 1
            with loop.phase("score"):
                rewards = loop.function_rewards(step, rollout)  # 2
                batch = make_batch(learner, rollout, rewards)  # 2, 3, 4
            metrics = batch_metrics(batch, learner) | reward_metrics(rewards)
            with loop.phase("update"):
                metrics |= learner.update(batch)  # 5
            learner.advance(batch.kl_per_token)
            loop.end_step(learner, rollout, metrics, bar)
    return loop.finish(learner)


# -- 2 score, 3 reward, 4 advantage ------------------------------------------------------------------------------------


@torch.no_grad()
def make_batch(learner: "Learner", rollout: Rollout, functions: FunctionRewards | None = None) -> Batch:
    """Do steps 2 to 4. Every (B, R) tensor of the result is 0 after the end of a response.

    `functions`: the rewards of functions; None where a recipe names none.
    """
    shared, options = learner.shared, learner.options

    # 2 score
    old_logp, values = role_passes.old_logprobs_and_values(shared, rollout, options)
    weights = role_passes.sampling_weights(rollout, old_logp, options)
    ref_logp = role_passes.logprobs(shared, "reference", rollout, options)
    scores = score(shared, rollout, options, learner.score_norm, functions)
    shaped_scores, mask = zero_pads(scores.shaped, scores.judged), rollout.mask & scores.judged[:, None]

    # 3 reward. `reward_kl_coef` is 0 with `kl_penalty: loss`.
    kl = estimate_kl(old_logp, ref_logp, options.kl_estimator)
    rewards = shape_rewards(kl, shaped_scores, rollout.mask, learner.reward_kl_coef)

    # 4 advantage
    advantages, returns = gae(rewards, values, mask, options.gamma, options.lam)
    if options.whiten_advantages:
        advantages = whiten(advantages, mask, size=torch.linalg.vector_norm(returns, math.inf))
    return Batch(
        rollout=rollout,
        judged=scores.judged,
        mask=mask,
        old_logp=old_logp,
        sampling_weights=weights,
        ref_logp=ref_logp,
        values=values,
        scores=scores.raw,
        shaped_scores=shaped_scores,
        kl=kl,
        rewards=rewards,
        advantages=advantages,
        returns=returns,
    )


# -- 5 update ----------------------------------------------------------------------------------------------------------


def new_critic(shared: SharedBase, rm_dir: Path, options: Ppo, score_norm: ScoreNorm) -> list[nn.Parameter]:
    """Add the critic to the base; return its parameters. peft draws an adapter's from torch's generator first."""
    if options.value_model == "head":
        return list(shared.add_value_head().parameters())
    if options.model_scores:
        # The critic starts as the model's part of the shaped score, weight * (s - mean) / sd.
        start = SIGMOID_TANGENT if options.sigmoid_scores else score_norm
        head = shared.add_value_adapter(rm_dir / ADAPTER, start.mean, start.sd, options.model_weight)
    else:
        head = shared.add_value_copy()
    return [*head.parameters(), *shared.roles.parameters("value")]


class Learner(TrainState[Batch]):
    """Policy and critic, their losses and their training.

    The critic's parameters have the name `value`, be it an adapter or a head on the policy.
    """

    options: Ppo

    def __init__(self, shared: SharedBase, options: Ppo, score_norm: ScoreNorm, critic: Sequence[nn.Parameter]):
        policy = shared.roles.parameters("policy")
        super().__init__("ppo", shared, options, score_norm, {"policy": policy, "value": critic})

    @property
    def critic_is_head(self) -> bool:
        """Return whether the critic is a head on the policy's hidden states, and not an adapter of its own."""
        return self.options.value_model == "head"

    @property
    def policy_learns(self) -> bool:
        """Return whether the policy learns in this step: not while the critic warms up."""
        return self.step >= self.options.value_warmup_steps

    def advance(self, kl: float | None) -> None:
        """Go to the next step. The KL coefficient follows `kl_target`, but not while the policy does not learn."""
        super().advance(kl if self.policy_learns else None)

    def add_gradients(self, batch: Batch, mini_rows: Tensor) -> dict[str, float]:
        """Add the gradients of a minibatch, of all its micro-batches in turn. Return its statistics.

        All of the policy's micro-batches come first, then the critic's: switching roles in each would be slow.
        """
        tokens = batch.mask[on_device(mini_rows, self.shared.device)].sum()
        with self.shared.role("policy"):
            parts = [self._add_policy_gradient(micro, tokens) for _, micro in self.micro_batches(batch, mini_rows)]
        if not self.critic_is_head:
            with self.shared.role("value"):
                parts += [self._add_critic_gradient(micro, tokens) for _, micro in self.micro_batches(batch, mini_rows)]
        return self.sums_of(parts)

    def _add_policy_gradient(self, micro: Batch, tokens: Tensor) -> dict[str, float]:
        """Add the gradient of the policy, and of a value head on it, while the role `policy` is active.

        `tokens` that count are in the minibatch. Return the statistics, which are means over those of the micro-batch,
        times its share of them. While the policy does not learn, the value head alone gets a gradient.
        """
        share = micro.mask.sum() / tokens
        with torch.set_grad_enabled(self.policy_learns):
            hidden = self.shared.response_hidden(micro.rollout)
            loss, stats = self._policy_loss(micro, hidden)
        if self.critic_is_head:
            value_loss, value_stats = self._value_loss(micro, hidden)
            loss, stats = loss + self.options.vf_coef * value_loss, stats | value_stats
        if self.policy_learns or self.critic_is_head:  # else the statistics alone, of a policy that stays as it is
            (loss * share).backward()
        return as_floats(stats, share)

    def _add_critic_gradient(self, micro: Batch, tokens: Tensor) -> dict[str, float]:
        """Add the gradient of a critic with an adapter, while the role `value` is active.

        Return the statistics, weighted as those of the policy.
        """
        share = micro.mask.sum() / tokens
        value_loss, stats = self._value_loss(micro, self.shared.response_hidden(micro.rollout))
        (self.options.vf_coef * value_loss * share).backward()
        return as_floats(stats, share)

    def _policy_loss(self, micro: Batch, hidden: Tensor) -> tuple[Tensor, Stats]:
        """Return the clipped loss, with the KL and the entropy bonus where the recipe asks for them, and statistics."""
        options, mask = self.options, micro.mask
        logp, entropy = self.shared.logprobs_and_entropies(
            hidden, micro.rollout, options.temperature, differentiable=options.entropy_coef > 0
        )
        loss, clipping = ppo_policy_loss(
            logp, micro.old_logp, micro.advantages, mask, options.cliprange, micro.sampling_weights
        )
        mean_entropy = masked_mean(entropy, mask)
        stats = {
            "loss/policy_avg": loss,
            "policy/entropy_avg": mean_entropy,
            "policy/clipfrac_avg": clipping.clipfrac,
            "policy/approxkl_avg": clipping.approxkl,
            "val/ratio": clipping.ratio,  # the policy's, under the name that TRL's PPO gave it
        }
        if options.kl_penalty == "loss":
            kl = masked_mean(estimate_kl(logp, micro.ref_logp, options.kl_estimator), mask)
            stats["loss/kl_avg"] = kl
            loss = loss + self.kl_coef * kl
        if options.entropy_coef:
            loss = loss - options.entropy_coef * mean_entropy
        return loss, stats

    def _value_loss(self, micro: Batch, hidden: Tensor) -> tuple[Tensor, Stats]:
        """Return the clipped loss of the critic's values, and statistics."""
        values = self.shared.values(hidden)
        loss, clipfrac = ppo_value_loss(values, micro.values, micro.returns, micro.mask, self.options.cliprange_value)
        return loss, {"loss/value_avg": loss, "val/clipfrac_avg": clipfrac}


# -- metrics -----------------------------------------------------------------------------------------------------------


def batch_metrics(batch: Batch, learner: Learner) -> dict[str, float]:
    """Return the batch's metrics before the update; docs/metrics.yaml explains each key."""
    kl_per_response, rollout = batch.kl.sum(1), batch.rollout
    explained = explained_variance(batch.values, batch.returns, batch.mask)
    metrics = {
        "objective/kl": kl_per_response.mean(),
        "objective/kl_per_token": masked_mean(batch.kl, rollout.mask),
        **mean_judged({"objective/scores": batch.scores, "objective/scores_shaped": batch.shaped_scores}, batch.judged),
        "objective/non_score_reward": -learner.reward_kl_coef * kl_per_response.mean(),
        **mean_judged({"objective/rlhf_reward": batch.rewards.sum(1)}, batch.judged),
        "policy/entropy_estimate": -masked_mean(batch.old_logp, rollout.mask),
        **({} if explained.isnan() else {"val/explained_variance": explained}),
        **role_passes.rollout_metrics(rollout, batch.old_logp, batch.sampling_weights),
    }
    return {name: value.item() for name, value in metrics.items()} | {"objective/kl_coef": learner.kl_coef}


def reward_metrics(rewards: FunctionRewards | None) -> dict[str, float]:
    """Return the mean of each reward function over its verdicts, and the share of responses that nothing judged."""
    if rewards is None:
        return {}
    return {name: mean.item() for name, mean in mean_rewards(rewards.by_name).items()} | {
        "objective/no_verdict": rewards.total.isnan().float().mean().item()
    }
