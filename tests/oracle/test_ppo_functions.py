"""A step of PPO on reward functions, with and without the reward model, against the step in numpy.

The model gives numpy its log-probabilities and values; everything from there to the losses and their gradients with
respect to both is written down again, row by row, from the papers: arXiv 1909.08593 (KL in the reward), 1506.02438
(GAE), 1707.06347 (clipping).
"""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from rlhf.data.batch import Rollout
from rlhf.errors import UserError
from rlhf.models.loading import load_tokenizer
from rlhf.recipe.schema_online import Ppo
from rlhf.run.directory import StageRun
from rlhf.stages import ppo
from rlhf.stages.online import role_passes
from rlhf.stages.online.scores import FunctionRewards, reward_scores
from tests.helpers import not_none, small
from tests.oracle.ppo_learner import NORM, new_learner
from tests.rollouts import LENGTHS, varied_rollout

Rows = list["np.ndarray[Any, Any]"]
GIVEN = [0.5, -1.0, 2.0, 0.0, 1.5, -0.25, 1.0, 3.0]  # by functions, to each response
FUNCTION = "length(most=1)"
ALONE: dict[str, Any] = {"reward_funcs": [FUNCTION], "normalize_scores": False}
BOTH: dict[str, Any] = {"reward_funcs": ["model", FUNCTION], "reward_weights": [0.5, 2.0]}


def options(**changes: Any) -> Ppo:
    settings = {
        "value_model": "adapter",
        "max_grad_norm": 1e6,
        "gamma": 0.9,
        "lam": 0.8,
        "kl_coef": 0.3,
        "vf_coef": 0.3,
        "num_ppo_epochs": 1,
        "num_mini_batches": 1,
        **changes,
    }
    return small(**{f"ppo__{key}": value for key, value in settings.items()}).recipe.options(Ppo)


@pytest.fixture(scope="module")
def rollout(trained) -> Rollout:
    return varied_rollout(load_tokenizer(StageRun(trained, small(), "ppo").base), torch.Generator().manual_seed(3))


class Step(NamedTuple):
    """What numpy makes of a step; lists have one array for each response."""

    scores: list[float]
    advantages: Rows
    returns: Rows
    policy_loss: float
    value_loss: float
    policy_gradients: Rows  # of the whole loss, with respect to log-probabilities and values
    value_gradients: Rows


def step_in_numpy(o: Ppo, logp: Rows, ref: Rows, values: Rows, of_model: list[float], ended: list[bool]) -> Step:
    """The first minibatch of a step, in which ratios are 1 and values are those of before the update."""
    weight = dict(zip(o.reward_funcs, o.weights, strict=True))
    scores, advantages, returns = [], [], []
    for i, length in enumerate(LENGTHS):
        shaped = weight[FUNCTION] * GIVEN[i]
        scores.append(shaped + weight.get("model", 0.0) * (of_model[i] if of_model else 0.0))
        if "model" in weight:
            shaped += weight["model"] * (of_model[i] - NORM.mean) / NORM.sd
        rewards = -o.kl_coef * (logp[i] - ref[i])
        rewards[-1] += shaped - (o.missing_eos_penalty or 0.0) * (not ended[i])
        estimate, later = np.zeros(length), 0.0
        for t in reversed(range(length)):
            after = values[i][t + 1] if t + 1 < length else 0.0
            later = rewards[t] + o.gamma * after - values[i][t] + o.gamma * o.lam * later
            estimate[t] = later
        advantages.append(estimate)
        returns.append(estimate + values[i])
    flat = np.concatenate(advantages)
    advantages = [(a - flat.mean()) / flat.std(ddof=1) for a in advantages]
    tokens = len(flat)
    errors = [v - r for v, r in zip(values, returns, strict=True)]
    return Step(
        scores=scores,
        advantages=advantages,
        returns=returns,
        policy_loss=-sum(a.sum() for a in advantages) / tokens,
        value_loss=0.5 * sum((e**2).sum() for e in errors) / tokens,
        policy_gradients=[-a / tokens for a in advantages],
        value_gradients=[o.vf_coef * e / tokens for e in errors],
    )


