"""PPO against the reward model: collect, score, shape rewards, advantages, update.

One frozen base carries every role as an adapter (rlhf/models/shared_base.py). The size of a micro-batch decides memory
and never the result: every denominator is the minibatch's number of response tokens.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import get_scheduler

from rlhf.console import Bar
from rlhf.data import load
from rlhf.evaluation import Measured, compare, measure, sample_of
from rlhf.models.loading import load_base, load_codec, save_adapter
from rlhf.models.optimizer import new_optimizer
from rlhf.models.shared_base import SharedBase
from rlhf.objectives import kl as kls
from rlhf.objectives.gae import gae
from rlhf.objectives.losses import ppo_policy_loss, ppo_value_loss
from rlhf.objectives.masked import explained_variance, masked_mean, whiten
from rlhf.objectives.rewards import shape_rewards
from rlhf.recipe import Ppo
from rlhf.rollout import Rollout, Sampling, sample
from rlhf.run import Run, RunError
from rlhf.stages import Result
from rlhf.telemetry import Telemetry

NORM_RESPONSES = 256  # at least this many give the mean and spread by which scores are normalised
ADAM = {"betas": (0.9, 0.999), "eps": 1e-5, "weight_decay": 0.0}  # eps: openai/baselines ppo2


@dataclass
class Experience:
    """A batch of rollouts with all that the update needs; (B, R) unless noted, 0 in masked slots where it matters."""

    rollout: Rollout
    old: Tensor  # log-probabilities under the policy that sampled
    ref: Tensor  # under the reference
    values: Tensor
    scores: Tensor  # (B,) raw scores of the reward model
    kl: Tensor
    rewards: Tensor
    advantages: Tensor
    returns: Tensor


def run_stage(run: Run, device: torch.device) -> Result:
    recipe = run.loaded.recipe
    options = recipe.ppo
    telemetry = Telemetry(device)

    corpus = load.load(run).prompts()
    codec = load_codec(run)
    prompts, cut = codec.encode_prompts(corpus.train[: options.max_samples], options.max_prompt_length)
    run.describe(cuts={"prompts_cut": cut})
    heldout = corpus.heldout[: options.max_eval_samples]

    sft, rm = run.root / "sft", run.root / "rm"
    how = Sampling(options.max_prompt_length, options.response_length, options.temperature, options.rollout_batch_size)
    torch.manual_seed(recipe.seed)
    shared = SharedBase(load_base(run, device), {"policy": sft, "reference": sft}, trainable=("policy",))
    if options.gradient_checkpointing:
        shared.base.activation_checkpointing_enable()
        shared.base.enable_input_require_grads()
    shared.add_reward(rm)

    def draw(step: int) -> Rollout:
        """Responses of the policy to the prompts of a step."""
        shared.activate("policy")
        order = prompt_order(len(prompts), step, options.batch_size, recipe.seed)
        return sample(shared.base, [prompts[i] for i in order], codec, how)

    def evaluate(role: str) -> Measured:
        truth = recipe.data.source == "toy"
        return measure(shared, role, codec, heldout, how, seed=recipe.seed, truth=truth)

    with telemetry.phase("evaluate"):
        before = evaluate("reference")
    if run.resumed_from:
        trained = Trained.load(shared, rm, options, run.resumed_from)
    else:
        norm = score_norm(shared, draw, options) if options.normalize_scores else (0.0, 1.0)
        trained = Trained(shared, rm, options, norm)
    after: Measured | None = None

    with Bar("ppo", options.steps) as bar:
        for step in range(trained.step, options.steps):
            with telemetry.phase("rollout"):
                rollout = draw(step)
            with telemetry.phase("score"):
                experience = collect(shared, rollout, trained.norm, options)
            with telemetry.phase("update"):
                stats = trained.update(experience)
            tokens = int((rollout.prompt_length + rollout.response_length).sum())
            telemetry.count(tokens)
            values = describe(experience, trained.norm, options) | stats
            last = step + 1 == options.steps
            if last or (step + 1) % options.eval_steps == 0:
                with telemetry.phase("evaluate"):
                    after = evaluate("policy")
                values |= {f"eval/{name}": value for name, value in compare(before, after).items()}
                rows = zip(heldout[:8], after.texts, strict=False)
                run.log_samples(step + 1, [{"prompt": codec.prompt_text(p), "response": text} for p, text in rows])
            if last or (step + 1) % options.logging_steps == 0:
                run.log(step + 1, values)
                run.log_telemetry(step + 1, {**telemetry.lap(), "tokens": tokens})
            if last or (step + 1) % options.save_steps == 0:
                run.save_checkpoint(step + 1, lambda folder: trained.save(run, folder))
            score, divergence = values["objective/scores"], values["objective/kl_per_token"]
            bar.update(step + 1, f"score {score:.3f}  KL/token {divergence:.3f}")

    save_adapter(shared.peft, run, run.path / "adapter", adapter="policy")
    after = after or evaluate("policy")  # a run that was stopped after its last step has not been evaluated
    return Result(compare(before, after), telemetry.costs(), sample_of(codec, heldout, before, after))


def prompt_order(count: int, step: int, batch_size: int, seed: int) -> list[int]:
    """Indices of one step's prompts: epoch after epoch, each in an order of its own; a function of seed and step."""
    orders: dict[int, list[int]] = {}

    def at(position: int) -> int:
        epoch = position // count
        if epoch not in orders:
            orders[epoch] = torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        return orders[epoch][position % count]

    return [at(position) for position in range(step * batch_size, (step + 1) * batch_size)]


