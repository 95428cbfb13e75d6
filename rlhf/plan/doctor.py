"""What this machine has for a recipe: driver, packages, container runtime, memory, disk; and the way out of a lack.

`look` reads the machine, `needs_of` the recipe; `checks` compares the two and asks nothing.
"""

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from rlhf.plan import machine, prediction_file
from rlhf.process import memory
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.stages import MERGE
from rlhf.terminal.wording import gb

DRIVER = 580  # the oldest branch for CUDA 13, for which torch's wheels are built: NVIDIA, "CUDA Compatibility"
SHARED = 10**9  # bytes of /dev/shm that several processes get by with; a container has 64 MiB unless told otherwise
BESIDE = 20 * 10**9  # bytes on disk beside the weights: the image (6.5 GB), packages, checkpoints, records
SECONDS = 20.0  # that another program may take to answer

State = Literal["ok", "note", "missing"]


class Gpu(NamedTuple):
    """A card as nvidia-smi shows it; memory in bytes, 0 where it is not shown."""

    name: str
    driver: str
    total: int
    free: int


class Host(NamedTuple):
    """What a machine has. Sizes are in bytes."""

    python: str
    free: memory.Free
    disk: int  # free where runs are written
    shm: int  # of /dev/shm
    gpus: Sequence[Gpu] | None  # None: nvidia-smi cannot be run
    torch: str | None  # version; None where it is not installed
    torch_cuda: str | None  # the CUDA that torch is built for
    torch_finds: bool  # a usable card
    engines: Sequence[str]  # docker and podman, those that answer
    compiles: bool  # a C compiler and Python's headers, which triton needs
    flash_attention: bool
    packages: Sequence[str]  # missing or of another version, with what is asked for


class Needs(NamedTuple):
    """What the stages of a recipe are predicted to need, in bytes; None where that is not known."""

    recipe: str
    on_card: bool
    cards: int
    card: int | None = None
    host: int | None = None
    disk: int | None = None
    flash_attention: bool = False


class Check(NamedTuple):
    """A line: what was looked at and found, and the way out unless all is well."""

    name: str
    state: State
    found: str
    way_out: str = ""


def needs_of(loaded: PinnedRecipe) -> Needs:
    """Return what a recipe needs, from the predictions that are pinned beside it."""
    hardware, on_card = loaded.recipe.hardware, loaded.recipe.hardware.device == "cuda"
    flash = loaded.recipe.model.attention == "flash_attention_2"
    needs = Needs(f"{loaded.name} {loaded.version}", on_card, hardware.count, flash_attention=flash)
    pinned = None if loaded.overrides else prediction_file.read(loaded.directory)
    if pinned is None:
        return needs
    peaks = {stage: max(sum(p.values()) for p in phases.values()) for stage, phases in pinned.stages.items() if phases}
    on_host = {stage: peak for stage, peak in peaks.items() if stage == MERGE or not on_card}
    needed = prediction_file.card_needs(pinned.needed) if on_card else {}
    base = max((parts.get("base", 0) for parts in pinned.stages.get(MERGE, {}).values()), default=0)
    return needs._replace(
        card=max(needed.values(), default=None),
        host=max(on_host.values()) + machine.LIBRARIES if on_host else None,
        disk=2 * base + BESIDE if base and on_card else None,  # as it is downloaded and as it is merged
    )


def look(out: Path) -> Host:
    """Return what this machine has; `out` is the root of runs."""
    folder = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    version, cuda, finds = None, None, False
    if importlib.util.find_spec("torch"):
        import torch

        version, cuda, finds = str(torch.__version__), torch.version.cuda, torch.cuda.is_available()
    compiler = shutil.which("cc") or shutil.which("gcc")
    return Host(
        python=platform.python_version(),
        free=memory.free(),
        disk=shutil.disk_usage(folder).free,
        shm=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else 0,
        gpus=_gpus(),
        torch=version,
        torch_cuda=cuda,
        torch_finds=finds,
        engines=[name for name in ("docker", "podman") if _answer(name, "info") is not None],
        compiles=bool(compiler) and Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
        flash_attention=bool(importlib.util.find_spec("flash_attn")),
        packages=[*_lacking_packages()],
    )


