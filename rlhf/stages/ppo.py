"""PPO against a reward model. Each step:

    1 sample     one response per prompt, from the policy
    2 score      log-probabilities under policy and reference, the critic's values, the reward model's scores
    3 reward     -kl_coef * KL at every response token (with `kl_penalty: reward`), and the score at the last one
    4 advantage  GAE over the rewards, then whitening
    5 update     clipped policy and value losses, a few passes over the batch in minibatches

All four roles are adapters on one frozen base (rlhf/models/shared_base.py). Every loss is divided by the number of
response tokens in the whole minibatch: the micro-batch size and the number of processes change the result by rounding
only.

Shapes: B prompts, R response slots; slot t holds the t-th generated token. docs/ppo.md numbers the details, with their
sources and what each is worth; docs/metrics.md explains every logged key; tests/oracle/test_ppo_step.py writes a whole
step down again.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rlhf.data.batch import Rollout
from rlhf.models.shared_base import SharedBase
from rlhf.objectives import kl as kls
from rlhf.objectives.gae import gae
from rlhf.objectives.logprobs import EntropyMode
from rlhf.objectives.losses import Stats, ppo_policy_loss, ppo_value_loss
from rlhf.objectives.masked import explained_variance, masked_mean, whiten, zero_pads
from rlhf.objectives.rewards import shape_rewards, shape_scores
from rlhf.observe.console import Bar
from rlhf.recipe import Ppo
from rlhf.rollout.responses import ValueFn
from rlhf.run.checkpoints import with_resume_advice
from rlhf.run.directory import Run
from rlhf.run.records import Number
from rlhf.stages.online import scoring
from rlhf.stages.online.scoring import ScoreNorm
from rlhf.stages.online.session import Session
from rlhf.stages.online.train_state import SavedState, TrainState, saved_state
from rlhf.stages.result import Result

# Near 0 the sigmoid of a raw score s is about (s + 2) / 4, which is (s - mean) / sd with these numbers: a critic of
# squashed scores starts from there. Recipes refuse `sigmoid_scores` together with `normalize_scores`.
SIGMOID_NORM = ScoreNorm(mean=-2.0, sd=4.0)


@dataclass(kw_only=True)
class Batch:
    """Rollouts of one step and the tensors that the update needs.

    Shapes are (B, R) unless noted, with 0 behind the end of a response.
    """

    rollout: Rollout
    logp: Tensor  # under the policy that sampled
    ref_logp: Tensor  # under the reference
    values: Tensor  # the critic's, before the update
    scores: Tensor  # (B,) the reward model's, raw
    shaped_scores: Tensor  # (B,) as they enter the rewards
    kl: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor


# -- the loop ----------------------------------------------------------------------------------------------------------


def run_stage(run: Run, device: torch.device) -> Result:
    options = run.loaded.recipe.ppo
    session = Session(run, device, options)
    learner = make_learner(session, options)
    session.shard()  # after the critic has got its adapter
    with Bar("ppo", options.steps) as bar:
        for step in range(learner.state.step, options.steps):
            with session.phase("rollout"):
                rollout = session.sample_step(step, learner.value_fn_while_sampling)  # 1
            with session.phase("score"):
                batch = make_batch(learner, rollout)  # 2, 3, 4
            metrics = batch_metrics(batch, learner)
            with session.phase("update"):
                metrics |= learner.update(batch)  # 5
            learner.state.advance(metrics["objective/kl_per_token"])
            session.end_step(learner.state, rollout, metrics, bar)
    return session.finish(learner.state)


def make_learner(session: Session, options: Ppo) -> "Learner":
    """Make the learner, from the newest checkpoint if the run is resumed."""
    shared, checkpoint = session.shared, session.run.resumed_from
    if checkpoint:
        with with_resume_advice(checkpoint):
            learner = Learner.load(shared, session.rm_dir, options, checkpoint)
    else:
        with session.phase("evaluate"):
            norm = scoring.score_norm(shared, session.sample_step, options) if options.normalize_scores else ScoreNorm()
        learner = Learner(shared, session.rm_dir, options, norm)
    return learner


# -- 2 score, 3 reward, 4 advantage ------------------------------------------------------------------------------------


@torch.no_grad()
def make_batch(learner: "Learner", rollout: Rollout) -> Batch:
    options, mask = learner.options, rollout.mask

    # States below the first adapter are the same for all roles and epochs: the lean trunk computes them once.
    rollout = scoring.with_lower_states(learner.shared, rollout, options.score_rows)
    logp, ref_logp, values, scores = score(learner, rollout)

    kl = kls.estimate(logp, ref_logp, options.kl_estimator)
    shaped_scores = shape_scores(
        scores,
        rollout.ended,
        mean=learner.norm.mean,
        sd=learner.norm.sd,
        sigmoid=options.sigmoid_scores,
        clip=options.score_clip,
        missing_eos_penalty=options.missing_eos_penalty or 0.0,
    )
    rewards = shape_rewards(kl, shaped_scores, mask, learner.state.reward_kl_coef)
    if options.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)

    advantages, returns = gae(rewards, values, mask, options.gamma, options.lam)
    if options.whiten_advantages:
        advantages = whiten(advantages, mask)
    return Batch(
        rollout=rollout,
        logp=logp,
        ref_logp=ref_logp,
        values=values,
        scores=scores,
        shaped_scores=shaped_scores,
        kl=kl,
        rewards=rewards,
        advantages=advantages,
        returns=returns,
    )


def score(learner: "Learner", rollout: Rollout) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities under policy and reference and values, each (B, R), and the scores (B,)."""
    shared, options, mask = learner.shared, learner.options, rollout.mask
    shared.base.eval()
    size = options.score_rows
    logprob_head, value_head = scoring.logprob_head(shared, options.temperature), scoring.value_head(shared)

    if options.old_logprobs == "rollout":
        assert rollout.logprobs is not None
        logp = zero_pads(rollout.logprobs, mask)
        values = None if rollout.values is None else zero_pads(rollout.values, mask)
    elif learner.critic_shares_trunk:
        logp, values = scoring.per_token(shared, "policy", rollout, size, logprob_head, value_head)
    else:
        (logp,), values = scoring.per_token(shared, "policy", rollout, size, logprob_head), None
    if values is None:  # the critic has a forward pass of its own
        (values,) = scoring.per_token(shared, "value", rollout, size, value_head)
    (ref_logp,) = scoring.per_token(shared, "reference", rollout, size, logprob_head)
    return logp, ref_logp, values, scoring.reward_scores(shared, rollout, size)


