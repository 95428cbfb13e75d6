"""Runs of a recipe with several seeds, in fresh processes, and the table of their results."""

import math
import os
import platform
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.packages import package_versions
from rlhf.process.task import run_child, task_of
from rlhf.recipe import PinnedRecipe, StageName, parents, published
from rlhf.recipe.chain import differences
from rlhf.recipe.published import OPEN, Figure, Verdict, verdict_of
from rlhf.recipe.stages import EVALUATE, STAGES, TRAINING_STAGES
from rlhf.run import reader
from rlhf.run.comparisons import totals
from rlhf.run.evidence import gains_over_start
from rlhf.run.finished import read_manifest, verified
from rlhf.run.layout import SUMMARY
from rlhf.run.provenance import code_version
from rlhf.run.records import Reproduction, Summary
from rlhf.terminal import say, wording

HEADLINES = ("accuracy", "perplexity", "eval_loss")  # of stages that train no policy
WALL = "wall time, s"
CONDITIONS = ("code", "packages", "python", "device")  # that all stages of one table share


def chain(loaded: PinnedRecipe, until: Sequence[StageName]) -> list[StageName]:
    """Return the stages of a recipe that lead to `until`, in order. Raises UserError for one that it does not have."""
    for stage in until:
        loaded.require(stage)
    needed = {*until, *(parent for stage in until for parent in parents(loaded.recipe, stage))}
    return [stage for stage in STAGES if stage in needed]


def final_stages(loaded: PinnedRecipe) -> list[StageName]:
    """Return the stages that train, and evaluate if one of the recipe's figures is about it."""
    stages: list[StageName] = [stage for stage in TRAINING_STAGES if loaded.recipe.section(stage) is not None]
    if any(figure.stage == EVALUATE for figure in loaded.figures):
        stages.append(EVALUATE)
    return stages


def runs_root(out: Path, seed: int) -> Path:
    """Return the runs root of one seed."""
    return out / f"seed-{seed}"


def _run_directory(loaded: PinnedRecipe, out: Path, seed: int) -> Path:
    return runs_root(out, seed) / loaded.name / loaded.version


def run_seeds(loaded: PinnedRecipe, stages: Sequence[StageName], seeds: Sequence[int], out: Path) -> None:
    """Run the stages for every seed and stage. Finished stages are kept and interrupted ones are resumed.

    Raises UserError as `check_same` does. Exits with the exit code of a stage that fails.
    """
    every = [_run_directory(loaded, out, seed) / stage for seed in seeds for stage in stages]
    for seed in seeds:
        run = _run_directory(loaded, out, seed)
        for stage in stages:
            check_same(every, runs_another=not (run / stage / SUMMARY).is_file())
            task = task_of(loaded, stage, runs_root(out, seed), resume=True, if_needed=True).of(stage, seed=seed)
            if code := run_child(task):
                say(
                    f"error: seed {seed} stopped in {stage}; solve the problem and repeat this command, which "
                    f"continues from the last checkpoint (that stage alone: `rlhf run {stage} "
                    f"{run} --resume`)"
                )
                sys.exit(code)


def check_same(folders: Iterable[Path], runs_another: bool = False) -> None:
    """Raise UserError where finished stages among `folders` had other CONDITIONS than the first of them.

    Where this process `runs_another`, it counts as the first, on the same device.
    """
    found = [(str(folder), _conditions(folder)) for folder in folders if (folder / SUMMARY).is_file()]
    if runs_another and found:
        now = {"code": code_version().plain(), "packages": package_versions(), "python": platform.python_version()}
        found.insert(0, ("this process", found[0][1] | now))
    for name, others in found[1:]:
        first, its = found[0]
        for key, (one, other) in differences(its, others).items():
            raise UserError(
                f"{name}: {key} is {other}, and {one} in {first}; one table holds "
                "stages of the same code, packages, python and device: restore that, or choose another --out"
            )


def _conditions(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder).plain()
    return {key: manifest.get(key) for key in CONDITIONS}


def write_record(
    loaded: PinnedRecipe, stages: Sequence[StageName], seeds: Sequence[int], out: Path, price: float | None = None
) -> Reproduction:
    """Return the record of a reproduction: every seed's summaries with the code and device that they come from.

    It is written to `<out>/<recipe>-<version>.json`. `price` is in dollars per hour of one card. Raises UserError if
    not all stages were run by the same code, packages and device.
    """
    every = [_run_directory(loaded, out, seed) / stage for seed in seeds for stage in stages]
    check_same(every)
    content = {
        "recipe": loaded.name,
        "version": loaded.version,
        "recipe_sha256": loaded.sha256,
        "released_sha256": loaded.released_sha256,
        "modified": loaded.modified,
        **_conditions(every[0]),
        "price_per_hour": price,
        **_own_rows(loaded, every),
        "seeds": {
            str(seed): {stage: verified(_run_directory(loaded, out, seed), stage).plain() for stage in stages}
            for seed in seeds
        },
    }
    write_json(out / f"{loaded.name}-{loaded.version}.json", content)
    return Reproduction.model_validate(content)


def _own_rows(loaded: PinnedRecipe, folders: Sequence[Path]) -> dict[str, Any]:
    """Return the files that `--data` named, by name and hash, and what else was changed; {} without such files."""
    if "data.files" not in loaded.overrides:
        return {}
    manifests = (read_manifest(folder) for folder in folders)
    read = {(Path(file.name).name, file.sha256) for made in manifests if made.data for file in made.data.files}
    others = {key: value for key, value in loaded.overrides.items() if key != "data.files"}
    return {"rows": [{"name": name, "sha256": digest} for name, digest in sorted(read)], "overrides": others}


