"""A step of PPO against the same step written down again from the papers, row by row."""

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf.data.batch import Rollout
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.models.loading import load_tokenizer
from rlhf.models.shared_base import SharedBase
from rlhf.recipe.schema_online import Ppo
from rlhf.recipe.stages import SharedRole
from rlhf.run.directory import StageRun
from rlhf.stages import ppo
from rlhf.stages.online import scores as scores_of
from tests.helpers import beside, not_none, run_stages, small
from tests.lines import read_intact_lines
from tests.oracle.ppo_learner import NORM, new_learner
from tests.rollouts import LENGTHS, sampler_weight, varied_rollout


@pytest.fixture(scope="module")
def tokenizer(trained) -> DialogueTokenizer:
    return load_tokenizer(StageRun(trained, small(), "ppo").base)


@pytest.fixture(scope="module")
def rollout(tokenizer) -> Rollout:
    """Made-up dialogues of many lengths; the longest response is cut off without EOS."""
    generator = torch.Generator().manual_seed(3)
    made_up = varied_rollout(tokenizer, generator)
    return replace(made_up, logprobs=-10 * torch.rand(made_up.mask.shape, generator=generator))


def reference_step(
    shared: SharedBase, rollout: Rollout, o: Ppo, kl_coef: float, optimizers: list[torch.optim.SGD]
) -> dict[str, float]:
    """One PPO step written down again: row by row, without padding, micro-batches or any of the project's formulas.

    Returns the share of clipped tokens and the critic's loss, each a mean over minibatches.
    """
    spans = list(zip(rollout.prompt_length.tolist(), rollout.response_length.tolist(), strict=True))
    sampled = not_none(rollout.logprobs)
    rows = [rollout.ids[i, : p + n] for i, (p, n) in enumerate(spans)]

    def states(i: int, role: SharedRole) -> Tensor:
        shared.roles.activate(role)
        hidden: Tensor = shared.base.model(input_ids=rows[i][None]).last_hidden_state
        return hidden[0]

    def distribution(i: int, role: SharedRole) -> Tensor:
        p, n = spans[i]
        logits: Tensor = shared.base.lm_head(states(i, role)[p - 1 : p + n - 1]) / o.temperature
        return logits - logits.logsumexp(-1, keepdim=True)

    def logp(i: int, role: SharedRole) -> Tensor:
        p, n = spans[i]
        return distribution(i, role)[torch.arange(n), rows[i][p:]]

    def value(i: int) -> Tensor:
        p, n = spans[i]
        role: SharedRole = "value" if "value" in shared.roles.trainable else "policy"
        values: Tensor = not_none(shared.value_head)(states(i, role)[p - 1 : p + n - 1])
        return values[:, 0]

    old, ref, before, shaped, advantages = [], [], [], [], []
    with torch.no_grad():
        for i in range(len(rows)):
            old.append(logp(i, "policy"))
            ref.append(logp(i, "reference"))
            before.append(value(i))
            d = ref[i] - old[i]
            kl = {"k1": -d, "k2": d**2 / 2, "k3": d.exp() - 1 - d}[o.kl_estimator]
            shaped.append(-kl_coef * kl if o.kl_penalty == "reward" else torch.zeros(spans[i][1]))
            score = (shared.score_heads["reward"](states(i, "reward")[-1]).item() - NORM[0]) / NORM[1]
            score = 1 / (1 + math.exp(-score)) if o.sigmoid_scores else score
            shaped[i][-1] += score - (o.missing_eos_penalty or 0.0) * (not rollout.ended[i])
        for i, (_, n) in enumerate(spans):
            delta = shaped[i] + o.gamma * torch.cat([before[i][1:], torch.zeros(1)]) - before[i]
            decay = o.gamma * o.lam
            terms = [[decay ** (k - t) * delta[k] for k in range(t, n)] for t in range(n)]
            advantages.append(torch.stack([sum(later, torch.zeros(())) for later in terms]))
    returns = [a + v for a, v in zip(advantages, before, strict=True)]
    spread, mean = torch.cat(advantages).std(), torch.cat(advantages).mean()
    advantages = [(a - mean) / spread for a in advantages] if o.whiten_advantages else advantages

    reach = math.inf if o.cliprange_value is None else o.cliprange_value
    minibatches = o.num_ppo_epochs * o.num_mini_batches
    measured = {"policy/clipfrac_avg": 0.0, "loss/value_avg": 0.0}
    for _ in range(o.num_ppo_epochs):
        for mini in torch.randperm(len(rows)).chunk(o.num_mini_batches):
            tokens = sum(spans[i][1] for i in mini.tolist())
            for i in mini.tolist():
                ratio = (logp(i, "policy") - old[i]).exp()
                bounded = ratio.clamp(1 - o.cliprange, 1 + o.cliprange)
                gain = torch.minimum(ratio * advantages[i], bounded * advantages[i])
                seen = sampled[i, : spans[i][1]]
                gain = gain * sampler_weight(old[i], seen, o.correction, o.sampling_correction_cap)
                clipped = (bounded * advantages[i] < ratio * advantages[i]).sum().item()
                measured["policy/clipfrac_avg"] += clipped / tokens / minibatches
                if o.kl_penalty == "loss":
                    d = ref[i] - logp(i, "policy")
                    gain = gain - kl_coef * (d.exp() - 1 - d if o.kl_estimator == "k3" else d**2 / 2)
                if o.entropy_coef:
                    everything = distribution(i, "policy")
                    gain = gain - o.entropy_coef * (everything.exp() * everything).sum(-1)
                (-gain.sum() / tokens).backward()
                v = value(i)
                near = before[i] + (v - before[i]).clamp(-reach, reach)
                error = torch.maximum((v - returns[i]) ** 2, (near - returns[i]) ** 2)
                (o.vf_coef * 0.5 * error.sum() / tokens).backward()
                measured["loss/value_avg"] += 0.5 * error.sum().item() / tokens / minibatches
            for optimizer in optimizers:
                gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
                norm = sum((g**2).sum() for g in gradients).sqrt()
                for g in gradients:
                    g *= min(1.0, o.max_grad_norm / (norm.item() + 1e-6))
                optimizer.step()
                optimizer.zero_grad()
    return measured


