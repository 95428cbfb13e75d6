"""Every policy of a run on the same held-out prompts, and every held-out pair under the reward model."""

from typing import Any

import torch

from rlhf.data import load
from rlhf.evaluation import Measured, compare, measure, sampling
from rlhf.models.loading import load_base, load_codec
from rlhf.models.shared_base import SharedBase
from rlhf.run import Run, trained_policies
from rlhf.stages import Result
from rlhf.telemetry import Telemetry
from rlhf.trainer import perplexity

REPEATED = {"response_length_sft", "score_sft", "true_reward_sft"}  # they stand under sft/ already


def run_stage(run: Run, device: torch.device) -> Result:
    recipe = run.loaded.recipe
    options = recipe.evaluate
    telemetry = Telemetry(device)

    corpus = load.load(run)
    codec = load_codec(run)
    prompts = corpus.prompts().heldout[: options.max_samples]
    how = sampling(options)
    demonstrations = corpus.demonstrations().heldout[: options.max_samples]
    rows, _ = codec.encode(
        [(d.prompt, d.response) for d in demonstrations],
        options.max_prompt_length,
        options.max_prompt_length + options.response_length,
    )
    scored = [(row.prompt + row.response, len(row.prompt)) for row in rows if row]

    trained = trained_policies(run.root)
    with telemetry.phase("load"):
        shared = SharedBase(load_base(run, device), {name: run.root / stage for name, stage in _roles(trained).items()})
        shared.add_reward(run.root / "rm")
    metrics: dict[str, float] = {}
    measured: dict[str, Measured] = {}
    with telemetry.phase("evaluate"):
        for name in ("base", "sft", *trained):
            role = "reference" if name == "sft" else name
            truth = recipe.data.source == "toy"
            found = measured[name] = measure(shared, role, codec, prompts, how, seed=recipe.seed, truth=truth)
            values = compare(measured["sft"], found) if name in trained else found.metrics()
            shared.activate(role)
            values["perplexity"] = perplexity(shared.base, scored, codec.pad_id, options.batch_size)
            metrics |= {f"{name}/{key}": value for key, value in values.items() if key not in REPEATED}
    run.log_samples(0, _rows(codec, prompts, measured))
    answers = {name: found.texts[0] for name, found in measured.items()}
    return Result(metrics, telemetry.costs(), (codec.prompt_text(prompts[0]), answers))


def _roles(trained: list[str]) -> dict[str, str]:
    """Role -> the stage whose adapter plays it."""
    return {"reference": "sft"} | {stage: stage for stage in trained}


def _rows(codec: Any, prompts: Any, measured: dict[str, Measured]) -> list[dict[str, Any]]:
    rows = []
    for i, prompt in enumerate(prompts):
        row: dict[str, Any] = {"prompt": codec.prompt_text(prompt)}
        for name, found in measured.items():
            row[name] = {"response": found.texts[i]}
            if found.scores is not None:
                row[name]["score"] = found.scores[i].item()
            if found.truths is not None:
                row[name]["true_reward"] = found.truths[i].item()
        rows.append(row)
    return rows
