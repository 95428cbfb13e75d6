"""Direct preference optimisation from the SFT adapter, with TRL's DPOTrainer.

TRL copies the loaded adapter as its frozen reference, so that the reference is SFT and not the bare base.
Loss: -log σ(β [(log π(y_c) - log π_ref(y_c)) - (log π(y_r) - log π_ref(y_r))]).
"""

from typing import Any

import torch
from trl import DPOConfig, DPOTrainer

from rlhf.data import load
from rlhf.data.tokenize import Codec, Encoded
from rlhf.evaluation import compare_with_sft
from rlhf.models.loading import base_name, load_base, load_codec, save_adapter, trainable_adapter
from rlhf.run import Run
from rlhf.stages import Result
from rlhf.stages.rm import encode_pairs
from rlhf.telemetry import Telemetry
from rlhf.trainer import arguments, rows_to_dataset, train, with_exact_weights


def run_stage(run: Run, device: torch.device) -> Result:
    recipe = run.loaded.recipe
    options = recipe.dpo
    telemetry = Telemetry(device)

    corpus = load.load(run)
    pairs = corpus.preferences("dpo")
    codec = load_codec(run)
    training, counts = encode_pairs(codec, pairs.train[: options.max_samples], options)
    run.describe(cuts=counts)

    _fit(run, codec, training, device, telemetry)
    with telemetry.phase("evaluate"):
        metrics, sample = compare_with_sft(run, codec, corpus.prompts().heldout, device)
    return Result(metrics | {"train_pairs": len(training), **counts}, telemetry.costs(), sample)


def _fit(
    run: Run, codec: Codec, pairs: list[tuple[Encoded, Encoded]], device: torch.device, telemetry: Telemetry
) -> None:
    """Train and write the adapter; the model is gone from memory when this returns."""
    recipe = run.loaded.recipe
    torch.manual_seed(recipe.seed)
    model = trainable_adapter(load_base(run, device), run.parent("sft"))
    more = {"max_length": None, "beta": recipe.dpo.beta, "remove_unused_columns": False}  # the sampler needs `length`
    trainer = with_exact_weights(
        model,
        lambda: _TokenizedDPOTrainer(
            model=model,
            args=arguments(DPOConfig, run, recipe.dpo, **more),
            train_dataset=rows_to_dataset([_row(chosen, rejected) for chosen, rejected in pairs]),
            processing_class=codec.tokenizer,
        ),
    )
    train(trainer, run, telemetry)
    save_adapter(model, run.path / "adapter", base_name(run))


class _TokenizedDPOTrainer(DPOTrainer):
    """TRL's trainer for rows that are token ids already; it has no other way to take them."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset


def _row(chosen: Encoded, rejected: Encoded) -> dict[str, Any]:
    length = len(chosen.prompt) + max(len(chosen.response), len(rejected.response))
    return {
        "prompt_ids": chosen.prompt,
        "chosen_ids": chosen.response,
        "rejected_ids": rejected.response,
        "length": length,
    }
