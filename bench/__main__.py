"""`python -m bench`: time and memory of each stage of a recipe, compared with published figures and the last record."""

import datetime
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bench import compare, goals, options, steps
from bench.clocks import clock_of
from bench.paths import RESULTS
from bench.steps import StageSteps
from rlhf.cli import guarded
from rlhf.cli.options import PRICE
from rlhf.files import read_json, write_json
from rlhf.memory import projection
from rlhf.memory.phases import PredictedStage
from rlhf.memory.predict import Predictor
from rlhf.observe import console
from rlhf.recipe import PinnedRecipe, StageName, published
from rlhf.recipe.choices import LengthsShape
from rlhf.recipe.published import Figure, Spent, Verdict
from rlhf.run.provenance import code_version
from rlhf.run.reader import reading


@click.command()
@options.HW
@options.RECIPE
@click.option(
    "--stage",
    "stages",
    multiple=True,
    type=click.Choice(steps.STAGES),
    help="Measure only these stages. [default: all]",
)
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key; such a record is not saved.")
@click.option("--steps", "count", default=8, show_default=True, type=click.IntRange(min=2), help="Steps after warm-up.")
@click.option("--shape", default="hh", show_default=True, type=click.Choice(["hh", "longest"]), help="Length of rows.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the record there, as JSON.")
@click.option(
    "--save", is_flag=True, help="Put the record into results/; needs committed code and an unchanged recipe."
)
@PRICE
def main(
    hw: str,
    directory: Path | None,
    stages: tuple[StageName, ...],
    changes: tuple[str, ...],
    count: int,
    shape: LengthsShape,
    out: Path | None,
    save: bool,
    price: float | None,
) -> None:
    """Take a few real steps of each stage on random weights and compare what they cost with what is published.

    Exit code 1: a cost is worse than every figure that is published for it, or has grown since the last record.
    """
    loaded = options.load(hw, directory, changes)
    if save and (loaded.modified or code_version()["dirty"] is not False):
        raise click.ClickException(
            "only an unchanged recipe and committed code make a record: commit first, or leave out --save"
        )
    record = measure(loaded, stages or steps.STAGES, count, shape)
    title = f"{loaded.name} {loaded.version} on {record['device']['name']}"
    console.rows_table(title, stage_columns(record), stage_rows(record))
    compared = comparisons(loaded, record, price)
    problems = [*out_of_memory(record), *worse(compared)]
    if compared:
        title = "published figures; hours and cost are projected"
        console.rows_table(title, ("stage", "figure", "published", "here", "verdict"), figure_rows(compared))
    if goal_rows := goals.rows(record):
        console.rows_table("goals, reached at a ratio of 1", ("", "goal", "measured", "ratio"), goal_rows)
    console.OUT.print(NOTE, style="dim", markup=False)
    previous = newest(loaded, record)
    if previous is not None:
        problems += [f"since {previous['date']}: {line}" for line in compare.losses(previous, record)]
    elif not loaded.modified:
        print(
            f"no record of this machine ({compare.machine(record)}) in {folder_of(record)}: nothing was compared with "
            "an earlier benchmark; BENCH_ARGS=--save stores this one",
            file=sys.stderr,
        )
    if out:
        write_json(out, record)
    if save:
        file = folder_of(record) / f"{record['date']}_{record['code']['commit'][:8]}_{shape}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, record)
        console.OUT.print(f"written to {file}", style="dim", markup=False)
    for line in problems:
        print(line, file=sys.stderr)
    sys.exit(bool(problems))


NOTE = (
    "step: median after the warm-up. CPU s: of all threads of the process. tokens: real ones. MFU: operations of the "
    "longest rows, without those that checkpointing repeats, over the rate of a measured product (HFU, in the record: "
    "with them); MBU: what decoding must read over a measured copy's (both with --shape longest). hours: the measured "
    "step times the recipe's steps, projected."
)


