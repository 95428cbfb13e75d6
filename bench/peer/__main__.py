"""`python -m bench.peer`: one step of PPO, RLOO or GRPO and one of TRL's trainer, on the same model and prompts.

Both run in separate processes, in turn, several times; figures are medians over all measured steps. Ours is the
real stage: `rlhf run ppo`. TRL 1.12 is the last release with a PPOTrainer and lives in a separate environment; its
RLOOTrainer and GRPOTrainer are those of the release that this project uses. A second peer for PPO, torchtune, lives in
a separate environment, too; it trains all weights, which is different work.
"""

import shutil
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import click
import torch

from bench import options
from bench.clocks import clock_of
from bench.kinds import PeerProvenance, PeerRecord
from bench.paths import ROOT, require_own_folder
from bench.peer.contenders import METHODS
from bench.peer.environments import TORCHTUNE, TRL, peer_python, torchtune_python, versions
from bench.peer.figures import contender_figures, phases_table, row_of
from bench.peer.inputs import BATCH, GROUP, PEER_SIZES, make_inputs
from bench.peer.runs import ContenderRun, attempt, floor, run_ours, run_torchtune, run_trl
from bench.provenance import code, today
from bench.rounds import in_order
from rlhf.cli import guarded
from rlhf.cli.options import OneOf, WholeNumber
from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.observe.device import cpu_model
from rlhf.terminal.screen import OUT
from rlhf.terminal.tables import rows_table


@options.command()
@click.option("--method", type=OneOf(list(METHODS)), default="ppo", show_default=True)
@click.option("--size", type=OneOf(list(PEER_SIZES)), default="tiny", show_default=True)
@click.option("--device", type=OneOf(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--repeats", default=3, show_default=True, type=WholeNumber(min=1), help="Runs of each contender, in turn."
)
@click.option(
    "--steps",
    default=3,
    show_default=True,
    type=WholeNumber(min=2),
    help="Steps of a run; the first is not measured.",
)
@click.option(
    "--micro",
    default="8",
    show_default=True,
    type=OneOf([str(n) for n in range(1, BATCH + 1) if BATCH % n == 0]),
    help="Rows of a micro-batch, on both sides.",
)
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
@options.SAVE
def main(
    method: str,
    size: str,
    device: str,
    repeats: int,
    steps: int,
    micro: str,
    work: Path,
    peer: Path,
    torchtune: Path,
    save: Path | None,
) -> None:
    """Compare one step of PPO, RLOO or GRPO with TRL's, interleaved."""
    require_own_folder(work, "inputs")
    rows, contenders = int(micro), METHODS[method]
    python = peer_python(peer) if method == "ppo" else Path(sys.executable)
    second = torchtune_python(torchtune) if contenders.torchtune else python
    shutil.rmtree(work, ignore_errors=True)
    inputs = work / "inputs"
    make_inputs_apart(inputs, size, method, device, steps)
    run: dict[str, Callable[[], ContenderRun]] = {}
    for name, flags in contenders.theirs.items():
        run[name] = partial(run_trl, method, python, inputs, flags, steps, rows)
    for name, flags in contenders.torchtune.items():
        run[name] = partial(run_torchtune, second, inputs, flags, steps, rows)
    for name, changes in contenders.ours.items():
        out = work / f"ours-{changes.get('lora.layers', 'all')}"  # their SFT and reward model are the same
        run[name] = partial(run_ours, method, inputs, out, changes, steps, rows)
    names = list(run)
    runs: dict[str, list[ContenderRun]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in in_order(names, repeat):
            runs[name].append(attempt(run[name]))
        OUT.print(f"round {repeat + 1} of {repeats} done")
    figures = contender_figures(contenders, runs, "wall" if device == "cuda" else "cpu")
    limit = floor(method, inputs, work / "floor", rows)
    origin = provenance(method, size, device, rows, repeats)
    if python != Path(sys.executable):
        origin["peer_packages"] = versions(python)
    if contenders.torchtune:
        origin["second_peer_packages"] = versions(second)
    record: PeerRecord = {**origin, "figures": figures, "floor": limit}
    show(method, record)
    if save:
        write_json(save, record)
        OUT.print(f"written to {save}")


def make_inputs_apart(inputs: Path, size: str, method: str, device: str, steps: int) -> None:
    """Write the inputs of both sides in a separate process, which gives the GPU back when it ends."""
    inputs.mkdir(parents=True)
    maker = get_context("spawn").Process(target=make_inputs, args=(inputs, size, method, device, steps))
    maker.start()
    maker.join()
    if maker.exitcode:
        raise UserError("the inputs could not be made")


def show(method: str, record: PeerRecord) -> None:
    """Print the figures of all contenders, and the phases of ours beside the floor."""
    figures = record["figures"]
    columns = (
        "",
        f"{clock_of(figures.values())} s/step",
        "samples per wall s",
        "MiB above loaded",
        "speed, times theirs",
        "memory ratio",
    )
    title = f"one {method.upper()} step, medians; ratios to {' and '.join(METHODS[method].theirs)}"
    rows_table(title, columns, [row_of(name, row) for name, row in figures.items()])
    OUT.print(phases_table(record))


def provenance(method: str, size: str, device: str, micro: int, repeats: int) -> PeerProvenance:
    """Return what the figures were measured with."""
    packages = ("torch", "transformers", "peft", "accelerate", "datasets")
    numbers = "bfloat16" if device == "cuda" else "float32"
    record: PeerProvenance = {
        "date": today(),
        "code": code(),
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{cpu_model()}, 1 thread",
        "model": {**PEER_SIZES[size], "dtype": numbers, "weights": "random"},
        "method": method,
        "batch": BATCH,
        "prompt_tokens": [48, 80],
        "new_tokens": 64,
        "epochs": METHODS[method].epochs,
        "micro_batch": micro,
        "repeats": repeats,
        "peer": f"trl {TRL if method == 'ppo' else version('trl')}",
        "packages": {name: version(name) for name in packages} | {"trl (ours)": version("trl")},
    }
    if method != "ppo":
        record["group"] = GROUP
    if METHODS[method].torchtune:
        record["second_peer"] = TORCHTUNE
    return record


if __name__ == "__main__":
    guarded(main)
