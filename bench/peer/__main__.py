"""`make bench-peer`: one step of PPO, RLOO or GRPO here beside one of TRL's trainer, on the same model and prompts.

Both run in separate processes, in turn, several times; figures are medians over all measured steps. Ours is the
real stage: `rlhf run ppo`. TRL 1.12 is the last release with a PPOTrainer and lives in a separate environment; its
RLOOTrainer and GRPOTrainer are those of the release that this project uses. A second peer for PPO, torchtune, lives in
a separate environment, too; it trains all weights, which is different work.
"""

import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypedDict, cast

import click
import torch

from bench.clocks import Clock, clock_of
from bench.paths import ROOT
from bench.peer.inputs import BATCH, GROUP, SIZES, make_inputs
from rlhf.files import read_intact_lines, read_json, write_json
from rlhf.observe.console import OUT, rows_table
from rlhf.observe.telemetry import cpu_model
from rlhf.process.launching import child_environment
from rlhf.run.provenance import code_version

RECIPE = Path(__file__).parent / "recipe" / "v1"
TRL = "1.12.0"  # the last release with a PPOTrainer
# torchtune's last release and the last torchao with which it can be imported; what else it needs is left to pip.
TORCHTUNE = {"torchtune": "0.6.1", "torchao": "0.10.0"}


@dataclass(frozen=True)
class Method:
    """What is compared for one method: contenders by name."""

    ours: dict[str, dict[str, Any]]  # overrides of the recipe
    theirs: dict[str, list[str]]  # arguments of the script that runs TRL's trainer
    epochs: int
    torchtune: dict[str, list[str]] = field(
        default_factory=dict
    )  # arguments of the script that runs torchtune's recipe


LEAN = {"hardware.trunk": "lean"}
FORMS = {  # of each of our contenders for PPO
    "": {},
    ", lean trunk": LEAN,
    ", lean trunk, adapters in the upper half": LEAN | {"lora.layers": "upper_half"},
    ", lean trunk, adapters in the upper third": LEAN | {"lora.layers": "upper_third"},
}


def _without_critic(stage: str) -> Method:
    return Method(
        ours={
            "ours, activations kept": {},
            "ours, activations recomputed": {f"{stage}.gradient_checkpointing": "true"},
            "ours, lean trunk": LEAN,
            "ours, lean trunk, adapters in the upper half": LEAN | {"lora.layers": "upper_half"},
        },
        theirs={
            "TRL, activations kept": ["--method", stage],
            "TRL, activations recomputed": ["--method", stage, "--checkpointing"],
        },
        epochs=1,
    )


METHODS = {
    "ppo": Method(
        ours={
            f"ours, {critic}{form}": changes | more
            for critic, changes in {
                "critic with an adapter": {"ppo.old_logprobs": "recompute", "ppo.value_model": "adapter"},
                "value head on the policy": {},
            }.items()
            for form, more in FORMS.items()
        },
        theirs={"TRL, value model trained whole": [], "TRL, value model through LoRA": ["--lora-value"]},
        epochs=4,
        torchtune={"torchtune, policy and value model trained whole": []},
    ),
    "rloo": _without_critic("rloo"),
    "grpo": _without_critic("grpo"),
}
PHASES = ("rollout", "score", "update")
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    # What `rlhf` asks of glibc itself, for both sides: pages of freed tensors stay with the process.
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
}


class ContenderRun(TypedDict, total=False):
    """What one run of a contender prints; of one that does not fit only `out_of_memory`."""

    out_of_memory: bool
    wall: list[float]  # seconds of each counted step
    cpu: list[float]
    growth: int  # bytes of the peak above the loaded models
    phases: dict[str, float]  # median seconds, of ours


class Figures(TypedDict, total=False):
    """A contender's row in a record; of one that does not fit only `out_of_memory`. Ratios are to TRL's two."""

    out_of_memory: bool
    seconds_per_step: float
    seconds_range: list[float]
    clock: Clock
    samples_per_second: float
    peak_over_loaded_bytes: float
    steps_measured: int
    seconds_by_phase: dict[str, float]
    times_faster: list[float]
    memory_ratio: list[float]


class OutOfMemory(Exception):
    """A contender did not fit on the GPU: a result, not a failure."""


def peer_python(folder: Path) -> Path:
    """Return the interpreter of an environment that holds TRL 1.12 and otherwise the versions installed here."""
    return _environment(folder, {"trl": TRL}, ("torch", "transformers", "peft", "accelerate", "datasets"))


