"""Comparison of two finished runs on the same held-out prompts: two recipes, 4-bit and 16-bit, two seeds.

Nothing is trained or sampled: the results in `evaluate/` of both run directories are compared. Prompts are paired, and
several answers to a prompt are one observation, their mean. Each run was trained once, so the intervals cover another
choice of prompts and not another seed.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from rlhf import recipe as recipes
from rlhf import stats
from rlhf.errors import UserError
from rlhf.recipe import POLICIES, PolicyLabel
from rlhf.run import reader
from rlhf.run.finished import finished_evaluation, read_manifest, read_summary, reward_model_digest, stage_folder
from rlhf.run.layout import MANIFEST, SAMPLES
from rlhf.run.outcomes import Answer, Details, SampleLine

COMPARED_POLICIES: tuple[PolicyLabel, ...] = (*POLICIES, "sft", "base")


class PolicyEvaluation(NamedTuple):
    """Evaluation of one policy of a run.

    `answers`: for each prompt its answers, each a response, with score and true_reward if there are any.
    """

    name: str
    answers: dict[str, list[Answer]]
    reward_model: str | None  # hash of the weights whose scores the answers have
    own_reward_model: str | None  # the run's own, whose scores are behind `metrics`
    metrics: Mapping[str, float | None]
    settings: Mapping[str, object]
    rm_pairs: int  # held-out pairs behind rm/accuracy


class FigureRow(NamedTuple):
    """A figure of both runs, with the difference B − A and its interval if the two can be compared."""

    name: str
    a: float | None
    b: float | None
    difference: float | None = None
    interval: tuple[float, float] | None = None


class PolicyComparison(NamedTuple):
    """Figures of two policies on the same prompts. `reward_model`: the model that scored both; None if they differ."""

    a: str
    b: str
    prompts: int
    prompts_sha256: str
    reward_model: str | None
    settings_that_differ: list[str]
    rows: list[FigureRow]

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain JSON values."""
        return self._asdict() | {"rows": [row._asdict() for row in self.rows]}


# ---- reading ----


def load(run_directory: Path, stage: PolicyLabel, scored: Path | None = None) -> PolicyEvaluation:
    """Return one policy's evaluation from the run directory `<out>/<recipe>/<version>`.

    `scored`: what `rlhf score RUN/evaluate/samples.jsonl --to FILE` wrote, whose scores replace the run's own.
    Raises UserError without a finished evaluation of that policy, and for scores of other answers.
    """
    folder = run_directory / "evaluate"
    summary, manifest = finished_evaluation(run_directory), read_manifest(folder)
    answers = _answers(_lines(folder / SAMPLES), stage, folder / SAMPLES)
    rm_summary = read_summary(stage_folder(run_directory, "rm"))
    reward_model = own_reward_model = reward_model_digest(rm_summary) if rm_summary else None
    if scored is not None:
        lines = _lines(scored)
        original, answers = answers, _answers(lines, stage, scored)
        if _texts(original) != _texts(answers):
            raise UserError(f"{scored}: not the answers of {folder / SAMPLES}; `rlhf score` that file again")
        reward_model = lines[0].reward_model
        if reward_model is None:
            raise UserError(f"{scored}: not written by `rlhf score`, which names the reward model")
    policy = run_directory / stage if stage == "base" else stage_folder(run_directory, stage)
    policy_settings = read_manifest(policy).settings.plain() if (policy / MANIFEST).is_file() else {}
    details = reader.read(folder / "details.json", Details)
    bins = details.reward_model.calibration if details and details.reward_model else []
    return PolicyEvaluation(
        name=f"{run_directory}: {stage}",
        answers=answers,
        reward_model=reward_model,
        own_reward_model=own_reward_model,
        metrics={
            key.removeprefix(f"{stage}/"): value
            for key, value in summary.metrics.items()
            if key.startswith((f"{stage}/", "rm/"))
        },
        settings=manifest.settings.plain() | ({stage: policy_settings[stage]} if stage in policy_settings else {}),
        rm_pairs=sum(bin.pairs for bin in bins),
    )


def _lines(file: Path) -> list[SampleLine]:
    """Return the lines of a file of samples. Raises UserError for a file without any, and for a damaged line."""
    lines = reader.read_lines(file, SampleLine)
    if not lines:
        raise UserError(f"{file}: no samples there")
    return lines


def _answers(lines: Sequence[SampleLine], stage: PolicyLabel, file: Path) -> dict[str, list[Answer]]:
    """Return a policy's answers by prompt. Raises UserError where a line of `file` has none of that policy."""
    by_prompt: dict[str, list[Answer]] = {}
    for number, line in enumerate(lines, 1):
        if stage not in line.answers:
            names = ", ".join(line.answers)
            raise UserError(f"{file}:{number}: no answer of {stage}; choose --stage from: {names or 'none there'}")
        by_prompt.setdefault(line.prompt, []).append(line.answers[stage])
    return by_prompt


