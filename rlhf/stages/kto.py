"""Kahneman–Tversky optimisation (arXiv 2402.01306) with TRL's KTOTrainer: answers that were judged one by one.

With z the mean of log π(y'|x) - log π_ref(y'|x) over answers y' to other prompts of the micro-batch, at least 0:
    loss of a good answer   w_good (1 - σ(β (log π(y) - log π_ref(y) - z)))
    loss of a bad answer    w_bad  (1 - σ(β (z - log π(y) + log π_ref(y))))
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from trl import KTOConfig, KTOTrainer

from rlhf.data.corpus import Corpus
from rlhf.data.rows import Example
from rlhf.data.tokenize import DialogueTokenizer, Encoded
from rlhf.errors import UserError
from rlhf.evaluation.policies import gains_over_start
from rlhf.observe.telemetry import Telemetry
from rlhf.recipe.schema import Kto
from rlhf.run.directory import StageRun
from rlhf.stages.supervised.policy import log_ratios, measure_against_start, train_policy
from rlhf.stages.supervised.trainer import ROWS, RunTrainer
from rlhf.stages.supervised.training import arguments
from rlhf.terminal import say
from rlhf.terminal.progress import working


class Judged(NamedTuple):
    """A judged answer as token ids."""

    row: Encoded
    good: bool


def run_stage(run: StageRun, telemetry: Telemetry, tokenizer: DialogueTokenizer, corpus: Corpus) -> dict[str, float]:
    """Train the KTO adapter, and measure the policy against its start on held-out prompts and answers."""
    recipe = run.loaded.recipe
    options = recipe.options(Kto)

    split = corpus.judged(run.stage)
    shuffled = random.Random(recipe.seed).sample(split.train, len(split.train))  # both sides of a pair come together
    training, cuts = _encode(tokenizer, shuffled[: options.max_samples], options)
    heldout, heldout_cuts = _encode(tokenizer, split.test[: options.max_eval_samples], options)
    run.describe(cuts={"train": cuts, "heldout": heldout_cuts})
    validation: list[Judged] = []
    if options.eval_steps:
        validation, _ = _encode(tokenizer, split.validation[: options.max_eval_samples], options)
    prompts = corpus.prompts(run.stage).test[: recipe.evaluate.max_samples]

    good = sum(judged.good for judged in training)
    if good in (0, len(training)):
        kinds = ("good", "bad") if good else ("bad", "good")
        say("kto: all {} training answers are {}: add {} ones with --data".format(len(training), *kinds))
    batch_size = options.per_device_train_batch_size
    training_rows = _rows(training, batch_size, "kto.max_samples")
    validation_rows = _rows(validation, batch_size, "kto.max_eval_samples")
    settings = arguments(
        KTOConfig,
        run,
        options,
        max_length=None,
        beta=options.beta,
        desirable_weight=options.desirable_weight,
        undesirable_weight=options.undesirable_weight,
    )
    best_step = train_policy(
        run,
        tokenizer,
        telemetry,
        partial(_Trainer, args=settings),
        training_rows,
        validation_rows,
        [len(judged.row.prompt) + len(judged.row.response) for judged in training],
    )

    with telemetry.phase("evaluate"):
        before, after, shared = measure_against_start(run, tokenizer, corpus, prompts, telemetry.device)
        with working(f"{run.stage}: scoring held-out answers"):
            rewards = options.beta * log_ratios(shared, tokenizer, [judged.row for judged in heldout], 2 * batch_size)
    is_good = torch.tensor([judged.good for judged in heldout])
    telling = {
        "heldout_reward_good": rewards[is_good].mean().item(),
        "heldout_reward_bad": rewards[~is_good].mean().item(),
    }
    counts = {"train_good": good, "train_bad": len(training) - good, **cuts}
    return gains_over_start(before, after, recipe.start) | telling | counts | best_step


class _Trainer(RunTrainer, KTOTrainer):
    """TRL's trainer with the changes of a run."""

    OVER: ClassVar = {
        "entropy": "tokens",
        **{f"{name}/chosen": "good" for name in ("rewards", "logps")},
        **{f"{name}/rejected": "bad" for name in ("rewards", "logps")},
        "logits/chosen": "good_tokens",
        "logits/rejected": "bad_tokens",
    }

    def counts(self, inputs: Mapping[str, Tensor]) -> dict[str, float]:
        good, tokens = inputs["label"].bool(), inputs["completion_mask"][:, 1:].sum(1)
        kinds = {"good": good.sum().item(), "bad": (~good).sum().item()}
        of_kinds = {"good_tokens": tokens[good].sum().item(), "bad_tokens": tokens[~good].sum().item()}
        return {ROWS: len(good), "tokens": tokens.sum().item(), **kinds, **of_kinds}

    def of_step(self, values: dict[str, float]) -> None:
        """Set the margin of a step, in which a micro-batch may have had answers of one kind alone."""
        sides = values.get("rewards/chosen"), values.get("rewards/rejected")
        if sides[0] is not None and sides[1] is not None:
            values["rewards/margins"] = sides[0] - sides[1]