def torchtune_python(folder: Path) -> Path:
    """Return the interpreter of an environment that holds torchtune, and torch and transformers as installed here."""
    return _environment(folder, TORCHTUNE, ("torch", "transformers"))


def _environment(folder: Path, packages: Mapping[str, str], ours: Sequence[str]) -> Path:
    """Return the interpreter of an environment with `packages` and the versions installed here of `ours`; make it."""
    python = folder / "bin" / "python"
    check = "; ".join(f"assert version({name!r}) == {wanted!r}" for name, wanted in packages.items())
    check = f"from importlib.metadata import version; {check}; import {', '.join(packages)}"
    if not python.exists() or subprocess.run([str(python), "-c", check], capture_output=True).returncode:
        pins = [f"{name}=={wanted}" for name, wanted in packages.items()]
        OUT.print(f"installing {' and '.join(pins)} into {folder}; this takes minutes")
        venv.create(folder, with_pip=True, clear=True)
        # A local version, as 2.13.0+cpu, is not one that can be asked for.
        pins += [f"{name}=={version(name)}".split("+")[0] for name in ours]
        more = shlex.split(os.environ.get("PIP_ARGS", ""))
        subprocess.run([python, "-m", "pip", "install", "--quiet", *more, *pins], check=True)
    return python


def prepare_ours(method: str, inputs: Path, out: Path, changes: dict[str, Any], steps: int, micro: int) -> list[str]:
    """Train the parents of the stage; return the arguments with which `rlhf` runs the stage itself."""
    settings = read_json(inputs / "settings.json") or {}
    base = inputs / "base"
    sets = {
        "model.name": base,
        "tokenizer.name": base,
        "data.files": f"[{inputs / 'pairs.jsonl'}]",
        "model.dtype": settings["dtype"],
        "hardware.device": settings["device"],
        f"{method}.steps": steps + 1,
        f"{method}.per_device_train_batch_size": micro,
        **changes,
    }
    flags = [part for key, value in sets.items() for part in ("--set", f"{key}={value}")]
    chain = ["sft", "rm", "ppo"] if method == "ppo" else ["sft", method]
    *parents, last = [["run", stage, "--recipe", str(RECIPE), "--out", str(out), *flags] for stage in chain]
    for stage in parents:
        _call([sys.executable, "-m", "rlhf.cli", *stage, "--if-needed"])
    return last


def run_ours(method: str, inputs: Path, out: Path, changes: dict[str, Any], steps: int, micro: int) -> ContenderRun:
    """Run the stage once; return the same keys as TRL's script prints."""
    _call([sys.executable, "-m", "rlhf.cli", *prepare_ours(method, inputs, out, changes, steps, micro)])
    folder = out / "recipe" / "v1" / method
    rows = counted_steps(read_intact_lines(folder / "telemetry.jsonl"))
    summary = read_json(folder / "summary.json") or {}
    prefix = "cpu/" if (read_json(inputs / "settings.json") or {})["device"] == "cpu" else ""
    shutil.rmtree(folder)
    return {
        "wall": [row["total"] for row in rows],
        "cpu": [row["cpu/total"] for row in rows],
        "growth": summary["peak_over_loaded_bytes"],
        "phases": {name: statistics.median(row[prefix + name] for row in rows) for name in PHASES},
    }