# -- 5 update ----------------------------------------------------------------------------------------------------------


class Saved(SavedState):
    """Schema of state.pt in a checkpoint of PPO."""

    norm: tuple[Number, Number]
    value: list[Tensor]


class Learner:
    """Policy and critic, their losses, and the state of their training."""

    def __init__(self, shared: SharedBase, rm_dir: Path, options: Ppo, norm: ScoreNorm):
        self.shared, self.options, self.norm = shared, options, norm
        critic_start = SIGMOID_NORM if options.sigmoid_scores else norm
        shared.add_value(options.value_model, rm_dir, critic_start.mean, critic_start.sd)
        assert shared.value_head is not None
        self.policy_parameters = shared.parameters("policy")
        self.critic_parameters = list(shared.value_head.parameters())
        if not self.critic_shares_trunk:
            self.critic_parameters += shared.parameters("value")
        roles = {"policy": self.policy_parameters, "value": self.critic_parameters}
        self.state = TrainState("ppo", shared, options, roles, {"norm": tuple(norm)})

    @classmethod
    def load(cls, shared: SharedBase, rm_dir: Path, options: Ppo, folder: Path) -> "Learner":
        """Continue from a checkpoint. Raises UserError when it is damaged, or of another version or other settings."""
        saved = saved_state(folder, Saved)
        learner = cls(shared, rm_dir, options, ScoreNorm(*saved["norm"]))
        learner.state.restore(saved, folder / "state.pt")
        return learner

    @property
    def critic_shares_trunk(self) -> bool:
        """Return whether the critic is a head on the policy's hidden states, and not an adapter of its own."""
        return self.shared.value_role == "policy"

    @property
    def value_fn_while_sampling(self) -> ValueFn | None:
        """Return the function that computes values while the policy samples, or None where `score` computes them.

        Only a head on the policy's hidden states can, and only `old_logprobs: rollout` takes what sampling computed.
        """
        return self.shared.values if self.options.old_logprobs == "rollout" and self.critic_shares_trunk else None

    def update(self, batch: Batch) -> dict[str, float]:
        """Pass `num_ppo_epochs` times over the batch in minibatches. Return the mean statistics of those used.

        With `max_update_kl` the update ends at the minibatch for which the policy has moved further than that.
        """
        with self.state.updating() as update:
            for mini_rows in update.minibatches(len(batch.rollout.ids), self.options.num_ppo_epochs):
                if not update.step(self._add_gradients(batch, mini_rows)):
                    break
        return update.metrics()

    def _add_gradients(self, batch: Batch, mini_rows: Tensor) -> dict[str, float]:
        """Add the gradients of a minibatch, of all micro-batches in turn. Return its statistics."""
        micro_batches = self.state.micro_batches(batch.rollout, mini_rows)
        with self.shared.role("policy"):
            shares = [self._add_policy_gradient(batch, micro_rows, mini_rows) for micro_rows in micro_batches]
        if not self.critic_shares_trunk:
            with self.shared.role("value"):
                shares += [self._add_value_gradient(batch, micro_rows, mini_rows) for micro_rows in micro_batches]
        return self.state.sum_of(shares)

    def _add_policy_gradient(self, batch: Batch, micro_rows: Tensor, mini_rows: Tensor) -> dict[str, float]:
        """Add the gradient of the policy, and of a value head on it. Return the micro-batch's share of the statistics.

        During `value_warmup_steps` the value head alone gets a gradient.
        """
        micro_batch, token_share = self._micro_batch(batch, micro_rows, mini_rows)
        policy_learns = self.state.step >= self.options.value_warmup_steps
        with torch.set_grad_enabled(policy_learns):
            hidden = self.shared.response_hidden(micro_batch)
            policy_loss, stats = self._policy_loss(batch, micro_rows, micro_batch, hidden)
        if self.critic_shares_trunk:
            value_loss, value_stats = self._value_loss(batch, micro_rows, micro_batch, hidden)
            stats |= value_stats
            ((policy_loss + self.options.vf_coef * value_loss) * token_share).backward()
        elif policy_learns:
            (policy_loss * token_share).backward()
        return _weighted(stats, token_share)

    def _add_value_gradient(self, batch: Batch, micro_rows: Tensor, mini_rows: Tensor) -> dict[str, float]:
        """Add the gradient of a critic with an adapter. Return the micro-batch's share of the statistics."""
        micro_batch, token_share = self._micro_batch(batch, micro_rows, mini_rows)
        value_loss, stats = self._value_loss(batch, micro_rows, micro_batch, self.shared.response_hidden(micro_batch))
        (self.options.vf_coef * value_loss * token_share).backward()
        return _weighted(stats, token_share)

    def _micro_batch(self, batch: Batch, micro_rows: Tensor, mini_rows: Tensor) -> tuple[Rollout, Tensor]:
        """Return a micro-batch, and its share of the response tokens of its minibatch."""
        micro_batch = batch.rollout.rows(micro_rows)
        return micro_batch, micro_batch.mask.sum() / batch.rollout.response_length[mini_rows].sum()

    def _policy_loss(
        self, batch: Batch, micro_rows: Tensor, micro_batch: Rollout, hidden: Tensor
    ) -> tuple[Tensor, Stats]:
        """Return the clipped loss, with the KL and the entropy bonus where the recipe asks for them."""
        options, mask = self.options, micro_batch.mask
        slots = slice(mask.shape[1])  # the micro-batch is as wide as its longest response
        entropy_mode: EntropyMode = "gradient" if options.entropy_coef else "value"
        logp, entropy = self.shared.logprobs(hidden, micro_batch, options.temperature, entropy_mode)
        assert entropy is not None
        loss, clip_stats = ppo_policy_loss(
            logp, batch.logp[micro_rows, slots], batch.advantages[micro_rows, slots], mask, options.cliprange
        )
        mean_entropy = masked_mean(entropy, mask)
        stats = {
            "loss/policy_avg": loss,
            "policy/entropy_avg": mean_entropy,
            "policy/clipfrac_avg": clip_stats["clipfrac"],
            "policy/approxkl_avg": clip_stats["approxkl"],
            "val/ratio": clip_stats["ratio"],
        }
        if options.kl_penalty == "loss":
            kl = masked_mean(kls.estimate(logp, batch.ref_logp[micro_rows, slots], options.kl_estimator), mask)
            stats["loss/kl_avg"] = kl
            loss = loss + self.state.kl_coef * kl
        if options.entropy_coef:
            loss = loss - options.entropy_coef * mean_entropy
        return loss, stats

    def _value_loss(
        self, batch: Batch, micro_rows: Tensor, micro_batch: Rollout, hidden: Tensor
    ) -> tuple[Tensor, Stats]:
        slots = slice(micro_batch.mask.shape[1])  # as in `_policy_loss`
        values, returns = batch.values[micro_rows, slots], batch.returns[micro_rows, slots]
        new_values = self.shared.values(hidden)
        loss, clip_stats = ppo_value_loss(new_values, values, returns, micro_batch.mask, self.options.cliprange_value)
        return loss, {"loss/value_avg": loss, "val/clipfrac_avg": clip_stats["clipfrac"]}


