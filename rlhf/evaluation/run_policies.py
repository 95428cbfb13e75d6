"""The policies of a run: as roles on one base, and their answers as rows of samples.jsonl."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rlhf.data.corpus import Prompt
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.evaluation.policies import PolicySamples
from rlhf.evaluation.reward_model import add_reward_models
from rlhf.files import JsonObject
from rlhf.models.loading import load_base
from rlhf.models.roles import AdapterStart
from rlhf.models.shared_base import SharedBase
from rlhf.recipe import SFT, PolicyLabel, PolicyName, Recipe, Role
from rlhf.run.directory import StageRun


def load_roles(run: StageRun, device: torch.device, start: Path | None, trained: Sequence[PolicyName]) -> SharedBase:
    """Return the base with the `start` as `reference`, each trained policy under its stage's name, any reward model."""
    roles: dict[Role, AdapterStart] = {"reference": start, **{stage: run.parents.folder(stage) for stage in trained}}
    shared = SharedBase(load_base(run.base, device), roles, lean=run.loaded.recipe.hardware.trunk == "lean")
    add_reward_models(shared, run)
    return shared


def role_of(label: PolicyLabel, recipe: Recipe) -> Role:
    """Return the role under which `load_roles` has a policy; SFT, at which policies start, is the reference."""
    return "reference" if label == SFT or label == recipe.start else label


def sample_rows(
    tokenizer: DialogueTokenizer,
    prompts: Sequence[Prompt],
    samples: Mapping[PolicyLabel, PolicySamples],
    samples_per_prompt: int,
) -> list[JsonObject]:
    """Return a row for each prompt with every policy's answer; with several samples a numbered row for each."""
    rows = []
    for i, (prompt, number) in enumerate(itertools.product(prompts, range(samples_per_prompt))):
        row: JsonObject = {"prompt": tokenizer.prompt_text(prompt)}
        if samples_per_prompt > 1:
            row["sample"] = number
        if tokenizer.template != "hh":  # only a transcript can be parsed back into messages
            row["messages"] = [{"role": message.role, "content": message.content} for message in prompt]
        for name, policy in samples.items():
            answer: JsonObject = {"response": policy.texts[i]}
            if policy.scores is not None:
                answer["score"] = policy.scores[i].item()
            if policy.true_rewards is not None:
                answer["true_reward"] = policy.true_rewards[i].item()
            if policy.second_scores is not None:
                answer["second_score"] = policy.second_scores[i].item()
            if policy.rewards:
                given = {reward: numbers[i].item() for reward, numbers in policy.rewards.items()}
                answer["rewards"] = {reward: number for reward, number in given.items() if not math.isnan(number)}
            row[name] = answer
        rows.append(row)
    return rows
