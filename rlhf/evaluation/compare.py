"""Comparison of two finished runs on the same held-out prompts: two recipes, 4-bit and 16-bit, two seeds.

Nothing is trained or sampled: the results in `evaluate/` of both run directories are compared. Prompts are paired, and
several answers to a prompt are one observation, their mean. Each run was trained once, so the intervals cover another
choice of prompts and not another seed.
"""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rlhf import stats
from rlhf.errors import UserError
from rlhf.recipe.chain import differences
from rlhf.recipe.stages import EVALUATE, POLICIES, RM, SFT, PolicyLabel
from rlhf.run import reader
from rlhf.run.evidence import NO_VERDICT, Word, verdict
from rlhf.run.finished import (
    evaluate_again,
    finished_evaluation,
    not_evaluated,
    read_manifest,
    read_summary,
    reward_model_digest,
    stage_folder,
)
from rlhf.run.layout import MANIFEST, SAMPLES
from rlhf.run.outcomes import Answer, Details, SampleLine

COMPARED_POLICIES: tuple[PolicyLabel, ...] = (*POLICIES, SFT, "base")


class PolicyEvaluation(NamedTuple):
    """Evaluation of one policy of a run.

    `answers`: for each prompt its answers, each a response, with score, true_reward and rewards if there are any.
    """

    name: str
    policy: PolicyLabel
    answers: dict[str, list[Answer]]
    reward_model: str | None  # hash of the weights whose scores the answers have
    own_reward_model: str | None  # the run's own, whose scores are behind `metrics`
    metrics: Mapping[str, float | None]
    settings: Mapping[str, object]
    details: Details


class FigureRow(NamedTuple):
    """A figure of both runs, with the difference B − A and its interval if the two can be compared.

    `verdict` is on figures of which more is better, and None for others.
    """

    name: str
    a: float | None
    b: float | None
    difference: float | None = None
    interval: tuple[float, float] | None = None
    verdict: Word | None = None

    def judged(self) -> "FigureRow":
        """Return the figure with the verdict that its interval allows."""
        return self._replace(verdict=verdict(self.interval))


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


def load(run_directory: Path, stage: PolicyLabel | None = None, scored: Path | None = None) -> PolicyEvaluation:
    """Return one policy's evaluation from the run directory `<out>/<recipe>/<version>`.

    `stage` None is the first of POLICIES that was evaluated. `scored`: what `rlhf score RUN/evaluate/samples.jsonl
    --to FILE` wrote, whose scores replace the run's own. Raises UserError without a finished evaluation of that policy,
    and for scores of other answers.
    """
    folder = run_directory / EVALUATE
    summary, manifest = finished_evaluation(run_directory), read_manifest(folder)
    samples = _lines(folder / SAMPLES)
    stage = stage or _first_policy(samples, folder / SAMPLES)
    if stage not in samples[0].answers:
        _explain_missing(run_directory, stage)
    answers = _answers(samples, stage, folder / SAMPLES)
    rm_summary = read_summary(stage_folder(run_directory, RM))
    reward_model = own_reward_model = reward_model_digest(rm_summary) if rm_summary else None
    if scored is not None:
        lines = _lines(scored)
        with reader.advising("or swap the two --scored"):
            original, answers = answers, _answers(lines, stage, scored)
        if _texts(original) != _texts(answers):
            raise UserError(
                f"{scored}: not the answers of {folder / SAMPLES}; `rlhf score` that file again, or swap the two "
                "--scored"
            )
        reward_model = lines[0].reward_model
        if reward_model is None:
            raise UserError(f"{scored}: not written by `rlhf score`, which names the reward model")
    policy = run_directory / stage if stage == "base" else stage_folder(run_directory, stage)
    policy_settings = read_manifest(policy).settings.plain() if (policy / MANIFEST).is_file() else {}
    return PolicyEvaluation(
        name=f"{run_directory}: {stage}",
        policy=stage,
        answers=answers,
        reward_model=reward_model,
        own_reward_model=own_reward_model,
        metrics={
            key.removeprefix(f"{stage}/"): value
            for key, value in summary.metrics.items()
            if key.startswith((f"{stage}/", "rm/"))
        },
        settings=manifest.settings.plain() | ({stage: policy_settings[stage]} if stage in policy_settings else {}),
        details=reader.read(folder / "details.json", Details) or Details(),
    )