def _weighted(stats: Stats, token_share: Tensor) -> dict[str, float]:
    """Return statistics times `token_share`; all of them are fetched from the device at once."""
    weighted = torch.stack([number.detach() for number in stats.values()]) * token_share
    return dict(zip(stats, weighted.tolist(), strict=True))


def batch_metrics(batch: Batch, learner: Learner) -> dict[str, float]:
    """Return the batch's metrics before the update; docs/metrics.md explains each key."""
    mask = batch.rollout.mask
    kl_per_response = (batch.kl * mask).sum(1)
    metrics = {
        "objective/kl": kl_per_response.mean(),
        "objective/kl_per_token": masked_mean(batch.kl, mask),
        "objective/scores": batch.scores.mean(),
        "objective/scores_shaped": batch.shaped_scores.mean(),
        "objective/non_score_reward": -learner.state.reward_kl_coef * kl_per_response.mean(),
        "objective/rlhf_reward": (batch.rewards * mask).sum(1).mean(),
        "policy/entropy_estimate": -masked_mean(batch.logp, mask),
        "val/explained_variance": explained_variance(batch.values, batch.returns, mask),
        "response/length": batch.rollout.response_length.float().mean(),
        "response/eos_rate": batch.rollout.ended.float().mean(),
        **scoring.sampling_mismatch(batch.rollout, batch.logp),
    }
    return {name: value.item() for name, value in metrics.items()} | {"objective/kl_coef": learner.state.kl_coef}
