"""PPO against the reward model: collect, score, shape rewards, advantages, update.

One frozen base carries every role as an adapter (rlhf/models/shared_base.py). The size of a micro-batch decides memory
and never the result: every denominator is the minibatch's number of response tokens.
Several ranks share out rows and hold all numbers of a batch alike (rlhf/distributed.py), so that neither do they.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ConfigDict
from torch import Tensor, nn
from transformers import get_scheduler

from rlhf import distributed, records, vllm
from rlhf.console import Bar
from rlhf.data import load
from rlhf.evaluation import Measured, compare, measure, sample_of
from rlhf.models.loading import load_base, load_codec, save_adapter
from rlhf.models.optimizer import new_optimizer, page_states
from rlhf.models.shared_base import SharedBase
from rlhf.models.weights import check_finite, check_optimizer, check_shapes, unpickled
from rlhf.objectives import kl as kls
from rlhf.objectives.gae import gae
from rlhf.objectives.losses import ppo_policy_loss, ppo_value_loss
from rlhf.objectives.masked import explained_variance, masked_mean, whiten, zero_pads
from rlhf.objectives.rewards import shape_rewards, shape_scores
from rlhf.recipe import Ppo
from rlhf.records import Amount, Count, MetricsLine, Number, OptimizerState, Record, SchedulerState, read_lines, reading
from rlhf.rollout import Observer, Rollout, Sampling, sample
from rlhf.run import Run, RunError, checkpoint_problem, checkpoint_step, resuming, write_json
from rlhf.stages import Result
from rlhf.telemetry import Telemetry
from rlhf.terminal import say


class RandomState(Record):
    """What `random_state` returns."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    torch: Tensor
    cuda: list[Tensor]
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]


