"""Comparison of policies on the same held-out prompts: two recipes, 4-bit and 16-bit, two policies of a run.

The results in `evaluate/` of the run directories are compared. Prompts are paired, and several answers to a prompt are
one observation, their mean: those of one run, and those of runs that differ in their seed alone. The intervals cover
another choice of prompts; the differences of single seeds show what another seed does.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from rlhf import stats
from rlhf.errors import UserError
from rlhf.recipe.chain import differences
from rlhf.recipe.stages import EVALUATE, POLICIES, RM, SFT, PolicyLabel, PolicyName
from rlhf.run import reader
from rlhf.run.evidence import IS_BETTER, NO_DIFFERENCE, NO_VERDICT, OF_FUNCTION, Word, verdict, way_to_know
from rlhf.run.finished import finished_evaluation, read_manifest, read_summary, reward_model_digest
from rlhf.run.layout import MANIFEST, SAMPLES, SUMMARY
from rlhf.run.outcomes import Answer, SampleLine
from rlhf.terminal import wording

FIGURES = ("kl_per_token", "perplexity", "response_length", "eos_rate", "rm/accuracy")  # of all answers together
Answers = dict[str, list[Answer]]  # by prompt


class PolicyEvaluation(NamedTuple):
    """Evaluation of one policy, of a run or of several that differ in their seed; answers and models by seed.

    `reward_models` are hashes of the weights whose scores the answers have; None for a run without one.
    """

    name: str
    policy: PolicyLabel
    answers: dict[int, Answers]
    reward_models: dict[int, str | None]
    metrics: Mapping[str, float]
    settings: Mapping[str, Any]
    reward_functions: Mapping[str, str]  # as the recipe writes them, by name

    def values(self, name: str, seeds: Collection[int]) -> dict[str, float]:
        """Return the mean of what a judge or a reward function gave these seeds' answers, by prompt, where it did."""
        found: dict[str, list[float]] = {}
        for seed in seeds:
            for prompt, answers in self.answers[seed].items():
                if known := [answer.given[name] for answer in answers if name in answer.given]:
                    found.setdefault(prompt, []).extend(known)
        return {prompt: fmean(values) for prompt, values in found.items()}

    @property
    def prompts(self) -> set[str]:
        """Return the prompts that the policy has answered."""
        return {prompt for answers in self.answers.values() for prompt in answers}


