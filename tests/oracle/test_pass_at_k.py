"""pass@k against every subset of the samples, and against the code of its authors."""

import itertools
import math
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf.evaluation.policies import PolicySamples, of_several_samples, pass_at_k
from rlhf.stages.evaluate import policy_metrics
from rlhf.stats import wilson

NAN = math.nan


@given(st.lists(st.booleans(), min_size=2, max_size=8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(verdicts):
    for name, (found,) in pass_at_k([[float(right) for right in verdicts]]).items():
        k = int(name.removeprefix("pass_at_"))
        share = fmean(any(subset) for subset in itertools.combinations(verdicts, k))
        published = 1 - math.prod(1 - k / i for i in range(len(verdicts) - sum(verdicts) + 1, len(verdicts) + 1))
        assert found == pytest.approx(share, abs=1e-12)
        assert published == pytest.approx(share, abs=1e-12)  # as the authors' code computes it


def test_pass_at_k_needs_verdicts_and_as_many_as_k():
    assert not pass_at_k([[1.0]]) and [*pass_at_k([[1.0] * 7])] == ["pass_at_2", "pass_at_4"]
    assert pass_at_k([[1.0, 0.0, 0.0, NAN], [0.0, 0.0, 0.0, 0.0], [1.0, NAN, NAN, NAN]]) == {
        "pass_at_2": [pytest.approx(2 / 3), 0.0],
        "pass_at_4": [0.0],
    }
    assert pass_at_k([[0.5, 1.0]]) == pass_at_k([]) == {}


def test_the_metrics_of_an_evaluation_with_several_samples():
    def samples(kl, rewards):
        return PolicySamples(
            texts=[""] * 4,
            lengths=torch.tensor([1, 3, 2, 2]),
            ended=torch.ones(4, dtype=torch.bool),
            kl=kl,
            judged={
                "reward_exact_answer": torch.tensor(rewards),
                "reward_length": torch.tensor([0.0, -0.5, 0.0, 0.0]),
            },
            samples_per_prompt=2,
        )

    before, after = samples(0.0, [0.0, 1.0, 0.0, 0.0]), samples(0.5, [1.0, 1.0, 0.0, 1.0])
    every = policy_metrics({"base": before, "sft": before, "ppo": after}, "sft")
    assert every["ppo/kl_per_response"] == pytest.approx(1.0)  # two tokens each
    assert not {"base/kl_per_response", "sft/kl_per_response"} & every.keys()
    metrics = of_several_samples(after)
    assert metrics["reward_exact_answer_pass_at_2"] == 1.0
    assert not any("length" in name for name in metrics)
    assert of_several_samples(before) == {
        "reward_exact_answer_pass_at_2": 0.5,
        "reward_exact_answer_pass_at_2_low": wilson(1, 2).low,
        "reward_exact_answer_pass_at_2_high": wilson(1, 2).high,
    }
