"""Comparison of policies on the same held-out prompts: two recipes, 4-bit and 16-bit, two policies of a run.

The results in `evaluate/` of the run directories are compared. Prompts are paired, and several answers to a prompt are
one observation, their mean: those of one run, and those of runs that differ in their seed alone. The intervals cover
another choice of prompts; the differences of single seeds show what another seed does.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rlhf import stats
from rlhf.errors import UserError
from rlhf.recipe.chain import differences
from rlhf.recipe.stages import EVALUATE, POLICIES, PolicyLabel, PolicyName
from rlhf.run import reader
from rlhf.run.evidence import IS_BETTER, NO_VERDICT, NOT_KNOWN, OF_FUNCTION, Word, verdict, way_to_know
from rlhf.run.finished import finished_evaluation, read_manifest, reward_model_digest
from rlhf.run.layout import MANIFEST, SAMPLES, SUMMARY
from rlhf.run.records import Answer, SampleLine
from rlhf.terminal import wording

# Figures of all answers together. They have no interval; perplexity is by tokens of the side's own tokenizer, and KL to
# where its policy started.
FIGURES = ("kl_per_token", "perplexity", "response_length", "eos_rate")
Answers = dict[str, list[Answer]]  # by prompt


class Evaluated(NamedTuple):
    """Evaluation of one policy of a run. `reward_model`: a hash of the weights that scored the answers, or None."""

    run: Path
    policy: PolicyLabel
    seed: int
    answers: Answers
    reward_model: str | None
    metrics: Mapping[str, float]
    settings: Mapping[str, Any]
    reward_functions: Mapping[str, str]  # as the recipe writes them, by name


class Side:
    """One side of a comparison: a policy of one run, or of several that differ in their seed alone."""

    def __init__(self, *runs: Evaluated):
        self.runs, self.policy, self.settings = runs, runs[0].policy, runs[0].settings
        seeds = ", ".join(str(run.seed) for run in runs)
        self.name = f"{runs[0].run}: {self.policy}" + (f", seeds {seeds}" if len(runs) > 1 else "")
        self.answers: Answers = {}
        for run in runs:
            for prompt, answers in run.answers.items():
                self.answers.setdefault(prompt, []).extend(answers)

    def values(self, name: str) -> dict[str, float]:
        """Return the mean of what a judge or a reward function gave the answers, by prompt, where it did."""
        given = {p: [x.given[name] for x in answers if name in x.given] for p, answers in self.answers.items()}
        return {prompt: fmean(values) for prompt, values in given.items() if values}

    def metric(self, key: str) -> float | None:
        """Return the mean of a metric over runs; None where one lacks it. Records leave a share of 0 out."""
        found = [run.metrics.get(key, 0.0 if key.endswith(NO_VERDICT) else None) for run in self.runs]
        known = [value for value in found if value is not None]
        return fmean(known) if len(known) == len(found) else None


class FigureRow(NamedTuple):
    """A figure of both sides; where prompts are paired and can be compared, the difference B − A with its interval.

    `verdict` is on figures of which more is better, and None for others. `by_seed` are the differences of single seeds.
    """

    name: str
    a: float | None
    b: float | None
    difference: float | None = None
    interval: tuple[float, float] | None = None
    verdict: Word | None = None
    by_seed: tuple[float, ...] = ()


class PolicyComparison(NamedTuple):
    """Figures of two policies on the prompts that both answered, and the settings that differ, by key."""

    a: str
    b: str
    prompts: int
    other_prompts: int  # that only one of them answered
    settings: dict[str, tuple[Any, Any]]
    rows: list[FigureRow]

    def sentences(self) -> list[tuple[str, str]]:
        """Return what is known in words, for each figure with a verdict, and its kind: good, bad or ""."""
        said = []
        for row in (row for row in self.rows if row.verdict and row.difference is not None):
            name, difference = wording.metric(row.name), row.difference or 0.0
            ends = " (95 %: {:+.3g} to {:+.3g})".format(*row.interval) if row.interval else ""
            text = f"{difference:+.3g}{ends} on {self.prompts:,} shared prompts"
            if row.verdict == NOT_KNOWN:
                way = way_to_know(difference, row.interval, self.prompts)
                said.append((f"It is not known which is better in {name}: B − A is {text}; {way}.", ""))
            else:
                said.append(
                    (f"B is {row.verdict} than A in {name}: {text}.", "good" if row.verdict == IS_BETTER else "bad")
                )
            if row.by_seed:
                said.append((f"By seed, B − A is {', '.join(f'{one:+.3g}' for one in row.by_seed)}.", ""))
        return said


# ---- reading ----


def policies_to_evaluate(run_directory: Path, stage: PolicyLabel | None) -> list[PolicyName] | None:
    """Return the policies that an evaluation has to see before `stage` of a run can be compared; None if it has.

    They are those that an earlier evaluation has seen, and `stage`.
    """
    folder = run_directory / EVALUATE
    lines = reader.read_lines(folder / SAMPLES, SampleLine)[:1] if (folder / SUMMARY).is_file() else []
    answered = [name for line in lines for name in line.answers]
    if stage in answered or (stage is None and {*answered} & {*POLICIES}):
        return None
    wanted = [name for name in POLICIES if name in answered or name == stage]
    return wanted or [name for name in POLICIES if (run_directory / name / SUMMARY).is_file()][:1]


def load(run_directory: Path, stage: PolicyLabel | None = None) -> Evaluated:
    """Return one policy's evaluation from the run directory `<out>/<recipe>/<version>`.

    `stage` None is the first of POLICIES that was evaluated. Raises UserError without a finished evaluation of that
    policy.
    """
    folder = run_directory / EVALUATE
    summary, manifest = finished_evaluation(run_directory), read_manifest(folder)
    lines = reader.read_lines(folder / SAMPLES, SampleLine)
    names = list(lines[0].answers) if lines else []
    stage = stage or next((policy for policy in POLICIES if policy in names), None)
    if stage is None or any(stage not in line.answers for line in lines) or not lines:
        way_out = f"name one of {', '.join(names)} by its folder"
        raise UserError(f"{folder / SAMPLES}: no answers of {stage or 'a trained policy'}; {way_out}")
    answers: Answers = {}
    for line in lines:
        answers.setdefault(line.prompt, []).append(line.answers[stage])
    policy = run_directory / stage
    of_policy = read_manifest(policy).settings if (policy / MANIFEST).is_file() else {}
    metrics = {key.removeprefix(f"{stage}/"): x for key, x in summary.metrics.items() if x is not None}
    return Evaluated(
        run=run_directory,
        policy=stage,
        seed=manifest.seed,
        answers=answers,
        reward_model=reward_model_digest(run_directory),
        metrics={key: x for key, x in metrics.items() if "/" not in key},
        settings=manifest.settings | ({stage: of_policy[stage]} if stage in of_policy else {}),
        reward_functions=manifest.reward_functions,
    )


def sides_of(evaluations: Sequence[Evaluated]) -> list[Side]:
    """Return the sides of a comparison: runs of one recipe and policy, which differ in their seed alone, are one.

    Where that would leave one side, each run is one by itself: seeds are compared.
    """
    sides: list[list[Evaluated]] = []
    for one in evaluations:
        same = (side for side in sides if one.policy == side[0].policy and _differ_in_seed_alone(one, side))
        if side := next(same, None):
            side.append(one)
        else:
            sides.append([one])
    return [Side(one) for one in evaluations] if len(sides) == 1 else [Side(*side) for side in sides]


def _differ_in_seed_alone(one: Evaluated, side: Sequence[Evaluated]) -> bool:
    seeds = {other.seed for other in side}
    return one.seed not in seeds and {*differences(one.settings, side[0].settings)} <= {"seed"}


# ---- comparing ----


def compare_runs(a: Side, b: Side) -> PolicyComparison:
    """Return all figures of both, on the prompts that both answered. Raises UserError if they share none."""
    shared = a.answers.keys() & b.answers.keys()
    if not shared:
        raise UserError(
            f"{a.name} and {b.name} share none of {len(a.answers)} and {len(b.answers)} held-out prompts; compare runs "
            "with the same data, seed and template"
        )
    rows = _paired(a, b, "true_reward", "true_reward", comparable=True)
    for name in a.runs[0].reward_functions:
        functions = {run.reward_functions.get(name) for run in (*a.runs, *b.runs)}
        rows += _paired(a, b, f"{OF_FUNCTION}{name}", name, comparable=len(functions) == 1)
    models_a, models_b = ({run.seed: run.reward_model for run in side.runs} for side in (a, b))
    rows += _paired(a, b, "score", "score", comparable=models_a == models_b and None not in models_a.values())
    no_verdict = (key for run in (*a.runs, *b.runs) for key in run.metrics if key.endswith(NO_VERDICT))
    figures = [FigureRow(key, a.metric(key), b.metric(key)) for key in dict.fromkeys((*FIGURES, *no_verdict))]
    rows += [row for row in figures if (row.a, row.b) != (None, None)]
    own = {a.policy, b.policy} - (a.settings.keys() & b.settings.keys())  # a section that the other side does not have
    of_a, of_b = ({key: value for key, value in side.settings.items() if key not in own} for side in (a, b))
    other_prompts = len(a.answers.keys() ^ b.answers.keys())
    return PolicyComparison(a.name, b.name, len(shared), other_prompts, differences(of_a, of_b), rows)


def _paired(a: Side, b: Side, key: str, name: str, *, comparable: bool) -> list[FigureRow]:
    """Return the means of what `name` gave over the prompts for which both sides have it; nothing if there is none.

    There is a difference only if the values are `comparable`.
    """
    x, y = _shared(a, b, name)
    if not x or not comparable:
        return [FigureRow(key, fmean(x), fmean(y))] if x else []
    estimate = stats.paired_difference(x, y)
    interval = None if estimate is None else (estimate.low, estimate.high)
    seeds = [(one, other) for one in a.runs for other in b.runs if one.seed == other.seed] if len(a.runs) > 1 else []
    each = [_shared(Side(one), Side(other), name) for one, other in seeds]
    by_seed = tuple(fmean(of_b) - fmean(of_a) for of_a, of_b in each if of_a)
    return [FigureRow(key, fmean(x), fmean(y), fmean(y) - fmean(x), interval, verdict(interval), by_seed)]


def _shared(a: Side, b: Side, name: str) -> tuple[list[float], list[float]]:
    """Return the values of both sides on the prompts of which both have one."""
    x, y = a.values(name), b.values(name)
    return [x[prompt] for prompt in x if prompt in y], [y[prompt] for prompt in x if prompt in y]