OPTIONS: list[dict[str, Any]] = [
    {},
    {"kl_penalty": "loss", "kl_estimator": "k2"},
    {"kl_penalty": "loss", "kl_estimator": "k3", "kl_coef": 2.0},
    {"entropy_coef": 0.5},
    {"sigmoid_scores": True, "normalize_scores": False},
    {"kl_estimator": "k2", "kl_coef": 2.0},
    {"kl_estimator": "k3", "kl_coef": 2.0},
    {"cliprange_value": None},
    {"whiten_advantages": False},
    {"missing_eos_penalty": None},
    {"sampling_correction": "token_truncate"},
    {"sampling_correction": "sequence_mask"},
]


@pytest.mark.parametrize(
    ("kind", "max_grad_norm", "rates", "more"),
    [
        *((kind, 1e6, (1.0, 0.1), more) for kind in ("head", "adapter") for more in OPTIONS),
        *((kind, 0.05, (20.0, 5.0), {}) for kind in ("head", "adapter")),
    ],
)
def test_a_step_is_what_the_paper_writes(trained, rollout, kind, max_grad_norm, rates, more):
    """Two epochs of two minibatches in plain torch. SGD shows every factor; Adam would divide most of them out."""
    settings = small(
        **{
            f"ppo__{name}": value
            for name, value in {
                "value_model": kind,
                "max_grad_norm": max_grad_norm,
                "temperature": 0.7,
                "gamma": 0.9,
                "lam": 0.8,
                "kl_coef": 0.3,
                "vf_coef": 0.3,
                "cliprange": 0.05,
                "cliprange_value": 0.003,
                "per_device_train_batch_size": 3,
                **more,
            }.items()
        }
    ).recipe.options(Ppo)
    assert (settings.num_ppo_epochs, settings.num_mini_batches) == (2, 2)

    moved = []
    for independent in (False, True):
        learner = new_learner(trained, settings)
        before = torch.cat([p.detach().flatten() for p in (*learner.by_role["policy"], *learner.by_role["value"])])
        groups = [
            {"params": p, "lr": lr}
            for p, lr in zip((learner.by_role["policy"], learner.by_role["value"]), rates, strict=True)
        ]
        learner.kl_coef = 1.2 * settings.kl_coef  # as after steps with `kl_target`
        torch.manual_seed(1)
        if independent:
            optimizers = [torch.optim.SGD([group]) for group in groups]
            measured = reference_step(learner.shared, rollout, settings, learner.kl_coef, optimizers)
        else:
            batch = ppo.make_batch(learner, rollout)
            learner.optimizer = torch.optim.SGD(groups)
            torch.manual_seed(1)
            stats = learner.update(batch)
        moved.append(
            torch.cat([p.detach().flatten() for p in (*learner.by_role["policy"], *learner.by_role["value"])]) - before
        )
    assert stats["policy/clipfrac_avg"] > 0
    assert {name: stats[name] for name in measured} == pytest.approx(measured, rel=1e-2)
    assert (stats["val/clipfrac_avg"] > 0) == (settings.cliprange_value is not None)
    assert (stats["policy/grad_norm"] > max_grad_norm) == (max_grad_norm < 1)
    policy = sum(p.numel() for p in learner.by_role["policy"])
    for part in (slice(None, policy), slice(policy, None)):
        ours, theirs = moved[0][part], moved[1][part]
        assert theirs.abs().max() > 1e-3
        assert (ours - theirs).abs().max() < 1e-2 * theirs.abs().max()
        assert (ours - theirs).abs().mean() < 1e-3 * theirs.abs().mean()