def _texts(answers: Mapping[str, Sequence[Answer]]) -> dict[str, list[str]]:
    return {prompt: [answer.response for answer in rows] for prompt, rows in answers.items()}


def fingerprint(prompts: Sequence[str]) -> str:
    """Return the hash of a set of prompts, independent of their order."""
    return hashlib.sha256(json.dumps(sorted(prompts)).encode()).hexdigest()[:16]


# ---- comparing ----


def compare_runs(a: PolicyEvaluation, b: PolicyEvaluation) -> PolicyComparison:
    """Return all figures of both. Raises UserError if they did not answer the same prompts."""
    if fingerprint(list(a.answers)) != fingerprint(list(b.answers)):
        common = len(a.answers.keys() & b.answers.keys())
        raise UserError(
            f"{a.name} and {b.name} answered other prompts: {len(a.answers)} and {len(b.answers)}, {common} of them in "
            "common; compare runs with the same data, seed, template and evaluate.max_samples"
        )
    same_reward_model = a.reward_model is not None and a.reward_model == b.reward_model
    rows = [
        *_paired(a, b, "true_reward", comparable=True),
        *_paired(a, b, "score", comparable=same_reward_model),
        *_overall(a, b),
    ]
    return PolicyComparison(
        a=a.name,
        b=b.name,
        prompts=len(a.answers),
        prompts_sha256=fingerprint(list(a.answers)),
        reward_model=a.reward_model if same_reward_model else None,
        settings_that_differ=recipes.differences(a.settings, b.settings),
        rows=rows,
    )


def _paired(
    a: PolicyEvaluation, b: PolicyEvaluation, key: Literal["score", "true_reward"], *, comparable: bool
) -> list[FigureRow]:
    """Return the means of a value that every answer has, and how often B's answer has more.

    Only the means are returned if the values are not `comparable`.
    """
    if any(getattr(answer, key) is None for side in (a, b) for answers in side.answers.values() for answer in answers):
        return []
    sides = [
        [[float(getattr(answer, key)) for answer in side.answers[prompt]] for prompt in a.answers] for side in (a, b)
    ]
    means = [[fmean(values) for values in side] for side in sides]
    row = FigureRow(key, fmean(means[0]), fmean(means[1]))
    if not comparable:
        return [row]
    gain = stats.mean_interval([y - x for x, y in zip(*means, strict=True)])
    won = [
        fmean(stats.outcomes([y - x for x, y in itertools.product(values_a, values_b)]))
        for values_a, values_b in zip(*sides, strict=True)
    ]
    rate = stats.wilson(sum(won), len(won))
    wins = FigureRow(
        f"win_rate_by_{key}", 1 - rate.value, rate.value, 2 * rate.value - 1, _scaled_interval(rate, 2, -1)
    )
    if gain is not None:
        row = row._replace(difference=gain.value, interval=_scaled_interval(gain))
    return [row, wins]


def _scaled_interval(estimate: stats.Estimate, factor: float = 1.0, offset: float = 0.0) -> tuple[float, float]:
    return factor * estimate.low + offset, factor * estimate.high + offset


def _overall(a: PolicyEvaluation, b: PolicyEvaluation) -> list[FigureRow]:
    """Return the figures of all answers together: B − A, with an interval only for the reward models' accuracy.

    Both were measured on the same held-out pairs, so the interval for independent ones is too wide rather than too
    narrow.
    """
    rows = []
    for key in ("score_gain_sd", "true_reward_gain_sd", "win_rate_vs_sft", "kl_per_token", "perplexity"):
        comparable = key != "perplexity" or a.settings.get("tokenizer") == b.settings.get("tokenizer")
        if key in ("score_gain_sd", "win_rate_vs_sft"):
            comparable = a.own_reward_model is not None and a.own_reward_model == b.own_reward_model
        rows += _figure(a, b, key, comparable=comparable)
    rows += [row for key in ("response_length", "eos_rate") for row in _figure(a, b, key)]
    for row in _figure(a, b, "rm/accuracy"):
        if row.difference is not None and a.rm_pairs and b.rm_pairs:
            shares = ((row.a, a.rm_pairs), (row.b, b.rm_pairs))
            half_width = stats.Z95 * math.sqrt(sum(p * (1 - p) / n for p, n in shares if p is not None))
            row = row._replace(interval=(row.difference - half_width, row.difference + half_width))
        rows.append(row)
    return rows


def _figure(a: PolicyEvaluation, b: PolicyEvaluation, key: str, *, comparable: bool = True) -> list[FigureRow]:
    x, y = a.metrics.get(key), b.metrics.get(key)
    if x is None and y is None:
        return []
    return [FigureRow(key, x, y, y - x if comparable and x is not None and y is not None else None)]
