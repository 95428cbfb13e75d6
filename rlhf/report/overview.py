"""The top of a report: the outcome in a sentence, devices and time, and the chain of stages as a picture."""

import datetime
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from rlhf.recipe import StageName, published
from rlhf.recipe.published import Verdict
from rlhf.recipe.released import difference
from rlhf.recipe.stages import EVALUATE, GROUPS, MERGE, POLICIES, STAGE_TABLE, STAGES
from rlhf.report.parts import STAGE_TITLES, Charts, Section
from rlhf.report.runs import RunRecords, trusted_summaries
from rlhf.run.evidence import IS_WORSE, NOT_KNOWN, START_IN_WORDS, Gain, gains_over_start, origin_of
from rlhf.run.finished import evaluate_again, not_evaluated, totals
from rlhf.run.records import Manifest, Summary
from rlhf.terminal import counted, wording

BOX_WIDTH, BOX_HEIGHT, COLUMN, ROW = 168, 52, 192, 88  # units of the picture; a phone shows 360

Summaries = Mapping[str, Summary]
Manifests = Mapping[str, Manifest]


def verdicts_of(summaries: Summaries, price: float | None = None) -> list[tuple[str, str, Verdict]]:
    """Return (stage, figure, verdict) for all figures of a run's finished stages and of all stages together."""
    of_stages = [
        (stage, target.figure.title, target.outcome)
        for stage, summary in summaries.items()
        for target in summary.targets
    ]
    return of_stages + [("all", figure.title, verdict) for figure, _, verdict in totals(summaries, price)]


def outcome(
    manifests: Manifests,
    summaries: Summaries,
    price: float | None = None,
    unreadable: Collection[str] = (),
    gained: Sequence[Gain] = (),
) -> tuple[str, str]:
    """Return the outcome in a sentence, and its kind: good, bad or neither ("").

    A policy that is worse than its start, SFT or the base, is bad whatever the targets say. Without targets the outcome
    is good if every measured policy is better. Both need an interval, by `rlhf.run.evidence`. `unreadable` are the
    stages whose summary.json cannot be read, `gained` the gains of the policies.
    """
    judged, kind = _judgement(verdicts_of(summaries, price))
    worse, unknown = ([gain for gain in gained if gain.verdict == word] for word in (IS_WORSE, NOT_KNOWN))
    if worse:
        kind = "bad"
    elif not judged and gained and all(gain.kind == "good" for gain in gained):
        kind = "good"
    sentences = [judged] if judged else []
    without_summary = [stage for stage in manifests if stage not in summaries]
    damaged = [STAGE_TITLES[stage] for stage in without_summary if stage in unreadable]
    unfinished = [STAGE_TITLES[stage] for stage in without_summary if stage not in unreadable]
    if without_summary and kind == "good":
        kind = ""
    if damaged:
        sentences.append(f"summary.json cannot be read: {', '.join(damaged)}.")
    if unfinished:
        sentences.append(f"Not finished: {', '.join(unfinished)}.")
    if not sentences:
        finished = ", ".join(STAGE_TITLES[stage] for stage in summaries)
        sentences.append(f"Finished: {finished}." if finished else "Nothing has finished yet.")
    if unknown:
        sentences.insert(0, f"Not known yet: whether {_compared(unknown)} better than {_starts(unknown)}.")
    if worse:
        sentences.insert(0, f"{_compared(worse)} worse than {_starts(worse)}.")
    return " ".join(sentences), kind


def _not_evaluated(run: RunRecords) -> str:
    """Return a sentence that follows the outcome where policies have finished after the evaluation; else ""."""
    missing = not_evaluated(run.run_directory) if EVALUATE in run.manifests else []
    names = ", ".join(STAGE_TITLES[stage] for stage in missing)
    return f" Not in the evaluation: {names}; evaluate again, {evaluate_again(run.run_directory)}." if missing else ""


def _compared(gained: Sequence[Gain]) -> str:
    """Return the policies of gains with their verb: `PPO is`, `PPO and DPO are`."""
    return f"{' and '.join(STAGE_TITLES[gain.stage] for gain in gained)} {'is' if len(gained) == 1 else 'are'}"


def _starts(gained: Sequence[Gain]) -> str:
    """Return where the policies of gains started."""
    return " or ".join(dict.fromkeys(START_IN_WORDS[gain.origin] for gain in gained))


def _judgement(verdicts: Sequence[tuple[str, str, Verdict]]) -> tuple[str, str]:
    """Return how many figures were reached and which were not, as a sentence, and its kind; "" for both without any."""
    judged = [(stage, title, v) for stage, title, v in verdicts if v.word in (*published.GOOD, published.MISSED)]
    if not judged:
        return "", ""
    good = sum(verdict.word in published.GOOD for *_, verdict in judged)
    bad = [f"{STAGE_TITLES.get(stage, stage)}, {title}" for stage, title, v in judged if v.word == published.MISSED]
    missed = f"; missed: {'; '.join(bad[:3])}" if bad else ""
    remaining = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    unmeasured = published.not_judged(verdict for *_, verdict in verdicts if verdict.detail == published.NOT_MEASURED)
    met = f"{counted(good, 'target')} met" if unmeasured and not bad else f"{good} of {len(judged)} targets met"
    return f"{met}{unmeasured}{missed}{remaining}.", "bad" if bad else "good"


