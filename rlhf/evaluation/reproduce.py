"""Runs of a recipe with several seeds, in fresh processes, and the table of their results."""

import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rlhf.errors import UserError
from rlhf.evaluation import conditions
from rlhf.files import write_json
from rlhf.process.task import run_child, task_of
from rlhf.recipe import PinnedRecipe, StageName, parents, published
from rlhf.recipe.folders import no_section
from rlhf.recipe.published import OPEN, Figure, Verdict, verdict_of
from rlhf.recipe.stages import EVALUATE, STAGES, TRAINING_STAGES
from rlhf.run import reader
from rlhf.run.evidence import gains_over_start
from rlhf.run.finished import read_manifest, read_summary, totals
from rlhf.run.layout import SUMMARY
from rlhf.run.outcomes import Reproduction
from rlhf.run.records import DataFile, Summary
from rlhf.terminal import say, wording

HEADLINES = ("accuracy", "perplexity", "eval_loss")  # of stages that train no policy
OF_ROWS = ("data.source", "data.files", "data.format")  # keys by which rows of files stand in for the recipe's


def chain(loaded: PinnedRecipe, until: Sequence[StageName]) -> list[StageName]:
    """Return the stages of a recipe that lead to `until`, in order. Raises UserError for one that it does not have."""
    if absent := next((stage for stage in until if loaded.recipe.section(stage) is None), None):
        raise UserError(no_section(absent, loaded))
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


def stage_path(loaded: PinnedRecipe, out: Path, seed: int, stage: StageName) -> Path:
    """Return the directory of one seed's stage."""
    return runs_root(out, seed) / loaded.name / loaded.version / stage


def run_seeds(loaded: PinnedRecipe, stages: Sequence[StageName], seeds: Sequence[int], out: Path) -> None:
    """Run the stages for every seed and stage. Finished stages are kept and interrupted ones are resumed.

    Raises UserError before a stage whose table would mix code, packages, python or device. Exits with the exit code of
    a stage that fails.
    """
    folders = [stage_path(loaded, out, seed, stage) for seed in seeds for stage in stages]
    for seed in seeds:
        for stage in stages:
            following = stage_path(loaded, out, seed, stage)
            is_first = not any((folder / SUMMARY).is_file() for folder in folders)
            is_done = (following / SUMMARY).is_file()
            conditions.check_same(
                folders, following, None if is_first or is_done else conditions.of_this_process(loaded)
            )
            task = task_of(loaded, stage, runs_root(out, seed), resume=True, if_needed=True).of(stage, seed=seed)
            if code := run_child(task):
                say(
                    f"error: seed {seed} stopped in {stage}; solve the problem and repeat this command, which "
                    f"continues from the last checkpoint (that stage alone: `rlhf run {stage} "
                    f"{following.parent} --resume`)"
                )
                sys.exit(code)


def done_so_far(
    loaded: PinnedRecipe, stages: Sequence[StageName], seeds: Sequence[int], out: Path
) -> dict[str, dict[str, Summary]]:
    """Return the summaries by seed and stage of the seeds that have begun, of the stages that all of those have done.

    Raises UserError for a damaged one.
    """
    found = {
        str(seed): {s: summary for s in stages if (summary := read_summary(stage_path(loaded, out, seed, s)))}
        for seed in seeds
    }
    begun = {seed: of_seed for seed, of_seed in found.items() if of_seed}
    common = [stage for stage in stages if begun and all(stage in of_seed for of_seed in begun.values())]
    return {seed: {stage: of_seed[stage] for stage in common} for seed, of_seed in begun.items()} if common else {}


