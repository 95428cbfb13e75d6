"""One step of GRPO beside TRL 1.16's trainer: advantages, loss and gradients from the same responses and rewards.

Of TRL's trainer only the sampling is replaced, by given responses.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.experimental.gmpo import GMPOTrainer

from rlhf.data.batch import Rollout
from rlhf.data.rows import Message
from rlhf.models.adapters import attach_adapter
from rlhf.models.loading import load_base, load_tokenizer
from rlhf.run.directory import StageRun
from rlhf.stages.groups import make_batch
from rlhf.stages.online.reward_sum import RewardSum
from rlhf.stages.online.role_passes import logprobs
from rlhf.stages.online.scores import score
from tests.helpers import corpus_of, grouped, not_none
from tests.invariants.group_learner import CPU, new_learner
from tests.rollouts import grouped_rollout

# Responses 1, 2 and 6 are not judged, and the scales differ. Here one missing verdict is enough; TRL adds the others.
FIRST = [0.5, None, None, 1.0, 0.0, 1.0, 1.0, 0.0]
SECOND = [30.0, None, 10.0, 25.0, -5.0, 40.0, None, 12.0]
UNJUDGED = (1, 2, 6)
REWARDS = ("tests.oracle.test_trl_step:first", "tests.oracle.test_trl_step:second")
WEIGHTS = (1.0, 0.02)


def first(completions: Sequence[str], **_: Any) -> list[float | None]:
    return FIRST


def second(completions: Sequence[str], **_: Any) -> list[float | None]:
    return SECOND


@pytest.fixture(scope="module")
def run(trained) -> StageRun:
    return StageRun(trained, grouped("grpo"), "grpo")


@pytest.fixture(scope="module")
def rollout(run) -> Rollout:
    """Two prompts with four made-up responses each, of many lengths."""
    generator = torch.Generator().manual_seed(3)
    return grouped_rollout(load_tokenizer(run.base), generator)


def of_judged(function: Any) -> Any:
    """A function as TRL gets it: without a verdict wherever one is missing."""

    def reward(**given: Any) -> list[float | None]:
        return [None if i in UNJUDGED else number for i, number in enumerate(function(**given))]

    return reward


class GivenResponses(GRPOTrainer):
    """TRL's trainer with responses that it need not sample."""

    given: tuple[list[list[int]], list[list[int]], list[list[float]]]

    def _generate(self, prompts: list[str]) -> tuple[Any, ...]:
        prompt_ids, completion_ids, logprobs = self.given
        return prompt_ids, completion_ids, None, ["text"] * len(prompts), logprobs, {}, None, None


class GivenGeometric(GivenResponses, GMPOTrainer):
    """As above, with the loss of TRL's GMPO."""


def trl_step(run: StageRun, rollout: Rollout, learner: Any, folder: Path, **options: Any) -> dict[str, torch.Tensor]:
    """Advantages, loss and gradients of TRL, whose policy is the learner's and whose reference is SFT."""
    model = attach_adapter(load_base(run.base, CPU), run.require("sft") / "adapter", trainable=True)
    corrected = options.pop("corrected", None)
    kind: type[GivenResponses] = GivenResponses
    if options.get("loss_type") == "gmpo":  # which is a trainer there
        kind = GivenGeometric
        del options["loss_type"]
    config = GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        num_generations=4,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        vllm_importance_sampling_mode=corrected or "sequence_mask",
        vllm_importance_sampling_clip_max=1.5,
        **options,
    )
    tokenizer = load_tokenizer(run.base).hf
    rows = Dataset.from_list([{"prompt": "a"}] * 8)
    trainer = kind(
        model, [of_judged(first), of_judged(second)], args=config, train_dataset=rows, processing_class=tokenizer
    )
    trainer.use_vllm = corrected is not None
    trainer.current_gradient_accumulation_steps = 1
    trained = [p for p in not_none(trainer.model).parameters() if p.requires_grad]
    for theirs, ours in zip(trained, learner.by_role["policy"], strict=True):
        theirs.data.copy_(ours)
    spans = zip(rollout.ids.tolist(), rollout.prompt_length.tolist(), rollout.response_length.tolist(), strict=True)
    cut = [(ids[:p], ids[p : p + n]) for ids, p, n in spans]
    assert rollout.logprobs is not None
    sampled = [row[:n] for row, n in zip(rollout.logprobs.tolist(), rollout.response_length.tolist(), strict=True)]
    trainer.given = [p for p, _ in cut], [r for _, r in cut], sampled
    not_none(trainer.model).train()
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * 8)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradient = torch.cat([not_none(p.grad).flatten() for p in trained])
    return {"advantages": inputs["advantages"], "loss": loss.detach(), "gradient": gradient}


