"""Sections about the evaluation: the policies, ratings of their answers, the reward model, samples."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from rlhf.evaluation.best_of_n import best_by_score, sizes
from rlhf.recipe.stages import EVALUATE, OF_REWARD_MODELS, POLICIES, RM, SECOND_RM, STARTS
from rlhf.report.parts import (
    LINE_COLOURS,
    STAGE_TITLES,
    Chart,
    Charts,
    Section,
    Table,
    Trace,
    Turn,
    dialogue,
    line,
    middles,
    table,
)
from rlhf.report.runs import RunRecords, check_evaluation, details, suffix, trusted_summaries
from rlhf.run import reader
from rlhf.run.evidence import HELDOUT_PROMPTS, of_prompts
from rlhf.run.layout import SAMPLES
from rlhf.run.outcomes import Answer, RewardModelFigures, SampleLine
from rlhf.stats import kl_of_best_of
from rlhf.terminal.wording import estimate, number, without_ends
from rlhf.terminal.wording import metric as metric_in_words

JUDGES = ("score", "true_reward", "second_score")


class Policies(NamedTuple):
    """The metrics of a run's policies side by side, some with `intervals`, and the distributions of their scores."""

    metrics: Table | None
    intervals: bool
    scores: Chart | None
    prompts: str  # that the figures are of, in words; "" where an older evaluation does not say