def score_norm(shared: SharedBase, draw: Callable[[int], Rollout], options: Ppo) -> tuple[float, float]:
    """Mean and standard deviation of the reward model's scores on SFT's responses to the first training prompts.

    Raises RunError when the scores do not differ: such a reward model has nothing to teach.
    """
    parts = []
    for step in range(math.ceil(NORM_RESPONSES / options.batch_size)):
        rollout = draw(step)
        parts += [shared.scores(rollout.rows(i)) for i in rollout.by_length(options.rollout_batch_size)]
    scores = torch.cat(parts)
    mean, sd = scores.mean().item(), scores.std().item()
    if not sd > 0:
        raise RunError(f"the reward model gives every response the same score ({mean:.4g}): look at rm/summary.json")
    return mean, sd


@torch.no_grad()
def collect(shared: SharedBase, rollout: Rollout, norm: tuple[float, float], options: Ppo) -> Experience:
    """Score a batch of rollouts with every role and turn the result into advantages and returns."""
    shared.base.eval()
    mask = rollout.mask
    size = options.per_device_train_batch_size

    def fill(role: str, *functions: Callable[[Rollout, Tensor], Tensor]) -> list[Tensor]:
        """(B, R) float32 for each function of (part, its response hidden states under role), in parts by length."""
        shared.activate(role)
        found = [torch.zeros(mask.shape, device=mask.device) for _ in functions]
        for index in rollout.by_length(size):
            part = rollout.rows(index)
            hidden = shared.response_hidden(part)
            for result, function in zip(found, functions, strict=True):
                result[index, : part.mask.shape[1]] = function(part, hidden)
        return found

    def logprobs(part: Rollout, hidden: Tensor) -> Tensor:
        return shared.logprobs(hidden, part, options.temperature)

    def critic(part: Rollout, hidden: Tensor) -> Tensor:
        return shared.values(hidden)

    if shared.value_role == "policy":
        old, values = fill("policy", logprobs, critic)
    else:
        (old,), (values,) = fill("policy", logprobs), fill("value", critic)
    (ref,) = fill("reference", logprobs)
    scores = torch.empty(len(mask), device=mask.device)
    for index in rollout.by_length(size):
        scores[index] = shared.scores(rollout.rows(index))

    kl = kls.estimate(old, ref, options.kl_estimator)
    mean, sd = norm
    final = (scores - mean) / sd - (options.missing_eos_penalty or 0.0) * ~rollout.ended
    rewards = shape_rewards(kl, final, mask, options.kl_coef)
    advantages, returns = gae(rewards, values, mask, options.gamma, options.lam)
    if options.whiten_advantages:
        advantages = whiten(advantages, mask)
    return Experience(rollout, old, ref, values, scores, kl, rewards, advantages, returns)