def record_of(loaded: PinnedRecipe) -> tuple[Path, Reproduction] | None:
    """Return the newest record of this recipe in `results/` of its checkout; None without one.

    An edited recipe, and one that options changed, has none, and a record of other rows is none of it. Raises UserError
    for a damaged record.
    """
    if loaded.modified:
        return None
    checkout = Path(os.path.abspath(loaded.directory)).parents[2]
    for file in sorted((checkout / "results" / loaded.name / loaded.version).glob("*/*.json"), reverse=True):
        record = reader.read(file, Reproduction)
        if record is not None and record.recipe_sha256 == loaded.sha256 and not record.rows:
            return file, record
    return None


def rows(
    seeds: Mapping[str, Mapping[str, Summary]],
    price: float | None = None,
    recorded: Mapping[str, Mapping[str, Summary]] | None = None,
) -> list[tuple[str, ...]]:
    """Return the rows of the table of every seed's summaries by stage, the header first.

    `price` is in dollars per hour of one card. `recorded` are the summaries of an earlier record, whose figures are
    named beside those of the same seed.

    A figure's row has its range, each seed's value, mean ± sample standard deviation and the verdict. Each stage ends
    with its wall times. Figures of all stages together come last.
    """
    runs = list(seeds.values())
    of_chain = [totals(run, price) for run in runs]
    has_guide = any(figure.guide for run in runs for summary in run.values() for figure, *_ in summary.figures)
    heading = "published" if has_guide or of_chain[0] else "target"
    table: list[tuple[str, ...]] = [
        ("stage", "metric", heading, *(f"seed {seed}" for seed in seeds), "mean ± sd", "verdict")
    ]
    before = [(recorded or {}).get(seed, {}) for seed in seeds]
    for summaries in zip(*(run.values() for run in runs), strict=True):
        stage = summaries[0].stage
        for of_seeds in zip(*(summary.figures for summary in summaries), strict=True):
            figure, values = of_seeds[0].figure, [value for _, value, _ in of_seeds]
            beside = [_recorded(figure, value, run.get(stage)) for value, run in zip(values, before, strict=True)]
            verdicts = [verdict_of(figure, value) for value in values]
            table.append(_row(stage, figure.title, values, *figure_verdict(figure, values, verdicts), beside))
        if not summaries[0].targets and (headline := _headline(summaries)):
            table.append(_row(stage, *headline))
        table.append(_row(stage, WALL, [summary.wall_seconds for summary in summaries]))
    for of_seeds in zip(*of_chain, strict=True):
        figure, values = of_seeds[0][0], [value for _, value, _ in of_seeds]
        verdicts = [verdict for *_, verdict in of_seeds]
        table.append(_row("all", figure.title, values, *figure_verdict(figure, values, verdicts)))
    table.append(_row("all", WALL, [sum(summary.wall_seconds for summary in run.values()) for run in runs]))
    return table


def _row(
    stage: StageName | Literal["all"],
    title: str,
    values: Sequence[float | None],
    asked: str = "",
    verdict: str = "",
    beside: Sequence[str] = (),
) -> tuple[str, ...]:
    """Return a row of the table; `beside` follows each seed's value."""
    cells = [wording.number(value) for value in values]
    if beside:
        cells = [cell + text for cell, text in zip(cells, beside, strict=True)]
    return stage, title, asked, *cells, mean_sd(values), verdict


def _headline(summaries: Sequence[Summary]) -> tuple[str, list[float | None]] | None:
    """Return a stage's main figure by its name: a policy's reward, an accuracy or a loss; None without any."""
    gains = [next(iter(gains_over_start({summary.stage: summary})), None) for summary in summaries]
    if (first := gains[0]) is not None:
        return f"{first.name}, {first.start:.3g} at the start", [gain.end if gain else None for gain in gains]
    key = next((key for key in HEADLINES if key in summaries[0].metrics), None)
    return None if key is None else (wording.metric(key), [summary.metrics.get(key) for summary in summaries])


def _recorded(figure: Figure, value: float | None, summary: Summary | None) -> str:
    """Return what follows a seed's value: the recorded one, and whether it is the same to the last digit.

    "" if the record's `summary` lacks it.
    """
    found = summary.figures if summary else []
    old = next((value for recorded, value, _ in found if recorded.name == figure.name), None)
    if old is None or value is None:
        return ""
    return f" (recorded {wording.number(old)}: {'equal' if value == old else f'different by {value - old:+.2g}'})"


def figure_verdict(figure: Figure, values: Sequence[float | None], verdicts: Sequence[Verdict]) -> tuple[str, str]:
    """Return what a figure asks of each seed and of their mean, and the verdict on the seeds and on the mean.

    The first is text such as `≥ 0.6; mean ≥ 0.62`; the second counts the seeds that reach the figure.
    """
    asked = figure.text()
    if figure.range_of_mean:
        asked += f"; mean {wording.span(*figure.range_of_mean)}"
    if all(verdict.word in OPEN for verdict in verdicts):
        return asked, str(verdicts[0])
    verdict = published.count(verdicts)
    if None not in values and (figure.guide or figure.range_of_mean):
        mean = statistics.mean(value for value in values if value is not None)
        of_mean = verdict_of(figure.model_copy(update={"range": figure.range_of_mean or figure.range}), mean)
        verdict += f", mean {of_mean if figure.guide else of_mean.word}"
    return asked, verdict


def mean_sd(values: Sequence[float | None]) -> str:
    """Return `mean ± sd` of the finite values as text."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return "-"
    deviation = f" ± {wording.number(statistics.stdev(finite))}" if len(finite) > 1 else ""
    return wording.number(statistics.mean(finite)) + deviation
