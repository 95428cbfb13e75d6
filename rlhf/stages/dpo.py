"""Direct preference optimisation from the SFT adapter, or without SFT from the base, with TRL's DPOTrainer.

TRL copies the adapter as its frozen reference, so that the reference is SFT and not the bare base. A new adapter, with
which a policy starts without SFT, has B = 0: its copy is the base.
Loss: -log σ(β [(log π(y_c) - log π_ref(y_c)) - (log π(y_r) - log π_ref(y_r))]), or another one of TRL's (`loss_type`).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from torch import Tensor
from trl import DPOConfig, DPOTrainer

from rlhf.data.corpus import Corpus
from rlhf.data.pairs import EncodedPair
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.evaluation.policies import gains_over_start
from rlhf.evaluation.reward_model import accuracy
from rlhf.models.shared_base import SharedBase
from rlhf.observe.telemetry import Telemetry
from rlhf.recipe.schema import Dpo
from rlhf.run.directory import StageRun
from rlhf.stages.supervised.pairs import stage_pairs
from rlhf.stages.supervised.policy import log_ratios, measure_against_start, train_policy
from rlhf.stages.supervised.trainer import ROWS, RunTrainer
from rlhf.stages.supervised.training import arguments
from rlhf.terminal.progress import working


def run_stage(run: StageRun, telemetry: Telemetry, tokenizer: DialogueTokenizer, corpus: Corpus) -> dict[str, float]:
    """Train the DPO adapter, and measure the policy against its start on held-out prompts and pairs."""
    recipe = run.loaded.recipe
    options = recipe.options(Dpo)

    split = corpus.preferences("dpo")
    pairs = stage_pairs(run, tokenizer, split, options)
    prompts = corpus.prompts("dpo").test[: recipe.evaluate.max_samples]

    settings = arguments(DPOConfig, run, options, max_length=None, **losses_of(options))
    best_step = train_policy(
        run,
        tokenizer,
        telemetry,
        partial(_Trainer, args=settings),
        [_row(pair) for pair in pairs.training],
        [_row(pair) for pair in pairs.validation],
        pairs.lengths(),
        pairs=True,
    )

    with telemetry.phase("evaluate"):
        before, after, shared = measure_against_start(run, tokenizer, corpus, prompts, telemetry.device)
        with working("dpo: scoring held-out pairs"):
            preferred = preference_accuracy(shared, tokenizer, pairs.heldout, 2 * options.per_device_train_batch_size)
    counts = {"preference_accuracy": preferred, "train_pairs": len(pairs.training), **pairs.cuts}
    return gains_over_start(before, after, recipe.start) | counts | best_step


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


def preference_accuracy(
    shared: SharedBase, tokenizer: DialogueTokenizer, pairs: Sequence[EncodedPair], batch_size: int
) -> float:
    """Return the share of pairs whose chosen response gained more log-probability over the reference than the other."""
    chosen, rejected = (log_ratios(shared, tokenizer, side, batch_size) for side in zip(*pairs, strict=True))
    return accuracy(chosen - rejected)


class _Trainer(RunTrainer, DPOTrainer):
    """TRL's trainer with the changes of a run."""

    OVER: ClassVar = {
        "entropy": "tokens",
        "logits/chosen": "chosen",
        "logits/rejected": "rejected",
        "mean_token_accuracy": "chosen",
    }

    def counts(self, inputs: Mapping[str, Tensor]) -> dict[str, float]:
        chosen, rejected = inputs["completion_mask"][:, 1:].chunk(2)
        tokens = {"chosen": chosen.sum().item(), "rejected": rejected.sum().item()}
        return {ROWS: len(chosen), "tokens": sum(tokens.values()), **tokens}

    def weigh(self, inputs: Mapping[str, Tensor]) -> None:
        args: Any = self.args
        first, *sft = args.loss_weights
        if sft:  # TRL's term is a mean over the micro-batch's tokens, and its loss is weighed by rows
            self.loss_weights = [first, sft[0] * self.share(inputs, "chosen") / self.share(inputs, ROWS)]


def _row(pair: EncodedPair) -> dict[str, list[int]]:
    chosen, rejected = pair
    return {"prompt_ids": chosen.prompt, "chosen_ids": chosen.response, "rejected_ids": rejected.response}