@pytest.mark.parametrize("rewards", [ALONE, BOTH], ids=["functions", "functions and the model"])
@pytest.mark.parametrize("kind", ["adapter", "head"])
def test_a_step_is_what_numpy_makes_of_it(trained, rollout, rewards, kind):
    settings = options(value_model=kind, **rewards)
    learner = new_learner(trained, settings)
    weight = dict(zip(settings.reward_funcs, settings.weights, strict=True))[FUNCTION]
    batch = ppo.make_batch(learner, rollout, FunctionRewards({}, weight * torch.tensor(GIVEN)))

    def rows(x: torch.Tensor) -> Rows:
        return [row[:n].double().numpy() for row, n in zip(x, LENGTHS, strict=True)]

    of_model = reward_scores(learner.shared, rollout, 8).tolist() if settings.model_scores else []
    logp, ref, values = rows(batch.old_logp), rows(batch.ref_logp), rows(batch.values)
    expected = step_in_numpy(settings, logp, ref, values, of_model, rollout.ended.tolist())
    assert batch.scores.tolist() == pytest.approx(expected.scores, abs=1e-5)
    for ours, theirs in ((batch.advantages, expected.advantages), (batch.returns, expected.returns)):
        assert np.concatenate(rows(ours)) == pytest.approx(np.concatenate(theirs), abs=1e-5)

    # The gradients reach the weights through log-probabilities and values: take those of numpy through the same passes.
    parameters = {role: list(learner.by_role[role]) for role in ("policy", "value")}
    gradients = []
    for written_again in (False, True):
        learner.optimizer.zero_grad()
        if written_again:
            with learner.shared.role("policy"):
                hidden = learner.shared.response_hidden(rollout)
                new_logp = learner.shared.logprobs(hidden, rollout, settings.temperature)
                if kind == "head":
                    new_values = learner.shared.values(hidden)
                    _pull(new_logp, expected.policy_gradients, new_values, expected.value_gradients)
                else:
                    _pull(new_logp, expected.policy_gradients)
            if kind == "adapter":
                with learner.shared.role("value"):
                    hidden = learner.shared.response_hidden(rollout)
                    _pull(learner.shared.values(hidden), expected.value_gradients)
        else:
            stats = learner.add_gradients(batch, torch.arange(len(LENGTHS)))
        gradients.append(
            {
                role: torch.cat([not_none(p.grad).flatten().clone() for p in weights])
                for role, weights in parameters.items()
            }
        )
    assert stats["loss/policy_avg"] == pytest.approx(expected.policy_loss, abs=1e-5)
    assert stats["loss/value_avg"] == pytest.approx(expected.value_loss, rel=1e-4)
    for role in parameters:
        gradient, again = (found[role] for found in gradients)
        assert again.abs().max() > 1e-4
        assert (gradient - again).abs().max() < 1e-3 * again.abs().max(), role


def _pull(*outputs_and_gradients: Any) -> None:
    """Go backward from (B, R) outputs with the gradients of their real slots, in one pass."""
    outputs, rows = outputs_and_gradients[::2], outputs_and_gradients[1::2]
    gradients = []
    for output, of_rows in zip(outputs, rows, strict=True):
        gradient = torch.zeros_like(output)
        for i, row in enumerate(of_rows):
            gradient[i, : len(row)] = torch.from_numpy(row).float()
        gradients.append(gradient)
    torch.autograd.backward(outputs, gradients)


@pytest.mark.parametrize("kind", ["adapter", "head"])
def test_without_a_reward_model_the_critic_starts_where_the_policy_does_and_says_zero(trained, rollout, kind):
    learner = new_learner(trained, options(value_model=kind, **ALONE), moved=False)
    assert role_passes.old_logprobs_and_values(learner.shared, rollout, learner.options)[1].abs().max() == 0
    if kind == "adapter":
        policy, critic = (learner.shared.roles.parameters(role) for role in ("policy", "value"))
        assert len(policy) == len(critic) > 0
        for a, b in zip(policy, critic, strict=True):
            assert torch.equal(a, b) and a is not b and b.requires_grad
    assert "reward" not in learner.shared.peft.peft_config


def test_with_the_reward_model_the_critic_starts_as_its_part_of_the_score(trained, rollout):
    learner = new_learner(trained, options(**BOTH), moved=False)
    with torch.no_grad():
        scores = 0.5 * (learner.shared.scores(rollout) - NORM.mean) / NORM.sd
        with learner.shared.role("value"):
            hidden = learner.shared.hidden(rollout.ids)[torch.arange(len(LENGTHS)), rollout.last]
        assert learner.shared.values(hidden[:, None])[:, 0].tolist() == pytest.approx(scores.tolist(), abs=1e-4)


@pytest.mark.parametrize("kind", ["adapter", "head"])
@pytest.mark.parametrize(
    "changes",
    [BOTH, {**ALONE, "kl_penalty": "loss", "kl_estimator": "k3", "entropy_coef": 0.1}],
)
def test_a_response_that_is_not_judged_counts_as_one_that_was_never_sampled(trained, rollout, kind, changes):
    """In the update of policy and critic, also where a micro-batch or a whole minibatch has no other."""
    judged = torch.tensor([True, False, True, True, False, True, True, True])
    numbers = torch.tensor(GIVEN)
    stats, gradients = [], []
    for rows, given in (
        (rollout, numbers.where(judged, math.nan)),
        (rollout.rows(judged.nonzero().squeeze(1)), numbers[judged]),
    ):
        learner = new_learner(trained, options(value_model=kind, per_device_train_batch_size=1, **changes))
        batch = ppo.make_batch(learner, rows, FunctionRewards({}, given))
        stats.append(ppo.batch_metrics(batch, learner) | learner.add_gradients(batch, torch.arange(len(given))))
        gradients.append(torch.cat([not_none(p.grad).flatten() for p in learner.all_parameters]))
    of_judged = {key for key in stats[1] if key.startswith(("objective/scores", "objective/rlhf", "val/", "loss/"))}
    assert len(of_judged) >= 7
    for key in of_judged:
        assert stats[0][key] == pytest.approx(stats[1][key], rel=1e-3, abs=1e-5), key
    assert gradients[1].abs().max() > 1e-3
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-4 * gradients[1].abs().max().item())


