"""Perplexity, exact divergence, gains and win rates against numbers made in another way."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf import stats
from rlhf.data.batch import Rollout, collate
from rlhf.data.tokenize import Encoded
from rlhf.evaluation import policies
from rlhf.evaluation.likelihood import perplexity
from rlhf.evaluation.policies import (
    PolicySamples,
    exact_kl,
    further_metrics,
    gains_over_base,
    gains_over_start,
    own_figures,
    win_rate,
)
from tests.helpers import not_none

PAD, EOS = 0, 2


def tiny(seed: int) -> LlamaForCausalLM:
    """A model whose predictions are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    model.lm_head.weight.data *= 20
    return model


def next_token(model: LlamaForCausalLM, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Probabilities of the token after `ids`, by the definition of softmax."""
    with torch.no_grad():
        logits = (model(input_ids=torch.tensor([ids])).logits[0, -1].double() / temperature).tolist()
    weights = [math.exp(x) for x in logits]
    return [w / sum(weights) for w in weights]


SEQUENCES = [
    Encoded([1, 5, 6], [7, 8, 9, EOS]),
    Encoded([1, 10], [EOS]),
    Encoded([], [1, 11, 12, 13, 14]),
    Encoded([1, 15, 16, 17, 18], [19, 20, 21, 22, 3, EOS]),
    Encoded([4], [6]),
]


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_perplexity_is_of_all_scored_tokens_alike(batch_size):
    model = tiny(0)
    losses = [
        -math.log(next_token(model, row.ids[:at])[row.ids[at]])
        for row in SEQUENCES
        for at in range(max(len(row.prompt), 1), len(row.ids))
    ]
    assert len(losses) == 4 + 1 + 4 + 6 + 1
    expected = math.exp(sum(losses) / len(losses))
    assert perplexity(model, SEQUENCES, PAD, batch_size) == pytest.approx(expected, rel=1e-5)
    assert perplexity(model, SEQUENCES[::-1], PAD, batch_size) == pytest.approx(expected, rel=1e-5)
    everything = [Encoded([], row.ids) for row in SEQUENCES]
    assert abs(perplexity(model, everything, PAD, batch_size) / expected - 1) > 0.05


class Roles:
    """A stand-in for SharedBase whose hidden states are the logits themselves: the policy is sharper than SFT."""

    def __init__(self, rows: int, slots: int):
        generator = torch.Generator().manual_seed(0)
        self.vocabulary, self.largest = 23, 0
        self.states = {
            role: scale * torch.randn(rows, slots, 23, generator=generator)
            for role, scale in {"policy": 3.0, "reference": 1.0}.items()
        }

    @contextmanager
    def role(self, name: str) -> Iterator[None]:
        self.active = name
        yield

    def response_hidden(self, rollout: Rollout) -> Tensor:
        return self.states[self.active].masked_fill(~rollout.mask[..., None], torch.nan)

    def logits(self, hidden: Tensor) -> Tensor:
        self.largest = max(self.largest, len(hidden))
        return hidden


@pytest.mark.parametrize(("temperature", "tokens"), [(1.0, 1024), (0.4, 1024), (1.0, 2), (1.0, 0)])
def test_the_exact_divergence_is_from_the_role_to_the_reference(monkeypatch, temperature, tokens):
    """Over whole distributions at the response tokens, one by one in float64; the other direction is another number."""
    monkeypatch.setattr(policies, "KL_LOGITS", 23 * tokens)
    lengths = [4, 6, 1]
    rollout = collate([[1, 3], [1], [1, 4, 5]], [[7] * n for n in lengths], PAD, EOS)
    roles: Any = Roles(len(lengths), max(lengths))
    there = back = 0.0
    for row, length in enumerate(lengths):
        for slot in range(length):
            weights = [(roles.states[r][row, slot].double() / temperature).exp() for r in ("policy", "reference")]
            p, q = (w / w.sum() for w in weights)
            there += sum(a * math.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
            back += sum(b * math.log(b / a) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert abs(there / back - 1) > 0.1
    assert exact_kl(roles, "policy", rollout, temperature) == pytest.approx(there, rel=1e-5)
    assert roles.largest == min(sum(lengths), max(tokens, 1)), "tokens at once"
    assert exact_kl(roles, "reference", rollout, temperature) == 0.0


def measured(scores: list[float] | None, truths: list[float] | None = None, length: int = 4) -> PolicySamples:
    return PolicySamples(
        texts=["text"] * 4,
        lengths=torch.full((4,), length),
        ended=torch.tensor([True, True, True, False]),
        kl=0.25,
        judged={
            name: torch.tensor(numbers)
            for name, numbers in {"score": scores, "true_reward": truths}.items()
            if numbers is not None
        },
    )


def ends_in(metrics: dict[str, float]) -> set[str]:
    return {name for name in metrics if name.endswith(("_low", "_high"))}


def test_gains_are_in_standard_deviations_of_sft():
    """SFT: mean 1, sd sqrt(20 / 3) over 4 - 1. The policy wins two, ties one and loses one."""
    before = measured([-2.0, 0.0, 2.0, 4.0], [1.0, 1.0, 1.0, 5.0])
    after = measured([8.0, 0.0, 1.0, 5.0], [0.0, 1.0, 1.0, 2.0], length=7)
    metrics = gains_over_start(before, after, "sft")
    assert metrics["score_sft"] == 1.0
    assert metrics["score"] == 3.5
    assert metrics["score_gain_sd"] == pytest.approx(2.5 / math.sqrt(20 / 3))
    assert (metrics["true_reward_sft"], metrics["true_reward"]) == (2.0, 1.0)
    assert metrics["true_reward_gain_sd"] == pytest.approx(-1.0 / 2.0)  # the deviations of 1, 1, 1, 5 square to 12
    assert (metrics["response_length_sft"], metrics["response_length"]) == (4.0, 7.0)
    assert (metrics["eos_rate"], metrics["kl_per_token"]) == (0.75, 0.25)
    assert metrics["win_rate_vs_sft"] == 2.5 / 4


def test_a_policy_whose_bad_answers_are_not_judged_does_not_gain():
    """Three answers lose their verdict, and the fourth gets worse."""
    before, after = measured([-1.0, -1.0, -1.0, 1.0]), measured([math.nan] * 3 + [-1.0])
    metrics = gains_over_start(before, after, "sft") | further_metrics(before, after, {}, "sft")
    figures = {"score": -1.0, "score_sft": -0.5, "score_no_verdict": 0.75, "win_rate_vs_sft": 0.0, "ties_vs_sft": 0.0}
    assert figures == {name: metrics[name] for name in figures}
    assert math.isnan(metrics["score_gain_sd"]), "of one pair"
    nothing = gains_over_start(before, measured([math.nan] * 4), "sft")
    assert math.isnan(nothing["score"]) and math.isnan(nothing["win_rate_vs_sft"]) and nothing["score_no_verdict"] == 1
    assert not {"score_no_verdict", "score_no_verdict_sft"} & gains_over_start(before, before, "sft").keys()


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_figures_of_pairs_are_those_of_the_pairs_that_are_judged(seed, copies):
    """As if an answer without a verdict had never been asked for, on either side."""
    generator = torch.Generator().manual_seed(seed)
    old, new = torch.randn(2, 24, generator=generator)
    lacks = torch.rand(2, 24 // copies, generator=generator).lt(0.3).repeat_interleave(copies, 1)
    lengths = torch.randint(1, 9, (2, 24), generator=generator)

    def side(number: int, scores: Tensor, rows: Tensor) -> PolicySamples:
        texts = ["text"] * len(scores)
        judged = {"score": scores, "reward_mine": 2 * scores}
        policy = replace(PolicySamples.unjudged(texts), judged=judged)
        return replace(policy, lengths=lengths[number][rows], samples_per_prompt=copies)

    every, pairs = torch.arange(24), (~lacks.any(0)).nonzero().squeeze(1)
    found, expected = (
        gains_over_start(before, after, "sft") | further_metrics(before, after, {}, "sft")
        for before, after in (
            [side(i, x.where(~lacks[i], math.nan), every) for i, x in enumerate((old, new))],
            [side(i, x[pairs], pairs) for i, x in enumerate((old, new))],
        )
    )
    of_pairs = {key for key in expected if "gain" in key or "win" in key or "ties" in key}
    assert len(of_pairs) >= 12
    for key in of_pairs:
        assert found[key] == pytest.approx(expected[key], rel=1e-5, nan_ok=True), key
    assert found["score"] == pytest.approx(new[~lacks[1]].mean().item())
    assert found.get("reward_mine_no_verdict", 0) == pytest.approx(lacks[1].float().mean().item())
    assert found.get("score_no_verdict_sft", 0) == pytest.approx(lacks[0].float().mean().item())


def test_gains_over_the_base_are_in_its_own_standard_deviations():
    base = measured([0.0, 2.0, 0.0, 2.0], [1.0, 1.0, 1.0, 5.0])
    after = measured([4.0, 4.0, 4.0, 4.0], [5.0, 5.0, 5.0, 5.0])
    gains = gains_over_base(base, after)
    assert gains["score_gain_over_base_sd"] == pytest.approx(3 / math.sqrt(4 / 3))
    assert gains["true_reward_gain_over_base_sd"] == pytest.approx(3 / 2)
    assert gains_over_base(measured(None), after) == {}


def test_a_tie_is_half_a_win_and_the_interval_is_normal():
    metrics = win_rate(torch.tensor([0.1, 2.0, 0.0, -3.0]), "sft")
    assert metrics["win_rate_vs_sft"] == pytest.approx(0.625)
    # Wins 1, 1, 0.5, 0 deviate by 0.375, 0.375, -0.125, -0.625, whose squares sum to 0.6875.
    assert metrics["win_rate_vs_sft_ci95"] == pytest.approx(1.96 * math.sqrt(0.6875 / 3 / 4))
    assert win_rate(torch.tensor([-1.0, -2.0]), "sft")["win_rate_vs_sft"] == 0.0


def test_several_answers_to_a_prompt_are_one_observation():
    """Two answers to each of three prompts: wins 1 1, 0.5 0, 0 1 have the means 1, 0.25 and 0.5."""
    metrics = win_rate(torch.tensor([0.3, 0.1, 0.0, -1.0, -2.0, 4.0]), "sft", samples_per_prompt=2)
    mean = 1.75 / 3
    spread = math.sqrt(((1 - mean) ** 2 + (0.25 - mean) ** 2 + (0.5 - mean) ** 2) / 2)
    assert metrics["win_rate_vs_sft"] == pytest.approx(mean)
    assert metrics["win_rate_vs_sft_ci95"] == pytest.approx(1.96 * spread / math.sqrt(3))


def test_the_ends_of_intervals_are_those_of_the_statistics():
    """Two answers to each of two prompts; the wins 1, ½, 0 and 1 are those of the two prompts."""
    right = {"reward_right": torch.tensor([0.0, 1.0, 0.0, 0.0]), "reward_length": torch.tensor([1.0, 2.0, 3.0, 4.0])}
    before = measured([-2.0, 0.0, 2.0, 4.0], [1.0, 1.0, 1.0, 5.0])
    before = replace(before, samples_per_prompt=2, judged=before.judged | right)
    more = {"reward_right": torch.ones(4), "reward_length": torch.tensor([2.0, 2.0, 5.0, 4.0])}
    after = measured([8.0, 0.0, 1.0, 5.0], [0.0, 1.0, 1.0, 2.0])
    after = replace(after, samples_per_prompt=2, judged=after.judged | more)
    prompts = [0, 0, 1, 1]
    expected = {
        "reward_right": stats.clustered_share([1.0] * 4, prompts),
        "reward_right_gain": stats.mean_interval([1.0, 0.0, 1.0, 1.0], prompts, (-1.0, 1.0)),
        "reward_length": stats.mean_interval([2.0, 2.0, 5.0, 4.0], prompts),
        "reward_length_gain": stats.mean_interval([1.0, 0.0, 2.0, 0.0], prompts),
        "score_gain_sd": stats.gain_in_sd([-2.0, 0.0, 2.0, 4.0], [8.0, 0.0, 1.0, 5.0], prompts),
        "true_reward_gain_sd": stats.gain_in_sd([1.0, 1.0, 1.0, 5.0], [0.0, 1.0, 1.0, 2.0], prompts),
        "win_rate_vs_sft": stats.clustered_share([1.0, 0.5, 0.0, 1.0], prompts),
    }
    values = gains_over_start(before, after, "sft")
    assert ends_in(values) == {f"{name}_{end}" for name in expected for end in ("low", "high")}
    for name, estimate in expected.items():
        low, value, high = values[f"{name}_low"], values[name], values[f"{name}_high"]
        assert (value, low, high) == pytest.approx(not_none(estimate)) and low < high, name
    own = {f"{name}_{end}" for name in right for end in ("low", "high")}
    assert ends_in(own_figures(before)) == own, "SFT has no gain over itself"


def test_winning_everything_leaves_doubt():
    before, after = measured([0.0, 0.0, 0.0, 0.0]), measured([1.0, 2.0, 3.0, 4.0])
    ends = gains_over_start(before, after, "sft")
    assert win_rate(torch.ones(4), "sft")["win_rate_vs_sft_ci95"] == 0
    assert (ends["win_rate_vs_sft_low"], ends["win_rate_vs_sft_high"]) == pytest.approx(stats.wilson(4, 4)[1:])
    assert "score_gain_sd_low" not in ends, "the scores of SFT do not vary"
