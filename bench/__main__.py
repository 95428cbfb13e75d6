"""`python -m bench`: what each stage of a recipe costs here, against published budgets and the last record."""

import datetime
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from bench import compare, goals, steps
from rlhf import console, recipe
from rlhf.cli import guarded
from rlhf.memory import projection
from rlhf.memory.predict import Predictor, Stage
from rlhf.recipe import Loaded
from rlhf.run import code_version, inside, read_json, write_json

ROOT = Path(__file__).parents[1]


@click.command()
@click.option("--hw", metavar="NAME", default="cpu", show_default=True, help="Hardware: its default recipe.")
@click.option("--recipe", "directory", type=click.Path(path_type=Path), help="A recipe's folder, instead.")
@click.option("--stage", "stages", multiple=True, type=click.Choice(steps.STAGES), help="Only these; default: all.")
@click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key; such a record is not saved.")
@click.option("--steps", "count", default=8, show_default=True, type=click.IntRange(min=2), help="Steps after warm-up.")
@click.option("--shape", default="hh", show_default=True, type=click.Choice(["hh", "longest"]), help="Length of rows.")
@click.option("--out", type=click.Path(path_type=Path), help="Also write the record there, as JSON.")
@click.option(
    "--save", is_flag=True, help="Put the record into results/; needs committed code and an unchanged recipe."
)
def main(
    hw: str,
    directory: Path | None,
    stages: tuple[str, ...],
    changes: tuple[str, ...],
    count: int,
    shape: str,
    out: Path | None,
    save: bool,
) -> None:
    """Take a few real steps of each stage on random weights and say what they cost."""
    loaded = recipe.load(directory or recipe.resolve(hw, ROOT / "recipes"), recipe.parse_overrides(changes))
    if save and (loaded.modified or code_version()["dirty"] is not False):
        raise click.ClickException(
            "only an unchanged recipe and committed code make a record: commit first, or leave out --save"
        )
    record = measure(loaded, stages or steps.STAGES, count, shape)
    rows, broken = budgets(loaded, record)
    columns = (
        "stage",
        "step, s",
        "tokens/s",
        "MFU",
        "MBU",
        "peak, GB",
        "predicted",
        "published",
        "hours",
        "published",
        "",
    )
    console.rows_table(f"{loaded.name} {loaded.version} on {record['device']['name']}", columns, rows)
    if held := goals.rows(record):
        console.rows_table("goals, reached at a ratio of 1", ("", "goal", "measured", "ratio"), held)
    console.OUT.print(NOTE, style="dim", markup=False)
    last = newest(loaded, record)
    if last is not None:
        broken += [f"since {last['date']}: {line}" for line in compare.losses(last, record)]
    if out:
        write_json(out, record)
    if save:
        file = folder_of(record) / f"{record['date']}_{record['code']['commit'][:8]}_{shape}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, record)
        console.OUT.print(f"written to {file}", style="dim", markup=False)
    for line in broken:
        print(line, file=sys.stderr)
    sys.exit(bool(broken))


NOTE = (
    "step: median after the warm-up. tokens/s: real tokens. MFU: operations of the longest rows, with those that "
    "gradient checkpointing repeats (else called HFU), over the rate of a measured product; MBU: what decoding must "
    "read over a measured copy's (both with --shape longest). hours: the measured step times the recipe's steps, "
    "projected."
)


def measure(loaded: Loaded, stages: tuple[str, ...], count: int, shape: str) -> dict[str, Any]:
    """The record of one benchmark: provenance, ceilings of the device, and what each stage took."""
    with console.quiet_libraries():
        import torch

        from bench.ceilings import ceilings
        from rlhf.models.loading import device_of
        from rlhf.telemetry import device_facts

    device = device_of(loaded.recipe)
    if loaded.recipe.hardware.threads:
        torch.set_num_threads(loaded.recipe.hardware.threads)
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as folder:
        with console.working("measuring what the device can do"):
            best = ceilings(device, getattr(torch, loaded.recipe.model.dtype))
        with console.working(f"taking {steps.WARM_UP + count} steps of {', '.join(stages)}"):
            found = steps.measure(loaded, stages, Path(folder), steps=count, shape=shape)
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
        "stages": found,
    }
    with Predictor() as predict:
        for stage, row in found.items():
            row |= derived(loaded, stage, row, predict(loaded, stage), best, shape)
    return record


