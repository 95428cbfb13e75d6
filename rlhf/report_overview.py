"""The top of a report: the outcome in a sentence, what it was measured on, and the chain of stages as a picture."""

import datetime
import html
import re
from collections.abc import Mapping
from typing import Any

from rlhf.observe import console
from rlhf.page import text
from rlhf.recipe import GROUPS, ONLINE, POLICIES, STAGES, published
from rlhf.recipe.published import Verdict

NAMES = {
    "pretrain": "pretraining",
    "sft": "SFT",
    "rm": "reward model",
    "ppo": "PPO",
    "rloo": "RLOO",
    "grpo": "GRPO",
    "dpo": "DPO",
    "evaluate": "evaluation",
    "merge": "merged model",
}
# Column and row of each stage in the picture, which is narrow enough for a phone, and the stages that it is made from.
PLACES = {
    "pretrain": (0, 0),
    "sft": (0, 1),
    "rm": (1, 1),
    "ppo": (0, 2),
    "dpo": (1, 2),
    "rloo": (0, 3),
    "grpo": (1, 3),
    "evaluate": (0, 4),
    "merge": (1, 4),
}
ARROWS = {
    "sft": ("pretrain",),
    "rm": ("sft",),
    **dict.fromkeys(ONLINE, ("sft", "rm")),
    "dpo": ("sft",),
    "evaluate": POLICIES,
}
CURVES: dict[str, tuple[tuple[str, str], ...]] = {  # stage -> (key of metrics.jsonl, title)
    "pretrain": (("loss", "loss"),),
    "sft": (("loss", "loss"),),
    "rm": (("loss", "loss"), ("accuracy", "accuracy"), ("margin", "margin")),
    "ppo": (
        ("objective/scores", "score"),
        ("objective/kl_per_token", "KL to the reference, nats per token"),
        ("response/length", "response length, tokens"),
        ("response/eos_rate", "share that ends"),
        ("policy/entropy_avg", "entropy, nats per token"),
        ("val/explained_variance", "explained variance of the critic"),
        ("loss/value_avg", "value loss"),
        ("policy/clipfrac_avg", "clipped tokens"),
    ),
    **dict.fromkeys(
        GROUPS,
        (
            ("objective/scores", "score"),
            ("objective/kl_per_token", "KL to the reference, nats per token"),
            ("groups/no_signal", "groups without signal"),
            ("groups/reward_sd", "standard deviation of the rewards in a group"),
            ("response/length", "response length, tokens"),
            ("response/eos_rate", "share that ends"),
            ("policy/entropy_avg", "entropy, nats per token"),
            ("policy/clipfrac_avg", "clipped tokens"),
        ),
    ),
    "dpo": (("loss", "loss"), ("rewards/accuracies", "accuracy"), ("rewards/margins", "margin")),
}
BOX_WIDTH, BOX_HEIGHT, COLUMN, ROW = 168, 52, 192, 88  # units of the picture, of which a phone shows 360

Summaries = Mapping[str, Mapping[str, Any]]
Manifests = Mapping[str, Mapping[str, Any]]


def verdicts(summaries: Summaries, price: float | None = None) -> list[tuple[str, str, Verdict]]:
    """Stage, figure and verdict of everything that a run's finished stages were compared with."""
    found = [
        (stage, published.recorded(entry).title, published.verdict_of(entry))
        for stage, summary in summaries.items()
        for entry in summary["targets"]
    ]
    return found + [("all", figure.title, verdict) for figure, _, verdict in published.totals(summaries, price)]


def outcome(manifests: Manifests, summaries: Summaries, price: float | None = None) -> tuple[str, str]:
    """The outcome in a sentence, and how it reads: good, bad or neither ("")."""
    sentences = []
    compared = verdicts(summaries, price)
    kind = ""
    judged = [(stage, title, v) for stage, title, v in compared if v.word in (*published.GOOD, *published.BAD)]
    if judged:
        good = sum(verdict.word in published.GOOD for *_, verdict in judged)
        targets = any(verdict.word in (published.MET, published.MISSED) for *_, verdict in judged)
        noun = "targets met" if targets else "published figures reproduced or bettered"
        bad = [f"{NAMES.get(stage, stage)}, {title}" for stage, title, v in judged if v.word in published.BAD]
        missed = f"; {'missed' if targets else 'worse'}: {'; '.join(bad[:3])}" if bad else ""
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        sentences.append(f"{good} of {len(judged)} {noun}{missed}{more}.")
        kind = "bad" if bad else "good"
    unfinished = [NAMES[stage] for stage in manifests if stage not in summaries]
    if unfinished:
        sentences.append(f"Not finished: {', '.join(unfinished)}.")
    return " ".join(sentences) or "Nothing has finished yet.", kind


def gains(summaries: Summaries) -> str:
    """What each trained policy gained over SFT, in a sentence each."""
    return " ".join(sentence for stage in POLICIES if (sentence := _gain(stage, summaries.get(stage))))


def _gain(stage: str, summary: Mapping[str, Any] | None) -> str:
    """What a policy gained over SFT and at which divergence; empty where it was not measured."""
    metrics = (summary or {}).get("metrics", {})
    names = (("true_reward_gain_sd", "true reward"), ("score_gain_sd", "score of the reward model"))
    gains = [f"{name} {metrics[key]:+.2f}" for key, name in names if metrics.get(key) is not None]
    if not gains:
        return ""
    kl = metrics.get("kl_per_token")
    at = f", at a KL of {console.number(kl)} nats per token" if kl is not None else ""
    return f"{NAMES[stage]} against SFT: {', '.join(gains)} standard deviations{at}."