class State(Record):
    """state.pt of a checkpoint."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    step: Count
    norm: tuple[Number, Number]
    kl_coef: Amount
    policy: list[Tensor]
    value: list[Tensor]
    optimizer: OptimizerState
    schedule: SchedulerState
    random: RandomState


@dataclass
class Experience:
    """A batch of rollouts with all that the update needs; (B, R) unless noted, 0 in masked slots where it matters."""

    rollout: Rollout
    old: Tensor  # log-probabilities under the policy that sampled
    ref: Tensor  # under the reference
    values: Tensor
    scores: Tensor  # (B,) raw scores of the reward model
    final: Tensor  # (B,) the same as the rewards hold them: normalised, clipped, without EOS penalised
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
    validation = corpus.validation[: options.max_eval_samples]

    sft, rm = run.folder_of("sft"), run.folder_of("rm")
    how = sampling(options)
    server = vllm.Server(options.vllm_url) if options.vllm_url else None
    torch.manual_seed(recipe.seed)
    with telemetry.phase("load"):
        shared = SharedBase(load_base(run, device), {"policy": sft, "reference": sft}, trainable=("policy",))
        if options.gradient_checkpointing:
            shared.base.activation_checkpointing_enable()
            shared.base.enable_input_require_grads()
        shared.add_reward(rm)
    telemetry.loaded()

    def draw(step: int, observe: Observer | None = None) -> Rollout:
        """Responses of the policy to the prompts of a step."""
        batch = [prompts[i] for i in prompt_order(len(prompts), step, options.batch_size, recipe.seed)]
        if server is not None:
            save_adapter(shared.peft, run, run.path / "sampling", adapter="policy")
            with server.adapter(run.path / "sampling"):
                return server.sample(batch, codec, how, device)
        shared.activate("policy")
        return sample(shared.base, batch, codec, how, observe, telemetry.phase)

    def evaluate(role: str, on: Sequence[load.Prompt] = validation) -> Measured:
        truth = recipe.data.source == "toy"
        return measure(shared, role, codec, on, how, seed=recipe.seed, truth=truth)

    with telemetry.phase("evaluate"):
        before = evaluate("reference")
    if run.resumed_from:
        with resuming(run.resumed_from):
            trained = Trained.load(shared, rm, options, run.resumed_from)
    else:
        with telemetry.phase("evaluate"):
            norm = score_norm(shared, draw, options) if options.normalize_scores else (0.0, 1.0)
        trained = Trained(shared, rm, options, norm)
    if recipe.hardware.engine == "fsdp" and distributed.world() > 1:
        shared.shard()
    after: Measured | None = None

    with Bar("ppo", options.steps) as bar:
        for step in range(trained.step, options.steps):
            last = step + 1 == options.steps
            save = last or (step + 1) % options.save_steps == 0
            with telemetry.phase("rollout"):
                rollout = draw(step, trained.observer)
            with telemetry.phase("score"):
                experience = collect(trained, rollout)
            values = describe(experience, trained)
            with telemetry.phase("update"):
                values |= trained.update(experience)
            tokens = int((rollout.prompt_length + rollout.response_length).sum())
            telemetry.count(tokens)
            if save or (step + 1) % options.eval_steps == 0:
                with telemetry.phase("evaluate"):
                    after = evaluate("policy")
                values |= {f"eval/{name}": value for name, value in compare(before, after).items()}
                rows = zip(validation[:8], after.texts, strict=False)
                run.log_samples(step + 1, [{"prompt": codec.prompt_text(p), "response": text} for p, text in rows])
            if last or (step + 1) % options.logging_steps == 0:
                run.log(step + 1, values)
                run.log_telemetry(step + 1, {**telemetry.lap(), "tokens": tokens, "memory_bytes": telemetry.memory()})
            if save:
                run.save_checkpoint(step + 1, lambda folder: trained.save(run, folder))
                distributed.from_main(lambda: choose_checkpoints(run, options))
            score, divergence = values["objective/scores"], values["objective/kl_per_token"]
            bar.update(step + 1, f"score {score:.3f}  KL/token {divergence:.3f}")

    if distributed.world() == 1:
        telemetry.note_components(shared.peft, trained.optimizer)
    best = distributed.from_main(lambda: choose_checkpoints(run, options))
    if options.adapter == "best" and best is None:
        say(f"ppo: no checkpoint is within best_kl_limit: {options.best_kl_limit} nats/token; the result is the last")
    elif options.adapter == "best" and best is not None and best != trained.step:
        trained.take_policy(run.checkpoint(best))
        after = None
    save_adapter(shared.peft, run, run.path / "adapter", adapter="policy")
    test = corpus.heldout[: options.max_eval_samples]
    if corpus.apart:
        with telemetry.phase("evaluate"):
            before, after = evaluate("reference", test), evaluate("policy", test)
    else:
        after = after or evaluate("policy")  # also when a run that was stopped after its last step goes on
    metrics = compare(before, after) | {"best_step": math.nan if best is None else best}
    return Result(metrics, telemetry.costs(), sample_of(codec, test, before, after))


def sampling(options: Ppo) -> Sampling:
    """How the policy's responses are drawn."""
    return Sampling(
        max_prompt_length=options.max_prompt_length,
        response_length=options.response_length,
        temperature=options.temperature,
        batch_size=options.rollout_batch_size,
        merged=options.rollout_weights == "merged",
        four_bit=options.rollout_4bit,
    )


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

    At least `norm_responses` responses are scored, in whole batches of rollouts.
    Raises RunError when the scores do not differ: such a reward model has nothing to teach.
    """
    parts = []
    for step in range(math.ceil(options.norm_responses / options.batch_size)):
        rollout = draw(step)
        by_length = torch.cat(rollout.by_length(options.rollout_batch_size))
        parts.append(scores_of(shared, rollout, options.rollout_batch_size)[by_length])
    scores = torch.cat(parts)
    mean, sd = scores.mean().item(), scores.std().item()
    if not sd > 0:
        raise RunError(f"the reward model gives every response the same score ({mean:.4g}): look at rm/summary.json")
    return mean, sd


def scores_of(shared: SharedBase, rollout: Rollout, size: int) -> Tensor:
    """The reward model's raw scores (B,), each rank scoring its share."""
    scores = torch.zeros(len(rollout.ids), device=shared.device)
    for index in rollout.dealt(size):
        scores[index] = shared.scores(rollout.rows(index))
    distributed.all_sum(scores)
    return scores