def write_record(
    loaded: PinnedRecipe, stages: Sequence[StageName], seeds: Sequence[int], out: Path, price: float | None = None
) -> Reproduction:
    """Return the record of a reproduction: every seed's summaries with the code and device that they come from.

    It is written to `<out>/<recipe>-<version>.json`. `price` is in dollars per hour of one card. Raises UserError if
    not all stages were run by the same code, packages and device.
    """
    folders = {seed: {s: stage_path(loaded, out, seed, s) for s in stages} for seed in seeds}
    summaries = {str(seed): {s: _summary(f) for s, f in of_seed.items()} for seed, of_seed in folders.items()}
    every = [folder for of_seed in folders.values() for folder in of_seed.values()]
    conditions.check_same(every)
    content = {
        "recipe": loaded.name,
        "version": loaded.version,
        "recipe_sha256": loaded.sha256,
        "released_sha256": loaded.released_sha256,
        "modified": loaded.modified,
        **conditions.of_stage(every[0]),
        "price_per_hour": price,
        **_own_rows(loaded, every),
        "seeds": {seed: {s: summary.plain() for s, summary in run.items()} for seed, run in summaries.items()},
    }
    write_json(out / f"{loaded.name}-{loaded.version}.json", content)
    return Reproduction.model_validate(content)


def _own_rows(loaded: PinnedRecipe, folders: Sequence[Path]) -> dict[str, Any]:
    """Return the files that `--data` named, by name and hash, and what else options changed; {} without such files."""
    if "data.files" not in loaded.overrides:
        return {}
    read = {(file.name, file.sha256) for folder in folders for file in _data_files(folder)}
    others = {
        key: value
        for key, value in loaded.overrides.items()
        if key not in OF_ROWS and not (key.startswith("data.") and value is None)  # keys of the hub, of no use then
    }
    return {"rows": [{"name": Path(name).name, "sha256": digest} for name, digest in sorted(read)], "overrides": others}


def _data_files(folder: Path) -> list[DataFile]:
    """Return the files of data that a stage has read."""
    data = read_manifest(folder).data
    return data.files if data else []


def _summary(folder: Path) -> Summary:
    """Return the summary of a stage. Raises UserError if the stage is not done."""
    summary = read_summary(folder)
    if summary is None:
        raise UserError(f"{folder}: {folder.name} is not done")
    return summary


def table_of(file: Path) -> str:
    """Return the Markdown table of a record that `write_record` wrote. Raises UserError if the file is not one."""
    reproduction = reader.read(file, Reproduction)
    if reproduction is None:
        raise UserError(f"{file}: not a file")
    return markdown(reproduction)


