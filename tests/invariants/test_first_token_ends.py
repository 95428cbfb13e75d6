"""A response may be EOS alone: every loss, metric and reward of such responses is finite, and what it should be."""

import math
from typing import Any

import pytest
import torch

from rlhf.data.batch import Rollout, collate
from rlhf.data.pairs import EncodedPair
from rlhf.data.tokenize import DialogueTokenizer, Encoded
from rlhf.evaluation.policies import exact_kl
from rlhf.models.loading import load_tokenizer
from rlhf.run.directory import StageRun
from rlhf.stages import groups, ppo
from rlhf.stages.dpo import preference_accuracy
from rlhf.stages.online.scores import Scores
from tests.helpers import small
from tests.invariants import group_learner, ppo_learner

PROMPTS = [[1, 7, 8, 9]] * 4 + [[1, 40, 41, 42, 43, 44]] * 4
VARIANTS: list[dict[str, Any]] = [
    {"loss_type": "grpo"},
    {"loss_type": "dapo", "kl_penalty": "loss", "kl_estimator": "k3"},
    {"loss_type": "dr_grpo", "mask_truncated_completions": True},
    {"importance_sampling_level": "sequence"},
]


@pytest.fixture(scope="module")
def run(trained) -> StageRun:
    return StageRun(trained, small(), "ppo")


@pytest.fixture(scope="module")
def tokenizer(run) -> DialogueTokenizer:
    return load_tokenizer(run.base)


@pytest.fixture(scope="module")
def rollout(tokenizer) -> Rollout:
    """Eight responses, each of them EOS."""
    return collate(PROMPTS, [[tokenizer.eos_id]] * 8, tokenizer.pad_id, tokenizer.eos_id)


def all_finite(numbers: dict[str, float]) -> bool:
    return all(math.isfinite(value) for value in numbers.values())


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("kind", ["head", "adapter"])
@pytest.mark.parametrize("kl_penalty", ["reward", "loss"])
def test_ppo(run, rollout, kind, kl_penalty, lean):
    changes: dict[str, Any] = {"kl_penalty": kl_penalty, "kl_estimator": "k3", "entropy_coef": 0.1}
    learner = ppo_learner.new_learner(run, kind, lean, **changes)
    batch = ppo.make_batch(learner, rollout)
    metrics = ppo.batch_metrics(batch, learner)
    assert (metrics["response/length"], metrics["response/eos_rate"]) == (1, 1)
    assert metrics["objective/kl"] == metrics["objective/kl_per_token"] == 0, "the policy is the reference still"
    assert all_finite(metrics) and all_finite(learner.update(batch))
    assert all(p.isfinite().all() for name in ("policy", "value") for p in learner.by_role[name])


@pytest.mark.parametrize("stage", ["rloo", "grpo"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: "-".join(map(str, variant.values())))
def test_groups(run, rollout, stage, variant):
    if stage == "rloo":
        variant = {key: value for key, value in variant.items() if key.startswith("kl_")}
    learner = group_learner.new_learner(run, stage, **variant)
    rewards = torch.tensor(group_learner.REWARDS)
    scores = Scores({"model": rewards}, raw=rewards, shaped=rewards)
    batch = groups.make_batch(learner, rollout, scores)
    metrics = groups.batch_metrics(batch, scores, learner)
    assert (metrics["response/length"], metrics["response/eos_rate"]) == (1, 1)
    assert batch.advantages.isfinite().all() and batch.advantages.abs().max() > 0
    assert all_finite(metrics) and all_finite(learner.update(batch))
    assert all(p.isfinite().all() for p in learner.by_role["policy"])


def test_its_text_is_empty_and_its_divergence_finite(run, tokenizer, rollout):
    assert tokenizer.decode_rows(rollout.tokens, rollout.mask) == [""] * 8
    shared = group_learner.new_learner(run, "rloo").shared  # a policy that has moved
    assert 0 < exact_kl(shared, "policy", rollout, temperature=0.7) < math.inf


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_held_out_pairs_of_rm_and_dpo(run, tokenizer, side):
    empty, other = Encoded([1, 7, 8, 9], [tokenizer.eos_id]), Encoded([1, 7, 8, 9], [40, 41, tokenizer.eos_id])
    rows: dict[str, Encoded] = {"chosen": other, "rejected": other, side: empty}
    shared = ppo_learner.roles(run)
    assert preference_accuracy(shared, tokenizer, [EncodedPair(**rows)], 2) == 0.5, "the policy is the reference still"
    batch = collate(
        [r.prompt for r in rows.values()], [r.response for r in rows.values()], tokenizer.pad_id, tokenizer.eos_id
    )
    chosen, rejected = shared.scores(batch).chunk(2)
    assert chosen.isfinite().all() and rejected.isfinite().all() and chosen != rejected
