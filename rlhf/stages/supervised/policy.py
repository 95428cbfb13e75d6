"""What the stages share that train a policy on rows: where it starts, and how it is measured against its start."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from peft import PeftModel

from rlhf.data.corpus import Prompt
from rlhf.data.tokenize import Codec
from rlhf.evaluation.policies import START_TITLES, PolicySamples, heldout_sampling, measure
from rlhf.models.adapters import new_adapter, trainable_adapter
from rlhf.models.loading import load_base
from rlhf.models.roles import AdapterStart
from rlhf.models.shared_base import SharedBase
from rlhf.recipe import STAGE_TABLE, Role
from rlhf.rollout.probe import check_sampling
from rlhf.run.directory import StageRun

SAMPLES = 8  # held-out prompts whose answers are logged before and after


def policy_at_its_start(run: StageRun, device: torch.device) -> PeftModel:
    """Return the base with the adapter that is trained: SFT's, or a new one where policies start at the base."""
    base, start = load_base(run, device), run.parents.start()
    return new_adapter(base, run.loaded.recipe.lora) if start is None else trainable_adapter(base, start)


class Measured(NamedTuple):
    """The start of a policy and the policy: their answers to held-out prompts, and both on one base."""

    before: PolicySamples
    after: PolicySamples
    shared: SharedBase  # with the roles `reference` and `policy`


def measure_against_start(run: StageRun, codec: Codec, prompts: Sequence[Prompt], device: torch.device) -> Measured:
    """Sample answers of a trained policy and of its start, and log the first ones."""
    recipe = run.loaded.recipe
    roles: dict[Role, AdapterStart] = {"policy": run.path, "reference": run.parents.start()}
    shared = SharedBase(load_base(run, device), roles, lean=recipe.hardware.trunk == "lean")
    check_sampling(shared.base, codec)
    sampling, truth = heldout_sampling(recipe.evaluate), recipe.data.has_true_reward
    before, after = (
        measure(shared, role, codec, prompts, sampling, seed=recipe.seed, with_true_reward=truth)
        for role in ("reference", "policy")
    )
    titles = START_TITLES[recipe.start], STAGE_TABLE[run.stage].title
    answers = zip(prompts[:SAMPLES], before.texts, after.texts, strict=False)
    run.logs.samples(0, [{"prompt": codec.prompt_text(prompt), titles[0]: a, titles[1]: b} for prompt, a, b in answers])
    return Measured(before, after, shared)