def markdown(reproduction: Reproduction) -> str:
    """Return the table of a reproduction as Markdown, with the code and device that it was measured on."""
    columns, *body = rows(reproduction.seeds, reproduction.price_per_hour)
    lines = [columns, ("---",) * len(columns), *body]
    packages = reproduction.packages
    files = "".join(f", rows of {file.name} (sha256 {file.sha256[:12]})" for file in reproduction.rows)
    sha256, edited = reproduction.recipe_sha256[:12], reproduction.edited()
    measured = (
        f"Measured by `rlhf reproduce`: recipe {reproduction.recipe} {reproduction.version} "
        f"({edited or sha256}){files}, {reproduction.device.text()}, commit "
        f"{(reproduction.code.commit or 'unknown')[:12]}, torch {packages.torch}, "
        f"transformers {packages.transformers}, trl {packages.trl}, peft {packages.peft}."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{measured}\n"


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
    chain_figures = [totals(run, price) for run in runs]
    has_guide = any(target.guide for run in runs for summary in run.values() for target in summary.targets)
    heading = "published" if has_guide or chain_figures[0] else "target"
    table: list[tuple[str, ...]] = [
        ("stage", "metric", heading, *(f"seed {seed}" for seed in seeds), "mean ± sd", "verdict")
    ]
    walls = []
    for summaries in zip(*(run.values() for run in runs), strict=True):
        stage = summaries[0].stage
        for targets in zip(*(summary.targets for summary in summaries), strict=True):
            figure = targets[0].figure
            values = [target.measured for target in targets]
            row = _row(stage, figure, values, [verdict_of(figure, value) for value in values])
            beside = [
                _recorded(figure, value, (recorded or {}).get(seed, {}).get(stage))
                for seed, value in zip(seeds, values, strict=True)
            ]
            cells = [cell + text for cell, text in zip(row[3:-2], beside, strict=True)]
            table.append((*row[:3], *cells, *row[-2:]))
        if not summaries[0].targets and (found := _headline(summaries)):
            table.append((stage, *found))
        walls.append([summary.wall_seconds for summary in summaries])
        table.append(
            (stage, "wall time, s", "", *(f"{w:.0f}" for w in walls[-1]), f"{statistics.mean(walls[-1]):.0f}", "")
        )
    for figure_by_seed in zip(*chain_figures, strict=True):
        values, verdicts = [value for _, value, _ in figure_by_seed], [verdict for *_, verdict in figure_by_seed]
        table.append(_row("all", figure_by_seed[0][0], values, verdicts))
    times = [sum(of_seed) for of_seed in zip(*walls, strict=True)]
    table.append(("all", "wall time, s", "", *(f"{t:.0f}" for t in times), f"{statistics.mean(times):.0f}", ""))
    return table


def _headline(summaries: Sequence[Summary]) -> tuple[str, ...] | None:
    """Return the cells of a stage's main figure: a policy's reward, an accuracy or a loss; None without any."""
    gains = [next(iter(gains_over_start({summary.stage: summary})), None) for summary in summaries]
    if (first := gains[0]) is not None:
        name, values = f"{first.name}, {first.start:.3g} at the start", [gain.end if gain else None for gain in gains]
    else:
        key = next((key for key in HEADLINES if key in summaries[0].metrics), None)
        if key is None:
            return None
        name, values = wording.metric(key), [summary.metrics.get(key) for summary in summaries]
    return name, "", *map(wording.number, values), mean_sd(values), ""


def _recorded(figure: Figure, value: float | None, summary: Summary | None) -> str:
    """Return what follows a seed's value: the recorded one, and whether it is the same to the last digit.

    "" if the record's `summary` lacks it.
    """
    old = next((target.measured for target in summary.targets if target.name == figure.name), None) if summary else None
    if old is None or value is None:
        return ""
    return f" (recorded {wording.number(old)}: {'equal' if value == old else f'different by {value - old:+.2g}'})"


def _row(
    stage: StageName | Literal["all"], figure: Figure, values: Sequence[float | None], verdicts: Sequence[Verdict]
) -> tuple[str, ...]:
    """Return the row of one figure."""
    range_text, verdict = figure_verdict(figure, values, verdicts)
    return (stage, figure.title, range_text, *map(wording.number, values), mean_sd(values), verdict)


def figure_verdict(figure: Figure, values: Sequence[float | None], verdicts: Sequence[Verdict]) -> tuple[str, str]:
    """Return what a figure asks of each seed and of their mean, and the verdict on the seeds and on the mean.

    The first is text such as `≥ 0.6; mean ≥ 0.62`; the second counts the seeds that reach the figure.
    """
    range_text = figure.text()
    if figure.range_of_mean:
        range_text += f"; mean {wording.span(*figure.range_of_mean)}"
    if all(verdict.word in OPEN for verdict in verdicts):
        return range_text, str(verdicts[0])
    verdict = published.count(verdicts)
    if None not in values and (figure.guide or figure.range_of_mean):
        mean = statistics.mean(value for value in values if value is not None)
        mean_figure = figure.model_copy(update={"range": figure.range_of_mean or figure.range})
        mean_verdict = verdict_of(mean_figure, mean)
        verdict += f", mean {mean_verdict if figure.guide else mean_verdict.word}"
    return range_text, verdict


def mean_sd(values: Sequence[float | None]) -> str:
    """Return `mean ± sd` of the finite values as text."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return "-"
    deviation = f" ± {wording.number(statistics.stdev(finite))}" if len(finite) > 1 else ""
    return wording.number(statistics.mean(finite)) + deviation
