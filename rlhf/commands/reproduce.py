"""Runs of a recipe with several seeds, in fresh processes, and the table of their results."""

import math
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.process import children
from rlhf.recipe import STAGES, TRAINING_STAGES, PinnedRecipe, StageName, no_section, parents, published
from rlhf.recipe.published import NOT_COMPARABLE, NOT_MEASURED, Figure, Verdict, verdict_of
from rlhf.run import reader
from rlhf.run.finished import read_manifest, read_summary, totals
from rlhf.run.outcomes import Reproduction
from rlhf.run.records import Summary
from rlhf.terminal import say, wording


def chain(loaded: PinnedRecipe, until: Sequence[StageName]) -> list[StageName]:
    """Return the stages of a recipe that lead to `until`, in order. Raises UserError for one that it does not have."""
    if absent := next((stage for stage in until if loaded.recipe.section(stage) is None), None):
        raise UserError(no_section(absent, loaded))
    needed = {*until, *(parent for stage in until for parent in parents(loaded.recipe, stage))}
    return [stage for stage in STAGES if stage in needed]


def final_stages(loaded: PinnedRecipe) -> list[StageName]:
    """Return the stages that train, and evaluate if one of the recipe's figures is about it."""
    stages: list[StageName] = [stage for stage in TRAINING_STAGES if loaded.recipe.section(stage) is not None]
    if any(figure.stage == "evaluate" for figure in loaded.figures):
        stages.append("evaluate")
    return stages


def runs_root(out: Path, seed: int) -> Path:
    """Return the runs root of one seed."""
    return out / f"seed-{seed}"


def run_seeds(stages: Sequence[StageName], seeds: Sequence[int], out: Path, options: Sequence[str]) -> None:
    """Run `rlhf run` for every seed and stage. Finished stages are kept and interrupted ones are resumed.

    Exits with the exit code of a stage that fails.
    """
    for seed in seeds:
        for stage in stages:
            arguments = [
                "run",
                stage,
                "--if-needed",
                "--resume",
                "--seed",
                str(seed),
                "--out",
                str(runs_root(out, seed)),
            ]
            code = children.run_child([sys.executable, "-m", "rlhf.cli", *arguments, *options])
            if code:
                command_line = shlex.join(["rlhf", *arguments, *options])
                say(
                    f"error: seed {seed} stopped in {stage}; solve the problem and repeat this command, which "
                    f"continues from the last checkpoint (that stage alone: {command_line})"
                )
                sys.exit(code)


def write_record(
    loaded: PinnedRecipe, stages: Sequence[StageName], seeds: Sequence[int], out: Path, price: float | None = None
) -> Reproduction:
    """Return the record of a reproduction: every seed's summaries with the code and device that they come from.

    It is written to `<out>/<recipe>-<version>.json`. `price` is in dollars per hour of one card. Raises UserError if
    not all stages were run by the same code, packages and device.
    """
    folders = {seed: runs_root(out, seed) / loaded.name / loaded.version for seed in seeds}
    manifests = [read_manifest(folder / stage) for folder in folders.values() for stage in stages]
    measured_on = [{key: m.plain().get(key) for key in ("code", "packages", "python", "device")} for m in manifests]
    if any(setup != measured_on[0] for setup in measured_on):
        raise UserError(f"{out}: not all stages were run by the same code, packages and device; choose another --out")
    content = {
        "recipe": loaded.name,
        "version": loaded.version,
        "recipe_sha256": loaded.sha256,
        "released_sha256": loaded.released_sha256,
        "modified": loaded.modified,
        **measured_on[0],
        "price_per_hour": price,
        "seeds": {
            str(seed): {stage: _summary(folder / stage).plain() for stage in stages} for seed, folder in folders.items()
        },
    }
    write_json(out / f"{loaded.name}-{loaded.version}.json", content)
    return Reproduction.model_validate(content)


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
    sha256, edited = reproduction.recipe_sha256[:12], reproduction.edited()
    measured = (
        f"Measured by `rlhf reproduce`: recipe {reproduction.recipe} {reproduction.version} "
        f"({edited or sha256}), {reproduction.device.text()}, commit "
        f"{(reproduction.code.commit or 'unknown')[:12]}, torch {packages.torch}, "
        f"transformers {packages.transformers}, trl {packages.trl}, peft {packages.peft}."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + f"\n\n{measured}\n"


def rows(seeds: Mapping[str, Mapping[str, Summary]], price: float | None = None) -> list[tuple[str, ...]]:
    """Return the rows of the table of every seed's summaries by stage, the header first.

    `price` is in dollars per hour of one card.

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
            table.append(_row(stage, figure, values, [verdict_of(figure, value) for value in values]))
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
    if all(verdict.word in (NOT_COMPARABLE, NOT_MEASURED) for verdict in verdicts):
        return range_text, str(verdicts[0])
    verdict = published.count(verdicts)
    if None not in values and (figure.guide or figure.range_of_mean):
        mean = statistics.mean(value for value in values if value is not None)
        mean_figure = figure.model_copy(update={"range": figure.range_of_mean or figure.range})
        mean_verdict = verdict_of(mean_figure, mean)
        verdict += f", mean {mean_verdict.with_distance if figure.guide and mean_verdict.detail else mean_verdict.word}"
    return range_text, verdict


def mean_sd(values: Sequence[float | None]) -> str:
    """Return `mean ± sd` of the finite values as text."""
    finite = [value for value in values if value is not None and math.isfinite(value)]
    if not finite:
        return "-"
    deviation = f" ± {wording.number(statistics.stdev(finite))}" if len(finite) > 1 else ""
    return wording.number(statistics.mean(finite)) + deviation