def _explain_missing(run_directory: Path, stage: PolicyLabel) -> None:
    """Raise UserError for a policy of the run that its evaluation has not seen, with the way to evaluate it."""
    again = evaluate_again(run_directory)
    if stage != "base" and not_evaluated(run_directory, [stage]):
        raise UserError(f"{run_directory / EVALUATE}: {stage} has finished since: evaluate again, {again}")
    if stage != "base" and (run_directory / stage / MANIFEST).is_file():
        raise UserError(f"{run_directory / stage}: {stage} still trains, or was stopped: let it finish, then {again}")


def _lines(file: Path) -> list[SampleLine]:
    """Return the lines of a file of samples. Raises UserError for a file without any, and for a damaged line."""
    lines = reader.read_lines(file, SampleLine)
    if not lines:
        raise UserError(f"{file}: no samples there")
    return lines


def _first_policy(lines: Sequence[SampleLine], file: Path) -> PolicyLabel:
    """Return the first of POLICIES that has answers in `file`. Raises UserError without one."""
    names = lines[0].answers
    for policy in POLICIES:
        if policy in names:
            return policy
    raise UserError(f"{file}: no answer of a trained policy; choose --stage from: {', '.join(names) or 'none there'}")


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
            f"{a.name} and {b.name} answered different prompts: {len(a.answers)} and {len(b.answers)}, {common} of "
            "them in common; compare runs with the same data, seed, template and evaluate.max_samples"
        )
    same_reward_model = a.reward_model is not None and a.reward_model == b.reward_model
    rows = _paired(a, b, "true_reward", lambda answer: answer.true_reward, comparable=True)
    functions_of_b = b.details.reward_functions
    for name, function in a.details.reward_functions.items():
        same_function = function == functions_of_b.get(name)
        rows += _paired(a, b, f"reward_{name}", partial(_reward, name), comparable=same_function)
        rows += _no_verdict(a, b, f"reward_{name}")
    rows += _paired(a, b, "score", lambda answer: answer.score, comparable=same_reward_model)
    rows += _no_verdict(a, b, "score")
    rows += _overall(a, b)
    return PolicyComparison(
        a=a.name,
        b=b.name,
        prompts=len(a.answers),
        prompts_sha256=fingerprint(list(a.answers)),
        reward_model=a.reward_model if same_reward_model else None,
        settings_that_differ=_settings_that_differ(a, b),
        rows=rows,
    )


def _settings_that_differ(a: PolicyEvaluation, b: PolicyEvaluation) -> list[str]:
    """Return the keys with different values. The section of a policy that the other side is not of is no difference."""
    own = {a.policy, b.policy} - (a.settings.keys() & b.settings.keys())
    of_a, of_b = ({key: value for key, value in side.settings.items() if key not in own} for side in (a, b))
    return differences(of_a, of_b)


def _reward(name: str, answer: Answer) -> float | None:
    """Return what a reward function has given an answer; None without it."""
    return answer.rewards.get(name)


def _values(
    evaluation: PolicyEvaluation, prompts: Iterable[str], value_of: Callable[[Answer], float | None]
) -> list[list[float]]:
    """Return a value of the answers that have one by prompt, in the order of `prompts`."""
    return [
        [value for answer in evaluation.answers[prompt] if (value := value_of(answer)) is not None]
        for prompt in prompts
    ]


