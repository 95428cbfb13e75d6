"""`python -m bench.peer`: a few steps of a stage here, and in the trainers of TRL and torchtune.

Both sides train adapters of the same shape on the same weights and rows, with the recipe's batches and lengths. All
else of TRL's is its default; once more it is tuned as a careful user would. Ours is the real stage. Each run is a
process of its own; they take turns, and figures are medians over all runs. TRL 1.12 is the last release with a
PPOTrainer and lives in a separate environment, and so does torchtune, which trains all weights: that is other work.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import click

from bench import options, steps
from bench.kinds import SideFigures, StageSteps, SupervisedRecord
from bench.paths import ROOT
from bench.peer import figures
from bench.peer.environments import TORCHTUNE, TRL, peer_python, torchtune_python, versions
from bench.peer.inputs import PEER_RECIPE, PEER_SIZES, Asked, make_model
from bench.peer.methods import METHODS, Environment, Peer
from bench.peer.training import Taken
from bench.provenance import code, describe_for, today
from bench.reading import last_line
from bench.rounds import in_order
from rlhf.cli import guarded
from rlhf.cli.choice import Choice
from rlhf.cli.options import OneOf, WholeNumber
from rlhf.errors import UserError
from rlhf.files import sha256, write_json
from rlhf.plan.rehearsal.short_runs import few_steps
from rlhf.process.children import child_environment
from rlhf.recipe import Changes, PinnedRecipe, Recipe, StageName

Weights = Literal["made-up", "random", "recipe"]
# Stages without `--stage`: of the made-up model, of a recipe with random weights, of one with its own.
USUAL_STAGES: dict[Weights, tuple[StageName, ...]] = {
    "made-up": ("ppo",),
    "random": ("sft", "rm", "dpo"),
    "recipe": ("sft", "rm", "dpo", "grpo"),
}
WARM_UP: dict[Weights, int] = {"made-up": 1, "random": steps.WARM_UP, "recipe": 1}  # steps that do not count
EVALUATED = 8  # held-out rows of an evaluation: it is no part of a step
# What `rlhf` asks of glibc itself, for the peers: pages of freed tensors stay with the process.
GLIBC = {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1), "MALLOC_MMAP_THRESHOLD_": str(2**25)}


@options.command()
@click.option(
    "--weights",
    type=OneOf(list(USUAL_STAGES)),
    default="made-up",
    show_default=True,
    help="A made-up model; or a recipe with random weights and rows, or with its own.",
)
@click.option("--size", type=OneOf(list(PEER_SIZES)), default="tiny", show_default=True, help="Of the made-up model.")
@options.HW
@options.RECIPE
@options.SET
@click.option("--data", multiple=True, metavar="FILE", help="Rows used instead of the recipe's. May be repeated.")
@options.stages(tuple(METHODS), "made-up: ppo; random: sft, rm, dpo; recipe: those and grpo, if it has them")
@options.STEPS
@click.option("--repeats", default=3, show_default=True, type=WholeNumber(min=1), help="Runs of each, in turn.")
@options.SAVE
def main(
    weights: Weights,
    size: str,
    hw: str,
    directory: Path | None,
    changes: tuple[str, ...],
    data: tuple[str, ...],
    stages: tuple[StageName, ...],
    count: int,
    repeats: int,
    save: Path | None,
) -> None:
    """Compare steps of SFT, reward model, PPO, RLOO, GRPO and DPO with those of TRL's trainers, in turn."""
    loaded = options.load(hw, directory or (PEER_RECIPE if weights == "made-up" else None), changes)
    chosen = options.stages_of(loaded, stages, [*METHODS] if stages else USUAL_STAGES[weights])
    with tempfile.TemporaryDirectory(prefix="rlhf-bench-") as folder:
        short = shortened(loaded, weights, size, data, count, Path(folder))
        beside = {
            stage: Comparison(short, stage, Path(folder, stage), WARM_UP[weights]).run(repeats) for stage in chosen
        }
    figures.show(f"{loaded.name} {loaded.version}, {weights} weights", beside)
    if save:
        record = record_of(loaded, count, repeats, beside)
        if weights == "made-up":
            record["made_up"] = size
        else:
            record["recipe"], record["version"] = loaded.name, loaded.version
            record["recipe_sha256"] = loaded.sha256
        if weights == "recipe":
            record["weights"] = "the recipe's"
        if data:
            record["rows"] = [{"name": Path(file).name, "sha256": sha256(Path(file))} for file in data]
        write_json(save, record)


def shortened(
    loaded: PinnedRecipe, weights: Weights, size: str, data: tuple[str, ...], count: int, folder: Path
) -> PinnedRecipe:
    """Return the recipe with few steps of each stage: on random weights, on its own model, or on one made up here."""
    taken = WARM_UP[weights] + count
    if weights == "random":
        return loaded.with_changes(few_steps(loaded.recipe, taken, "hh"))
    if weights == "made-up":
        loaded = loaded.with_changes(make_model(folder, size, loaded))
    elif data:
        loaded = Choice(directory=loaded.directory, data=data).load().with_changes(loaded.overrides)
    return loaded.with_changes(few_real_steps(loaded.recipe, taken))