def checks(host: Host, needs: Needs) -> Iterator[Check]:
    """Yield a check for each thing that a recipe needs; what a recipe for a CPU does not need is a note at most."""
    lack: State = "missing" if needs.on_card else "note"
    yield Check("Python", "ok", host.python)
    found = ", ".join(host.packages) or "all that pyproject.toml asks for"
    yield _check("packages", not host.packages, found, "missing", "make setup")
    usable = host.torch_cuda and (host.torch_finds or not host.gpus)
    found = "not installed" if not host.torch else f"{host.torch}, CUDA {host.torch_cuda}, usable: {host.torch_finds}"
    way_out = "make setup, with torch's wheels for CUDA; in a container, --gpus all"
    yield _check("torch", bool(host.torch and (usable or not needs.on_card)), found, "missing", way_out)
    yield from _of_cards(host, needs, lack)
    way_out = "install docker and NVIDIA's container toolkit, or --runtime local"
    yield _check("container", bool(host.engines or not needs.on_card), ", ".join(host.engines), "note", way_out)
    if needs.on_card:
        found = "a C compiler and Python's headers" if host.compiles else "no C compiler, or no Python.h"
        yield _check("compiler", host.compiles, found, "note", "outside of a container: apt install gcc python3-dev")
    if needs.flash_attention:
        way_out = "pip install --no-build-isolation flash-attn, or model.attention: sdpa"
        yield _check("flash-attn", host.flash_attention, "for model.attention", "missing", way_out)
    yield _amount("memory", host.free.size, host.free.words, needs.host, "a machine with more, or end what takes it")
    yield _amount("disk", host.disk, "free where runs are written", needs.disk, "make room, or --out on another disk")
    state: State = "missing" if needs.cards > 1 else "note"
    yield _check("/dev/shm", host.shm >= SHARED, f"{gb(host.shm)} GB", state, "docker run --ipc=host or --shm-size 1g")


def _check(name: str, well: bool, found: str, otherwise: State, way_out: str) -> Check:
    return Check(name, "ok", found or "not needed") if well else Check(name, otherwise, found or "none", way_out)


def _amount(name: str, has: int, words: str, need: int | None, way_out: str) -> Check:
    """Return the check of bytes that are free against those that are needed."""
    asked = "" if need is None else f"; the recipe needs {gb(need)} GB (predicted)"
    return _check(name, need is None or has >= need, f"{gb(has)} GB {words}{asked}", "missing", way_out)


def _of_cards(host: Host, needs: Needs, lack: State) -> Iterator[Check]:
    """Yield the checks of the driver and of the cards that the recipe takes."""
    if not host.gpus:
        way_out = f"a machine with a card and driver {DRIVER} or newer" if needs.on_card else ""
        yield Check("driver", lack, "nvidia-smi shows no card, or cannot be run", way_out)
        return
    branch = host.gpus[0].driver.partition(".")[0]
    new = branch.isdecimal() and int(branch) >= DRIVER
    yield _check("driver", new, host.gpus[0].driver, lack, f"install {DRIVER} or newer, which CUDA 13 needs")
    if len(host.gpus) < needs.cards:
        yield Check("cards", lack, f"{len(host.gpus)}", f"the recipe takes {needs.cards}: change hardware.count")
    for number, gpu in enumerate(host.gpus[: needs.cards if needs.on_card else None]):
        small = needs.card and gpu.total < needs.card
        way_out = "`rlhf plan --fit card` looks for settings" if small else "nvidia-smi shows what else runs there"
        yield _amount(f"card {number}", gpu.free, f"of {gb(gpu.total)} GB free, {gpu.name}", needs.card, way_out)


def _answer(*words: str) -> str | None:
    """Return what a program prints; None where it cannot be run, fails, or is silent for too long."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _gpus() -> list[Gpu] | None:
    """Return the cards that nvidia-smi shows."""
    query = "--query-gpu=name,driver_version,memory.total,memory.free"
    if (said := _answer("nvidia-smi", query, "--format=csv,noheader,nounits")) is None:
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in said.splitlines()]
    return [
        Gpu(name, driver, *(int(size) * 2**20 if size.isdecimal() else 0 for size in sizes))
        for name, driver, *sizes in (row for row in rows if len(row) == 4)
    ]


def _lacking_packages() -> Iterator[str]:
    """Yield the required packages that are missing, or have a version that is not asked for; none in the image."""
    from packaging.requirements import Requirement  # comes with transformers

    try:
        lines = importlib.metadata.requires("rlhf-one-gpu") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{requirement} is missing"
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield f"{requirement.name} {version}, asked for is {requirement.specifier}"