def gains(summaries: Summaries) -> str:
    """Return a sentence for each trained policy: its gain over its start."""
    return " ".join(sentence for stage in POLICIES if (sentence := _gain(stage, summaries.get(stage))))


def _gain(stage: StageName, summary: Summary | None) -> str:
    """Return a policy's gains over its start and its KL, as a sentence; "" if they were not measured.

    The rewards of functions come first, such as the share of right answers: what the policy is to raise.
    """
    metrics = summary.metrics if summary else {}
    may_be_sum = stage in GROUPS or any(_reward_gain(key, metrics) for key in metrics)
    score = "score" if may_be_sum else "score of the reward model"
    names = (
        ("true_reward_gain_sd", "true reward"),
        ("score_gain_sd", score),
        ("second_score_gain_sd", "score of the second reward model"),
    )
    in_sd = [f"{name} {value:+.2f}" for key, name in names if (value := metrics.get(key)) is not None]
    texts = [text for key in metrics if (text := _reward_gain(key, metrics))]
    texts += [f"{', '.join(in_sd)} standard deviations"] if in_sd else []
    if not texts:
        return ""
    kl = metrics.get("kl_per_token")
    kl_text = f", at a KL {_of_kl(kl)} nats per token" if kl is not None else ""
    return f"{STAGE_TITLES[stage]} against {START_IN_WORDS[origin_of(metrics)]}: {'; '.join(texts)}{kl_text}."


def _of_kl(kl: float) -> str:
    """Return a KL in a sentence, without the powers of ten of very small numbers."""
    return "below 0.0001" if 0 <= kl < 0.0001 else f"of {wording.number(kl)}"


def _reward_gain(key: str, metrics: Mapping[str, float | None]) -> str:
    """Return the mean of a reward function and its gain, from the metric `reward_NAME_gain`; "" for other metrics."""
    name = key.removeprefix("reward_").removesuffix("_gain")
    mean, gain = metrics.get(f"reward_{name}"), metrics.get(f"reward_{name}_gain")
    if key != f"reward_{name}_gain" or mean is None or gain is None:
        return ""
    return f"{name.replace('_', ' ')} {wording.number(mean)} ({gain:+.3g})"


def facts(manifests: Manifests, summaries: Summaries, price: float | None = None) -> list[str]:
    """Return the date, devices, time and cost of a run. `price` is in dollars per hour of one card."""
    started = sorted({manifest.started[:10] for manifest in manifests.values() if manifest.started})
    texts = [" to ".join(dict.fromkeys((started[0], started[-1])))] if started else []
    texts += dict.fromkeys(manifest.device.text() for manifest in manifests.values())
    seconds = sum(summary.wall_seconds for summary in summaries.values())
    if seconds:
        texts.append(f"{_duration(seconds)} in {counted(len(summaries), 'finished stage')}")
        if price is not None:
            texts.append(f"{seconds / 3600 * price:.2f} USD for each card")
    edited = {difference(manifest.recipe_sha256, manifest.released_sha256) for manifest in manifests.values()} - {""}
    if edited or any(manifest.overrides for manifest in manifests.values()):
        texts.append("modified recipe" + "".join(f", {text}" for text in sorted(edited)))
    return texts


class Box(NamedTuple):
    """A stage in the picture: its corner, its kind (good, bad, plain or open) and its text."""

    x: int
    y: int
    kind: str
    name: str
    line: str


class Picture(NamedTuple):
    """The stages that were begun as boxes, and arrows from the inputs of each, as paths of SVG."""

    label: str
    width: int
    height: int
    boxes: list[Box]
    arrows: list[str]
    box_width: int = BOX_WIDTH
    box_height: int = BOX_HEIGHT


class Change(NamedTuple):
    """The main metric of a policy before and after training, large, and its gain in words; `kind` colours it."""

    metric: str
    start: str
    end: str
    gain: str
    kind: str


class Overview(NamedTuple):
    """The top of the page for one run; `name` is "" if there is only one."""

    name: str
    outcome: str
    kind: str
    changes: list[Change]
    gains: str
    facts: str


