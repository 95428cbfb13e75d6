"""`python -m bench.tables`: write results/README.md, and the tables of README and docs that say what records say.

A table stands between `<!-- NAME -->` and `<!-- /NAME -->`; TABLES has the names. Nothing is measured or predicted
here.
"""

import os
import re
import statistics
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench import records
from bench.records import RECIPES, RESULTS, ROOT, device_text, read
from rlhf import recipe as recipes
from rlhf.plan import prediction_file, published_figures
from rlhf.plan.phases import ON_HOST, PredictedPhase, PredictedStage, Work
from rlhf.plan.plan import plan_of
from rlhf.plan.predict import PREDICTED_STAGES
from rlhf.plan.prediction_file import Pinned
from rlhf.recipe import StageName
from rlhf.recipe.published import verdict_of
from rlhf.run import reader
from rlhf.run.layout import METRICS, SAMPLES
from rlhf.run.records import Reproduction
from rlhf.terminal.wording import gb

BLOCK = re.compile(r"(<!-- (?P<name>[^/].*?) -->\n)(?P<table>.*?)(<!-- /(?P=name) -->)", re.S)
SECTIONS = {  # of results/README.md: kinds of records, and what they claim
    "Learned": (
        ("learned",),
        "Recipes that were trained whole, with every seed; the interval is over held-out prompts.",
    ),
    "On a GPU": (("gpu",), "Random weights on an H200: memory, seconds and tests; each names its commit."),
    "Beside TRL": (
        ("peer",),
        'Steps of both in turn on one machine; "1.7 times" means that ours is 1.7 times as fast.',
    ),
    "Regressions": (("steps", "memory", "against"), "What later measurements of the same recipe are compared with."),
}
SUMS = RESULTS / "cpu-smollm2-sums" / "v1" / "cpu"
PICTURE = ROOT / "docs" / "images" / "sums.svg"
SHOWN = 3  # questions of the table: the first held-out ones
REWARD = "reward_numeric_answer"
COLOURS = ("#1f6feb", "#cf222e", "#1a7f37", "#8250df", "#9a6700")


def markdown(*rows: tuple[str, ...]) -> str:
    """Return rows as a table; the first one is its heading."""
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *body)) + "\n"


# -- results/README.md -------------------------------------------------------------------------------------------------


def index(root: Path = RESULTS) -> str:
    """Return the page of records: a section for each kind of claim, the newest record first within one."""
    found = [(file, read(file)) for file in sorted(root.rglob("*.json"), key=lambda file: file.name, reverse=True)]
    page = "# Results\n\nEvery measurement that is kept. `python -m bench.tables` writes this page from the records.\n"
    for title, (kinds, claim) in SECTIONS.items():
        rows = [_row(file.relative_to(root), record) for file, record in found if record.get("kind") in kinds]
        heading = ("what was measured", "result", "device", "date, commit", "record")
        page += f"\n## {title}\n\n{claim}\n\n{markdown(heading, *rows) if rows else 'None yet.'}"
    return page


def _row(file: Path, record: Mapping[str, Any]) -> tuple[str, ...]:
    what, result = DESCRIBED[record["kind"]](record)
    commit = (record["code"]["commit"] or "unknown")[:8]
    date = re.search(r"\d{4}-\d{2}-\d{2}", file.name)
    cells = what, result, device_text(record.get("device")), f"{date[0] if date else ''}, {commit}"
    return *(cell.replace("|", "\\|") for cell in cells), f"[{file.name}]({file})"


def _learned(record: Mapping[str, Any]) -> tuple[str, str]:
    summaries = [summary for stages in record["seeds"].values() for summary in stages.values()]
    judged = [target for summary in summaries for target in summary["targets"] if target.get("measured") is not None]
    met = [target.get("verdict", target.get("within")) in ("met", "better", True) for target in judged]
    folder = RECIPES / record["recipe"] / record["version"]
    if not judged and (folder / "published.yaml").exists():  # of rows that are not the recipe's: a run is not compared
        figures = recipes.load(folder).figures
        values = [(f, s["metrics"].get(f.metric)) for f in figures for s in summaries if s["stage"] == f.stage]
        met = [verdict_of(figure, value).word == "met" for figure, value in values]
    targets = f"{sum(met)} of {len(met)} targets met" if met else "no targets"
    return f"{record['recipe']} {record['version']}, {len(record['seeds'])} seeds", targets


def _steps(record: Mapping[str, Any]) -> tuple[str, str]:
    speeds = [
        f"{s} {row['tokens_per_second']:,.0f}" for s, row in record["stages"].items() if "tokens_per_second" in row
    ]
    return f"{record['recipe']}: a few steps, {record['shape']} rows", f"tokens per second: {', '.join(speeds)}"


def _memory(record: Mapping[str, Any]) -> tuple[str, str]:
    errors = [abs(row["error"]) for row in record["phases"]]
    median, worst = statistics.median(errors), max(errors)
    return (
        f"{record['recipe']}: predicted peaks beside measured",
        f"{len(errors)} phases: {median:.1%}, worst {worst:.1%}",
    )


