"""What the stages share that train a policy on rows: where it starts, and how it is measured against its start."""

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from peft import PeftModel

from rlhf.data.corpus import Corpus, Prompt
from rlhf.data.tokenize import DialogueTokenizer, Encoded
from rlhf.evaluation.likelihood import scored_texts, sequence_logprobs
from rlhf.evaluation.policies import PolicySamples, heldout_sampling, measure
from rlhf.evaluation.samples import expected_answers, sample_rows
from rlhf.models.adapters import new_adapter, trainable_adapter
from rlhf.models.loading import load_base
from rlhf.models.roles import AdapterStart
from rlhf.models.shared_base import SharedBase
from rlhf.recipe import Dialogues, Role
from rlhf.recipe.stages import FEW_SAMPLES
from rlhf.rollout.probe import check_sampling
from rlhf.run.directory import StageRun

OptionsT = TypeVar("OptionsT", bound=Dialogues)


def policy_at_its_start(run: StageRun, device: torch.device) -> PeftModel:
    """Return the base with the adapter that is trained: SFT's, or a new one where policies start at the base."""
    base, start = load_base(run.base, device), run.parents.start()
    return new_adapter(base, run.loaded.recipe.lora) if start is None else trainable_adapter(base, start)


class Measuring(Generic[OptionsT]):
    """Measures a policy on held-out rows, against the reference.

    It is made when the policy is still at its start, the reference: before the first step, and before a checkpoint is
    loaded.
    """

    def __init__(self, model: PeftModel, pad_id: int, options: OptionsT):
        self.model, self.pad_id, self.options = model, pad_id, options

    def logprobs(self, sequences: Sequence[Encoded]) -> torch.Tensor:
        """Return the log-probabilities (N,) of responses, in nats."""
        batch_size = 2 * self.options.per_device_train_batch_size
        return sequence_logprobs(self.model, scored_texts(sequences), self.pad_id, batch_size)


class Measured(NamedTuple):
    """The start of a policy and the policy: their answers to held-out prompts, and both on one base."""

    before: PolicySamples
    after: PolicySamples
    shared: SharedBase  # with the roles `reference` and `policy`


def measure_against_start(
    run: StageRun, tokenizer: DialogueTokenizer, corpus: Corpus, prompts: Sequence[Prompt], device: torch.device
) -> Measured:
    """Sample answers of a trained policy and of its start, and log the first ones."""
    recipe = run.loaded.recipe
    roles: dict[Role, AdapterStart] = {"policy": run.path, "reference": run.parents.start()}
    shared = SharedBase(load_base(run.base, device), roles, lean=recipe.hardware.trunk == "lean")
    check_sampling(shared.base, tokenizer)
    sampling, truth = heldout_sampling(recipe.evaluate), recipe.data.has_true_reward
    before, after = (
        measure(shared, role, tokenizer, prompts, sampling, seed=recipe.seed, with_true_reward=truth)
        for role in ("reference", "policy")
    )
    few = prompts[:FEW_SAMPLES]
    run.logs.samples(0, sample_rows(tokenizer, few, {recipe.start: before, run.stage: after}, expected_answers(corpus)))
    return Measured(before, after, shared)