def sections_of_overview(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return the outcome of each run in a sentence, its gains, and its devices and time."""
    overviews = []
    for run in runs:
        gained = gains_over_start(trusted_summaries(run))
        sentence, kind = outcome(run.manifests, run.summaries, run.price, run.unreadable, gained)
        sentence += _not_evaluated(run)
        facts_text = " · ".join(facts(run.manifests, run.summaries, run.price))
        name = run.name if len(runs) > 1 else ""
        changes = [_change(gain) for gain in gained]
        overviews.append(Overview(name, sentence, kind, changes, gains(run.summaries), facts_text))
    return [Section("", "overview.html", overviews)]


class PictureOfRun(NamedTuple):
    """The stages of a run as a picture; `name` is "" if there is only one run."""

    name: str
    picture: Picture


def sections_of_stages(runs: Sequence[RunRecords], charts: Charts) -> list[Section]:
    """Return the stages of each run as a picture, with their times."""
    pictures = [
        PictureOfRun(run.name if len(runs) > 1 else "", picture(run.manifests, run.summaries, run.unreadable))
        for run in runs
    ]
    return [Section("Stages", "stages.html", pictures)]


def _change(gain: Gain) -> Change:
    """Return a gain as the page shows it."""
    metric = f"{gain.name}, {START_IN_WORDS[gain.origin]} → {STAGE_TITLES[gain.stage]}"
    return Change(metric, f"{gain.start:.2f}", f"{gain.end:.2f}", gain.in_words(), gain.kind)


def _duration(seconds: float) -> str:
    """Return a time as days and hours; a record may hold more than Python can count."""
    return str(datetime.timedelta(seconds=min(round(seconds), 10**13)))


def picture(manifests: Manifests, summaries: Summaries, unreadable: Collection[str] = ()) -> Picture:
    """Return the picture of the stages that were begun, coloured by verdict.

    `unreadable` are the stages whose summary.json cannot be read.
    """
    # In words that fit into a box.
    states = {stage: "summary unreadable" if stage in unreadable else "not finished" for stage in manifests}
    begun = [stage for stage in STAGES if stage in manifests]
    place = {stage: STAGE_TABLE[stage].place for stage in begun}
    rows = {row: index for index, row in enumerate(sorted({row for _, row in place.values()}))}
    alone = {row for row in rows if [r for _, r in place.values()].count(row) == 1}  # their stages stand in one line
    corner = {
        stage: (2 + (0 if row in alone else column) * COLUMN, 2 + rows[row] * ROW)
        for stage, (column, row) in place.items()
    }
    return Picture(
        label=", ".join(STAGE_TITLES[s] + ("" if s in summaries else f" ({states[s]})") for s in begun),
        width=COLUMN + BOX_WIDTH + 4,
        height=(len(rows) - 1) * ROW + BOX_HEIGHT + 4,
        boxes=[_box(stage, *corner[stage], summaries.get(stage), states[stage]) for stage in begun],
        arrows=[_arrow(corner[a], corner[b]) for b in begun for a in _arrows_to(b, manifests[b]) if a in corner],
    )


def _arrows_to(stage: StageName, manifest: Manifest) -> Iterable[StageName]:
    """Return the stages from which arrows lead to a stage: those that it builds on, not those that these build on."""
    merge = manifest.settings.merge if stage == MERGE else None
    if stage == EVALUATE or merge:
        return [name for name in ((merge.stage,) if merge else POLICIES) if name in manifest.parents]
    direct = STAGE_TABLE[stage].parents
    # A recipe may lack a parent, and a stage may do without it: then its own parents stand for it.
    before = [p for parent in direct if parent not in manifest.parents for p in STAGE_TABLE[parent].parents]
    return dict.fromkeys(name for name in (*direct, *before) if name in manifest.parents)


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    """Return the path of an arrow between two boxes: to the right within a row, up or down otherwise."""
    (x1, y1), (x2, y2) = start, end
    if y1 == y2:
        return f"M{x1 + BOX_WIDTH} {y1 + BOX_HEIGHT // 2}H{x2 - 3}"
    shift = (x2 > x1) * 24 - (x2 < x1) * 24  # arrows that cross columns start and end beside the straight ones
    leaves, arrives = (y1 + BOX_HEIGHT, y2 - 3) if y2 > y1 else (y1, y2 + BOX_HEIGHT + 3)
    return f"M{x1 + BOX_WIDTH // 2 + shift} {leaves}L{x2 + BOX_WIDTH // 2 - shift} {arrives}"


def _box(stage: StageName, x: int, y: int, summary: Summary | None, state: str) -> Box:
    """Return a stage's box: its name, its wall time and how many of its figures it reached, or else its `state`."""
    if summary is None:
        return Box(x, y, "open", STAGE_TITLES[stage], state)
    words = [target.outcome.word for target in summary.targets]
    good, bad = sum(word in published.GOOD for word in words), words.count(published.MISSED)
    line = _duration(summary.wall_seconds)
    line += f" · {good} of {good + bad} {'✓' if not bad else '✗'}" if good + bad else ""
    return Box(x, y, "bad" if bad else "good" if good else "plain", STAGE_TITLES[stage], line)