def our_step(run: StageRun, rollout: Rollout, learner: Any) -> dict[str, torch.Tensor]:
    rewards = RewardSum("grpo", [learner.options], corpus_of(), load_tokenizer(run.base))
    functions = rewards([(Message("user", "a"),)] * 8, ["text"] * 8, [[0]] * 8)
    scores = score(learner.shared, rollout, learner.options, learner.score_norm, functions)
    batch = make_batch(learner, rollout, scores)
    stats = learner.add_gradients(batch, torch.arange(8))
    loss = stats["loss/policy_avg"] + learner.kl_coef * stats.get("loss/kl_avg", 0.0)
    gradient = torch.cat([p.grad.flatten() for p in learner.by_role["policy"]])
    return {"advantages": batch.advantages, "loss": torch.tensor(loss), "gradient": gradient}


VARIANTS: list[dict[str, Any]] = [
    {},
    {"beta": 0.2},
    {"beta": 0.2, "loss_type": "grpo", "scale_rewards": "batch"},
    {"loss_type": "dr_grpo", "scale_rewards": "none"},
    {"loss_type": "cispo", "epsilon_high": 5.0, "beta": 0.2},
    {"loss_type": "gmpo", "epsilon": 0.4, "epsilon_high": 0.3},
    *({"corrected": mode} for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")),
    {"corrected": "token_truncate", "loss_type": "cispo", "epsilon_high": 1.2, "temperature": 0.7, "beta": 0.2},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_step_is_that_of_trl_s_trainer(run, rollout, tmp_path, variant):
    changes = dict(variant)
    usual: dict[str, Any] = {"beta": 0.0, "temperature": 1.0}
    correction: dict[str, Any] = {
        "sampling_correction": changes.pop("corrected", "none"),
        "sampling_correction_cap": 1.5,
    }
    ours: dict[str, Any] = {
        "reward_funcs": REWARDS,
        "reward_weights": WEIGHTS,
        "normalize_scores": False,
        "missing_eos_penalty": None,
    }
    learner = new_learner(run, "grpo", per_device_train_batch_size=3, **ours, **correction, **(usual | changes))
    torch.manual_seed(7)
    with torch.no_grad():
        policy = logprobs(learner.shared, "policy", rollout, learner.options)
    sampled = replace(rollout, logprobs=policy + 0.4 * torch.randn(policy.shape))
    mine = our_step(run, sampled, learner)
    limits = {"max_completion_length": learner.options.response_length, "reward_weights": list(WEIGHTS)}
    theirs = trl_step(run, sampled, learner, tmp_path, **limits, **(usual | variant))
    for unjudged in UNJUDGED:
        assert mine["advantages"][unjudged] == theirs["advantages"][unjudged] == 0
    assert mine["advantages"].abs().max() > 0.1
    torch.testing.assert_close(mine["advantages"], theirs["advantages"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(mine["loss"], theirs["loss"].double().float(), rtol=1e-5, atol=1e-6)
    scale = theirs["gradient"].abs().max().item()
    assert scale > 1e-4
    torch.testing.assert_close(mine["gradient"], theirs["gradient"], rtol=0, atol=1e-4 * scale)
