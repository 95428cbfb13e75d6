"""Weights for responses of a sampler that differs from the policy: by hand, and as an expectation."""

import math
from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from rlhf.objectives.choices import SamplingCorrection
from rlhf.objectives.groups import LossTerms, policy_loss
from rlhf.objectives.importance import importance_weights
from rlhf.objectives.losses import ppo_policy_loss

# Ratios p / q of two responses of three tokens and of one: products 4 and 0.5. A pad holds garbage.
RATIOS = torch.tensor([[4.0, 0.5, 2.0], [0.5, math.nan, math.inf]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, False, False]])
SAMPLED = torch.full((2, 3), -1.0, dtype=torch.float64)
WORKED: dict[SamplingCorrection, list[list[float]]] = {
    "token_truncate": [[3.0, 0.5, 2.0], [0.5, 0.0, 0.0]],
    "token_mask": [[0.0, 0.5, 2.0], [0.5, 0.0, 0.0]],
    "sequence_truncate": [[3.0, 3.0, 3.0], [0.5, 0.0, 0.0]],
    "sequence_mask": [[0.0, 0.0, 0.0], [0.5, 0.0, 0.0]],
}


@pytest.mark.parametrize("correction", WORKED)
def test_weights_worked_by_hand(correction):
    weights = importance_weights(SAMPLED + RATIOS.log(), SAMPLED, MASK, correction, 3.0)
    torch.testing.assert_close(weights, torch.tensor(WORKED[correction], dtype=torch.float64))


def test_every_correction_is_worked():
    assert {"none", *WORKED} == {*get_args(SamplingCorrection)}


def test_equal_distributions_have_weight_one():
    for correction in WORKED:
        weights = importance_weights(SAMPLED, SAMPLED, MASK, correction, 3.0)
        assert weights.tolist() == MASK.double().tolist()


# -- the gradient that a sampler in a lower precision gives ------------------------------------------------------------


def bfloat16(weight: Tensor) -> Tensor:
    return weight.bfloat16().float()


def int8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


@pytest.mark.parametrize(("rounded", "least"), [(bfloat16, 1e-3), (int8, 1e-2)])
@pytest.mark.parametrize("loss", ["clipped", "ppo"])
def test_a_rounded_sampler_biases_the_gradient_and_the_weights_remove_it(
    rounded: Callable[[Tensor], Tensor], least: float, loss: str
):
    """Two tokens from a vocabulary of 12, all 144 responses with their probability: no sampling noise is left."""
    generator = torch.Generator().manual_seed(0)
    size, width = 12, 32
    states = torch.randn(size + 1, width, generator=generator)  # before the first token, and after each of them
    head = (torch.randn(size, width, generator=generator)).requires_grad_()
    rewards = torch.randn(size * size, generator=generator)
    responses = torch.cartesian_prod(torch.arange(size), torch.arange(size))
    before = torch.stack([torch.full((len(responses),), size), responses[:, 0]], 1)
    mask = torch.ones(responses.shape, dtype=torch.bool)

    def logp_of(weight: Tensor) -> Tensor:
        logp = (states[before] @ weight.T).log_softmax(-1)
        return logp.gather(-1, responses[..., None]).squeeze(-1)

    policy = logp_of(head)
    trained, sampled = policy.detach(), logp_of(rounded(head.detach()))

    def gradient(drawn_with: Tensor, weights: Tensor) -> Tensor:
        """Expected gradient of the loss when responses are drawn with these log-probabilities."""
        each = drawn_with.sum(1).exp()[:, None] * weights
        if loss == "ppo":
            value, _ = ppo_policy_loss(policy, trained, rewards[:, None].expand_as(policy), mask, 0.2, each)
            value = value * mask.sum()
        else:
            value, _ = policy_loss("grpo", LossTerms(policy, policy - trained, rewards, each, mask, 0.2, 0.2))
        return torch.autograd.grad(value, head, retain_graph=True)[0]

    ones = torch.ones(policy.shape)
    exact = gradient(trained, ones)
    corrected = importance_weights(trained, sampled, mask, "sequence_mask", 3.0)
    assert corrected.all(), "no ratio exceeds the cap"

    def error(found: Tensor) -> float:
        return float((found - exact).norm() / exact.norm())

    assert error(gradient(sampled, ones)) > least
    assert error(gradient(sampled, corrected)) < 2e-6
    by_token = importance_weights(trained, sampled, mask, "token_truncate", 3.0)
    assert error(gradient(sampled, by_token)) < error(gradient(sampled, ones))
