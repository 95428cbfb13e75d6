"""A step of RLOO and GRPO against the same step written down again from the papers, row by row."""

import math
from dataclasses import replace
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.data.batch import Rollout
from rlhf.models.loading import load_tokenizer
from rlhf.models.shared_base import SharedBase
from rlhf.recipe import StageName
from rlhf.recipe.schema_online import GroupOptions, Grpo
from rlhf.recipe.stages import SharedRole
from rlhf.run.directory import StageRun
from rlhf.stages.groups import make_batch
from rlhf.stages.online.scores import Scores
from tests.helpers import grouped, not_none
from tests.invariants.group_learner import REWARDS, new_learner
from tests.rollouts import GROUP, grouped_rollout, sampler_weight


@pytest.fixture(scope="module")
def run(trained) -> StageRun:
    return StageRun(trained, grouped("grpo"), "grpo")


@pytest.fixture(scope="module")
def rollout(run) -> Rollout:
    """Two prompts with four made-up responses each, of many lengths; the second is cut off without EOS."""
    generator = torch.Generator().manual_seed(3)
    made_up = grouped_rollout(load_tokenizer(run.base), generator)
    return replace(made_up, logprobs=-10 * torch.rand(made_up.mask.shape, generator=generator))


def kl_estimate(new: Tensor, ref: Tensor, estimator: str) -> Tensor:
    d = ref - new
    return {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}[estimator]


