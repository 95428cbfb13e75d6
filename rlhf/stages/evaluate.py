"""Every policy of a run on the same held-out prompts, and every held-out pair under the reward model."""

from contextlib import nullcontext
from typing import Any

import torch

from rlhf.data import load
from rlhf.evaluation import Measured, compare, measure
from rlhf.models.loading import load_base, load_codec
from rlhf.models.shared_base import SharedBase
from rlhf.run import Run
from rlhf.stages import Result, trained_policies
from rlhf.telemetry import Telemetry
from rlhf.trainer import perplexity


def run_stage(run: Run, device: torch.device) -> Result:
    recipe = run.loaded.recipe
    options = recipe.evaluate
    telemetry = Telemetry(device)

    corpus = load.load(run)
    codec = load_codec(run)
    sft, rm = run.parent("sft"), run.parent("rm")
    prompts = corpus.prompts().heldout[: options.max_samples]
    demonstrations = corpus.demonstrations().heldout[: options.max_samples]
    rows, _ = codec.encode(
        [(d.prompt, d.response) for d in demonstrations],
        options.max_prompt_length,
        options.max_prompt_length + options.response_length,
    )
    scored = [(row.prompt + row.response, len(row.prompt)) for row in rows if row]

    metrics: dict[str, float] = {}
    repeated = {"response_length_sft", "score_sft", "true_reward_sft"}  # they stand under sft/ already
    measured: dict[str, Measured] = {}
    present = trained_policies(run)
    run.describe(policies=present)
    with telemetry.phase("evaluate"):
        for name in ("base", "sft", *present):
            shared = SharedBase(load_base(run, device), run.parent(name) if name in present else sft, sft)
            shared.add_reward(rm)
            role = {"base": "base", "sft": "reference"}.get(name, "policy")
            found = measure(
                shared,
                role,
                codec,
                prompts,
                seed=recipe.seed,
                max_prompt_length=options.max_prompt_length,
                response_length=options.response_length,
                temperature=options.temperature,
                batch_size=options.batch_size,
                truth=recipe.data.source == "toy",
            )
            measured[name] = found
            values = found.metrics() if name in ("base", "sft") else compare(measured["sft"], found)
            values["perplexity"] = _perplexity(shared, role, scored, codec.pad_id, options.batch_size)
            metrics |= {f"{name}/{key}": value for key, value in values.items() if key not in repeated}
    run.log_samples(0, _rows(codec, prompts, measured))
    answers = {name: found.texts[0] for name, found in measured.items()}
    return Result(metrics, telemetry.costs(), (codec.prompt_text(prompts[0]), answers))


def _perplexity(shared: SharedBase, role: str, scored: list[Any], pad_id: int, batch_size: int) -> float:
    """Of the held-out demonstrations under one policy, response tokens only."""
    shared.activate("policy" if role == "base" else role)
    with shared.without_adapters() if role == "base" else nullcontext():
        return perplexity(shared.base, scored, pad_id, batch_size)


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
