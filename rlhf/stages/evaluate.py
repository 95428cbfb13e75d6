"""Evaluation of every policy of a run on the same held-out prompts."""

from collections.abc import Mapping

from rlhf.data.corpus import Corpus
from rlhf.data.tokenize import DialogueTokenizer, Encoded
from rlhf.evaluation.likelihood import perplexity
from rlhf.evaluation.policies import (
    PolicySamples,
    further_metrics,
    gains_over_base,
    gains_over_start,
    heldout_sampling,
    load_roles,
    measure,
    of_several_samples,
    own_figures,
    role_of,
)
from rlhf.evaluation.references import Overlap
from rlhf.evaluation.samples import expected_answers, sample_rows
from rlhf.observe.telemetry import Telemetry
from rlhf.recipe.schema import Evaluate
from rlhf.recipe.stages import EVALUATE, PolicyLabel, PolicyStart
from rlhf.run.directory import StageRun
from rlhf.stages.online.reward_sum import RewardSum


def run_stage(run: StageRun, telemetry: Telemetry, tokenizer: DialogueTokenizer, corpus: Corpus) -> dict[str, float]:
    """Sample every policy of the run on the same held-out prompts, and measure the answers."""
    recipe, start = run.loaded.recipe, run.loaded.recipe.start
    options = recipe.evaluate
    device = telemetry.device

    trained = run.trained_policies()
    sections = [section for stage, section in recipe.online().items() if stage in trained]
    rewards = RewardSum(run.stage, sections, corpus, tokenizer, run.path, device.type)
    run.describe(reward_functions={label: function.name for label, function in rewards.functions.items()})
    prompts = rewards.usable(corpus.prompts(EVALUATE)).test[: options.max_samples]
    demonstrations = _demonstrations(tokenizer, corpus, options)

    with telemetry.phase("load"):
        shared = load_roles(run, device, run.policy_start(), trained)
        overlap = Overlap(corpus, prompts, options.num_samples, options.bertscore_model, device)
    labels: list[PolicyLabel] = [*dict.fromkeys(("base", start)), *trained]
    samples: dict[PolicyLabel, PolicySamples] = {}
    perplexities: dict[PolicyLabel, float] = {}
    with telemetry.phase("evaluate"):
        for number, label in enumerate(labels, 1):
            role = role_of(label, recipe)
            samples[label] = measure(
                shared,
                role,
                tokenizer,
                prompts,
                heldout_sampling(options),
                seed=recipe.seed,
                with_true_reward=recipe.data.has_true_reward,
                samples_per_prompt=options.num_samples,
                reward_fn=lambda prompts, texts, scores, ids: (rewards(prompts, texts, ids).by_name, scores),
                whose=f"{label} ({number} of {len(labels)})",
            )
            if demonstrations:
                with shared.roles.using(role):
                    perplexities[label] = perplexity(shared.base, demonstrations, tokenizer.pad_id, options.batch_size)

    metrics = policy_metrics(samples, start)
    metrics |= {f"{label}/perplexity": value for label, value in perplexities.items()}
    with telemetry.phase("references"):
        for label, policy in samples.items():
            metrics |= {f"{label}/{key}": value for key, value in overlap.metrics(policy.texts).items()}
    run.logs.samples(0, sample_rows(tokenizer, prompts, samples, expected_answers(corpus)))
    return metrics


def _demonstrations(tokenizer: DialogueTokenizer, corpus: Corpus, options: Evaluate) -> list[Encoded]:
    """Return held-out demonstrations; none where data have prompts alone."""
    if not corpus.has_responses:
        return []
    rows, _ = tokenizer.encode(
        [(row.prompt, row.response) for row in corpus.demonstrations().test[: options.max_samples]],
        options.max_prompt_length,
        options.max_prompt_length + options.response_length,
    )
    return [row for row in rows if row]


def policy_metrics(samples: Mapping[PolicyLabel, PolicySamples], start: PolicyStart) -> dict[str, float]:
    """Return the metrics of every policy, as `<policy>/<metric>`."""
    metrics: dict[str, float] = {}
    base, before = samples["base"], samples[start]
    for name, policy in samples.items():
        values = own_figures(policy) if name == start else gains_over_start(before, policy, start)
        values |= further_metrics(before, policy, values, start) | of_several_samples(policy)
        if name != "base":
            values |= gains_over_base(base, policy)
        if name not in ("base", start):
            values["kl_per_response"] = policy.kl * policy.lengths.double().mean().item()
        for key, value in values.items():
            if "_vs_" in key or not key.endswith(f"_{start}"):  # the start's own stand under its name
                metrics[f"{name}/{key}"] = value
    return metrics