def test_the_optimizer_has_a_rate_for_each_role_and_steps_once_per_minibatch(trained, rollout):
    settings = small(
        ppo__value_model="adapter", ppo__num_ppo_epochs=3, ppo__num_mini_batches=4, ppo__learning_rate=0.25
    ).recipe.options(Ppo)
    learner = new_learner(trained, settings)
    shared = learner.shared
    policy, value = learner.optimizer.param_groups
    assert {id(p) for p in policy["params"]} == {id(p) for p in shared.roles.parameters("policy")}
    assert {id(p) for p in value["params"]} == {
        id(p) for p in (*shared.roles.parameters("value"), *not_none(shared.value_head).parameters())
    }
    assert (policy["initial_lr"], value["initial_lr"]) == (0.25, settings.value_learning_rate)
    for group in (policy, value):
        assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.9, 0.999), 1e-5, 0.0)
    learner.update(ppo.make_batch(learner, rollout))
    assert {int(state["step"]) for state in learner.optimizer.state.values()} == {3 * 4}


@pytest.mark.parametrize("wanted", [True, False])
def test_whitened_advantages_have_mean_0_and_sd_1_over_real_tokens(trained, rollout, wanted):
    settings = small(ppo__whiten_advantages=wanted).recipe.options(Ppo)
    batch = ppo.make_batch(new_learner(trained, settings), rollout)
    real = torch.cat([row[:n] for row, n in zip(batch.advantages, LENGTHS, strict=True)])
    assert len(real) == sum(LENGTHS)
    assert (abs(real.mean().item()) < 1e-5) is wanted
    assert (real.std().item() == pytest.approx(1.0, abs=1e-4)) is wanted
    gaps = torch.cat([(e - v)[:n] for e, v, n in zip(batch.returns, batch.values, LENGTHS, strict=True)])
    scaled = (gaps - gaps.mean()) / gaps.std() if wanted else gaps  # the returns are made before whitening
    assert real.tolist() == pytest.approx(scaled.tolist(), abs=1e-4)


def test_scores_are_normalised_by_mean_and_sd_of_sft_responses(trained, rollout: Rollout):
    options = small(ppo__batch_size=128, ppo__rollout_batch_size=2, ppo__norm_responses=256).recipe.options(Ppo)
    shared = new_learner(trained, options).shared
    scores = []
    shared.roles.activate("reward")
    for row, n in zip(rollout.ids, (rollout.prompt_length + rollout.response_length).tolist(), strict=True):
        with torch.no_grad():
            last = shared.base.model(input_ids=row[None, :n]).last_hidden_state[0, -1]
            scores.append(shared.score_heads["reward"](last).item())
    drawn = []

    def draw(step: int) -> Rollout:  # unequal parts: a mean of means would not do
        drawn.append(step)
        return rollout.rows(torch.arange(3) if step else torch.arange(3, 8))

    expected = statistics.mean(scores), statistics.stdev(scores)
    assert scores_of.measure_score_norm(shared, draw, options) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert drawn == [0, 1]


def test_scores_stay_as_they_are_where_the_recipe_says_so(trained, tmp_path):
    loaded = small(ppo__steps=1, ppo__normalize_scores=False)
    run_stages(loaded, beside(trained, tmp_path, "pretrain", "sft", "rm"), "ppo")
    (logged,) = read_intact_lines(tmp_path / "cpu-tiny/v1/ppo/metrics.jsonl")
    penalty = 1.0 - logged["response/eos_rate"]
    assert logged["objective/scores_shaped"] == pytest.approx(logged["objective/scores"] - penalty, abs=1e-6)