def _paired(
    a: PolicyEvaluation,
    b: PolicyEvaluation,
    key: str,
    value_of: Callable[[Answer], float | None],
    *,
    comparable: bool,
) -> list[FigureRow]:
    """Return the means of a value, and how often B's answer has more, over the prompts of which both sides have it.

    Only the means are returned if the values are not `comparable`, and nothing if no prompt has the value on both
    sides. If all values are 0 or 1, wins are left out: their rate would say the same as the difference, with a wider
    interval.
    """
    of_each = zip(*(_values(side, a.answers, value_of) for side in (a, b)), strict=True)
    judged = [(of_a, of_b) for of_a, of_b in of_each if of_a and of_b]
    if not judged:
        return []
    sides = [[pair[side] for pair in judged] for side in (0, 1)]
    means = [[fmean(values) for values in side] for side in sides]
    row = FigureRow(key, fmean(means[0]), fmean(means[1]))
    if not comparable:
        return [row]
    gain = stats.paired_difference(*means)
    row = row._replace(
        difference=fmean(means[1]) - fmean(means[0]), interval=None if gain is None else _scaled_interval(gain)
    ).judged()
    if all(value in (0, 1) for side in sides for values in side for value in values):
        return [row]
    won = [
        fmean(stats.outcomes([y - x for x, y in itertools.product(values_a, values_b)]))
        for values_a, values_b in zip(*sides, strict=True)
    ]
    rate = stats.wilson(sum(won), len(won))
    wins = FigureRow(
        f"win_rate_by_{key}", 1 - rate.value, rate.value, 2 * rate.value - 1, _scaled_interval(rate, 2, -1)
    )
    return [row, wins.judged()]


def _scaled_interval(estimate: stats.Estimate, factor: float = 1.0, offset: float = 0.0) -> tuple[float, float]:
    return factor * estimate.low + offset, factor * estimate.high + offset


def _overall(a: PolicyEvaluation, b: PolicyEvaluation) -> list[FigureRow]:
    """Return the figures of all answers together: B − A, with an interval only for the reward models' accuracy."""
    rows = []
    win_rates = "win_rate_vs_sft", "win_rate_vs_base"
    same_start = (SFT in a.settings) == (SFT in b.settings)  # gains and KL are over where each policy started
    for key in ("score_gain_sd", "true_reward_gain_sd", *win_rates, "kl_per_token", "perplexity"):
        comparable = same_start
        if key == "perplexity":
            comparable = a.settings.get("tokenizer") == b.settings.get("tokenizer")
        if key in ("score_gain_sd", *win_rates):
            same_model = a.own_reward_model is not None and a.own_reward_model == b.own_reward_model
            comparable = same_start and same_model
        rows += _figure(a, b, key, comparable=comparable)
    rows += [row for key in ("response_length", "eos_rate") for row in _figure(a, b, key)]
    return rows + [row._replace(interval=_accuracy_interval(a, b)) for row in _figure(a, b, "rm/accuracy")]


def _accuracy_interval(a: PolicyEvaluation, b: PolicyEvaluation) -> tuple[float, float] | None:
    """Return the interval of the difference of two reward models' accuracies, with pairs of one prompt as a cluster.

    There is none for one reward model against itself, and unless both runs list the same held-out pairs.
    """
    pairs_a, pairs_b = a.details.heldout_pairs, b.details.heldout_pairs
    same_pairs = [pair.pair for pair in pairs_a] == [pair.pair for pair in pairs_b]
    if not same_pairs or (a.own_reward_model is not None and a.own_reward_model == b.own_reward_model):
        return None
    right_a, right_b = (stats.outcomes([pair.margin for pair in pairs]) for pairs in (pairs_a, pairs_b))
    interval = stats.paired_difference(right_a, right_b, [pair.prompt for pair in pairs_a])
    return None if interval is None else _scaled_interval(interval)


def _no_verdict(a: PolicyEvaluation, b: PolicyEvaluation, name: str) -> list[FigureRow]:
    """Return the shares of answers that have no `name`; nothing if both are 0, which records leave out."""
    key = f"{name}{NO_VERDICT}"
    if not any(side.metrics.get(key) for side in (a, b)):
        return []
    a, b = (side._replace(metrics={key: 0.0, **side.metrics}) if name in side.metrics else side for side in (a, b))
    return _figure(a, b, key)


def _figure(a: PolicyEvaluation, b: PolicyEvaluation, key: str, *, comparable: bool = True) -> list[FigureRow]:
    x, y = a.metrics.get(key), b.metrics.get(key)
    if x is None and y is None:
        return []
    return [FigureRow(key, x, y, y - x if comparable and x is not None and y is not None else None)]