def few_real_steps(recipe: Recipe, count: int) -> Changes:
    """Return the overrides by which every stage takes `count` steps on its own rows, with little around them."""
    changes: Changes = {"evaluate.max_samples": EVALUATED}
    around: Changes = {"max_eval_samples": EVALUATED, "logging_steps": 1, "save_steps": count, "adapter": "last"}
    online: Changes = {"steps": count, "eval_steps": count} | around
    dialogues: Changes = {"max_steps": count, "eval_steps": None} | around
    for stage in (*recipe.online(), *recipe.dialogues()):
        section = online if stage in recipe.online() else dialogues
        changes |= {f"{stage}.{key}": value for key, value in section.items()}
    return changes


class Comparison:
    """The runs of one stage below a folder. The peers take rows and weights of our first run there."""

    def __init__(self, short: PinnedRecipe, stage: StageName, out: Path, warm_up: int):
        self.short, self.stage, self.out, self.warm_up = short, stage, out, warm_up
        self.method = METHODS[stage]

    def run(self, repeats: int) -> dict[str, SideFigures]:
        """Run all contenders in turn, `repeats` times; return `figures.side_by_side`."""
        work: dict[str, Callable[[], StageSteps]] = {
            name: partial(self.ours, name, changes) for name, changes in self.method.ours.items()
        }
        for name, peer in {**self.method.theirs, **self.method.beside}.items():
            work[name] = partial(self.peer, peer)
        runs: dict[str, list[StageSteps]] = {name: [] for name in work}
        for number in range(repeats):
            for name, take in in_order(work.items(), number):
                runs[name].append(take())
        return figures.side_by_side(runs, [*self.method.ours], [*self.method.theirs])

    def ours(self, name: str, changes: Changes) -> StageSteps:
        """Run our stage once, again if it was run before; what it builds on is run there once."""
        short, out = self.short.with_changes(changes), self.out / name
        shutil.rmtree(out / short.name / short.version / self.stage, ignore_errors=True)
        return steps.measure_short(short, (self.stage,), out, preflight=False, warm_up=self.warm_up)[self.stage]

    def peer(self, peer: Peer) -> StageSteps:
        """Run a peer's trainer once. Return the same keys as `bench.steps` has for ours."""
        files = self.out / "files"
        asked: Asked = {
            "recipe": str(self.short.directory),
            "overrides": self.short.overrides,
            "stage": self.stage,
            "out": str(self.out / "ours"),
            "files": str(files),
            "settings": {**peer.settings},
            "warm_up": self.warm_up,
        }
        if peer.environment != "here" and not files.exists():
            call([sys.executable, "-m", "bench.peer.inputs", json.dumps(asked)])
        script = Path(__file__).with_name(peer.script)
        printed = call([str(python_of(peer.environment)), str(script), json.dumps(asked)])
        if printed is None:
            return {"out_of_memory": True}
        return row_of(last_line(printed, Taken, peer.script), self.short)


def row_of(taken: Taken, loaded: PinnedRecipe) -> StageSteps:
    """Return the row of a peer's steps, by the clock of ours."""
    cuda = loaded.recipe.hardware.device == "cuda"
    seconds = taken["wall"] if cuda else taken["cpu"]
    row: StageSteps = {
        "clock": "wall" if cuda else "cpu",
        "step_seconds": steps.spread(seconds),
        "phase_peak_bytes": {"train": taken["peak"]} if cuda else None,
    }
    if taken["tokens"]:
        row["tokens_per_second"] = taken["tokens"] / sum(seconds)
    if not cuda:
        row["peak_rss_bytes"] = taken["peak"]
    return row


def python_of(environment: Environment) -> Path:
    """Return the interpreter of an environment; one of the peers' own is made when it is needed first."""
    if environment == "trl 1.12":
        return peer_python(ROOT / ".venv-trl-1.12")
    return torchtune_python(ROOT / ".venv-torchtune-0.6") if environment == "torchtune" else Path(sys.executable)


def call(command: list[str]) -> str | None:
    """Return what a process prints; None where it does not fit on the GPU, which is a result."""
    environment = child_environment(TRL_EXPERIMENTAL_SILENCE="1", HF_HUB_OFFLINE="1", **GLIBC)
    if command[0] != sys.executable:  # its environment's packages stay its own
        environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode and "CUDA out of memory" in done.stderr:
        return None
    if done.returncode:
        raise UserError(f"{Path(command[1]).name} ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def record_of(
    loaded: PinnedRecipe, count: int, repeats: int, beside: Mapping[StageName, dict[str, SideFigures]]
) -> SupervisedRecord:
    """Return the record of a comparison, without its recipe: what was made up here has none."""
    run = [peer for stage in beside for peer in (*METHODS[stage].theirs.values(), *METHODS[stage].beside.values())]
    peers = {peer.environment for peer in run}
    names = {
        "here": f"trl {version('trl')} at its defaults, and tuned",
        "trl 1.12": f"trl {TRL}",
        "torchtune": " ".join(f"{name} {pin}" for name, pin in TORCHTUNE.items()),
    }
    record: SupervisedRecord = {
        "date": today(),
        "code": code(),
        "peer": "; ".join(text for name, text in names.items() if name in peers),
        "overrides": loaded.overrides,
        "device": describe_for(loaded.recipe),
        "packages": {name: version(name) for name in ("torch", "transformers", "trl", "peft")},
        "steps": count,
        "repeats": repeats,
        "stages_beside": {**beside},
    }
    if environments := peers - {"here"}:
        record["peer_packages"] = {name: versions(python_of(name)) for name in sorted(environments)}
    return record


if __name__ == "__main__":
    guarded(main)