def parameters_after(trained: Any, rollout: Rollout, numbers: torch.Tensor, **changes: Any) -> tuple[Any, float]:
    """What an update logs, and the largest change of a parameter."""
    learner = new_learner(trained, options(**ALONE, **changes))
    before = [p.detach().clone() for p in learner.all_parameters]
    batch = ppo.make_batch(learner, rollout, FunctionRewards({}, numbers))
    stats = ppo.batch_metrics(batch, learner) | learner.update(batch)
    after = learner.all_parameters
    return stats, max((a - b).abs().max().item() for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("judged", [[], [LENGTHS.index(min(LENGTHS))]])
def test_too_few_verdicts_take_no_step(trained, rollout, judged, capsys):
    """None at all, and one of a response with a single token."""
    assert min(LENGTHS) == 1
    numbers = torch.full((8,), math.nan)
    numbers[judged] = 1.0
    stats, moved = parameters_after(trained, rollout, numbers, num_mini_batches=4)
    assert (stats["update/optimizer_steps"], moved) == (0, 0)
    assert all(math.isfinite(x) for x in stats.values())
    assert f"no update in step 1: {len(judged)} of 8 responses count" in capsys.readouterr().err


def test_advantages_that_are_the_rounding_of_returns_are_zero(trained, rollout, monkeypatch):
    """A critic that knows every return but for its last bit leaves nothing to learn; one more of 700 is a signal."""
    settings = {"gamma": 1.0, "lam": 1.0, "kl_coef": 0.0, "missing_eos_penalty": None}
    learner = new_learner(trained, options(**ALONE, **settings))
    bits = torch.arange(rollout.mask.shape[1]) % 2
    known = (700 * (1 + bits * torch.finfo().eps)).expand_as(rollout.mask), torch.zeros(rollout.mask.shape)
    monkeypatch.setattr(role_passes, "old_logprobs_and_values", lambda *given: known[::-1])
    assert not ppo.make_batch(learner, rollout, FunctionRewards({}, torch.full((8,), 700.0))).advantages.any()
    better = torch.tensor([700.0] * 7 + [701.0])
    assert ppo.make_batch(learner, rollout, FunctionRewards({}, better)).advantages[
        rollout.mask
    ].std().item() == pytest.approx(1, rel=1e-3)


def test_a_minibatch_without_a_verdict_takes_no_step(trained, rollout):
    numbers = torch.full((8,), math.nan)
    numbers[LENGTHS.index(max(LENGTHS))] = 1.0
    stats, moved = parameters_after(trained, rollout, numbers, num_mini_batches=4, num_ppo_epochs=2)
    assert stats["update/optimizer_steps"] == 2 and moved > 0, "of eight minibatches, one in each pass"


def test_metrics_have_each_function_and_the_share_without_verdict():
    by_name = {"mine": torch.tensor([1.0, math.nan, 0.0, math.nan])}
    rewards = FunctionRewards(by_name, torch.tensor([0.0, math.nan, 0.0, 0.0]))
    assert ppo.reward_metrics(rewards) == {"rewards/mine": 0.5, "objective/no_verdict": 0.25}
    assert ppo.reward_metrics(None) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_funcs": [FUNCTION]}, "normalize_scores needs model"),
        ({**ALONE, "sigmoid_scores": True}, "sigmoid_scores needs model"),
        ({**BOTH, "reward_weights": [1.0]}, "reward_weights"),
        ({**BOTH, "reward_weights": [0.0, 0.0]}, "reward_weights"),
        ({"reward_funcs": ["model", "model"]}, "names a reward twice"),
    ],
)
def test_keys_that_cannot_be_combined_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        options(**changes)


def test_rewards_decide_what_ppo_builds_on():
    from rlhf.recipe import deciding_settings

    assert "rm" in deciding_settings(small().recipe, "ppo")
    on_functions = small(**{f"ppo__{key}": value for key, value in ALONE.items()}).recipe
    settings = deciding_settings(on_functions, "ppo")
    assert isinstance(settings["ppo"], dict) and settings["ppo"]["reward_funcs"] == [FUNCTION]
    assert "rm" not in settings