def measure(loaded: PinnedRecipe, stages: tuple[StageName, ...], count: int, shape: LengthsShape) -> dict[str, Any]:
    """Run a benchmark. Return its record: provenance, limits of the device, time and memory of each stage."""
    with console.quiet_libraries():
        import torch

        from bench.ceilings import ceilings
        from rlhf.observe.telemetry import device_facts
        from rlhf.process.torch_setup import device_of

    device = device_of(loaded.recipe)
    if loaded.recipe.hardware.threads:
        torch.set_num_threads(loaded.recipe.hardware.threads)
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as folder:
        with console.working("measuring what the device can do"):
            best = ceilings(device, getattr(torch, loaded.recipe.model.dtype))
        with console.working(f"taking {steps.WARM_UP + count} steps of {', '.join(stages)}"):
            measured = steps.measure(loaded, stages, Path(folder), steps=count, shape=shape)
        manifest = read_json(next(Path(folder).glob("*/*/*/manifest.json"))) or {}
    record: dict[str, Any] = {
        "recipe": loaded.name,
        "version": loaded.version,
        "recipe_sha256": loaded.sha256,
        "modified": loaded.modified,
        "date": datetime.date.today().isoformat(),
        "shape": shape,
        "steps": count,
        "code": code_version(),
        "packages": manifest["packages"],
        "python": manifest["python"],
        "device": device_facts(device),
        "ceilings": best,
        "stages": measured,
    }
    with Predictor() as predict:
        for stage, row in measured.items():
            row |= derived_figures(loaded, stage, row, predict(loaded, stage), best, shape)
    return record


