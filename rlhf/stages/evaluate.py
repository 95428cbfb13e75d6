"""Evaluation of every policy of a run on the same held-out prompts, and of a reward model on held-out pairs."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from rlhf.data.corpus import Corpus, Prompt
from rlhf.data.pairs import encode_pairs
from rlhf.data.rows import PreferencePair
from rlhf.data.tokenize import DialogueTokenizer
from rlhf.evaluation.likelihood import ScoredText, perplexity, scored_texts
from rlhf.evaluation.policies import (
    EvaluationRewards,
    PolicySamples,
    further_metrics,
    gains_over_base,
    gains_over_start,
    heldout_sampling,
    interval_ends,
    load_roles,
    measure,
    of_several_samples,
    role_of,
)
from rlhf.evaluation.references import Overlap, answers
from rlhf.evaluation.reward_model import reward_model_figures, scores_of
from rlhf.evaluation.samples import examples, expected_answers, sample_rows
from rlhf.files import JsonObject, write_json
from rlhf.models.shared_base import SharedBase
from rlhf.observe.telemetry import Telemetry
from rlhf.recipe import Recipe, StageName
from rlhf.recipe.schema import Evaluate, Rm
from rlhf.recipe.stages import RM, SECOND_RM, PolicyLabel, PolicyName, PolicyStart, ScoreRole
from rlhf.run.directory import StageRun
from rlhf.run.evidence import HELDOUT_PROMPTS
from rlhf.run.layout import SUMMARY
from rlhf.stages.online.loop import ByName
from rlhf.stages.online.reward_sum import RewardSum, total_figures
from rlhf.stages.online.rewards import RewardFunction
from rlhf.stages.result import Result
from rlhf.stats import clustered_share, outcomes

# With the start's name; they are logged under that already.
REPEATED = ("response_length_", "score_", "true_reward_", "second_score_")
CONTRADICTED = 10  # pairs that are listed


def run_stage(run: StageRun, device: torch.device, tokenizer: DialogueTokenizer, corpus: Corpus) -> Result:
    """Sample every policy of the run on the same held-out prompts, and judge a reward model on held-out pairs."""
    recipe = run.loaded.recipe
    options = recipe.evaluate
    telemetry = Telemetry(device)

    trained = run.parents.trained_policies()
    prompts, reward_sums = _prompts_and_rewards(run, corpus, tokenizer, trained, device)
    demonstrations = _demonstrations(tokenizer, corpus, options)
    has_rm = recipe.rm is not None and (run.parents.folder(RM) / SUMMARY).exists()
    pairs = _HeldoutPairs(tokenizer, corpus, recipe.rm) if has_rm and recipe.rm else None

    with telemetry.phase("load"):
        shared = load_roles(run, device, run.parents.start(), trained)
        overlap = Overlap(answers(corpus, prompts, options.num_samples), options.bertscore_model, device)
    with telemetry.phase("evaluate"):
        labels: list[PolicyLabel] = [*dict.fromkeys(("base", recipe.start)), *trained]
        reward_fn = _reward_fn(reward_sums) if reward_sums else None
        rm_metrics, rm_details = pairs.judged(shared) if pairs else ({}, {})  # before the start's answers set its scale
        samples, perplexities = _measure_policies(shared, labels, tokenizer, prompts, demonstrations, recipe, reward_fn)

    metrics = _policy_metrics(samples, perplexities, overlap, telemetry, recipe.start) | rm_metrics
    metrics |= total_figures({f.name: f for reward_sum in reward_sums for f in reward_sum.called}.values())
    details: JsonObject = {}
    if functions := _reward_functions(reward_sums):
        details["reward_functions"] = functions
    write_json(run.path / "details.json", details | rm_details)
    run.logs.samples(0, sample_rows(tokenizer, prompts, samples, expected_answers(corpus)))
    return Result(
        metrics, telemetry.costs(), examples(prompts, {name: samples[name] for name in (recipe.start, *trained)})
    )


def _prompts_and_rewards(
    run: StageRun, corpus: Corpus, tokenizer: DialogueTokenizer, trained: Sequence[PolicyName], device: torch.device
) -> tuple[list[Prompt], list[RewardSum]]:
    """Return held-out prompts, and the rewards of the policies where they are sums, which can judge all of these."""
    recipe = run.loaded.recipe
    known: dict[str, RewardFunction] = {}
    reward_sums = [
        RewardSum(
            stage, options, corpus.right_answers(), tokenizer, corpus.columns, run.path, known, device=device.type
        )
        for stage, options in recipe.online().items()
        if stage in trained and options.sums_rewards
    ]
    prompts = corpus.prompts("evaluate")
    for reward_sum in reward_sums:
        prompts = reward_sum.usable(prompts)
    return prompts.test[: recipe.evaluate.max_samples], reward_sums


class _HeldoutPairs:
    """Held-out pairs, which the reward models are to judge. Raises UserError if none can be used."""

    def __init__(self, tokenizer: DialogueTokenizer, corpus: Corpus, options: Rm):
        self.tokenizer, self.batch_size = tokenizer, 2 * options.per_device_train_batch_size
        self.encoded, _, self.pairs = encode_pairs(tokenizer, corpus.pairs.test[: options.max_eval_samples], options)

    def judged(self, shared: SharedBase) -> tuple[dict[str, float], JsonObject]:
        """Return metrics of each reward model, as `<stage>/<metric>`, and what details.json has about the first."""
        metrics, margins = self._figures(shared, "reward")
        named = {f"{RM}/{key}": value for key, value in metrics.items()}
        if "second_reward" in shared.score_heads:
            second, _ = self._figures(shared, "second_reward")
            named |= {f"{SECOND_RM}/{key}": value for key, value in second.items()}
        details: JsonObject = {
            "contradicted": contradicted(self.tokenizer, self.pairs, margins),
            "heldout_pairs": heldout_pairs(self.pairs, margins),
        }
        return named, details

    def _figures(self, shared: SharedBase, role: ScoreRole) -> tuple[dict[str, float], list[float]]:
        """Return metrics of one reward model, and its margin of each pair."""
        sides = [pair.chosen for pair in self.encoded], [pair.rejected for pair in self.encoded]
        score = partial(shared.scores_at, role=role)
        chosen, rejected = (scores_of(side, score, self.tokenizer.pad_id, self.batch_size) for side in sides)
        length_differences = [len(pair.chosen.response) - len(pair.rejected.response) for pair in self.encoded]
        metrics = reward_model_figures(chosen.tolist(), rejected.tolist(), length_differences)
        margins = (chosen - rejected).tolist()
        share = clustered_share(outcomes(margins), [pair.prompt for pair in self.pairs])
        ends = {"accuracy_low": share.low, "accuracy_high": share.high}
        return metrics | ends | {"heldout_pairs": len(margins)}, margins


def _measure_policies(
    shared: SharedBase,
    labels: Sequence[PolicyLabel],
    tokenizer: DialogueTokenizer,
    prompts: Sequence[Prompt],
    demonstrations: Sequence[ScoredText],
    recipe: Recipe,
    reward_fn: EvaluationRewards | None,
) -> tuple[dict[PolicyLabel, PolicySamples], dict[str, float]]:
    """Return, by policy, its samples and their scores, and its perplexity of the demonstrations."""
    options = recipe.evaluate
    samples: dict[PolicyLabel, PolicySamples] = {}
    perplexities: dict[str, float] = {}
    for number, label in enumerate(labels, 1):
        samples[label] = measure(
            shared,
            role_of(label, recipe),
            tokenizer,
            prompts,
            heldout_sampling(options),
            seed=recipe.seed,
            with_true_reward=recipe.data.has_true_reward,
            samples_per_prompt=options.num_samples,
            reward_fn=reward_fn,
            whose=f"{label} ({number} of {len(labels)})",
        )
        if demonstrations:
            with shared.roles.using(role_of(label, recipe)):
                perplexities[label] = perplexity(shared.base, demonstrations, tokenizer.pad_id, options.batch_size)
    return samples, perplexities


def _reward_names(reward_sums: Sequence[RewardSum]) -> dict[tuple[StageName, str], str]:
    """Return the name of every reward function by stage and label.

    It is the label. Where two stages give one label to different functions, the name begins with the stage.
    """
    functions_by_label: dict[str, set[str]] = {}  # as the recipe writes them
    for reward_sum in reward_sums:
        for label, function in reward_sum.functions.items():
            if function:
                functions_by_label.setdefault(label, set()).add(function.name)
    return {
        (reward_sum.stage, label): label if len(functions_by_label[label]) == 1 else f"{reward_sum.stage}.{label}"
        for reward_sum in reward_sums
        for label, function in reward_sum.functions.items()
        if function
    }


def _reward_functions(reward_sums: Sequence[RewardSum]) -> dict[str, str]:
    """Return every reward function by name, as the recipe writes it."""
    names = _reward_names(reward_sums)
    return {
        names[reward_sum.stage, label]: function.name
        for reward_sum in reward_sums
        for label, function in reward_sum.functions.items()
        if function
    }


def _reward_fn(reward_sums: Sequence[RewardSum]) -> EvaluationRewards:
    """Return the function that gives every reward of the policies by name."""
    names = _reward_names(reward_sums)

    def rewards(
        prompts: Sequence[Prompt], texts: Sequence[str], scores: Tensor | None, ids: Sequence[list[int]]
    ) -> tuple[ByName, Tensor | None]:
        by_name: ByName = {}
        for reward_sum in reward_sums:
            for label, numbers in reward_sum.for_evaluation(prompts, texts, scores, ids)[0].items():
                by_name[names[reward_sum.stage, label]] = numbers
        return by_name, scores

    return rewards


def _demonstrations(tokenizer: DialogueTokenizer, corpus: Corpus, options: Evaluate) -> list[ScoredText]:
    """Return held-out demonstrations as texts of which the responses are scored; none where data have prompts alone."""
    if not corpus.has_responses:
        return []
    rows, _ = tokenizer.encode(
        [(row.prompt, row.response) for row in corpus.demonstrations().test[: options.max_samples]],
        options.max_prompt_length,
        options.max_prompt_length + options.response_length,
    )
    return scored_texts(row for row in rows if row)


def _policy_metrics(
    samples: Mapping[PolicyLabel, PolicySamples],
    perplexities: dict[str, float],
    overlap: Overlap,
    telemetry: Telemetry,
    start: PolicyStart,
) -> dict[str, float]:
    """Return the metrics of every policy, as `<policy>/<metric>`."""
    metrics: dict[str, float] = {}
    before = samples[start]
    for name, policy in samples.items():
        values = policy.metrics() if name == start else gains_over_start(before, policy, start)
        if name != "base":
            values |= gains_over_base(samples["base"], policy)
        if name in perplexities:
            values["perplexity"] = perplexities[name]
        values |= further_metrics(before, policy, values, start)
        values |= of_several_samples(policy if name == "base" else before, policy)
        values |= interval_ends(before, policy, start) | {HELDOUT_PROMPTS: policy.prompts}
        with telemetry.phase("references"):
            values |= overlap.metrics(policy.texts)
        metrics |= {f"{name}/{key}": value for key, value in values.items() if not _repeated(key, start)}
    return metrics


def _repeated(key: str, start: PolicyStart) -> bool:
    """Return whether a metric of a policy is logged under the name of its start already."""
    return key.removesuffix(start) in REPEATED or (key.startswith("reward_") and key.endswith(f"_{start}"))


def contradicted(tokenizer: DialogueTokenizer, pairs: list[PreferencePair], margins: list[float]) -> list[JsonObject]:
    """Return the held-out pairs whose label the reward model contradicts most: its mistakes, or the annotators'."""
    worst = sorted(range(len(pairs)), key=lambda i: margins[i])[:CONTRADICTED]
    return [
        {
            "margin": margins[i],
            "prompt": tokenizer.prompt_text(pairs[i].prompt),
            "chosen": pairs[i].chosen,
            "rejected": pairs[i].rejected,
            "source": pairs[i].source,
        }
        for i in worst
        if margins[i] < 0
    ]


def heldout_pairs(pairs: Sequence[PreferencePair], margins: Sequence[float]) -> list[JsonObject]:
    """Return for details.json the hashes of each pair's prompt and of the whole pair, and its margin.

    They do not depend on the template, so that pairs of two runs can be recognised.
    """
    rows: list[JsonObject] = []
    for pair, margin in zip(pairs, margins, strict=True):
        prompt = [(message.role, message.content) for message in pair.prompt]
        rows.append({"prompt": _hash(prompt), "pair": _hash([prompt, pair.chosen, pair.rejected]), "margin": margin})
    return rows


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