@torch.no_grad()
def collect(trained: "Trained", rollout: Rollout) -> Experience:
    """Score a batch of rollouts with every role and turn the result into advantages and returns."""
    shared, options = trained.shared, trained.options
    shared.base.eval()
    mask = rollout.mask
    size = options.score_batch_size or options.per_device_train_batch_size

    def fill(role: str, *functions: Callable[[Rollout, Tensor], Tensor]) -> list[Tensor]:
        """(B, R) float32 for each function of (part, its response hidden states under role), in parts by length."""
        shared.activate(role)
        found = [torch.zeros(mask.shape, device=mask.device) for _ in functions]
        for index in rollout.dealt(size):
            part = rollout.rows(index)
            hidden = shared.response_hidden(part)
            for result, function in zip(found, functions, strict=True):
                result[index, : part.mask.shape[1]] = function(part, hidden)
        distributed.all_sum(*found)
        return found

    def logprobs(part: Rollout, hidden: Tensor) -> Tensor:
        return shared.logprobs(hidden, part, options.temperature)[0]

    def critic(part: Rollout, hidden: Tensor) -> Tensor:
        return shared.values(hidden)

    if options.old_logprobs == "recompute":
        old, *values = fill("policy", logprobs, *([critic] if trained.on_policy else []))
    else:
        assert rollout.logprobs is not None
        old = zero_pads(rollout.logprobs, mask)
        values = [zero_pads(rollout.seen, mask)] if rollout.seen is not None else []
    if not trained.on_policy:
        values = fill("value", critic)
    (ref,) = fill("reference", logprobs)
    scores = scores_of(shared, rollout, size)

    kl = kls.estimate(old, ref, options.kl_estimator)
    final = shape_scores(
        scores,
        rollout.ended,
        mean=trained.norm[0],
        sd=trained.norm[1],
        sigmoid=options.sigmoid_scores,
        clip=options.score_clip,
        missing_eos_penalty=options.missing_eos_penalty or 0.0,
    )
    rewards = shape_rewards(kl, final, mask, trained.kl_coef if options.kl_penalty == "reward" else 0.0)
    if options.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False)
    advantages, returns = gae(rewards, values[0], mask, options.gamma, options.lam)
    if options.whiten_advantages:
        advantages = whiten(advantages, mask)
    return Experience(rollout, old, ref, values[0], scores, final, kl, rewards, advantages, returns)


