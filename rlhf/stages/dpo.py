"""Direct preference optimisation from the SFT adapter, or without SFT from the base, with TRL's DPOTrainer.

TRL copies the adapter as its frozen reference, so that the reference is SFT and not the bare base. A new adapter, with
which a policy starts without SFT, has B = 0: its copy is the base.
Loss: -log σ(β [(log π(y_c) - log π_ref(y_c)) - (log π(y_r) - log π_ref(y_r))]), or another one of TRL's (`loss_type`).
"""

from collections.abc import Sequence
from typing import Any

import torch
from peft import PeftModel
from trl import DPOConfig, DPOTrainer

from rlhf.data.batch import Rollout, collate
from rlhf.data.pairs import EncodedPair
from rlhf.data.tokenize import DialogueTokenizer, Encoded
from rlhf.evaluation.policies import gains_with_intervals
from rlhf.evaluation.reward_model import accuracy
from rlhf.evaluation.samples import examples
from rlhf.models.adapters import save_adapter
from rlhf.models.loading import load_tokenizer
from rlhf.models.shared_base import SharedBase
from rlhf.objectives.losses import dpo_loss
from rlhf.observe.telemetry import Telemetry
from rlhf.process import distributed
from rlhf.recipe import Dpo, SharedRole
from rlhf.run.directory import StageRun
from rlhf.run.layout import ADAPTER
from rlhf.stages.corpus import load_corpus
from rlhf.stages.result import Result
from rlhf.stages.supervised.pairs import StagePairs, stage_pairs
from rlhf.stages.supervised.policy import Measuring, measure_against_start, policy_at_its_start
from rlhf.stages.supervised.trainer import EncodedRowsTrainer
from rlhf.stages.supervised.training import arguments, best_step_metric, free_memory, rows_to_dataset, train
from rlhf.terminal.progress import working


def run_stage(run: StageRun, device: torch.device) -> Result:
    """Train the DPO adapter, and measure the policy against its start on held-out prompts and pairs."""
    recipe = run.loaded.recipe
    options = recipe.options(Dpo)
    telemetry = Telemetry(device)

    tokenizer = load_tokenizer(run.base)
    corpus = load_corpus(run, tokenizer)
    split = corpus.preferences("dpo")
    pairs = stage_pairs(run, tokenizer, split, options)
    prompts = corpus.prompts("dpo").test[: recipe.evaluate.max_samples]

    _fit(run, tokenizer, pairs, device, telemetry)
    free_memory()

    with telemetry.phase("evaluate"):
        before, after, shared = measure_against_start(run, tokenizer, corpus, prompts, device)
        with working("dpo: scoring held-out pairs"):
            preferred = preference_accuracy(shared, tokenizer, pairs.heldout, 2 * options.per_device_train_batch_size)
    counts = {"preference_accuracy": preferred, "train_pairs": len(pairs.training), **pairs.cuts}
    metrics = gains_with_intervals(before, after, recipe.start) | counts | best_step_metric(run)
    return Result(metrics, telemetry.costs(), examples(prompts, {recipe.start: before, "dpo": after}))


def _fit(
    run: StageRun, tokenizer: DialogueTokenizer, pairs: StagePairs, device: torch.device, telemetry: Telemetry
) -> None:
    """Train and write the adapter. Only this function holds the model, so that `free_memory` can free it afterwards."""
    recipe = run.loaded.recipe
    options = recipe.options(Dpo)
    torch.manual_seed(recipe.seed)
    with telemetry.phase("load"):
        model = policy_at_its_start(run, device)
    trainer = _Trainer(
        model=model,
        args=arguments(DPOConfig, run, options, max_length=None, **losses_of(options)),
        train_dataset=rows_to_dataset([_training_row(pair) for pair in pairs.training]),
        processing_class=tokenizer.hf,
    )
    evaluate = None
    if pairs.validation:
        with telemetry.phase("evaluate"):
            evaluate = _Validation(model, pairs.validation, tokenizer.pad_id, options)
    weights = train(trainer, run, telemetry, pairs.lengths(), evaluate, pairs=True)
    save_adapter(model, run.base, run.path / ADAPTER, weights=weights)
    distributed.barrier()  # every rank reads the adapter


def losses_of(options: Dpo) -> dict[str, Any]:
    """Return TRL's arguments for the loss: the preference loss, and with `sft_weight` the likelihood of chosen tokens.

    TRL's `robust` is the sigmoid loss with a share of flipped labels.
    """
    preference = "robust" if options.label_smoothing else options.loss_type
    losses = [(preference, 1.0), *([("sft", options.sft_weight)] if options.sft_weight else [])]
    return {
        "beta": options.beta,
        "loss_type": [name for name, _ in losses],
        "loss_weights": [weight for _, weight in losses],
        "label_smoothing": options.label_smoothing,
    }


class _Validation(Measuring[Dpo]):
    """Measures a policy on validation pairs, against the reference."""

    def __init__(self, model: PeftModel, pairs: Sequence[EncodedPair], pad_id: int, options: Dpo):
        super().__init__(model, pad_id, options)
        self.chosen, self.rejected = [pair.chosen for pair in pairs], [pair.rejected for pair in pairs]
        self.reference = self.logprobs(self.chosen), self.logprobs(self.rejected)

    def __call__(self) -> dict[str, float]:
        options, beta = self.options, self.options.beta
        chosen, rejected = self.logprobs(self.chosen), self.logprobs(self.rejected)
        lengths = _lengths(self.chosen), _lengths(self.rejected)
        loss = dpo_loss(chosen, rejected, *self.reference, beta, options.loss_type, options.label_smoothing, lengths)
        if options.sft_weight:
            loss = loss - options.sft_weight * chosen.sum() / lengths[0].sum()
        margins = beta * ((chosen - self.reference[0]) - (rejected - self.reference[1]))
        return {
            "loss": loss.item(),
            "accuracy": accuracy(margins),
            "margin": margins.mean().item(),
        }


@torch.no_grad()
def preference_accuracy(
    shared: SharedBase, tokenizer: DialogueTokenizer, pairs: Sequence[EncodedPair], batch_size: int
) -> float:
    """Return the share of pairs whose chosen response gained more log-probability over the reference than the other."""

    def gains(sequences: Sequence[Encoded]) -> torch.Tensor:
        prompts, responses = [s.prompt for s in sequences], [s.response for s in sequences]
        batch = collate(prompts, responses, tokenizer.pad_id, tokenizer.eos_id, shared.device)
        policy, reference = (logprobs(role, batch) for role in ("policy", "reference"))
        return policy - reference

    def logprobs(role: SharedRole, batch: Rollout) -> torch.Tensor:
        result = torch.empty(len(batch.ids))
        with shared.role(role):
            for rows in batch.by_length(batch_size):
                micro_batch = batch.rows(rows)
                logp = shared.logprobs(shared.response_hidden(micro_batch), micro_batch, 1.0)
                result[rows.cpu()] = logp.sum(1).float().cpu()
        return result

    return accuracy(gains([pair.chosen for pair in pairs]) - gains([pair.rejected for pair in pairs]))


class _Trainer(EncodedRowsTrainer, DPOTrainer):
    """TRL's trainer with the changes of a run."""


def _lengths(sequences: Sequence[Encoded]) -> torch.Tensor:
    """Return the tokens (N,) of responses."""
    return torch.tensor([len(sequence.response) for sequence in sequences])


def _training_row(pair: EncodedPair) -> dict[str, list[int]]:
    chosen, rejected = pair
    return {"prompt_ids": chosen.prompt, "chosen_ids": chosen.response, "rejected_ids": rejected.response}
