"""Supervised fine-tuning: LoRA on the base, loss on response tokens only, with TRL's SFTTrainer."""

import math

import torch
from peft import PeftModel
from trl import SFTConfig, SFTTrainer

from rlhf.data.corpus import Prompt
from rlhf.data.load import load_corpus
from rlhf.data.rows import Example
from rlhf.data.tokenize import Codec, Encoded
from rlhf.errors import UserError
from rlhf.evaluation.likelihood import perplexity
from rlhf.evaluation.policies import heldout_sampling
from rlhf.models.adapters import new_adapter, save_adapter
from rlhf.models.loading import load_base, load_codec
from rlhf.observe.telemetry import Telemetry
from rlhf.recipe import Sft
from rlhf.rollout.engine import sample
from rlhf.rollout.probe import check_sampling
from rlhf.run.directory import Run
from rlhf.run.layout import ADAPTER
from rlhf.stages.result import Result
from rlhf.stages.supervised import arguments, best_step, rows_to_dataset, train
from rlhf.stages.trainer import RunTrainer
from rlhf.stages.training_forward import IGNORED

SAMPLES = 8  # held-out prompts whose answers are logged before and after


def run_stage(run: Run, device: torch.device) -> Result:
    """Train the SFT adapter, and measure the perplexity of held-out responses before and after."""
    recipe = run.loaded.recipe
    options = recipe.sft
    telemetry = Telemetry(device)

    corpus = load_corpus(run)
    demonstrations = corpus.demonstrations()
    codec = load_codec(run)
    training, counts = _encode(codec, demonstrations.train[: options.max_samples], options)
    heldout, heldout_counts = _encode(codec, demonstrations.test[: options.max_eval_samples], options)
    run.describe(cuts={"train": counts, "heldout": heldout_counts})
    heldout_sequences = _sequences(heldout)
    validation: list[tuple[list[int], int]] = []
    if options.eval_steps:
        validation = _sequences(_encode(codec, demonstrations.validation[: options.max_eval_samples], options)[0])
    batch_size = options.per_device_train_batch_size

    torch.manual_seed(recipe.seed)
    with telemetry.phase("load"):
        base = load_base(run, device)
        check_sampling(base, codec)
        model = new_adapter(base, recipe.lora)
    prompts = corpus.prompts("sft").test[:SAMPLES]

    def evaluate() -> dict[str, float]:
        value = perplexity(model, validation, codec.pad_id, batch_size)
        return {"perplexity": value, "loss": math.log(value)}

    with telemetry.phase("evaluate"):
        perplexity_before = perplexity(model, heldout_sequences, codec.pad_id, batch_size)
        answers_before = _answers(model, codec, prompts, run)
    trainer = _Trainer(
        model=model,
        args=arguments(SFTConfig, run, options, max_length=None),
        train_dataset=rows_to_dataset([_training_row(row) for row in training]),
        processing_class=codec.tokenizer,
    )
    weights = train(trainer, run, telemetry, [len(row.prompt) + len(row.response) for row in training], evaluate)

    save_adapter(model, run, run.path / ADAPTER, weights=weights)
    with telemetry.phase("evaluate"):
        perplexity_after = perplexity(model, heldout_sequences, codec.pad_id, batch_size)
        answers_after = _answers(model, codec, prompts, run)
    prompt_texts = [codec.prompt_text(prompt) for prompt in prompts]
    rows = zip(prompt_texts, answers_before, answers_after, strict=True)
    run.logs.samples(0, [{"prompt": prompt, "base": a, "SFT": b} for prompt, a, b in rows])
    metrics = {
        "perplexity": perplexity_after,
        "perplexity_before": perplexity_before,
        "perplexity_ratio": perplexity_after / perplexity_before,
        "train_examples": len(training),
        **counts,
        **best_step(run),
    }
    sample = prompt_texts[0], {"base": answers_before[0], "SFT": answers_after[0]}
    return Result(metrics, telemetry.costs(), sample)


class _Trainer(RunTrainer, SFTTrainer):
    """TRL's trainer with the changes of a run."""


def _answers(model: PeftModel, codec: Codec, prompts: list[Prompt], run: Run) -> list[str]:
    """Return one sampled response per held-out prompt, for reading."""
    settings = heldout_sampling(run.loaded.recipe.evaluate, SAMPLES)
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        torch.manual_seed(run.loaded.recipe.seed)
        rollout = sample(
            model, codec.encode_prompts(prompts, settings.max_prompt_length)[0], codec, settings, replicate=True
        )
    return [codec.decode(row[real].tolist()) for row, real in zip(rollout.tokens, rollout.mask, strict=True)]


def _encode(codec: Codec, rows: list[Example], options: Sft) -> tuple[list[Encoded], dict[str, int]]:
    texts = [(row.prompt, row.response) for row in rows]
    encoded, counts = codec.encode(texts, options.max_prompt_length, options.max_length)
    complete = [row for row in encoded if row]
    if not complete:
        raise UserError("sft: no response fits below sft.max_length; raise it or lower sft.max_prompt_length")
    return complete, dict(counts)


def _sequences(rows: list[Encoded]) -> list[tuple[list[int], int]]:
    """Return the tokens of each row, and how many of them are the prompt, as `perplexity` wants them."""
    return [(prompt + response, len(prompt)) for prompt, response in rows]


def _training_row(row: Encoded) -> dict[str, object]:
    ids = row.prompt + row.response
    return {"input_ids": ids, "labels": [IGNORED] * len(row.prompt) + row.response}
