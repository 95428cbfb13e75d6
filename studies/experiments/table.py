"""The experiments: which arms differ in what, on which seeds, and what is read of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from torch import nn
from transformers import PreTrainedModel

from bench.paths import ROOT
from rlhf.models import loading
from rlhf.models.nf4 import round_to_nf4
from rlhf.models.shared_base import SharedBase
from rlhf.recipe import Changes, StageName, load
from rlhf.recipe.learning_rates import usual_rate
from rlhf.stages import ppo

TINY, SMOLLM2 = ROOT / "recipes/cpu-tiny/v2", ROOT / "recipes/cpu-smollm2-hh/v1"
# All experiments on the toy world share a seed's base, SFT and reward model.
SHARED: Changes = {"hardware.trunk": "lean", "rm.max_samples": 10_000, "ppo.eval_steps": 5}
FACTORS = (0.1, 1, 3, 10)  # times the rate that `rlhf new` takes


class Reading(NamedTuple):
    """A figure of a stage: a key of its summary, or with `steps` the mean of a logged key from one step to another."""

    title: str
    stage: StageName
    key: str
    steps: tuple[int, int] | None = None


class Arm(NamedTuple):
    """One side of an experiment: what it changes, in the recipe or, where no key does, in the code."""

    changes: Changes
    in_code: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def changed(self) -> bool:
        """Return whether the arm differs from what all share."""
        return self != Arm({})


@dataclass(frozen=True)
class Experiment:
    """Arms that differ in one setting. `base`: stages that serve all arms; `stages`: those that each trains."""

    arms: dict[str, Arm]
    base: tuple[StageName, ...]
    stages: tuple[StageName, ...]
    readings: tuple[Reading, ...]
    recipe: Path = TINY
    shared: Changes = field(default_factory=lambda: SHARED)
    seeds: tuple[int, ...] = (0, 1, 2)


@contextmanager
def critic_of_policy() -> Iterator[None]:
    """Let PPO's critic start as the policy with a head of zeros, as where a recipe has no reward model."""

    def fresh(shared: SharedBase, *of_reward: object) -> list[nn.Parameter]:
        head = shared.add_value_copy()
        return [*head.parameters(), *shared.roles.parameters("value")]

    with patch.object(ppo, "new_critic", fresh):
        yield


@contextmanager
def nf4_base() -> Iterator[None]:
    """Round the weights of every base to what NF4 holds; float32 then computes what unpacking in each layer would.

    A base that was trained here is so the same in both arms, and a step takes no longer.
    """
    read = loading._read_base

    def rounded(*arguments: Any) -> PreTrainedModel:
        base = read(*arguments)
        round_to_nf4(base)
        return base

    with patch.object(loading, "_read_base", rounded):
        yield


def rates(stage: StageName, changes: Changes, *readings: Reading, factors: Sequence[float] = FACTORS) -> Experiment:
    """Return the sweep of a stage's learning rate: factors of what `rlhf new` takes for the toy model."""
    usual = usual_rate(load(TINY).recipe, stage) or 0.0
    keys = ("learning_rate", "value_learning_rate") if stage == "ppo" else ("learning_rate",)
    arms = {
        f"{factor * usual:.2g}": Arm(changes | {f"{stage}.{key}": factor * usual for key in keys}) for factor in factors
    }
    parents: dict[StageName, tuple[StageName, ...]] = {"sft": ("pretrain",), "ppo": ("pretrain", "sft", "rm")}
    base = parents.get(stage, ("pretrain", "sft"))
    return Experiment(arms, base, (stage,), readings, seeds=(0,))


def _pairs(count: int) -> Changes:
    """Return the changes for `count` pairs, few of which are read several times: 1,000 pairs at least."""
    return {"rm.max_samples": count, "rm.num_train_epochs": max(1, 1000 // count)}


ACCURACY = Reading("accuracy", "rm", "accuracy")
GAP = Reading("points below the best possible", "rm", "accuracy_gap_points_expected")
PERPLEXITY = Reading("perplexity", "sft", "perplexity")
PPO_GAIN = Reading("true gain, sd", "ppo", "true_reward_gain_sd")
PPO_KL = Reading("KL, nats per token", "ppo", "kl_per_token")
BASES = {"float32": Arm({}), "NF4": Arm({}, nf4_base)}

EXPERIMENTS = {
    "critic": Experiment(
        {"from the reward model": Arm({}), "fresh": Arm({}, critic_of_policy)},
        ("pretrain", "sft", "rm"),
        ("ppo",),
        (
            *(
                Reading(f"explained variance, steps {a} to {b}", "ppo", "val/explained_variance", (a, b))
                for a, b in ((1, 5), (6, 10), (11, 20), (21, 40))
            ),
            *(
                Reading(f"true gain at step {step}, sd", "ppo", "eval/true_reward_gain_sd", (step, step))
                for step in (5, 10, 20, 40)
            ),
            Reading("true gain at the end, sd", "ppo", "true_reward_gain_sd"),
            PPO_KL,
        ),
    ),
    "pairs": Experiment(
        {f"{count:,}": Arm(_pairs(count)) for count in (50, 100, 1_000)} | {"10,000": Arm({})},
        ("pretrain", "sft"),
        ("rm",),
        (ACCURACY, GAP),
    ),
    "rate-sft": rates("sft", {}, Reading("perplexity / before", "sft", "perplexity_ratio")),
    "rate-rm": rates("rm", {"rm.max_samples": 3_000}, ACCURACY, GAP),
    "rate-dpo": rates(
        "dpo",
        {"dpo.max_samples": 3_000},
        Reading("true gain, sd", "dpo", "true_reward_gain_sd"),
        Reading("KL, nats per token", "dpo", "kl_per_token"),
    ),
    "rate-ppo": rates("ppo", {"ppo.steps": 20}, PPO_GAIN, PPO_KL, factors=(0.1, 0.3, 1, 3, 10, 30)),
    "nf4-tiny": Experiment(BASES, ("pretrain",), ("sft", "rm"), (PERPLEXITY, ACCURACY, GAP)),
    "nf4-smollm2": Experiment(
        BASES,
        (),
        ("sft",),
        (Reading("perplexity before", "sft", "perplexity_before"), PERPLEXITY),
        recipe=SMOLLM2,
        shared={"sft.max_samples": 160, "sft.max_eval_samples": 64},
        seeds=(0,),
    ),
}
