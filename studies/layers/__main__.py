"""`python -m studies.layers`: what PPO learns with adapters in all layers or in the upper ones, and in how much time.

Runs whole chains of `rlhf run` with the lean trunk on the toy world of cpu-tiny, with a model of six layers. For each
seed one base serves all choices of `lora.layers`; SFT, reward model and PPO are trained with the same choice.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from statistics import mean

from typing_extensions import TypedDict

from bench import options
from bench.paths import ROOT
from bench.reading import read
from bench.steps import telemetry
from rlhf import recipe as recipes
from rlhf.cli import guarded
from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.process.children import child_environment
from rlhf.recipe import Changes
from rlhf.run.layout import METRICS
from rlhf.run.reader import read_lines
from rlhf.run.records import MetricsLine
from rlhf.terminal.screen import OUT
from studies import command
from studies.kinds import CurvePoint, LayersMeans, LayersRecord, LayersRun

RECIPE = ROOT / "recipes" / "cpu-tiny" / "v2"
# Six layers, so that a half and a third exist; narrower and with less data than the recipe, so that nine chains take
# half an hour.
CHANGES: Changes = {
    "model.architecture.num_hidden_layers": 6,
    "model.architecture.hidden_size": 48,
    "model.architecture.intermediate_size": 144,
    "data.toy.documents": 24_000,
    "rm.max_samples": 12_000,
    "ppo.eval_steps": 5,
    "hardware.trunk": "lean",
}
LAYERS = ("all", "upper_half", "upper_third")
PHASES = ("rollout", "score", "update")
SHARES = (0.3, 0.4, 0.5, 0.6)  # true gains, in standard deviations of SFT's samples
CHOSEN = ("true_reward_gain_sd", "score_gain_sd", "kl_per_token", "response_length", "eos_rate", "best_step")


def learning_curve(
    metrics: Sequence[Mapping[str, float]], telemetry: Sequence[Mapping[str, float]]
) -> list[CurvePoint]:
    """Return the evaluations of a PPO run from the rows of its metrics.jsonl and telemetry.jsonl."""
    spent = 0.0
    seconds: dict[float, float] = {}  # step -> CPU seconds until its end
    for row in telemetry:
        spent += sum(row[f"cpu/{phase}"] for phase in PHASES)
        seconds[row["step"]] = spent
    return [
        {
            "step": int(row["step"]),
            "seconds": seconds[row["step"]],
            "gain": row["eval/true_reward_gain_sd"],
            "kl": row["eval/kl_per_token"],
        }
        for row in metrics
        if "eval/true_reward_gain_sd" in row
    ]


def mean_curve(curves: Sequence[Sequence[CurvePoint]]) -> list[CurvePoint]:
    """Return the mean of curves with the same steps."""
    return [
        {
            "step": points[0]["step"],
            "seconds": mean(point["seconds"] for point in points),
            "gain": mean(point["gain"] for point in points),
            "kl": mean(point["kl"] for point in points),
        }
        for points in zip(*curves, strict=True)
    ]


def seconds_to_gain(curve: Sequence[CurvePoint], level: float) -> float | None:
    """Return the CPU seconds until a curve first reaches a gain, between evaluations on a straight line; or None."""
    seconds, gain = 0.0, 0.0
    for point in curve:
        if point["gain"] >= level:
            return seconds + (point["seconds"] - seconds) * (level - gain) / (point["gain"] - gain)
        seconds, gain = point["seconds"], point["gain"]
    return None


class StageRun(TypedDict):
    """The CPU seconds of a stage's process, loading and evaluation included, and its metrics."""

    cpu_seconds: float
    metrics: dict[str, float]


class _Summary(TypedDict):
    """The key of summary.json that is read."""

    metrics: dict[str, float | None]