def facts(manifests: Manifests, summaries: Summaries, price: float | None = None) -> list[str]:
    """When and on what a run was made, how long it took, and what it cost at `price` dollars an hour of one card."""
    started = sorted({manifest["started"][:10] for manifest in manifests.values() if manifest.get("started")})
    said = [" to ".join(dict.fromkeys((started[0], started[-1])))] if started else []
    device = next(iter(manifests.values()))["device"]
    threads = f", {device['threads']} thread(s)" if device.get("threads") else ""
    said.append(f"{device.get('model') or device['name']}{threads}")
    seconds = sum(summary["wall_seconds"] for summary in summaries.values() if "wall_seconds" in summary)
    if seconds:
        said.append(f"{datetime.timedelta(seconds=round(seconds))} in {len(summaries)} finished stages")
        if price is not None:
            said.append(f"{seconds / 3600 * price:.2f} USD a card")
    if any(manifest["overrides"] for manifest in manifests.values()):
        said.append("modified recipe")
    return said


def section(manifests: Manifests, summaries: Summaries, name: str = "", price: float | None = None) -> str:
    """HTML of the outcome, the facts and the picture of one run; `name` where there are several runs."""
    sentence, kind = outcome(manifests, summaries, price)
    title = f'<p class="who">{text(name)}</p>' if name else ""
    told = " · ".join(map(text, facts(manifests, summaries, price)))
    headline = f'<p class="headline {kind}">{text(sentence)}</p>'
    gained = f"<p>{text(said)}</p>" if (said := gains(summaries)) else ""
    return f'{title}{headline}{gained}<p class="note">{told}</p>{picture(manifests, summaries)}'


def contents(body: str) -> str:
    """HTML of links to the sections of a page."""
    found = re.findall(r'<section id="([^"]+)"><h2>(.*?)</h2>', body)
    links = [f'<a href="#{name}">{title}</a>' for name, title in found]
    return f"<nav>{' '.join(links)}</nav>"


def picture(manifests: Manifests, summaries: Summaries) -> str:
    """The stages that were begun and what each is made from, as inline SVG; coloured by verdict."""
    begun = [stage for stage in STAGES if stage in manifests]
    rows = {row: at for at, row in enumerate(sorted({PLACES[stage][1] for stage in begun}))}
    corner = {stage: (2 + PLACES[stage][0] * COLUMN, 2 + rows[PLACES[stage][1]] * ROW) for stage in begun}
    merged = manifests.get("merge", {}).get("settings", {}).get("merge", {}).get("stage", "ppo")
    sources = {**ARROWS, "merge": (merged,)}
    lines = [_arrow(corner[a], corner[b]) for b in begun for a in sources.get(b, ()) if a in corner]
    boxes = [_box(stage, *corner[stage], summaries.get(stage)) for stage in begun]
    width, height = COLUMN + BOX_WIDTH + 4, (len(rows) - 1) * ROW + BOX_HEIGHT + 4
    said = ", ".join(f"{NAMES[stage]}{'' if stage in summaries else ' (not finished)'}" for stage in begun)
    marker = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    tip = f'<defs>{marker}<path d="M0 0L8 4L0 8z"/></marker></defs>'
    label = html.escape(f"the stages of the run: {said}")
    view = f'viewBox="0 0 {width} {height}" width="{width}"'
    return f'<svg class="chain" {view} role="img" aria-label="{label}">{tip}{"".join(lines + boxes)}</svg>'


def _arrow(start: tuple[int, int], end: tuple[int, int]) -> str:
    """An arrow between two boxes: to the right within a row, down otherwise."""
    (x1, y1), (x2, y2) = start, end
    if y1 == y2:
        path = f"M{x1 + BOX_WIDTH} {y1 + BOX_HEIGHT // 2}H{x2 - 3}"
    else:
        shift = (x2 > x1) * 24 - (x2 < x1) * 24  # arrows that cross columns start and end beside the straight ones
        path = f"M{x1 + BOX_WIDTH // 2 + shift} {y1 + BOX_HEIGHT}L{x2 + BOX_WIDTH // 2 - shift} {y2 - 3}"
    return f'<path class="arrow" d="{path}" marker-end="url(#tip)"/>'


def _box(stage: str, x: int, y: int, summary: Mapping[str, Any] | None) -> str:
    """A stage: its name, how long it took and how many of its figures it reached."""
    kind, line = "open", "not finished"
    if summary is not None:
        words = [verdict.word for *_, verdict in verdicts({stage: {**summary, "all_stages": []}})]
        good, bad = (sum(word in kinds for word in words) for kinds in (published.GOOD, published.BAD))
        kind = "bad" if bad else "good" if good else "plain"
        line = str(datetime.timedelta(seconds=round(summary.get("wall_seconds", 0))))
        line += f" · {good} of {good + bad} {'✓' if not bad else '✗'}" if good + bad else ""
    place = f'<rect class="{kind}" x="{x}" y="{y}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6"/>'
    name = f'<text class="name" x="{x + 12}" y="{y + 22}">{html.escape(NAMES[stage])}</text>'
    return f'<g>{place}{name}<text x="{x + 12}" y="{y + 41}">{html.escape(line)}</text></g>'
