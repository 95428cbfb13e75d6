"""Supervised fine-tuning: LoRA on the base, loss on response tokens only, with TRL's SFTTrainer."""

import torch
from trl import SFTConfig, SFTTrainer

from rlhf.data import load
from rlhf.data.formats import Example
from rlhf.data.tokenize import Codec, Encoded
from rlhf.models.loading import base_name, load_base, load_codec, new_adapter, save_adapter
from rlhf.recipe import Sft
from rlhf.run import Run
from rlhf.stages import Result
from rlhf.telemetry import Telemetry
from rlhf.trainer import arguments, perplexity, rows_to_dataset, train, with_exact_weights

IGNORED = -100  # a label that takes no part in the loss


def run_stage(run: Run, device: torch.device) -> Result:
    recipe = run.loaded.recipe
    options = recipe.sft
    telemetry = Telemetry(device)

    demonstrations = load.load(run).demonstrations()
    codec = load_codec(run)
    training, counts = _encode(codec, demonstrations.train[: options.max_samples], options)
    heldout, _ = _encode(codec, demonstrations.heldout[: options.max_eval_samples], options)
    run.describe(cuts=counts)
    scored = [(prompt + response, len(prompt)) for prompt, response in heldout]

    torch.manual_seed(recipe.seed)
    model = new_adapter(load_base(run, device), run)
    with telemetry.phase("evaluate"):
        before = perplexity(model, scored, codec.pad_id, options.per_device_train_batch_size)
    trainer = with_exact_weights(
        model,
        lambda: SFTTrainer(
            model=model,
            args=arguments(SFTConfig, run, options, max_length=None),
            train_dataset=rows_to_dataset([_labelled(row) for row in training]),
            processing_class=codec.tokenizer,
        ),
    )
    train(trainer, run, telemetry)

    save_adapter(model, run.path / "adapter", base_name(run))
    with telemetry.phase("evaluate"):
        after = perplexity(model, scored, codec.pad_id, options.per_device_train_batch_size)
    metrics = {
        "perplexity": after,
        "perplexity_before": before,
        "perplexity_ratio": after / before,
        "train_examples": len(training),
        **counts,
    }
    return Result(metrics, telemetry.costs())


def _encode(codec: Codec, rows: list[Example], options: Sft) -> tuple[list[Encoded], dict[str, int]]:
    texts = [(row.prompt, row.response) for row in rows]
    encoded, counts = codec.encode(texts, options.max_prompt_length, options.max_length)
    return [row for row in encoded if row], dict(counts)


def _labelled(row: Encoded) -> dict[str, object]:
    ids = row.prompt + row.response
    return {"input_ids": ids, "labels": [IGNORED] * len(row.prompt) + row.response}