class FigureRow(NamedTuple):
    """A figure of both sides, with the difference B − A and its interval if the two can be compared.

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
            if row.verdict in (NO_DIFFERENCE, "not known yet"):
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


def load(run_directory: Path, stage: PolicyLabel | None = None) -> PolicyEvaluation:
    """Return one policy's evaluation from the run directory `<out>/<recipe>/<version>`.

    `stage` None is the first of POLICIES that was evaluated. Raises UserError without a finished evaluation of that
    policy.
    """
    folder = run_directory / EVALUATE
    summary, manifest = finished_evaluation(run_directory), read_manifest(folder)
    lines = reader.read_lines(folder / SAMPLES, SampleLine)
    names = list(lines[0].answers) if lines else []
    stage = stage or next((policy for policy in POLICIES if policy in names), None)
    answers: Answers = {}
    for number, line in enumerate(lines, 1):
        if stage is None or stage not in line.answers:
            way_out = f"no answer of {stage or 'a trained policy'}; name one of {', '.join(names)} by its folder"
            raise UserError(f"{folder / SAMPLES}:{number}: {way_out}")
        answers.setdefault(line.prompt, []).append(line.answers[stage])
    if stage is None or not lines:
        raise UserError(f"{folder / SAMPLES}: no samples there")
    rm_summary = read_summary(run_directory / RM)
    policy = run_directory / stage
    of_policy = read_manifest(policy).settings if (policy / MANIFEST).is_file() else {}
    metrics = {key.removeprefix(f"{stage}/"): x for key, x in summary.metrics.items() if x is not None}
    return PolicyEvaluation(
        name=f"{run_directory}: {stage}",
        policy=stage,
        answers={manifest.seed: answers},
        reward_models={manifest.seed: reward_model_digest(rm_summary) if rm_summary else None},
        metrics={key: x for key, x in metrics.items() if "/" not in key or key.startswith("rm/")},
        settings=manifest.settings | ({stage: of_policy[stage]} if stage in of_policy else {}),
        reward_functions=manifest.reward_functions,
    )


def pooled(evaluations: Sequence[PolicyEvaluation]) -> list[PolicyEvaluation]:
    """Return the evaluations with those of one recipe and policy, which differ in their seed alone, as one.

    Where that would leave one, each stays by itself: seeds are compared.
    """
    sides: list[list[PolicyEvaluation]] = []
    for one in evaluations:
        same = (side for side in sides if one.policy == side[0].policy and _differ_in_seed_alone(one, side))
        if side := next(same, None):
            side.append(one)
        else:
            sides.append([one])
    return [*evaluations] if len(sides) == 1 else [_as_one(side) for side in sides]


def _differ_in_seed_alone(one: PolicyEvaluation, side: Sequence[PolicyEvaluation]) -> bool:
    seeds = {seed for other in side for seed in other.answers}
    return not {*one.answers} & seeds and {*differences(one.settings, side[0].settings)} <= {"seed"}


def _as_one(side: Sequence[PolicyEvaluation]) -> PolicyEvaluation:
    """Return evaluations of several seeds as one; their metrics are the means."""
    first, seeds = side[0], [seed for one in side for seed in one.answers]
    return first._replace(
        name=first.name if len(side) == 1 else f"{first.name}, seeds {', '.join(map(str, seeds))}",
        answers={seed: answers for one in side for seed, answers in one.answers.items()},
        reward_models={seed: model for one in side for seed, model in one.reward_models.items()},
        metrics={
            key: fmean(one.metrics[key] for one in side)
            for key in first.metrics
            if all(key in one.metrics for one in side)
        },
    )


# ---- comparing ----


def compare_runs(a: PolicyEvaluation, b: PolicyEvaluation) -> PolicyComparison:
    """Return all figures of both, on the prompts that both answered. Raises UserError if they share none."""
    shared = a.prompts & b.prompts
    if not shared:
        raise UserError(
            f"{a.name} and {b.name} share none of {len(a.prompts)} and {len(b.prompts)} held-out prompts; compare runs "
            "with the same data, seed and template"
        )
    rows = _paired(a, b, "true_reward", "true_reward", comparable=True)
    for name, function in a.reward_functions.items():
        rows += _paired(a, b, f"{OF_FUNCTION}{name}", name, comparable=function == b.reward_functions.get(name))
    one_model = a.reward_models == b.reward_models and None not in a.reward_models.values()
    rows += _paired(a, b, "score", "score", comparable=one_model)
    figures = [*FIGURES, *(key for key in {**a.metrics, **b.metrics} if key.endswith(NO_VERDICT))]
    rows += [row for key in figures for row in _figure(a, b, key)]
    own = {a.policy, b.policy} - (a.settings.keys() & b.settings.keys())  # a section that the other side does not have
    of_a, of_b = ({key: value for key, value in side.settings.items() if key not in own} for side in (a, b))
    return PolicyComparison(a.name, b.name, len(shared), len(a.prompts ^ b.prompts), differences(of_a, of_b), rows)


def _paired(a: PolicyEvaluation, b: PolicyEvaluation, key: str, name: str, *, comparable: bool) -> list[FigureRow]:
    """Return the means of what `name` gave over the prompts for which both sides have it; nothing if there is none.

    There is a difference only if the values are `comparable`.
    """
    x, y = _shared(a, b, name, [*a.answers], [*b.answers])
    if not x or not comparable:
        return [FigureRow(key, fmean(x), fmean(y))] if x else []
    estimate = stats.paired_difference(x, y)
    interval = None if estimate is None else (estimate.low, estimate.high)
    seeds = [seed for seed in a.answers if seed in b.answers] if len(a.answers) > 1 else []
    each = [(fmean(y), fmean(x)) for seed in seeds for x, y in [_shared(a, b, name, [seed], [seed])] if x]
    by_seed = tuple(of_b - of_a for of_b, of_a in each)
    return [FigureRow(key, fmean(x), fmean(y), fmean(y) - fmean(x), interval, verdict(interval), by_seed)]


def _shared(
    a: PolicyEvaluation, b: PolicyEvaluation, name: str, of_a: Collection[int], of_b: Collection[int]
) -> tuple[list[float], list[float]]:
    """Return the values of both sides' seeds on the prompts of which both have one."""
    x, y = a.values(name, of_a), b.values(name, of_b)
    return [x[prompt] for prompt in x if prompt in y], [y[prompt] for prompt in x if prompt in y]


def _figure(a: PolicyEvaluation, b: PolicyEvaluation, key: str) -> list[FigureRow]:
    """Return a figure of all answers together; its difference, unless the two sides measure it in different units."""
    zero = key.endswith(NO_VERDICT)  # records leave a share of 0 out
    x, y = (side.metrics.get(key, 0.0 if zero else None) for side in (a, b))
    if x is None and y is None:
        return []
    same = {
        "perplexity": a.settings.get("tokenizer") == b.settings.get("tokenizer"),
        "kl_per_token": (SFT in a.settings) == (SFT in b.settings),  # it is to where each policy started
    }
    comparable = same.get(key, True) and x is not None and y is not None
    return [FigureRow(key, x, y, y - x if comparable and x is not None and y is not None else None)]
