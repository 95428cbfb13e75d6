"""Direct preference optimisation from the SFT adapter, with TRL's DPOTrainer.

TRL copies the loaded adapter as its frozen reference, so that the reference is SFT and not the bare base.
Loss: -log σ(β [(log π(y_c) - log π_ref(y_c)) - (log π(y_r) - log π_ref(y_r))]).
"""

from pathlib import Path

import torch
from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from rlhf.data import amount
from rlhf.data.batch import collate
from rlhf.data.load import load_corpus
from rlhf.data.pairs import encode_pairs, longest
from rlhf.data.tokenize import Codec, Encoded
from rlhf.evaluation.likelihood import sequence_logprobs
from rlhf.evaluation.policies import gains_over_sft, heldout_sampling, measure, sample_of
from rlhf.evaluation.reward_model import accuracy
from rlhf.models.adapters import save_adapter, trainable_adapter
from rlhf.models.loading import load_base, load_codec
from rlhf.models.shared_base import SharedBase
from rlhf.objectives.losses import dpo_loss
from rlhf.observe.telemetry import Telemetry
from rlhf.process import distributed
from rlhf.recipe import Role
from rlhf.rollout.probe import check_sampling
from rlhf.run.directory import Run
from rlhf.run.layout import ADAPTER
from rlhf.stages.result import Result
from rlhf.stages.supervised import arguments, best_step, free_memory, rows_to_dataset, train
from rlhf.stages.trainer import RunTrainer

SAMPLES = 8  # held-out prompts whose answers are logged before and after


def run_stage(run: Run, device: torch.device) -> Result:
    """Train the DPO adapter, and measure the policy against SFT on held-out prompts and pairs."""
    recipe = run.loaded.recipe
    options = recipe.dpo
    telemetry = Telemetry(device)

    corpus = load_corpus(run)
    pairs = corpus.preferences("dpo")
    codec = load_codec(run)
    training, counts, _ = encode_pairs(codec, pairs.train[: options.max_samples], options)
    heldout, heldout_counts, _ = encode_pairs(codec, pairs.test[: options.max_eval_samples], options)
    run.describe(cuts={"train": counts, "heldout": heldout_counts})
    if run.is_main and not recipe.data.is_stand_in:  # stand-in data needs no advice on its amount
        amount.note("dpo", len(training))
    validation: list[tuple[Encoded, Encoded]] = []
    if options.eval_steps:
        validation, _, _ = encode_pairs(codec, pairs.validation[: options.max_eval_samples], options)
    _fit(run, codec, training, validation, device, telemetry)
    free_memory()

    evaluation = heldout_sampling(recipe.evaluate)
    prompts = corpus.prompts("dpo").test[: recipe.evaluate.max_samples]
    truth = recipe.data.has_true_reward
    with telemetry.phase("evaluate"):
        roles: dict[Role, Path] = {"policy": run.path, "reference": run.parents.folder("sft")}
        shared = SharedBase(load_base(run, device), roles, lean=recipe.hardware.trunk == "lean")
        check_sampling(shared.base, codec)
        before, after = (
            measure(shared, role, codec, prompts, evaluation, seed=recipe.seed, with_true_reward=truth)
            for role in ("reference", "policy")
        )
        preferred = preference_accuracy(shared, codec, heldout, 2 * options.per_device_train_batch_size)
    run.logs.samples(
        0,
        [
            {"prompt": codec.prompt_text(prompt), "SFT": a, "DPO": b}
            for prompt, a, b in zip(prompts[:SAMPLES], before.texts, after.texts, strict=False)
        ],
    )
    metrics = gains_over_sft(before, after) | {"preference_accuracy": preferred, "train_pairs": len(training), **counts}
    metrics |= best_step(run)
    return Result(metrics, telemetry.costs(), sample_of(codec, prompts, before, after, "dpo"))


def _fit(
    run: Run,
    codec: Codec,
    pairs: list[tuple[Encoded, Encoded]],
    validation: list[tuple[Encoded, Encoded]],
    device: torch.device,
    telemetry: Telemetry,
) -> None:
    """Train and write the adapter. Only this function holds the model, so that `free_memory` can free it afterwards."""
    recipe = run.loaded.recipe
    batch_size = 2 * recipe.dpo.per_device_train_batch_size
    torch.manual_seed(recipe.seed)
    with telemetry.phase("load"):
        model = trainable_adapter(load_base(run, device), run.parents.folder("sft"))
    trainer = _Trainer(
        model=model,
        args=arguments(DPOConfig, run, recipe.dpo, max_length=None, beta=recipe.dpo.beta),
        train_dataset=rows_to_dataset([_row(chosen, rejected) for chosen, rejected in pairs]),
        processing_class=codec.tokenizer,
    )

    def pair_logprobs() -> tuple[torch.Tensor, torch.Tensor]:
        sides = [
            [(pair[side].prompt + pair[side].response, len(pair[side].prompt)) for pair in validation]
            for side in (0, 1)
        ]
        chosen, rejected = (sequence_logprobs(model, rows, codec.pad_id, batch_size) for rows in sides)
        return chosen, rejected

    reference: tuple[torch.Tensor, torch.Tensor] | None = None
    if validation:
        with telemetry.phase("evaluate"):
            reference = pair_logprobs()  # the policy is SFT before the first step and before a checkpoint is loaded

    def evaluate() -> dict[str, float]:
        assert reference is not None
        chosen, rejected = pair_logprobs()
        margins = recipe.dpo.beta * ((chosen - reference[0]) - (rejected - reference[1]))
        return {
            "loss": dpo_loss(chosen, rejected, *reference, recipe.dpo.beta).item(),
            "accuracy": accuracy(margins),
            "margin": margins.mean().item(),
        }

    lengths = [longest(chosen, rejected) for chosen, rejected in pairs]
    weights = train(trainer, run, telemetry, lengths, evaluate, pairs=True)
    save_adapter(model, run, run.path / ADAPTER, weights=weights)
    distributed.barrier()  # every rank reads the adapter


@torch.no_grad()
def preference_accuracy(
    shared: SharedBase, codec: Codec, pairs: list[tuple[Encoded, Encoded]], batch_size: int
) -> float:
    """Return the share of pairs whose chosen response gained more log-probability over the reference than the other."""
    gains = []
    for side in (0, 1):
        sequences = [pair[side] for pair in pairs]
        prompts, responses = [s.prompt for s in sequences], [s.response for s in sequences]
        rollout = collate(prompts, responses, codec.pad_id, codec.eos_id, shared.device)
        gain = torch.empty(len(pairs))
        for index in rollout.by_length(batch_size):
            batch = rollout.rows(index)
            logp = {}
            for role in ("policy", "reference"):
                with shared.role(role):
                    logp[role] = shared.logprobs(shared.response_hidden(batch), batch, 1.0).sum(1)
            gain[index.cpu()] = (logp["policy"] - logp["reference"]).float().cpu()
        gains.append(gain)
    return accuracy(gains[0] - gains[1])


class _Trainer(RunTrainer, DPOTrainer):
    """TRL's trainer with the changes of a run, for rows that are token ids already, for which TRL has no option."""

    def _prepare_dataset(self, dataset: Dataset, *_: object, **__: object) -> Dataset:
        return dataset


def _row(chosen: Encoded, rejected: Encoded) -> dict[str, list[int]]:
    return {"prompt_ids": chosen.prompt, "chosen_ids": chosen.response, "rejected_ids": rejected.response}