def reference_advantages(rewards: list[float], o: GroupOptions) -> list[float]:
    """The advantage of each response, from the rewards of two groups."""
    advantages = []
    for i, reward in enumerate(rewards):
        group = rewards[i // GROUP * GROUP : (i // GROUP + 1) * GROUP]
        if isinstance(o, Grpo):
            spread = {"group": stdev(group) + 1e-4, "batch": stdev(rewards) + 1e-4, "none": 1.0}[o.scale_rewards]
            advantages.append((reward - fmean(group)) / spread)
        else:
            advantages.append(reward - (sum(group) - reward) / (GROUP - 1))
    if o.normalize_advantages:
        mean, spread = fmean(advantages), stdev(advantages) + 1e-4
        advantages = [(a - mean) / spread for a in advantages]
    return advantages


def reference_step(
    shared: SharedBase, rollout: Rollout, o: GroupOptions, kl_coef: float, sgd: torch.optim.SGD
) -> float:
    """One step row by row, without padding, micro-batches or any of the project's formulas.

    Returns the share of clipped tokens, a mean over minibatches.
    """
    spans = list(zip(rollout.prompt_length.tolist(), rollout.response_length.tolist(), strict=True))
    sampled = not_none(rollout.logprobs)
    counts = [bool(ended) or not o.mask_truncated_completions for ended in rollout.ended]

    def distribution(i: int, role: SharedRole) -> Tensor:
        p, n = spans[i]
        shared.roles.activate(role)
        states = shared.base.model(input_ids=rollout.ids[i : i + 1, : p + n]).last_hidden_state[0]
        logits: Tensor = shared.base.lm_head(states[p - 1 : -1]) / o.temperature
        return logits - logits.logsumexp(-1, keepdim=True)

    def logp(i: int, role: SharedRole) -> Tensor:
        p, n = spans[i]
        return distribution(i, role)[torch.arange(n), rollout.ids[i, p : p + n]]

    with torch.no_grad():
        old, ref = ([logp(i, role) for i in range(len(spans))] for role in ("policy", "reference"))
    rewards = list(REWARDS)
    if o.kl_penalty == "reward":
        kl = [kl_estimate(a, b, o.kl_estimator).sum().item() for a, b in zip(old, ref, strict=True)]
        rewards = [reward - kl_coef * k for reward, k in zip(rewards, kl, strict=True)]
    advantages = reference_advantages(rewards, o)

    high = o.epsilon if o.epsilon_high is None else o.epsilon_high
    share_clipped = 0.0
    for _ in range(o.num_iterations):
        for mini in torch.randperm(len(spans)).chunk(o.num_mini_batches):
            rows = mini.tolist()
            tokens = sum(spans[i][1] for i in rows if counts[i])
            for i in (i for i in rows if counts[i]):
                n, new = spans[i][1], logp(i, "policy")
                d = new - old[i]
                d = {"token": d, "sequence": d.mean(), "sequence_sum": d.sum()}[o.importance_sampling_level].expand(n)
                ratio = d.exp()
                bounded = ratio.clamp(1 - o.epsilon, 1 + high)
                gain = torch.minimum(ratio * advantages[i], bounded * advantages[i])
                gain = gain * sampler_weight(old[i], sampled[i, :n], o.correction, o.sampling_correction_cap)
                clipped = (bounded * advantages[i] < ratio * advantages[i]).sum().item()
                share_clipped += clipped / tokens / (o.num_iterations * o.num_mini_batches)
                if o.kl_penalty == "loss":
                    kl_now = kl_estimate(new, ref[i], o.kl_estimator)
                    gain = gain - kl_coef * kl_now * ((new - old[i]).exp() if o.corrects_kl else 1.0)
                divisor = {
                    "grpo": len(rows) * n,
                    "dapo": tokens,
                    "dr_grpo": len(rows) * o.max_completion_length,
                }[o.loss_type]
                everything = distribution(i, "policy")
                entropy = -(everything.exp() * everything).sum() / tokens
                (-gain.sum() / divisor - o.entropy_coef * entropy).backward()
            gradients = [p.grad for p in sgd.param_groups[0]["params"]]
            norm = math.sqrt(sum((g**2).sum().item() for g in gradients))
            for g in gradients:
                g *= min(1.0, o.max_grad_norm / (norm + 1e-6))
            sgd.step()
            sgd.zero_grad()
    return share_clipped


VARIANTS: list[tuple[StageName, dict[str, Any]]] = [
    ("rloo", {}),
    ("rloo", {"normalize_advantages": True}),
    ("rloo", {"kl_penalty": "loss", "kl_estimator": "k2"}),
    ("rloo", {"mask_truncated_completions": True, "entropy_coef": 0.2}),
    ("grpo", {"epsilon_high": 0.3, "entropy_coef": 0.2}),
    ("grpo", {"loss_type": "grpo", "mask_truncated_completions": True, "entropy_coef": 0.2}),
    ("grpo", {"loss_type": "dapo", "mask_truncated_completions": True}),
    ("grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    ("grpo", {"scale_rewards": "batch"}),
    ("grpo", {"scale_rewards": "none", "normalize_advantages": True}),  # REINFORCE++
    ("grpo", {"importance_sampling_level": "sequence", "loss_type": "grpo", "epsilon": 0.01}),  # GSPO
    ("grpo", {"importance_sampling_level": "sequence", "loss_type": "grpo", "kl_estimator": "k1"}),
    ("grpo", {}),
    ("grpo", {"kl_estimator": "k1"}),
    ("grpo", {"kl_penalty": "reward", "kl_estimator": "k1"}),
    ("grpo", {"max_grad_norm": 0.01}),
    ("grpo", {"sampling_correction": "token_mask", "sampling_correction_cap": 1.5}),
    ("rloo", {"sampling_correction": "token_truncate"}),
    ("rloo", {"sampling_correction": "sequence_truncate", "kl_penalty": "loss", "kl_estimator": "k2"}),
]


@pytest.mark.parametrize(("stage", "changes"), VARIANTS)
def test_a_step_is_what_the_papers_write(run, rollout, stage, changes):
    """Two passes of two minibatches in plain torch. SGD shows every factor; Adam would divide most of them out."""
    usual: dict[str, Any] = {"temperature": 0.7, "max_grad_norm": 1e6, "epsilon": 0.1, "beta": 0.1}
    moved = []
    for independent in (False, True):
        learner = new_learner(run, stage, per_device_train_batch_size=3, **(usual | {"num_iterations": 2} | changes))
        options = learner.options
        assert options.num_mini_batches == 2
        learner.kl_coef = 0.3  # as after steps with `kl_target`
        before = torch.cat([p.detach().flatten() for p in learner.by_role["policy"]])
        sgd = torch.optim.SGD(learner.by_role["policy"], lr=20.0 if options.max_grad_norm < 1 else 0.1)
        if independent:
            torch.manual_seed(1)
            share_clipped = reference_step(learner.shared, rollout, options, learner.kl_coef, sgd)
        else:
            raw = torch.tensor(REWARDS)
            scores = Scores({"model": raw}, raw=raw, shaped=raw)
            batch = make_batch(learner, rollout, scores)
            learner.optimizer = sgd
            torch.manual_seed(1)
            stats = learner.update(batch)
        moved.append(torch.cat([p.detach().flatten() for p in learner.by_role["policy"]]) - before)
    ours, theirs = moved
    assert stats["policy/clipfrac_avg"] == pytest.approx(share_clipped, rel=1e-3) and share_clipped > 0
    assert (stats["policy/grad_norm"] > options.max_grad_norm) == (options.max_grad_norm < 1)
    assert theirs.abs().max() > 1e-3
    assert (ours - theirs).abs().max() < 1e-2 * theirs.abs().max()
    assert (ours - theirs).abs().mean() < 1e-3 * theirs.abs().mean()
