"""Reward model: the SFT adapter continued under a scalar head, trained on preference pairs with TRL's RewardTrainer.

Without SFT the adapter is a new one. The score of a dialogue is the head's output at its last real token, which is EOS
unless the response was cut. Default loss: Bradley-Terry, -log σ(r_c - r_r); option: max(0, margin - (r_c - r_r)), the
ranking loss of torch.nn.MarginRankingLoss.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from datasets import Dataset
from torch.nn import functional
from trl import RewardConfig, RewardTrainer

from rlhf.data.corpus import Corpus
from rlhf.data.pairs import EncodedPair
from rlhf.data.rows import PreferencePair
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.data.worlds import toy
from rlhf.evaluation.reward_model import accuracy, reward_model_figures, scores_of
from rlhf.files import JsonObject
from rlhf.models.adapters import reward_from_sft
from rlhf.models.loading import load_base
from rlhf.models.precision import Model, mixed_precision
from rlhf.observe.telemetry import Telemetry
from rlhf.recipe.schema import Rm
from rlhf.run.directory import StageRun
from rlhf.stages.supervised.pairs import stage_pairs
from rlhf.stages.supervised.trainer import ROWS, RunTrainer
from rlhf.stages.supervised.training import arguments, train
from rlhf.terminal.progress import working

SAMPLES = 8  # held-out pairs whose scores are kept


def run_stage(run: StageRun, telemetry: Telemetry, tokenizer: DialogueTokenizer, corpus: Corpus) -> dict[str, float]:
    """Train the reward model, and measure its accuracy on held-out pairs."""
    recipe = run.loaded.recipe
    options = recipe.options(Rm, run.stage)

    pairs = stage_pairs(run, tokenizer, corpus.preferences(run.stage), options)

    torch.manual_seed(run.seed)  # the score head is drawn when the base is loaded
    with telemetry.phase("load"):
        base = load_base(run.base, telemetry.device, head="score")
        base.config.pad_token_id = tokenizer.pad_id
        model = reward_from_sft(base, recipe.lora, run.policy_start())

    ranking = options.loss_type == "margin_ranking"
    margin = {"margin": options.margin} if options.margin and not ranking else {}
    validation = [_row(pair) | margin for pair in pairs.validation]
    trainer = _Trainer(
        model=model,
        args=arguments(
            RewardConfig,
            run,
            options,
            max_length=None,  # TRL would drop longer pairs silently; they are cut and counted already
            center_rewards_coefficient=options.center_rewards_coefficient or None,
        ),
        train_dataset=Dataset.from_list([_row(pair) | margin for pair in pairs.training]),
        eval_dataset=Dataset.from_list(validation) if validation else None,
        processing_class=tokenizer.hf,
    )
    trainer.ranking_margin = options.margin if ranking else None
    best_step = train(trainer, run, telemetry, pairs.lengths())

    with telemetry.phase("evaluate"), working(f"{run.stage}: scoring held-out pairs"):
        chosen, rejected = _scores(model, tokenizer, pairs.heldout, options)

    rows = zip(pairs.heldout_rows, chosen.tolist(), rejected.tolist(), strict=True)
    run.logs.samples(0, [_sample_row(tokenizer, *row) for row in itertools.islice(rows, SAMPLES)])
    margins, both = chosen - rejected, torch.cat([chosen, rejected])
    longer = [len(pair.chosen.response) - len(pair.rejected.response) for pair in pairs.heldout]
    metrics = reward_model_figures(margins.tolist(), longer, [row.prompt for row in pairs.heldout_rows]) | {
        "score_mean": both.mean().item(),
        "score_sd": both.std().item(),
        "train_pairs": len(pairs.training),
        "heldout_pairs": len(pairs.heldout),
        **pairs.cuts,
        **best_step,
    }
    if recipe.data.has_true_reward:
        assert recipe.data.toy
        metrics |= _against_best_possible(tokenizer, pairs.heldout_rows, margins, recipe.data.toy.bayes_accuracy)
    return metrics


def _scores(
    model: Model, tokenizer: DialogueTokenizer, pairs: Sequence[EncodedPair], options: Rm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the model's scores (N,) of the chosen and of the rejected responses."""
    model.eval()

    @torch.no_grad()
    def score(ids: torch.Tensor, last: torch.Tensor) -> torch.Tensor:  # the model finds the last real token itself
        with mixed_precision(model):
            scores: torch.Tensor = model(input_ids=ids.to(model.device), use_cache=False).logits
        return scores.squeeze(-1)

    batch_size = 2 * options.per_device_train_batch_size
    chosen = scores_of([pair.chosen for pair in pairs], score, tokenizer.pad_id, batch_size)
    rejected = scores_of([pair.rejected for pair in pairs], score, tokenizer.pad_id, batch_size)
    return chosen, rejected


class _Ranking(RewardTrainer):
    """TRL's trainer with the margin ranking loss in place of its own, where there is a `ranking_margin`."""

    ranking_margin: float | None = None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)  # type: ignore[no-untyped-call]
        if self.ranking_margin is not None:
            chosen, rejected = outputs.logits.squeeze(-1).float().chunk(2)
            loss = functional.margin_ranking_loss(chosen, rejected, torch.ones_like(chosen), self.ranking_margin)
        return (loss, outputs) if return_outputs else loss


class _Trainer(RunTrainer, _Ranking):
    """TRL's trainer with the changes of a run."""

    def counts(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, float]:
        return {ROWS: len(inputs["input_ids"]) // 2}


def _row(pair: EncodedPair) -> dict[str, object]:
    chosen_ids, rejected_ids = (side.prompt + side.response for side in pair)
    return {"chosen_ids": chosen_ids, "rejected_ids": rejected_ids}


def _sample_row(tokenizer: DialogueTokenizer, pair: PreferencePair, chosen: float, rejected: float) -> JsonObject:
    return {
        "prompt": tokenizer.prompt_text(pair.prompt),
        "chosen": {"response": pair.chosen, "score": chosen},
        "rejected": {"response": pair.rejected, "score": rejected},
    }


def _against_best_possible(
    tokenizer: DialogueTokenizer, pairs: list[PreferencePair], margins: torch.Tensor, bayes_accuracy: float
) -> dict[str, float]:
    """Return how far the accuracy is below the best possible one, in points.

    A judge who knows the annotator's utility has the best possible accuracy.
    """
    texts = [(tokenizer.prompt_text(p.prompt), p.chosen, p.rejected) for p in pairs]
    tau = toy.annotator_tau(bayes_accuracy)
    realised, expected = toy.bayes_accuracy(texts, tau)
    return {
        "best_possible_accuracy": realised,
        "best_possible_accuracy_expected": expected,
        "accuracy_gap_points": 100 * (realised - accuracy(margins)),
        "accuracy_gap_points_expected": toy.expected_gap(texts, margins.tolist(), tau),
    }