def derived_figures(
    loaded: PinnedRecipe,
    stage: StageName,
    row: StageSteps,
    predicted: PredictedStage,
    best: Mapping[str, float],
    shape: LengthsShape,
) -> StageSteps:
    """Return MFU, HFU, MBU, predicted peak and projected hours of a stage's steps; None for what is unknown."""
    shares: StageSteps = {"mfu": None, "hfu": None, "mbu": None, "hours": None}
    shares["predicted_peak_bytes"] = predicted[""].peak_bytes
    if row.get("out_of_memory"):
        return shares
    if shape == "longest":  # operations are known for the longest rows
        shares["mfu"], shares["hfu"] = (
            _rate(row, projection.step_flops(loaded.recipe, stage, predicted, of_model)) / best["flops"]
            for of_model in (True, False)
        )
        if stage == "ppo":
            ppo = loaded.recipe.ppo
            decoded = (ppo.response_length - 1) * -(-ppo.batch_size // ppo.rollout_batch_size)
            bytes_read = decoded * projection.decoding_bytes(loaded.recipe, predicted)
            shares["mbu"] = bytes_read / row["phase_seconds"]["rollout/decode"]["median"] / best["bandwidth"]
    total = projection.optimizer_steps(loaded.recipe, stage)
    if total is not None:
        shares["hours"] = total * row["step_seconds"]["median"] / 3600
    return shares


def _rate(row: StageSteps, flops: Mapping[str, float]) -> float:
    """Return the operations per second of all phases but decoding."""
    dense = {phase: n for phase, n in flops.items() if phase != "rollout/decode"}
    return sum(dense.values()) / sum(row["phase_seconds"][phase]["median"] for phase in dense)


def stage_columns(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the headings of `stage_rows`; they name the clock of the seconds."""
    clock = clock_of(record["stages"].values())
    return ("stage", f"step, {clock} s", f"tokens/{clock} s", "MFU", "MBU", "peak, GB", "predicted", f"{clock} hours")


def stage_rows(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a table row for each stage."""
    rows = []
    stages: Mapping[StageName, StageSteps] = record["stages"]
    for stage, row in stages.items():
        predicted = f"{row['predicted_peak_bytes'] / 1e9:.2f}"
        if row.get("out_of_memory"):
            rows.append((stage, *["-"] * 4, "OUT OF MEMORY", predicted, "-"))
            continue
        vram, time = row["peak_vram_bytes"], row["step_seconds"]
        rows.append(
            (
                stage,
                f"{time['median']:.3g} [{time['low']:.3g}, {time['high']:.3g}]",
                f"{row['tokens_per_second']:,.0f}",
                share(row["mfu"]),
                share(row["mbu"]),
                f"{vram / 1e9:.2f}" if vram else f"{row['peak_rss_bytes'] / 1e9:.2f} (process)",
                predicted,
                f"{row['hours']:.2f}" if row["hours"] is not None else "-",
            )
        )
    return rows


Compared = tuple[Figure, float | None, Verdict]


def comparisons(loaded: PinnedRecipe, record: Mapping[str, Any], price: float | None = None) -> list[Compared]:
    """Compare every published cost of the measured stages, then those of all stages together.

    Hours and dollars are projected from the measured steps. `price` is in dollars per hour of one card.
    """
    stages: Mapping[StageName, StageSteps] = record["stages"]
    measured = {stage: row for stage, row in stages.items() if not row.get("out_of_memory")}
    spent: dict[str, Spent] = {
        stage: Spent(
            row["peak_vram_bytes"] / published.GB if row["peak_vram_bytes"] else None,
            row["hours"],
            loaded.recipe.processes(stage),
        )
        for stage, row in measured.items()
    }
    comparisons: list[Compared] = []
    for figure in loaded.targets:
        if not published.is_cost(figure.metric):
            continue
        if figure.stage == "all":
            comparisons.append((figure, *published.compare_total(figure, spent, price)))
        elif figure.stage in measured:
            value = costs(measured[figure.stage]).get(figure.metric or "")
            comparisons.append((figure, value, published.verdict_of(figure, value)))
    return sorted(comparisons, key=lambda compared: compared[0].stage == "all")


def costs(row: StageSteps) -> dict[str, float]:
    """Return the costs of a stage's measured steps, by the metric of a published figure."""
    by_metric = {
        f"component_gb.{name}": size / published.GB for name, size in (row.get("component_bytes") or {}).items()
    }
    for metric, size in (("peak_vram_gb", row["peak_vram_bytes"]), ("adapter_gb", row.get("adapter_bytes"))):
        if size:
            by_metric[metric] = size / published.GB
    return by_metric if row["hours"] is None else by_metric | {"hours": row["hours"]}


def figure_rows(compared: Sequence[Compared]) -> list[tuple[str, ...]]:
    """Return a table row for each comparison: stage, figure with its heading, published, here, verdict."""
    return [
        (figure.stage, figure.title, console.figure_text(figure), console.number(value), str(verdict))
        for figure, value, verdict in compared
    ]


def worse(compared: Sequence[Compared]) -> Iterator[str]:
    """Yield a line for each cost that is worse than every figure published for it.

    A guide may publish several figures for one cost that disagree; a cost that reproduces one of them is not worse.
    """
    by_cost: dict[tuple[str, str | None], list[Compared]] = {}
    for row in compared:
        by_cost.setdefault((row[0].stage, row[0].metric), []).append(row)
    for (stage, metric), rows in by_cost.items():
        if published.best(verdict.word for *_, verdict in rows) in published.BAD:
            listing = "; ".join(
                f"{verdict} than {figure.title}, {console.figure_text(figure)}" for figure, _, verdict in rows
            )
            yield f"{stage}: {metric} {rows[0][1]:.3g} is {listing}"


def out_of_memory(record: Mapping[str, Any]) -> list[str]:
    return [f"{stage}: out of memory" for stage, row in record["stages"].items() if row.get("out_of_memory")]


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def folder_of(record: Mapping[str, Any]) -> Path:
    device: str = record["device"]["name"].lower().replace(" ", "-")
    return Path(RESULTS, record["recipe"], record["version"], device, "bench")


def newest(loaded: PinnedRecipe, record: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the last stored record of the same machine, recipe and shape. None for a changed recipe."""
    if loaded.modified:
        return None
    files = sorted(folder_of(record).glob(f"*_{record['shape']}.json"))
    for file in reversed(files):
        with reading(file):
            stored: dict[str, Any] = json.loads(file.read_text())
            if compare.machine(stored) == compare.machine(record):
                return stored
    return None


if __name__ == "__main__":
    guarded(main)
