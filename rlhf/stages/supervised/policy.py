"""What DPO and KTO share: a policy is trained from its start, and measured against it."""

from collections.abc import Callable, Mapping, Sequence

import torch
from datasets import Dataset

from rlhf.data.batch import collate
from rlhf.data.corpus import Corpus, Prompt
from rlhf.data.tokenize import DialogueTokenizer, Encoded
from rlhf.evaluation.policies import PolicySamples, heldout_sampling, measure
from rlhf.evaluation.samples import expected_answers, sample_rows
from rlhf.models.adapters import attach_adapter, new_adapter
from rlhf.models.loading import load_base
from rlhf.models.roles import AdapterStart
from rlhf.models.shared_base import SharedBase
from rlhf.observe.telemetry import Telemetry
from rlhf.recipe.stages import FEW_SAMPLES, Role, SharedRole
from rlhf.run.directory import StageRun
from rlhf.run.layout import ADAPTER
from rlhf.stages.supervised.trainer import RunTrainer
from rlhf.stages.supervised.training import free_memory, train


def train_policy(
    run: StageRun,
    tokenizer: DialogueTokenizer,
    telemetry: Telemetry,
    new_trainer: Callable[..., RunTrainer],
    training: Sequence[Mapping[str, object]],
    validation: Sequence[Mapping[str, object]],
    lengths: Sequence[int],
    pairs: bool = False,
) -> dict[str, float]:
    """Train SFT's adapter, or a new one where policies start at the base, and write it. Returns what `train` does.

    `training` and `validation`: rows as the trainer's collator takes them; `lengths` and `pairs` as in `train`. Nothing
    holds the model afterwards.
    """
    torch.manual_seed(run.loaded.recipe.seed)
    with telemetry.phase("load"):
        base, start = load_base(run.base, telemetry.device), run.policy_start()
        if start is None:
            model = new_adapter(base, run.loaded.recipe.lora)
        else:
            model = attach_adapter(base, start, trainable=True)
    trainer = new_trainer(
        model=model,
        train_dataset=Dataset.from_list([*training]),
        eval_dataset=Dataset.from_list([*validation]) if validation else None,
        processing_class=tokenizer.hf,
    )
    metrics = train(trainer, run, telemetry, lengths, pairs)
    del base, model, trainer
    free_memory()
    return metrics


def measure_against_start(
    run: StageRun, tokenizer: DialogueTokenizer, corpus: Corpus, prompts: Sequence[Prompt], device: torch.device
) -> tuple[PolicySamples, PolicySamples, SharedBase]:
    """Sample answers of a trained policy and of its start to held-out prompts, and log the first ones.

    Returns those of the start, those of the policy, and both as the roles `reference` and `policy` of one base.
    """
    recipe, hardware = run.loaded.recipe, run.loaded.recipe.hardware
    roles: dict[Role, AdapterStart] = {"policy": run.path / ADAPTER, "reference": run.policy_start()}
    shared = SharedBase(load_base(run.base, device), roles, lean=hardware.trunk == "lean", joins=hardware.joined_rows)
    sampling, truth = heldout_sampling(recipe.evaluate), recipe.data.has_true_reward
    before, after = (
        measure(shared, role, tokenizer, prompts, sampling, seed=recipe.seed, with_true_reward=truth)
        for role in ("reference", "policy")
    )
    few = prompts[:FEW_SAMPLES]
    run.logs.samples(0, sample_rows(tokenizer, few, {recipe.start: before, run.stage: after}, expected_answers(corpus)))
    return before, after, shared


@torch.no_grad()
def log_ratios(
    shared: SharedBase, tokenizer: DialogueTokenizer, sequences: Sequence[Encoded], batch_size: int
) -> torch.Tensor:
    """Return log π(y | x) - log π_ref(y | x) (N,) of whole responses in nats, on the CPU."""
    prompts, responses = [s.prompt for s in sequences], [s.response for s in sequences]
    batch = collate(prompts, responses, tokenizer.pad_id, tokenizer.eos_id, shared.device)

    def logprobs(role: SharedRole) -> torch.Tensor:
        result = torch.empty(len(batch.ids))
        with shared.role(role):
            for rows in batch.by_length(batch_size):
                micro_batch = batch.rows(rows)
                logp = shared.logprobs(shared.response_hidden(micro_batch), micro_batch, 1.0)
                result[rows.cpu()] = logp.sum(1).float().cpu()
        return result

    return logprobs("policy") - logprobs("reference")