def derived(
    loaded: Loaded, stage: str, row: Mapping[str, Any], predicted: Stage, best: Mapping[str, float], shape: str
) -> dict[str, Any]:
    """MFU, MBU, predicted peak and projected hours of a stage's measured steps; None where they cannot be told."""
    found: dict[str, Any] = {"mfu": None, "mbu": None, "hours": None, "predicted_peak_bytes": predicted[""].peak_bytes}
    if row.get("out_of_memory"):
        return found
    if shape == "longest":  # operations are known for the longest rows
        flops = projection.step_flops(loaded.recipe, stage, predicted)
        dense = {phase: n for phase, n in flops.items() if phase != "rollout/decode"}
        seconds = sum(row["phase_seconds"][phase]["median"] for phase in dense)
        found["mfu"] = sum(dense.values()) / seconds / best["flops"]
        if stage == "ppo":
            ppo = loaded.recipe.ppo
            decoded = (ppo.response_length - 1) * -(-ppo.batch_size // ppo.rollout_batch_size)
            read = decoded * projection.decoding_bytes(loaded.recipe, predicted)
            found["mbu"] = read / row["phase_seconds"]["rollout/decode"]["median"] / best["bandwidth"]
    total = projection.optimizer_steps(loaded.recipe, stage)
    if total is not None:
        found["hours"] = total * row["step_seconds"]["median"] / 3600
    return found


def budgets(loaded: Loaded, record: Mapping[str, Any]) -> tuple[list[tuple[str, ...]], list[str]]:
    """A table row for each stage, and a line for each published budget that is broken."""
    rows: list[tuple[str, ...]] = []
    broken = []
    for stage, row in record["stages"].items():
        targets = {t.metric: t for t in loaded.targets if t.stage == stage and t.metric in ("peak_vram_gb", "hours")}
        predicted = f"{row['predicted_peak_bytes'] / 1e9:.2f}"
        if row.get("out_of_memory"):
            rows.append((stage, *["-"] * 4, "out of memory", predicted, "", "-", "", "OUT OF MEMORY"))
            broken.append(f"{stage}: out of memory")
            continue
        vram = row["peak_vram_bytes"]
        values = {"peak_vram_gb": vram / 1e9 if vram else None, "hours": row["hours"]}
        over = [
            f"{name} {values[name]:.3g} is over {t.limits[1]:g}"
            for name, t in targets.items()
            if name and values[name] is not None and not inside(values[name], t.limits)
        ]
        broken += [f"{stage}: {line}" for line in over]
        peak = f"{vram / 1e9:.2f}" if vram else f"{row['peak_rss_bytes'] / 1e9:.2f} (process)"
        time = row["step_seconds"]
        shown = [console.span(*targets[name].range) if name in targets else "-" for name in ("peak_vram_gb", "hours")]
        rows.append(
            (
                stage,
                f"{time['median']:.3g} [{time['low']:.3g}, {time['high']:.3g}]",
                f"{row['tokens_per_second']:,.0f}",
                share(row["mfu"]),
                share(row["mbu"]),
                peak,
                predicted,
                shown[0],
                f"{row['hours']:.2f}" if row["hours"] is not None else "-",
                shown[1],
                "OVER" if over else "within" if targets and vram else "",
            )
        )
    return rows, broken


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def folder_of(record: Mapping[str, Any]) -> Path:
    device = record["device"]["name"].lower().replace(" ", "-")
    return ROOT / "results" / record["recipe"] / record["version"] / device / "bench"


def newest(loaded: Loaded, record: Mapping[str, Any]) -> dict[str, Any] | None:
    """The last stored record of the same device, recipe and shape; None for a changed recipe, which has none."""
    files = sorted(folder_of(record).glob(f"*_{record['shape']}.json"))
    return json.loads(files[-1].read_text()) if files and not loaded.modified else None


if __name__ == "__main__":
    guarded(main)