def _encode(tokenizer: DialogueTokenizer, rows: Sequence[Example], options: Kto) -> tuple[list[Judged], dict[str, int]]:
    """Return judged answers as token ids, and counts of what was cut.

    Answers are left out, and counted, that lose their text, and good and bad ones that become the same tokens: what
    tells them apart was cut off. Raises UserError where none is left.
    """
    with working("encoding answers"):
        texts = [(row.prompt, row.response) for row in rows]
        encoded, counts = tokenizer.encode(texts, options.max_prompt_length, options.max_length)
    whole = [(Judged(ids, bool(row.good)), row.response) for ids, row in zip(encoded, rows, strict=True) if ids]
    judgements: dict[str, dict[str, bool]] = {}  # the answers that became the same tokens after the same prompt
    for judged, text in whole:
        judgements.setdefault(str(judged.row), {})[text] = judged.good
    kept = [judged for judged, _ in whole if len({*judgements[str(judged.row)].values()}) == 1]
    if not kept:
        raise UserError(
            f"kto: no answer of {len(rows):,} is left: within kto.max_length {len(rows) - len(whole):,} lose their "
            f"text and {len(whole):,} become equal, good and bad; raise it or lower kto.max_prompt_length"
        )
    counts |= {"answers_dropped": len(rows) - len(whole), "answers_equal": len(whole) - len(kept)}
    return kept, dict(counts)


def _rows(rows: Sequence[Judged], batch_size: int, limit: str) -> list[dict[str, Any]]:
    """Return the rows that TRL's collator takes; each has the answer to another prompt, from which z is estimated.

    It is that of the nearest row before it with another prompt, round its micro-batch. Where the micro-batch has one
    prompt alone, as a last one of one row has, it comes from the rows before the micro-batch, round them all. Raises
    UserError where all rows have one prompt. `limit`: the key that says how many rows are taken.
    """
    taken: list[dict[str, Any]] = []
    for number, (row, good) in enumerate(rows):
        first = number - number % batch_size
        end = min(first + batch_size, len(rows))
        in_batch = itertools.chain(reversed(range(first, number)), reversed(range(number, end)))
        outside = itertools.chain(reversed(range(first)), reversed(range(end, len(rows))))
        others = (rows[i].row for i in itertools.chain(in_batch, outside))
        other = next((judged.response for judged in others if judged.prompt != row.prompt), None)
        if other is None:
            raise UserError(
                f"kto: all {len(rows):,} rows within {limit} have one prompt, and KTO compares answers to several: "
                "raise it, or add rows with --data"
            )
        ids = {"prompt_ids": row.prompt, "completion_ids": row.response, "KL_completion_ids": other}
        taken.append({**ids, "label": good})
    return taken