def sections_of_policies(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return the metrics of every policy on the same held-out prompts."""
    blocks = []
    for run in runs:
        check_evaluation(run)
        metrics = trusted_summaries(run)[EVALUATE].metrics if EVALUATE in run.summaries else {}
        names = [name.split("/", 1) for name in metrics if "/" in name and not name.startswith(OF_REWARD_MODELS)]
        if not names:
            continue
        policies = list(dict.fromkeys(policy for policy, _ in names))
        keys = list(dict.fromkeys(metric for _, metric in names))
        shown = [key for key in without_ends(keys) if key != HELDOUT_PROMPTS]
        prompts = next((int(n) for policy in policies if (n := metrics.get(f"{policy}/{HELDOUT_PROMPTS}"))), None)
        rows = [
            (run.name, metric_in_words(key), *(estimate(metrics, f"{policy}/{key}") for policy in policies))
            for key in shown
        ]
        columns = ("run", "metric", *policies)
        side_by_side = table(columns, rows, len(runs) > 1, numbers=tuple(range(2, len(columns))))
        bounded = any(key.endswith("_low") for key in keys)
        blocks.append(Policies(side_by_side, bounded, _scores(run, runs, charts), of_prompts(prompts).strip()))
    return [Section("The policies on held-out prompts", "policies.html", blocks)] if blocks else []


def _scores(run: RunRecords, runs: Sequence[RunRecords], charts: Charts) -> Chart | None:
    """Draw the distribution of the reward model's scores of each policy's answers."""
    scores = details(run).scores
    if not scores:
        return None
    centres = middles(scores.edges)
    lines = [
        line(policy, centres, counts, number, 2)
        | {"mode": "lines", "line": {"shape": "hvh", "color": LINE_COLOURS[number % len(LINE_COLOURS)]}}
        for number, (policy, counts) in enumerate(scores.counts.items())
    ]
    axes = {"xaxis": {"title": {"text": "score"}}, "yaxis": {"title": {"text": "answers"}}}
    return charts.add(f"scores of every policy's answers{suffix(run, runs)}", lines, tall=True, **axes)


def sections_of_best_of_n(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return best-of-n of the start beside the policies, where the evaluation took several samples of each prompt."""
    rows: list[tuple[object, ...]] = []
    for run in runs:
        check_evaluation(run)
        metrics = run.summaries[EVALUATE].metrics if EVALUATE in run.summaries else {}
        start = next((name for name in STARTS if f"{name}/score" in metrics), None)
        judgements = {} if start is None else _judgements(run, start)
        samples = min(map(len, judgements.get("score", [])), default=0)
        for n in [1, *sizes(samples)] if samples > 1 else []:
            best = {judge: fmean(values) for judge, values in best_by_score(judgements, n).items()}
            name = f"{start}, best of {n}" if n > 1 else start
            rows.append(
                (run.name, name, number(kl_of_best_of(n)), *(number(best[j]) if j in best else "" for j in JUDGES))
            )
        for policy in POLICIES if samples > 1 else ():
            if f"{policy}/kl_per_response" in metrics:
                keys = ("kl_per_response", *JUDGES)
                rows.append((run.name, policy, *(estimate(metrics, f"{policy}/{key}") for key in keys)))
    columns = ("run", "", "KL, nats per response", *map(metric_in_words, JUDGES))
    best_of_n = table(columns, rows, len(runs) > 1, numbers=(2, 3, 4, 5))
    return [Section("The best of n answers of the start, by score", "table.html", best_of_n)] if best_of_n else []


def _judgements(run: RunRecords, policy: str) -> dict[str, list[list[float]]]:
    """Return what each judge of all of a policy's answers in samples.jsonl gave them, prompt by prompt."""
    prompts: list[list[Answer]] = []
    for row in reader.read_lines(run.run_directory / EVALUATE / SAMPLES, SampleLine):
        if row.sample == 0 or not prompts:
            prompts.append([])
        prompts[-1].append(row.answers.get(policy, Answer(response="")))
    given = {judge: [[getattr(answer, judge) for answer in answers] for answers in prompts] for judge in JUDGES}
    return {judge: numbers for judge, numbers in given.items() if not any(None in row for row in numbers)}


class ContradictedPair(NamedTuple):
    """A held-out pair on which the reward model contradicts the label."""

    turns: list[Turn]
    margin: str


class RewardModel(NamedTuple):
    """The metrics and charts of a reward model, and the pairs on which it contradicts the labels most."""

    metrics: Table | None
    charts: list[Chart]
    contradicted: list[ContradictedPair]


def _words(metric: str) -> str:
    """Return a reward model's metric in words; the second model's begin with its name."""
    stage, _, name = metric.partition("/")
    return ("" if stage == RM else f"{STAGE_TITLES[SECOND_RM]}: ") + metric_in_words(name)


def sections_of_reward_model(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return metrics, calibration, margins and scores of the reward model, and the pairs that it contradicts."""
    model_charts: list[Chart] = []
    rows: list[tuple[object, ...]] = []
    contradicted = []
    for run in runs:
        check_evaluation(run)
        record = details(run)
        if record.reward_model is None:
            continue
        metrics = run.summaries[EVALUATE].metrics if EVALUATE in run.summaries else {}
        keys = without_ends(name for name in metrics if name.startswith(OF_REWARD_MODELS))
        rows += [(run.name, _words(key), estimate(metrics, key)) for key in keys]
        model_charts += _reward_model_charts(record.reward_model, suffix(run, runs), charts)
        for pair in record.contradicted:
            sides = (Turn("chosen", pair.chosen), Turn("rejected", pair.rejected))
            turns = [*_run_named(run, runs), *dialogue(pair.prompt), *sides]
            contradicted.append(ContradictedPair(turns, f"{pair.margin:.2f}"))
    if not model_charts:
        return []
    side_by_side = table(("run", "metric", "value (brackets: 95 %)"), rows, len(runs) > 1, numbers=(2,))
    shown = RewardModel(side_by_side, model_charts, contradicted)
    return [Section("The reward model on held-out pairs", "reward_model.html", shown)]


def _reward_model_charts(figures: RewardModelFigures, ending: str, charts: Charts) -> list[Chart]:
    """Draw calibration, margins and scores. Titles have the `ending`."""
    bins = figures.calibration
    style: Trace = {"mode": "lines", "showlegend": False}
    ideal = {"x": [0.5, 1], "y": [0.5, 1], "line": {"dash": "dot", "color": LINE_COLOURS[4]}} | style
    model = style | {
        "x": [row.confidence for row in bins],
        "y": [row.accuracy for row in bins],
        "text": [f"{row.pairs} pairs" for row in bins],
        "mode": "lines+markers",
        "line": {"color": LINE_COLOURS[0]},
    }
    axes: Trace = {"xaxis": {"title": {"text": "confidence"}}, "yaxis": {"title": {"text": "accuracy, share of pairs"}}}
    model_charts = [charts.add(f"calibration (dotted: perfect){ending}", [ideal, model], **axes)]
    histograms = (
        (figures.margins, "margin, chosen less rejected", "score", "pairs"),
        (figures.sigmoid_scores, "score after a sigmoid", "score after a sigmoid", "responses"),
    )
    for histogram, title, unit, counted in histograms:
        counts_axes: Trace = {"xaxis": {"title": {"text": unit}}, "yaxis": {"title": {"text": counted}}}
        bars = {"type": "bar", "x": middles(histogram.edges), "y": histogram.counts, "showlegend": False}
        model_charts.append(charts.add(f"{title}{ending}", [bars], bargap=0, **counts_axes))
    return model_charts


def _run_named(run: RunRecords, runs: Sequence[RunRecords]) -> list[Turn]:
    """Return what names the run above a dialogue, if there are several."""
    return [Turn("run", run.name, "said prompt")] if len(runs) > 1 else []


def answer_turns(row: SampleLine) -> list[Turn]:
    """Return each policy's answer in a line of samples, with its score and true reward if they are known."""
    turns = []
    for policy, answer in row.answers.items():
        known = (("score", answer.score), ("true reward", answer.true_reward), ("second score", answer.second_score))
        values = (*known, *answer.rewards.items())
        scores = "".join(f", {name} {value:.3f}" for name, value in values if value is not None)
        turns.append(Turn(policy + scores, answer.response))
    return turns