def _peer(record: Mapping[str, Any]) -> tuple[str, str]:
    parts = []
    for stage, sides in record.get("stages_beside", {}).items():
        ratios = {name: row["times_faster"] for name, row in sides.items() if "times_faster" in row}
        if "ours" in ratios:  # of a record from before each side had its own ratio
            ratios = {"trl": ratios["ours"], "trl, tuned": sides["ours"].get("times_faster_tuned")}
        parts += [f"{stage} {ratio:.2f} times {name}" for name, ratio in ratios.items() if ratio]
    return f"{record.get('recipe', 'a made-up model')} beside {record['peer']}", "; ".join(parts) or record.get(
        "claim", ""
    )


def _gpu(record: Mapping[str, Any]) -> tuple[str, str]:
    error = record.get("error")
    return record.get("claim") or record["gpu_item"], record.get("why") or error or record["outcome"]


def _against(record: Mapping[str, Any]) -> tuple[str, str]:
    return f"{record['recipe']}: a commit beside another", record.get("claim", "")


DESCRIBED: Mapping[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
    "learned": _learned,
    "steps": _steps,
    "memory": _memory,
    "peer": _peer,
    "gpu": _gpu,
    "against": _against,
}


# -- the sums of SmolLM2 -----------------------------------------------------------------------------------------------


def sums() -> str:
    """Return the first held-out questions with both answers, then each seed's share of right ones."""
    file = max(SUMS.glob("*.json"), key=lambda file: file.name)
    record = reader.read(file, Reproduction)
    assert record is not None
    samples = [*map(_json, (file.with_suffix("") / "seed-0" / SAMPLES).read_text(encoding="utf-8").splitlines())]
    rows = [
        (_cell(row["messages"][-1]["content"].partition("?")[0] + "?"), *(_cell(row[p]["response"]) for p in SIDES))
        for row in samples[:SHOWN]
    ]
    for seed, stages in record.seeds.items():
        telemetry = (file.with_suffix("") / f"seed-{seed}" / "telemetry.jsonl").read_text(encoding="utf-8").splitlines()
        minutes = sum(_json(line)["cpu/total"] for line in telemetry) / 60
        shares = [_share(stages["evaluate"].metrics, policy) for policy in SIDES]
        rows.append((f"**right, seed {seed}** ({minutes:.1f} CPU minutes)", *shares))
    return markdown(("held-out question", "answer before", "answer after"), *rows)


SIDES = ("base", "grpo")


def _json(line: str) -> dict[str, Any]:
    import json

    content: dict[str, Any] = json.loads(line)
    return content


def _cell(text: str) -> str:
    """Return a text as the cell of a table: on one line, with the signs of Markdown shown as they are."""
    return re.sub(r"([|*_<\\`$])", r"\\\1", " ".join(text.split()))


def _share(metrics: Mapping[str, Any], policy: str) -> str:
    """Return a policy's share of right answers with its 95 % interval."""
    value, low, high = (100 * metrics[f"{policy}/{REWARD}{end}"] for end in ("", "_low", "_high"))
    return f"{value:.1f} % ({low:.1f} to {high:.1f})"


def picture() -> str:
    """Return the share of right answers over the steps as SVG: in training as lines, on held-out questions as dots."""
    folder = max(SUMS.glob("*.json"), key=lambda file: file.name).with_suffix("")
    logs = {
        file.parent.name.removeprefix("seed-"): [*map(_json, file.read_text(encoding="utf-8").splitlines())]
        for file in sorted(folder.glob(f"seed-*/{METRICS}"))
    }
    last = max(lines[-1]["step"] for lines in logs.values())
    left, top, wide, high = 58, 14, 566, 222  # of the area that is drawn in, pixels

    def at(step: float, share: float) -> str:
        return f"{left + wide * step / last:.1f},{top + high * (1 - share):.1f}"

    parts = []
    for percent in range(0, 101, 20):
        y = top + high * (1 - percent / 100)
        parts.append(f'<path d="M{left},{y:.1f}H{left + wide}" class="grid"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" class="end">{percent}</text>')
    parts += [
        f'<text x="{left + wide * step / last:.1f}" y="{top + high + 18}" class="mid">{step}</text>'
        for step in range(0, last + 1, 5)
    ]
    for (seed, lines), colour in zip(logs.items(), COLOURS, strict=False):
        points = " ".join(at(line["step"], line.get("objective/scores") or 0.0) for line in lines)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" opacity="0.6"/>')
        for step, share in held_out(lines):
            x, _, height = at(step, share).partition(",")
            parts.append(
                f'<circle cx="{x}" cy="{height}" r="4" fill="{colour}"><title>seed {seed}: {share:.1%}</title></circle>'
            )
        parts.append(f'<text x="{left + 12}" y="{top + 18 + 16 * int(seed)}" fill="{colour}">seed {seed}</text>')
    note = "step of GRPO. Lines: the 64 answers of a step; dots: answers to 64 held-out questions; right answers in %"
    parts.append(f'<text x="{left}" y="{top + high + 42}">{note}</text>')
    style = "text{font:12px sans-serif;fill:#57606a}.end{text-anchor:end}.mid{text-anchor:middle}.grid{stroke:#8884}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 300" role="img"><title>{note}</title>'
    return f"{head}<style>{style}</style>{''.join(parts)}</svg>\n"


