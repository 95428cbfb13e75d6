"""What this machine has for a recipe: driver, packages, container runtime, memory, disk; and the way out of a lack.

`look` reads the machine, `needs_of` the recipe; `checks` compares the two and asks nothing.
"""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rlhf.plan import machine, prediction_file
from rlhf.process import memory
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.stages import MERGE
from rlhf.terminal.wording import gb

DRIVER = 580  # the oldest branch for CUDA 13, for which torch's wheels are built: NVIDIA, "CUDA Compatibility"
BESIDE = 20 * 10**9  # bytes on disk beside the weights: the image (6.5 GB), packages, checkpoints, records
SECONDS = 20.0  # that another program may take to answer
OURS = "rlhf-one-gpu "  # begins what pip says about this package's requirements

State = Literal["ok", "note", "missing"]


class Gpu(NamedTuple):
    """A card as nvidia-smi shows it; memory in bytes."""

    name: str
    driver: str
    total: int
    free: int


class Host(NamedTuple):
    """What a machine has. Sizes are in bytes."""

    free: memory.Free
    disk: int  # free where runs are written
    gpus: Sequence[Gpu]  # that nvidia-smi shows; none where it cannot be run
    torch: str | None  # version and CUDA; None where it is not installed
    torch_on_card: bool  # built for CUDA, and finds a card where there is one
    engines: Sequence[str]  # docker and podman, those that answer
    packages: Sequence[str]  # missing or of another version, as pip says it


class Needs(NamedTuple):
    """What the stages of a recipe are predicted to need, in bytes; None where that is not known."""

    recipe: str
    on_card: bool
    cards: int
    card: int | None = None
    host: int | None = None
    disk: int | None = None


class Check(NamedTuple):
    """A line: what was looked at and found, and the way out unless all is well."""

    name: str
    state: State
    found: str
    way_out: str = ""


def needs_of(loaded: PinnedRecipe) -> Needs:
    """Return what a recipe needs, from the predictions that are pinned beside one for a card."""
    hardware, on_card = loaded.recipe.hardware, loaded.recipe.hardware.device == "cuda"
    needs = Needs(f"{loaded.name} {loaded.version}", on_card, hardware.count)
    pinned = None if loaded.overrides else prediction_file.read(loaded.directory)
    if pinned is None:
        return needs
    merging = pinned.stages.get(MERGE, {}).values()
    base = max((parts.get("base", 0) for parts in merging), default=0)
    return needs._replace(
        card=max(prediction_file.card_needs(pinned.needed).values(), default=None),
        host=max(sum(parts.values()) for parts in merging) + machine.LIBRARIES if merging else None,
        disk=2 * base + BESIDE if base else None,  # as it is downloaded and as it is merged
    )


def look(out: Path) -> Host:
    """Return what this machine has; `out` is the root of runs."""
    folder = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    gpus, version, on_card = _gpus(), None, False
    if importlib.util.find_spec("torch"):
        import torch

        version = f"{torch.__version__}, CUDA {torch.version.cuda}"
        on_card = torch.version.cuda is not None and (torch.cuda.is_available() or not gpus)
    return Host(
        free=memory.free(),
        disk=shutil.disk_usage(folder).free,
        gpus=gpus,
        torch=version,
        torch_on_card=on_card,
        engines=[name for name in ("docker", "podman") if _lines(name, "info")],
        packages=[line for line in _lines(sys.executable, "-m", "pip", "check", fails=True) if line.startswith(OURS)],
    )


def checks(host: Host, needs: Needs) -> Iterator[Check]:
    """Yield a check for each thing that a recipe needs; what a recipe for a CPU does not need is a note at most."""
    lack: State = "missing" if needs.on_card else "note"
    yield _check("packages", not host.packages, "; ".join(host.packages) or "as pyproject.toml asks", "make setup")
    way_out = "make setup, with torch's wheels for CUDA; in a container, --gpus all"
    well = host.torch is not None and (host.torch_on_card or not needs.on_card)
    yield _check("torch", well, host.torch or "not installed", way_out)
    found = host.gpus[0].driver if host.gpus else "nvidia-smi shows no card, or cannot be run"
    branch = found.partition(".")[0]
    new = branch.isdecimal() and int(branch) >= DRIVER
    yield _check("driver", new, found, f"a card with driver {DRIVER} or newer, which CUDA 13 needs", lack)
    if host.gpus and len(host.gpus) < needs.cards:
        way_out = f"the recipe takes {needs.cards}: change hardware.count"
        yield _check("cards", False, f"{len(host.gpus)} shown", way_out)
    for number, gpu in enumerate(host.gpus[: needs.cards if needs.on_card else None]):
        way_out = "nvidia-smi shows what else runs there; `rlhf plan --fit card` looks for settings for a small card"
        if gpu.total:  # nvidia-smi does not know that of every card
            yield _amount(f"card {number}", gpu.free, f"of {gb(gpu.total)} GB free, {gpu.name}", needs.card, way_out)
    if needs.on_card:
        way_out = "install docker and NVIDIA's container toolkit, or --runtime local"
        yield _check("container", bool(host.engines), ", ".join(host.engines) or "none", way_out, "note")
    yield _amount("memory", host.free.size, host.free.words, needs.host, "a machine with more, or end what takes it")
    yield _amount("disk", host.disk, "free where runs are written", needs.disk, "make room, or --out on another disk")


def _check(name: str, well: bool, found: str, way_out: str, otherwise: State = "missing") -> Check:
    return Check(name, "ok", found) if well else Check(name, otherwise, found, way_out)


def _amount(name: str, has: int, words: str, need: int | None, way_out: str) -> Check:
    """Return the check of bytes that are free against those that are needed."""
    asked = "" if need is None else f"; the recipe needs {gb(need)} GB (predicted)"
    return _check(name, need is None or has >= need, f"{gb(has)} GB {words}{asked}", way_out)


def _lines(*words: str, fails: bool = False) -> list[str]:
    """Return the lines that a program prints; none where it cannot be run, is silent for too long or `fails`."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if fails or done.returncode == 0 else []


def _gpus() -> list[Gpu]:
    """Return the cards that nvidia-smi shows with their memory."""
    query = "--query-gpu=name,driver_version,memory.total,memory.free"
    rows = [line.split(", ") for line in _lines("nvidia-smi", query, "--format=csv,noheader,nounits")]
    return [
        Gpu(name, driver, *(int(size) * 2**20 if size.isdecimal() else 0 for size in sizes))
        for name, driver, *sizes in rows
        if len(sizes) == 2
    ]