def counted_steps(telemetry: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of the steps that count: the first warms up, and the last one also evaluates."""
    return telemetry[1:-1]


def floor(method: str, inputs: Path, out: Path, micro: int) -> dict[str, Any]:
    """Return the operations of each phase of a step with the lean trunk, and how many a second the device can do."""
    settings = read_json(inputs / "settings.json") or {}
    contender, changes = next((name, x) for name, x in METHODS[method].ours.items() if LEAN.items() <= x.items())
    arguments = prepare_ours(method, inputs, out, changes, 1, micro)
    printed = _call([sys.executable, "-m", "bench.peer.floor", settings["device"], settings["dtype"], "2", *arguments])
    return {"contender": contender, **json.loads(printed.splitlines()[-1])}


def run_trl(method: str, python: Path, inputs: Path, flags: list[str], steps: int, micro: int) -> ContenderRun:
    return _run_script("trl_ppo.py" if method == "ppo" else "trl_groups.py", python, inputs, flags, steps, micro)


def run_torchtune(python: Path, inputs: Path, flags: list[str], steps: int, micro: int) -> ContenderRun:
    return _run_script("torchtune_ppo.py", python, inputs, flags, steps, micro)


def _run_script(name: str, python: Path, inputs: Path, flags: list[str], steps: int, micro: int) -> ContenderRun:
    script = Path(__file__).with_name(name)
    printed = _call([str(python), str(script), str(inputs), "--steps", str(steps), "--micro", str(micro), *flags])
    return cast(ContenderRun, json.loads(printed.splitlines()[-1]))


def _call(command: list[str]) -> str:
    environment = child_environment(**ENVIRONMENT)
    if not command[1].startswith("-"):  # a script: it finds our modules, and its environment's packages stay its own
        environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if "CUDA out of memory" in done.stderr:
        raise OutOfMemory
    if done.returncode:
        raise click.ClickException(f"{' '.join(command[:6])} …\n{done.stderr[-2000:]}")
    return done.stdout


def attempt(run: Callable[[], ContenderRun]) -> ContenderRun:
    try:
        return run()
    except OutOfMemory:
        return {"out_of_memory": True}


def contender_figures(method: Method, runs: Mapping[str, Sequence[ContenderRun]], clock: Clock) -> dict[str, Figures]:
    """Return the medians over all measured steps of each contender, and the ratios to both of TRL's.

    `clock`: cpu, whose seconds other processes disturb least, or on a GPU wall.
    """
    figures: dict[str, Figures] = {}
    for name, parts in runs.items():
        if any(part.get("out_of_memory") for part in parts):
            figures[name] = {"out_of_memory": True}
            continue
        seconds = [x for part in parts for x in part[clock]]
        wall = statistics.median(x for part in parts for x in part["wall"])
        figures[name] = {
            "seconds_per_step": statistics.median(seconds),
            "seconds_range": [min(seconds), max(seconds)],
            "clock": clock,
            "samples_per_second": BATCH / wall,
            "peak_over_loaded_bytes": statistics.median(part["growth"] for part in parts),
            "steps_measured": len(seconds),
        }
        if "phases" in parts[0]:
            figures[name]["seconds_by_phase"] = {
                phase: statistics.median(part["phases"][phase] for part in parts) for phase in PHASES
            }
    for row in figures.values():
        others = [figures[name] for name in method.theirs]
        if row.get("out_of_memory") or any(other.get("out_of_memory") for other in others):
            continue
        row["times_faster"] = [other["seconds_per_step"] / row["seconds_per_step"] for other in others]
        row["memory_ratio"] = [row["peak_over_loaded_bytes"] / other["peak_over_loaded_bytes"] for other in others]
    return figures


@click.command()
@click.option("--method", type=click.Choice(list(METHODS)), default="ppo", show_default=True)
@click.option("--size", type=click.Choice(list(SIZES)), default="tiny", show_default=True)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Runs of each contender, in turn.")
@click.option("--steps", default=3, show_default=True, help="Steps of a run; the first is not measured.")
@click.option("--micro", default=8, show_default=True, help="Rows of a micro-batch, on both sides.")
@click.option("--work", type=click.Path(path_type=Path), default=ROOT / ".bench" / "peer", help="Scratch folder.")
@click.option(
    "--peer", type=click.Path(path_type=Path), default=ROOT / ".venv-trl-1.12", help="Environment for TRL 1.12."
)
@click.option(
    "--torchtune",
    type=click.Path(path_type=Path),
    default=ROOT / ".venv-torchtune-0.6",
    help="Environment for torchtune.",
)
@click.option("--save", type=click.Path(path_type=Path), help="Write the figures to this JSON file.")
def main(
    method: str,
    size: str,
    device: str,
    repeats: int,
    steps: int,
    micro: int,
    work: Path,
    peer: Path,
    torchtune: Path,
    save: Path | None,
) -> None:
    """Compare one step of PPO, RLOO or GRPO with TRL's, interleaved."""
    if save and code_version()["dirty"]:
        raise click.ClickException("--save: the code differs from its commit; a result must name what it was made by")
    contenders = METHODS[method]
    python = peer_python(peer) if method == "ppo" else Path(sys.executable)
    second = torchtune_python(torchtune) if contenders.torchtune else python
    shutil.rmtree(work, ignore_errors=True)
    inputs = work / "inputs"
    inputs.mkdir(parents=True)
    # in a separate process, which gives the GPU back
    maker = get_context("spawn").Process(target=make_inputs, args=(inputs, size, device, steps))
    maker.start()
    maker.join()
    if maker.exitcode:
        raise click.ClickException("the inputs could not be made")
    names = (*contenders.theirs, *contenders.torchtune, *contenders.ours)
    runs: dict[str, list[ContenderRun]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name, flags in contenders.theirs.items():
            runs[name].append(attempt(partial(run_trl, method, python, inputs, flags, steps, micro)))
        for name, flags in contenders.torchtune.items():
            runs[name].append(attempt(partial(run_torchtune, second, inputs, flags, steps, micro)))
        for name, changes in contenders.ours.items():
            out = work / f"ours-{changes.get('lora.layers', 'all')}"  # their SFT and reward model are the same
            runs[name].append(attempt(partial(run_ours, method, inputs, out, changes, steps, micro)))
        OUT.print(f"round {repeat + 1} of {repeats} done")
    figures = contender_figures(contenders, runs, "wall" if device == "cuda" else "cpu")
    limit = floor(method, inputs, work / "floor", micro)
    columns = (
        "",
        f"{clock_of(figures.values())} s/step",
        "samples/s",
        "MiB above loaded",
        "times faster",
        "memory ratio",
    )
    title = f"one {method.upper()} step, medians; ratios to TRL's two"
    rows_table(title, columns, [_row(n, row) for n, row in figures.items()])
    record = {**provenance(method, size, device, micro, repeats), "figures": figures, "floor": limit}
    OUT.print(phases_table(record), markup=False)
    if save:
        write_json(save, record)
        OUT.print(f"written to {save}")


def provenance(method: str, size: str, device: str, micro: int, repeats: int) -> dict[str, Any]:
    """Return what the figures were measured with."""
    packages = ("torch", "transformers", "peft", "accelerate", "datasets")
    return {
        "date": date.today().isoformat(),
        "code": code_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{cpu_model()}, 1 thread",
        "model": SIZES[size] | {"dtype": "bfloat16" if device == "cuda" else "float32", "weights": "random"},
        "method": method,
        "batch": BATCH,
        **({} if method == "ppo" else {"group": GROUP}),
        "prompt_tokens": [48, 80],
        "new_tokens": 64,
        "epochs": METHODS[method].epochs,
        "micro_batch": micro,
        "repeats": repeats,
        "peer": f"trl {TRL if method == 'ppo' else version('trl')}",
        **({"second_peer": TORCHTUNE} if METHODS[method].torchtune else {}),
        "packages": {name: version(name) for name in packages} | {"trl (ours)": version("trl")},
    }


def markdown(record: dict[str, Any]) -> str:
    """Return the figures as docs/speed.md shows them."""
    clock = clock_of(record["figures"].values())
    lines = [
        f"On {record['device']}, {record['date']}, commit `{record['code']['commit'][:8]}`; median over "
        f"all measured steps of {record['repeats']} runs each, in turn:",
        "",
        f"| | {clock} seconds per step (range) | samples/s | peak above the loaded models "
        "| times faster than TRL's two | memory, of TRL's two |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in record["figures"].items():
        cells = _row(name, row)
        if "seconds_range" in row:
            low, high = row["seconds_range"]
            cells = (name, f"{cells[1]} ({low:.2f} to {high:.2f})", cells[2], f"{cells[3]} MiB", *cells[4:])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def phases_table(record: dict[str, Any]) -> str:
    """Return where a step of the floor's contender goes, and what each part reaches, as docs/speed.md shows it."""
    limit = record["floor"]
    ours = [name for name, row in record["figures"].items() if "seconds_by_phase" in row]
    contender = limit.get("contender", ours[0] if ours else None)  # records before it was named took the first
    seconds: dict[str, float] = record["figures"][contender]["seconds_by_phase"] if contender in ours else {}
    total = sum(seconds.values())
    lines = [
        f"| phase | seconds | share | GFLOP | seconds at {limit['flops_per_second'] / 1e9:.0f} GFLOP/s | reached |",
        "|---|---|---|---|---|---|",
    ]
    for phase, spent in seconds.items():
        flops = limit["flops_per_step"][phase]
        least = flops / limit["flops_per_second"]
        lines.append(
            f"| {phase} | {spent:.2f} | {spent / total:.0%} | {flops / 1e9:.0f} | {least:.2f} | {least / spent:.0%} |"
        )
    return "\n".join(lines)


def _row(name: str, row: Figures) -> tuple[str, ...]:
    if row.get("out_of_memory"):
        return (name, "out of memory", "", "", "", "")
    return (
        name,
        f"{row['seconds_per_step']:.2f}",
        f"{row['samples_per_second']:.2f}",
        f"{row['peak_over_loaded_bytes'] / 2**20:.0f}",
        ", ".join(f"{ratio:.2f}" for ratio in row.get("times_faster", [])),
        ", ".join(f"{ratio:.2f}" for ratio in row.get("memory_ratio", [])),
    )


if __name__ == "__main__":
    main()