class Trained:
    """The trainable roles with their optimizer: everything that a checkpoint holds."""

    def __init__(self, shared: SharedBase, rm_dir: Path, options: Ppo, norm: tuple[float, float]):
        self.shared, self.options, self.norm = shared, options, norm
        shared.add_value(options.value_model, rm_dir, *norm)
        self.policy = shared.parameters("policy")
        assert shared.value_head is not None
        self.value = list(shared.value_head.parameters())
        if shared.value_role == "value":
            self.value += shared.parameters("value")
        groups = [
            {"params": self.policy, "lr": options.learning_rate},
            {"params": self.value, "lr": options.value_learning_rate},
        ]
        self.optimizer = new_optimizer(options.optim, groups, **ADAM)
        self.schedule = get_scheduler(
            options.lr_scheduler_type, self.optimizer, options.warmup_steps, num_training_steps=options.steps + 1
        )
        self.optimizer.step()  # without gradients nothing moves; the schedule wants it before its own first step
        self.schedule.step()  # transformers' schedules begin at 0, which would waste the first batch of rollouts
        self.step = 0

    def update(self, e: Experience) -> dict[str, float]:
        """`num_ppo_epochs` passes over the batch; returns means of the statistics over all response tokens."""
        options = self.options
        self.shared.base.train(options.gradient_checkpointing)  # dropout is 0; checkpointing asks for train mode
        sums: dict[str, float] = defaultdict(float)
        for _ in range(options.num_ppo_epochs):
            order = torch.randperm(len(e.scores)).to(e.scores.device)
            for mini in order.chunk(options.num_mini_batches):
                tokens = e.rollout.response_length[mini].sum()
                micro_batches = [mini[i] for i in e.rollout.rows(mini).by_length(options.per_device_train_batch_size)]
                for index in micro_batches:
                    for name, value in self._backward(e, index, tokens).items():
                        sums[name] += value / (options.num_ppo_epochs * options.num_mini_batches)
                sums["policy/grad_norm"] += self._optimizer_step() / (options.num_ppo_epochs * options.num_mini_batches)
        sums["lr"] = self.schedule.get_last_lr()[0]
        self.schedule.step()
        self.step += 1
        return dict(sums)

    def _backward(self, e: Experience, index: Tensor, tokens: Tensor) -> dict[str, float]:
        """Add one micro-batch's share of the minibatch's gradient; returns its share of the statistics."""
        shared, options = self.shared, self.options
        part = e.rollout.rows(index)
        mask = part.mask
        width = mask.shape[1]
        share = mask.sum() / tokens

        shared.activate("policy")
        hidden = shared.response_hidden(part)
        logp = shared.logprobs(hidden, part, options.temperature)
        policy_loss, policy = ppo_policy_loss(
            logp, e.old[index, :width], e.advantages[index, :width], mask, options.cliprange
        )
        if shared.value_role == "value":  # a trunk of its own: forward and backward stay inside one role
            (policy_loss * share).backward()
            shared.activate("value")
            hidden = shared.response_hidden(part)
        value_loss, value = ppo_value_loss(
            shared.values(hidden), e.values[index, :width], e.returns[index, :width], mask, options.cliprange_value
        )
        remaining = options.vf_coef * value_loss + (policy_loss if shared.value_role == "policy" else 0.0)
        (remaining * share).backward()
        stats = {
            "loss/policy_avg": policy_loss,
            "loss/value_avg": value_loss,
            "policy/clipfrac_avg": policy["clipfrac"],
            "policy/approxkl_avg": policy["approxkl"],
            "val/ratio": policy["ratio"],
            "val/clipfrac_avg": value["clipfrac"],
        }
        return {name: (number.detach() * share).item() for name, number in stats.items()}

    def _optimizer_step(self) -> float:
        norm = nn.utils.clip_grad_norm_(self.policy, self.options.max_grad_norm)
        if not norm.isfinite():
            raise RunError(f"ppo: the gradient is not finite in step {self.step + 1}; lower ppo.learning_rate")
        nn.utils.clip_grad_norm_(self.value, self.options.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm.item()

    def save(self, run: Run, folder: Path) -> None:
        """Everything from which the next step follows; the order of prompts is a function of seed and step."""
        state: dict[str, Any] = {
            "step": self.step,
            "norm": self.norm,
            "policy": [p.detach().cpu() for p in self.policy],
            "value": [p.detach().cpu() for p in self.value],
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        }
        torch.save(state, folder / "state.pt")
        save_adapter(self.shared.peft, run, folder / "adapter", adapter="policy")

    @classmethod
    def load(cls, shared: SharedBase, rm_dir: Path, options: Ppo, folder: Path) -> "Trained":
        """Continue from a checkpoint."""
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        found = cls(shared, rm_dir, options, state["norm"])
        with torch.no_grad():
            for name in ("policy", "value"):
                for parameter, saved in zip(getattr(found, name), state[name], strict=True):
                    parameter.copy_(saved)
        found.optimizer.load_state_dict(state["optimizer"])
        found.schedule.load_state_dict(state["schedule"])
        found.step = state["step"]
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"]:
            torch.cuda.set_rng_state_all(state["cuda_rng"])
        return found


def describe(e: Experience, norm: tuple[float, float], options: Ppo) -> dict[str, float]:
    """The batch in the field's terms; each key is explained in docs/metrics.md."""
    mask = e.rollout.mask
    per_response = (e.kl * mask).sum(1)
    normalised = (e.scores - norm[0]) / norm[1]
    found = {
        "objective/kl": per_response.mean(),
        "objective/kl_per_token": masked_mean(e.kl, mask),
        "objective/scores": e.scores.mean(),
        "objective/scores_normalized": normalised.mean(),
        "objective/non_score_reward": -options.kl_coef * per_response.mean(),
        "objective/rlhf_reward": (e.rewards * mask).sum(1).mean(),
        "policy/entropy_estimate": -masked_mean(e.old, mask),
        "val/explained_variance": explained_variance(e.values, e.returns, mask),
        "response/length": e.rollout.response_length.float().mean(),
        "response/eos_rate": e.rollout.ended.float().mean(),
    }
    return {name: value.item() for name, value in found.items()}