class Trained:
    """The trainable roles with their optimizer: everything that a checkpoint holds."""

    def __init__(self, shared: SharedBase, rm_dir: Path, options: Ppo, norm: tuple[float, float]):
        self.shared, self.options, self.norm = shared, options, norm
        # 1 / (1 + e^-s) is about 1/2 + s/4, which a critic that starts as a linear function of the score can be
        shared.add_value(options.value_model, rm_dir, *((-2.0, 4.0) if options.sigmoid_scores else norm))
        self.policy = shared.parameters("policy")
        assert shared.value_head is not None
        self.value = list(shared.value_head.parameters())
        if shared.value_role == "value":
            self.value += shared.parameters("value")
        groups = [
            {"params": self.policy, "lr": options.learning_rate},
            {"params": self.value, "lr": options.value_learning_rate},
        ]
        self.optimizer = new_optimizer(
            options.optim,
            groups,
            betas=(options.adam_beta1, options.adam_beta2),
            eps=options.adam_epsilon,
            weight_decay=options.weight_decay,
        )
        self.schedule = get_scheduler(
            options.lr_scheduler_type, self.optimizer, options.warmup_steps, num_training_steps=options.steps + 1
        )
        self.optimizer.step()  # without gradients nothing moves; the schedule wants it before its own first step
        self.schedule.step()  # transformers' schedules begin at 0, which would waste the first batch of rollouts
        self.kl_coef = options.kl_coef
        self.step = 0

    @property
    def observer(self) -> Observer | None:
        """What sampling shall note beside the tokens: values, where they need no pass of their own."""
        return self.shared.values if self.options.old_logprobs == "rollout" and self.on_policy else None

    @property
    def on_policy(self) -> bool:
        """Whether the critic stands on the policy's hidden states."""
        return self.shared.value_role == "policy"

    def update(self, e: Experience) -> dict[str, float]:
        """`num_ppo_epochs` passes over the batch; returns means of the statistics over the tokens that were used.

        Stops before the minibatch whose approxkl exceeds `max_update_kl`; then steers the KL coefficient.
        """
        options = self.options
        self.shared.base.train(options.gradient_checkpointing)  # dropout is 0; checkpointing asks for train mode
        self.shared.scatter()
        done: list[dict[str, float]] = []
        for mini in self._minibatches(len(e.scores)):
            tokens = e.rollout.response_length[mini].sum()
            stats: dict[str, float] = defaultdict(float)
            for index in e.rollout.rows(mini).dealt(options.per_device_train_batch_size):
                for name, value in self._backward(e, mini[index], tokens).items():
                    stats[name] += value
            stats = distributed.sum_of(stats, self.shared.device)
            if options.max_update_kl is not None and done and stats["policy/approxkl_avg"] > options.max_update_kl:
                self.optimizer.zero_grad()
                break
            done.append(stats | self._optimizer_step())
        self.shared.gather()
        found = {name: sum(stats[name] for stats in done) / len(done) for name in done[0]}
        found |= {"update/optimizer_steps": len(done), "lr": self.schedule.get_last_lr()[0]}
        if options.kl_target is not None:
            measured = masked_mean(e.kl, e.rollout.mask).item()
            self.kl_coef = kls.adapt(self.kl_coef, measured, options.kl_target, options.kl_adapt_rate)
        self.schedule.step()
        self.step += 1
        return found

    def _minibatches(self, count: int) -> Iterator[Tensor]:
        """Row indices of each minibatch, epoch after epoch, every epoch in an order of its own."""
        for _ in range(self.options.num_ppo_epochs):
            yield from torch.randperm(count).to(self.shared.device).chunk(self.options.num_mini_batches)

    def _backward(self, e: Experience, index: Tensor, tokens: Tensor) -> dict[str, float]:
        """Add one micro-batch's share of the minibatch's gradient; returns its share of the statistics."""
        shared, options = self.shared, self.options
        part = e.rollout.rows(index)
        mask = part.mask
        width = mask.shape[1]
        share = mask.sum() / tokens
        teach_policy = self.step >= options.value_warmup_steps

        shared.activate("policy")
        with torch.set_grad_enabled(teach_policy):
            hidden = shared.response_hidden(part)
            wanted = "gradient" if options.entropy_coef else "value"
            logp, entropy = shared.logprobs(hidden, part, options.temperature, wanted)
            loss, policy = ppo_policy_loss(
                logp, e.old[index, :width], e.advantages[index, :width], mask, options.cliprange
            )
            assert entropy is not None
            mean_entropy = masked_mean(entropy, mask)
            stats = {
                "loss/policy_avg": loss,
                "policy/entropy_avg": mean_entropy,
                "policy/clipfrac_avg": policy["clipfrac"],
                "policy/approxkl_avg": policy["approxkl"],
                "val/ratio": policy["ratio"],
            }
            if options.kl_penalty == "loss":
                stats["loss/kl_avg"] = masked_mean(kls.estimate(logp, e.ref[index, :width], options.kl_estimator), mask)
                loss = loss + self.kl_coef * stats["loss/kl_avg"]
            if options.entropy_coef:
                loss = loss - options.entropy_coef * mean_entropy
        if not self.on_policy:  # a trunk of its own: forward and backward stay inside one role
            if teach_policy:
                (loss * share).backward()
            shared.activate("value")
            hidden = shared.response_hidden(part)
        value_loss, value = ppo_value_loss(
            shared.values(hidden), e.values[index, :width], e.returns[index, :width], mask, options.cliprange_value
        )
        stats |= {"loss/value_avg": value_loss, "val/clipfrac_avg": value["clipfrac"]}
        remaining = options.vf_coef * value_loss + (loss if self.on_policy else 0.0)
        (remaining * share).backward()
        shares = torch.stack([number.detach() for number in stats.values()]) * share
        return dict(zip(stats, shares.tolist(), strict=True))  # one wait for the device

    def _optimizer_step(self) -> dict[str, float]:
        distributed.reduce_gradients([*self.policy, *self.value])
        norms = [nn.utils.clip_grad_norm_(group, self.options.max_grad_norm) for group in (self.policy, self.value)]
        if not all(norm.isfinite() for norm in norms):
            raise RunError(
                f"ppo: the gradient is not finite in step {self.step + 1}; lower ppo.learning_rate or "
                "ppo.value_learning_rate"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"policy/grad_norm": norms[0].item(), "val/grad_norm": norms[1].item()}

    def save(self, run: Run, folder: Path) -> None:
        """Everything from which the next step follows; the order of prompts is a function of seed and step."""
        state: dict[str, Any] = {
            "step": self.step,
            "norm": self.norm,
            "kl_coef": self.kl_coef,
            "policy": [p.detach().cpu() for p in self.policy],
            "value": [p.detach().cpu() for p in self.value],
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "random": random_state(),
        }
        torch.save(state, folder / "state.pt")
        save_adapter(self.shared.peft, run, folder / "adapter", adapter="policy")

    @classmethod
    def load(cls, shared: SharedBase, rm_dir: Path, options: Ppo, folder: Path) -> "Trained":
        """Continue from a checkpoint. Raises RunError when it is damaged, or of another version or other settings."""
        file = folder / "state.pt"
        state = load_state(folder)
        found = cls(shared, rm_dir, options, state["norm"])
        _copy(found.policy, state["policy"], f"{file}: policy")
        _copy(found.value, state["value"], f"{file}: value")
        with reading(file):
            found.optimizer.load_state_dict(state["optimizer"])
            found.schedule.load_state_dict(state["schedule"])
        check_optimizer(found.optimizer, str(file))
        page_states(found.optimizer)
        found.step, found.kl_coef = state["step"], state["kl_coef"]
        with reading(file):
            set_random_state(state["random"])
        return found

    def take_policy(self, folder: Path) -> None:
        """The policy's weights of another checkpoint of this run. Raises RunError when that is damaged."""
        if problem := checkpoint_problem(folder):
            raise RunError(f"{folder}, the best checkpoint, cannot be used: {problem}; set ppo.adapter=last")
        _copy(self.policy, load_state(folder)["policy"], f"{folder}/state.pt: policy")


