"""Times of every function of rlhf/objectives, with its gradient where it has one: `make bench-micro`.

Whether they are right is for tests/oracle; here a function must return finite numbers.
"""

from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from rlhf.objectives import groups, importance, kl, logprobs, losses, masked, rewards
from rlhf.objectives.choices import KlEstimator

ROWS, LENGTH, GROUP = 64, 128, 8  # a batch of responses; of one prompt
SEEDED = torch.Generator().manual_seed(0)
MASK = torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (ROWS, 1), generator=SEEDED)
A, B, C = torch.randn(3, ROWS, LENGTH, generator=SEEDED)  # of tokens
P, Q = torch.randn(2, ROWS, generator=SEEDED)  # of responses
LOGP = (A / 10).requires_grad_()  # what a loss is differentiated by
BY_PROMPT, ALL = Q.view(-1, GROUP), torch.ones(ROWS // GROUP, GROUP, dtype=torch.bool)
WEIGHTS = groups.token_weights(MASK, "dapo", ROWS, MASK.sum(), LENGTH)
TERMS = groups.LossTerms(LOGP, LOGP, P, WEIGHTS, MASK, 0.2, 0.2)
HIDDEN, OUTPUT = torch.randn(512, 128, generator=SEEDED), torch.randn(8000, 128, generator=SEEDED) / 10
IDS = torch.randint(0, 8000, (512,), generator=SEEDED)

CALLS: dict[str, Callable[[], object]] = {
    **{f"groups.ADVANTAGES[{kind}]": partial(compare, BY_PROMPT, ALL) for kind, compare in groups.ADVANTAGES.items()},
    **{f"groups.policy_loss[{kind}]": partial(groups.policy_loss, kind, TERMS) for kind in groups.POLICY_LOSSES},
    "groups.group_sd": lambda: groups.group_sd(BY_PROMPT, ALL),
    "groups.has_signal": lambda: groups.has_signal(BY_PROMPT, ALL),
    "groups.standardize": lambda: groups.standardize(BY_PROMPT, ALL),
    "groups.token_weights": lambda: groups.token_weights(MASK, "grpo", ROWS, MASK.sum(), LENGTH),
    "importance.log_ratios": lambda: importance.log_ratios(LOGP, B, MASK),
    "importance.pool_log_ratios": lambda: importance.pool_log_ratios(LOGP, MASK, "sequence"),
    "importance.importance_weights": lambda: importance.importance_weights(A, B, MASK, "token_truncate", 2.0),
    **{f"kl.estimate_kl[{kind}]": partial(kl.estimate_kl, A, B, kind) for kind in get_args(KlEstimator)},
    "logprobs.linear_token_logprobs": lambda: logprobs.linear_token_logprobs(HIDDEN, OUTPUT, IDS, 1.0, 256),
    "losses.clipped_surrogate": lambda: losses.clipped_surrogate(LOGP, B, 0.2, 0.2),
    "losses.ppo_policy_loss": lambda: losses.ppo_policy_loss(LOGP, B, C, MASK, 0.2),
    "losses.ppo_value_loss": lambda: losses.ppo_value_loss(LOGP, B, C, MASK, 0.2),
    "masked.explained_variance": lambda: masked.explained_variance(A, B, MASK),
    "masked.masked_mean": lambda: masked.masked_mean(A, MASK),
    "masked.masked_var": lambda: masked.masked_var(A, MASK),
    "masked.whiten": lambda: masked.whiten(A, MASK),
    "masked.zero_pads": lambda: masked.zero_pads(A, MASK),
    "rewards.gae": lambda: rewards.gae(A, B, MASK, 1.0, 0.95),
    "rewards.shape_rewards": lambda: rewards.shape_rewards(A, P, MASK, 0.1),
    "rewards.shape_scores": lambda: rewards.shape_scores(P, mean=0.1, sd=2.0),
}


def first(found: object) -> Tensor:
    """Return a function's result, the first where there are several."""
    result = found[0] if isinstance(found, tuple) else found
    assert isinstance(result, Tensor)
    return result


def whole(call: Callable[[], object]) -> Tensor:
    """Call a function and, where its result has a gradient, compute that."""
    result = first(call())
    if result.requires_grad:
        result.sum().backward()
    return result


@pytest.mark.parametrize("name", CALLS)
def test_objective(benchmark: BenchmarkFixture, name: str) -> None:
    result = benchmark(whole, CALLS[name])
    assert bool(result.isfinite().all())