def held_out(lines: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """Return the steps at which held-out questions were answered, and the share that was right: the base's at 0."""
    base = next(line[f"eval/{REWARD}_base"] for line in lines if f"eval/{REWARD}_base" in line)
    shares = [(0, base), *((line["step"], line.get(f"eval/{REWARD}")) for line in lines)]
    return [(step, share) for step, share in shares if share is not None]


# -- predictions -------------------------------------------------------------------------------------------------------


def peaks() -> str:
    """Return the pinned peak of each stage of every recipe for a card, in GB; "–" where a recipe has no such stage."""
    pinned = {f"{d.parent.name} {d.name}": prediction_file.read(d) for d in recipes.available(RECIPES)}
    found = {name: content.stages for name, content in pinned.items() if content}
    stages = [s for s in PREDICTED_STAGES if s not in ON_HOST and any(s in of_recipe for of_recipe in found.values())]
    rows = []
    for name, of_recipe in found.items():
        highest = {stage: max(sum(p.values()) for p in phases.values()) for stage, phases in of_recipe.items()}
        rows.append((name, *(gb(highest[stage], 1) if stage in highest else "–" for stage in stages)))
    return markdown(("recipe", *stages), *rows)


def stages_of(pinned: Pinned) -> dict[StageName, PredictedStage]:
    """Return the pinned stages as they were predicted."""
    predicted = {}
    for stage, phases in pinned.stages.items():
        needed = pinned.needed.get(stage, {})
        of_phase = {
            name: PredictedPhase(
                peak_bytes=sum(parts.values()),
                components=parts,
                paged_bytes=0,  # they are in what is needed
                work=Work(**pinned.work[stage][name]),
                needed_bytes=needed.get(name),
            )
            for name, parts in phases.items()
        }
        whole = max(of_phase.values(), key=lambda phase: phase.peak_bytes)
        most = max(needed.values(), default=None)
        predicted[stage] = PredictedStage(replace(whole, needed_bytes=most), of_phase)
    return predicted


# -- the guides, and what a card measured ------------------------------------------------------------------------------


def guides() -> str:
    """Return every published peak beside its prediction for the guide's settings, by the pinned predictions."""
    rows = []
    for directory in recipes.available(RECIPES):
        loaded, pinned = recipes.load(directory), prediction_file.read(directory)
        if pinned is None or not any(figure.guide for figure in loaded.figures):
            continue
        for row in published_figures.compare(loaded, plan_of(loaded, stages_of(pinned))):
            figure, value = row.figure, row.predicted
            if figure.metric == "peak_vram_gb" and value is not None and row.verdict.word != "not compared":
                words = figure.text().removesuffix(" GB"), f"{value:.3g}", "–", str(row.verdict)
                rows.append((loaded.name, figure.stage, *words))
    return markdown(("recipe", "stage", "published, GB", "predicted", "measured", "verdict"), *rows)


def ours() -> str:
    """Return each stage's largest peak that a card measured beside the prediction of that day."""
    rows = []
    for file in sorted(RESULTS.rglob("*_memory-*.json")):
        record = read(file)
        phases = [phase for phase in record["measured"]["phases"] if "error" in phase]
        for stage in dict.fromkeys(phase["stage"] for phase in phases):
            of_stage = [phase for phase in phases if phase["stage"] == stage]
            one = max(of_stage, key=lambda phase: phase["measured_bytes"])
            sizes = (f"{one[key] / 1e9:.2f}" for key in ("predicted_bytes", "measured_bytes"))
            place = f"[{device_text(record['device'])}]({os.path.relpath(file, ROOT / 'docs')})"
            rows.append((f"{record['recipe']} {record['version']}", stage, *sizes, f"{one['error']:+.1%}", place))
    return markdown(("settings", "stage", "predicted, GB", "measured", "off by", "record"), *rows)


# -- the pages ---------------------------------------------------------------------------------------------------------

TABLES: Mapping[str, Callable[[], str]] = {
    "guides": guides,
    "ours": ours,
    "sums": sums,
    "peaks": peaks,
}


def written(text: str) -> str:
    """Return a page's text with its tables as they should be."""
    return BLOCK.sub(
        lambda block: block[1] + (TABLES[block["name"]]() if block["name"] in TABLES else block["table"]) + block[4],
        text,
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Write results/README.md, the tables of README and docs, and the picture of the sums."""
    (records.RESULTS / "README.md").write_text(index(), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))):
        before = page.read_text(encoding="utf-8")
        if (after := written(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
