"""Supervised fine-tuning: LoRA on the base, loss on response tokens only, with TRL's SFTTrainer."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from datasets import Dataset
from peft import PeftModel
from torch import Tensor
from transformers.trainer_utils import EvalLoopOutput
from trl import SFTConfig, SFTTrainer

from rlhf.data.corpus import Corpus, Prompt
from rlhf.data.rows import Example
from rlhf.data.tokenize import DialogueTokenizer, Encoded, Imitated, imitated
from rlhf.errors import UserError
from rlhf.evaluation.likelihood import perplexity
from rlhf.evaluation.policies import PolicySamples, heldout_sampling
from rlhf.evaluation.samples import expected_answers, sample_rows
from rlhf.models.adapters import new_adapter
from rlhf.models.loading import load_base
from rlhf.observe.telemetry import Telemetry
from rlhf.recipe.schema import Sft
from rlhf.recipe.stages import FEW_SAMPLES
from rlhf.rollout.engine import sample
from rlhf.run.directory import StageRun
from rlhf.stages.supervised.forward import IGNORED
from rlhf.stages.supervised.trainer import ROWS, RunTrainer
from rlhf.stages.supervised.training import arguments, train
from rlhf.terminal import say
from rlhf.terminal.progress import working


def run_stage(run: StageRun, telemetry: Telemetry, tokenizer: DialogueTokenizer, corpus: Corpus) -> dict[str, float]:
    """Train the SFT adapter, and measure the perplexity of held-out responses before and after."""
    recipe = run.loaded.recipe
    options = recipe.options(Sft)

    split = corpus.demonstrations()
    training, cuts = _encode_turns(run, tokenizer, split.train[: options.max_samples])
    heldout, heldout_cuts = _encode(tokenizer, split.test[: options.max_eval_samples], options)
    run.describe(cuts={"train": cuts, "heldout": heldout_cuts})
    validation: list[Encoded] = []
    if options.eval_steps:
        validation, _ = _encode(tokenizer, split.validation[: options.max_eval_samples], options)
    prompts = corpus.prompts("sft").test[:FEW_SAMPLES]

    torch.manual_seed(recipe.seed)
    with telemetry.phase("load"):
        base = load_base(run.base, telemetry.device)
        model = new_adapter(base, recipe.lora)

    def perplexity_of(rows: list[Encoded]) -> float:
        return perplexity(model, rows, tokenizer.pad_id, options.per_device_train_batch_size)

    def measure() -> tuple[float, list[str]]:
        with telemetry.phase("evaluate"), working("sft: evaluating on held-out rows"):
            return perplexity_of(heldout), _answers(model, tokenizer, prompts, run)

    perplexity_before, answers_before = measure()
    trainer = _Trainer(
        model=model,
        args=arguments(SFTConfig, run, options, max_length=None),
        train_dataset=Dataset.from_list([_row(row) for row in training]),
        eval_dataset=Dataset.from_list([_row(imitated(row)) for row in validation]) if validation else None,
        processing_class=tokenizer.hf,
        perplexity=lambda: perplexity_of(validation),
    )
    best_step = train(trainer, run, telemetry, [len(row.ids) for row in training])
    perplexity_after, answers_after = measure()

    answers = {"base": PolicySamples.unjudged(answers_before), "sft": PolicySamples.unjudged(answers_after)}
    run.logs.samples(0, sample_rows(tokenizer, prompts, answers, expected_answers(corpus)))
    return {
        "perplexity": perplexity_after,
        "perplexity_before": perplexity_before,
        "perplexity_ratio": perplexity_after / perplexity_before,
        "train_examples": len(training),
        **cuts,
        **best_step,
    }


class _Trainer(RunTrainer, SFTTrainer):
    """TRL's trainer with the changes of a run."""

    OVER: ClassVar = {"entropy": "tokens", "mean_token_accuracy": "tokens"}

    def __init__(self, perplexity: Callable[[], float], **options: Any):
        super().__init__(**options)
        self.perplexity = perplexity

    def counts(self, inputs: Mapping[str, Tensor]) -> dict[str, float]:
        labels = inputs["labels"]
        return {ROWS: len(labels), "tokens": (labels[:, 1:] != IGNORED).sum().item()}

    def evaluation_loop(self, dataloader: Any, *_: Any, **__: Any) -> EvalLoopOutput:
        """Return the loss over the tokens of all validation rows; the library's is a mean of batches' means."""
        value = self.perplexity()
        metrics = {"eval_loss": math.log(value), "eval_perplexity": value}
        return EvalLoopOutput(None, None, metrics, num_samples=len(dataloader.dataset))  # type: ignore[arg-type]


def _encode_turns(
    run: StageRun, tokenizer: DialogueTokenizer, examples: list[Example]
) -> tuple[list[Imitated], dict[str, int]]:
    """Return the training rows as token ids, without those whose whole response is cut off, and counts of the cuts."""
    options = run.loaded.recipe.options(Sft)
    training, cut = tokenizer.encode_turns(examples, options.max_prompt_length, options.max_length)
    _require(training)
    if run.is_main:
        answers = sum(1 + len(row.earlier()) for row in examples)
        tokens = sum(sum(row.imitated) for row in training)
        say(f"sft: {tokens:,} tokens of {answers:,} answers are trained, and {cut['dropped']:,} answers left out")
    return training, dict(cut)


def _encode(tokenizer: DialogueTokenizer, rows: list[Example], options: Sft) -> tuple[list[Encoded], dict[str, int]]:
    """Return held-out rows, of which the last response is scored, and counts of what was cut."""
    texts = [(row.prompt, row.response) for row in rows]
    encoded, counts = tokenizer.encode(texts, options.max_prompt_length, options.max_length)
    complete = [row for row in encoded if row]
    _require(complete)
    return complete, dict(counts)


def _answers(model: PeftModel, tokenizer: DialogueTokenizer, prompts: list[Prompt], run: StageRun) -> list[str]:
    """Return one sampled response per held-out prompt, for reading."""
    settings = heldout_sampling(run.loaded.recipe.evaluate, FEW_SAMPLES)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(run.loaded.recipe.seed)
        rollout = sample(
            model, tokenizer.encode_prompts(prompts, settings.max_prompt_length)[0], tokenizer, settings, replicate=True
        )
    return tokenizer.decode_rows(rollout.tokens, rollout.mask)


def _require(rows: Sequence[object]) -> None:
    if not rows:
        raise UserError("sft: no response fits below sft.max_length; raise it or lower sft.max_prompt_length")


def _row(row: Imitated) -> dict[str, object]:
    labels = [token if imitated else IGNORED for token, imitated in zip(row.ids, row.imitated, strict=True)]
    return {"input_ids": row.ids, "labels": labels}