def run_stage(stage: str, out: Path, parents: Path, changes: Changes, seed: int) -> StageRun:
    """Run one stage; return its metrics and the CPU seconds of its process, loading and evaluation included."""
    flags = [part for key, value in changes.items() for part in ("--set", f"{key}={recipes.as_yaml(value)}")]
    command = [sys.executable, "-m", "rlhf.cli", "run", stage, "--recipe", str(RECIPE), "--seed", str(seed)]
    command += ["--out", str(out), "--reuse", str(parents), *flags]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=child_environment())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # it is reaped: Popen need not wait
        errors.seek(0)
        if process.returncode:
            raise UserError(f"{stage}: {errors.read().strip()[-2000:]}")
    metrics = read(_folder(out, stage) / "summary.json", _Summary)["metrics"]
    known = {name: value for name, value in metrics.items() if value is not None}
    return {"cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2), "metrics": known}


def measure(layers: str, out: Path, parents: Path, seed: int, changes: Changes) -> LayersRun:
    """Train SFT, reward model and PPO with adapters in `layers`; return what they cost and learned."""
    stages = {
        stage: run_stage(stage, out, parents, {**changes, "lora.layers": layers}, seed)
        for stage in ("sft", "rm", "ppo")
    }
    steps = telemetry(_folder(out, "ppo"), ("step", *(f"cpu/{phase}" for phase in PHASES)))
    metrics = [line.plain() for line in read_lines(_folder(out, "ppo") / METRICS, MetricsLine)]
    curve = learning_curve(metrics, steps)
    return {
        "stage_cpu_seconds": {name: row["cpu_seconds"] for name, row in stages.items()},
        "reward_model_accuracy": stages["rm"]["metrics"]["accuracy"],
        "phase_cpu_seconds": {phase: round(sum(row[f"cpu/{phase}"] for row in steps), 3) for phase in PHASES},
        "ppo": {key: stages["ppo"]["metrics"][key] for key in CHOSEN},
        "curve": curve,
    }


def run_seed(seed: int, folder: Path, changes: Changes) -> dict[str, LayersRun]:
    """Pretrain the base of a seed; return `measure` of each choice of layers."""
    base = folder / f"{seed}-base"
    base.mkdir()
    run_stage("pretrain", base, base, changes, seed)
    rows: dict[str, LayersRun] = {}
    for layers in LAYERS:
        rows[layers] = measure(layers, folder / f"{seed}-{layers}", base, seed, changes)
        OUT.print(f"seed {seed}, {layers}: {json.dumps(rows[layers]['ppo'])}")
    return rows


def layer_means(runs: Mapping[str, Mapping[str, LayersRun]]) -> dict[str, LayersMeans]:
    """Return means over the seeds of each choice of layers: final figures, and the seconds to each gain."""
    summary: dict[str, LayersMeans] = {}
    for layers, seeds in runs.items():
        rows = list(seeds.values())
        curve = mean_curve([row["curve"] for row in rows])
        gains = [row["ppo"]["true_reward_gain_sd"] for row in rows]
        summary[layers] = {
            "true_gain": mean(gains),
            "true_gain_range": [min(gains), max(gains)],
            "kl_per_token": mean(row["ppo"]["kl_per_token"] for row in rows),
            "step_cpu_seconds": curve[-1]["seconds"] / curve[-1]["step"],
            "chain_cpu_seconds": mean(sum(row["stage_cpu_seconds"].values()) for row in rows),
            "curve": curve,
            "seconds_to_gain": {str(level): seconds_to_gain(curve, level) for level in SHARES},
        }
    return summary


def markdown(summary: Mapping[str, LayersMeans]) -> str:
    """Return the table of a record as README.md shows it."""
    levels = " | ".join(f"{level:g} sd" for level in SHARES)
    lines = [
        "| adapters in | true gain, sd (range) | KL, nats per token | CPU s per step | CPU s, SFT to PPO "
        f"| CPU s of steps to a gain of {levels} |",
        "|---|---|---|---|---|" + "---|" * len(SHARES),
    ]
    for layers, row in summary.items():
        low, high = row["true_gain_range"]
        reached = (row["seconds_to_gain"][str(level)] for level in SHARES)
        cells = [
            layers.replace("_", " "),
            f"{row['true_gain']:.2f} ({low:.2f} to {high:.2f})",
            f"{row['kl_per_token']:.3f}",
            f"{row['step_cpu_seconds']:.2f}",
            f"{row['chain_cpu_seconds']:.0f}",
            *("–" if seconds is None else f"{seconds:.1f}" for seconds in reached),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _folder(out: Path, stage: str) -> Path:
    return out / RECIPE.parent.name / RECIPE.name / stage


@options.command()
@command.SEEDS
@command.SET
@command.JOBS
@options.SAVE
def main(seeds: tuple[int, ...], more: tuple[str, ...], jobs: int, save: Path | None) -> None:
    """Train with adapters in all, the upper half and the upper third of six layers. Takes half an hour of CPU time."""
    changes = CHANGES | recipes.parse_overrides(more)
    origin = command.provenance(recipes.load(RECIPE), "layers", sys.argv[1:], changes)
    runs: dict[str, dict[str, LayersRun]] = {layers: {} for layers in LAYERS}
    with tempfile.TemporaryDirectory(prefix="rlhf-layers-") as folder, ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(run_seed, seed, Path(folder), changes): seed for seed in seeds}
        for done in as_completed(waiting):
            for layers, row in done.result().items():
                runs[layers][str(waiting[done])] = row
            record: LayersRecord = {**origin, "adapters_in": runs, "summary": layer_means(runs)}
            if save:
                write_json(save, record)  # after every seed, so that an interrupted run keeps what it has measured
    OUT.print(markdown(record["summary"]))


if __name__ == "__main__":
    guarded(main)