def load_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint. Raises RunError when it is damaged, or of another version or step."""
    file = folder / "state.pt"
    state = records.check(unpickled(file), State, str(file))
    if state["step"] != checkpoint_step(folder):
        raise RunError(f"{file} is that of step {state['step']}")
    return state


@torch.no_grad()
def _copy(parameters: Sequence[Tensor], values: Sequence[Tensor], where: str) -> None:
    """Give parameters their stored values. Raises RunError unless these have the same shapes and are finite."""
    names = [f"tensor {i}" for i in range(max(len(parameters), len(values)))]
    stored = dict(zip(names, values, strict=False))
    check_shapes(stored, dict(zip(names, parameters, strict=False)), where)
    check_finite(stored, where)
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def random_state() -> dict[str, Any]:
    """The state of every generator that a step may draw from, of numbers and tensors only."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_available() else [],  # of this rank's device
        "python": random.getstate(),
        "numpy": (kind, np.asarray(keys).tolist(), *rest),
    }


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"]:
        torch.cuda.set_rng_state(state["cuda"][0])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])


def choose_checkpoints(run: Run, options: Ppo) -> int | None:
    """Name the best checkpoint in checkpoints/best.json, and delete those that `keep_checkpoints` does not keep.

    The best has the highest held-out score among those within the KL limit. Returns its step, None without one.
    """
    rows = {row["step"]: row for row in read_lines(run.path / "metrics.jsonl", MetricsLine)}

    def fact(step: int, name: str) -> float | None:
        return rows[step].get(f"eval/{name}")  # null where it was not finite

    def within(step: int) -> bool:
        kl, limit = fact(step, "kl_per_token"), options.best_kl_limit
        return fact(step, "score") is not None and (limit is None or (kl is not None and kl <= limit))

    candidates = [step for step in run.checkpoint_steps() if step in rows and within(step)]
    best = max(candidates, key=lambda step: (fact(step, "score"), -step), default=None)
    if options.keep_checkpoints != "all":
        run.drop_checkpoints(options.keep_checkpoints, spare=best)
    facts = [
        {"step": step, "score": fact(step, "score"), "kl_per_token": fact(step, "kl_per_token")}
        for step in run.checkpoint_steps()
        if step in rows
    ]
    found = {"kl_limit": options.best_kl_limit, "best_step": best, "checkpoints": facts}
    write_json(run.path / "checkpoints" / "best.json", found)
    return best


def describe(e: Experience, trained: Trained) -> dict[str, float]:
    """The batch in the field's terms; each key is explained in docs/metrics.md."""
    mask = e.rollout.mask
    per_response = (e.kl * mask).sum(1)
    in_reward = trained.kl_coef if trained.options.kl_penalty == "reward" else 0.0
    found = {
        "objective/kl": per_response.mean(),
        "objective/kl_per_token": masked_mean(e.kl, mask),
        "objective/scores": e.scores.mean(),
        "objective/scores_shaped": e.final.mean(),
        "objective/non_score_reward": -in_reward * per_response.mean(),
        "objective/rlhf_reward": (e.rewards * mask).sum(1).mean(),
        "policy/entropy_estimate": -masked_mean(e.old, mask),
        "val/explained_variance": explained_variance(e.values, e.returns, mask),
        "response/length": e.rollout.response_length.float().mean(),
        "response/eos_rate": e.rollout.ended.float().mean(),
    }
    if e.rollout.logprobs is not None:
        mismatch = (zero_pads(e.rollout.logprobs, mask) - e.old).abs()
        found |= {"rollout/logprob_diff_avg": masked_mean(mismatch, mask), "rollout/logprob_diff_max": mismatch.max()}
    return {name: value.item() for name, value in found.items()} | {"objective/kl_coef": trained.kl_coef}
