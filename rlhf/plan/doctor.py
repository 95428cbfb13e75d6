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

import psutil

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


class Engine(NamedTuple):
    """A container engine that is installed: whether it answers, and whether it gives containers the cards."""

    name: str
    answers: bool
    gives_cards: bool


class Host(NamedTuple):
    """What a machine has. Sizes are in bytes."""

    python: str
    memory: int
    free: memory.Free
    disk: int  # free where runs are written
    shm: int | None  # of /dev/shm; None without it
    gpus: Sequence[Gpu] | None  # None: nvidia-smi cannot be run
    torch: str | None  # version; None where it is not installed
    torch_cuda: str | None  # the CUDA that torch is built for
    torch_finds: bool  # a usable card
    engines: Sequence[Engine]
    compiles: bool  # a C compiler and Python's headers, which triton needs
    packages: Sequence[str] | None  # missing or too old, with what is asked for; None in the image, which has no list


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
    """Return what a recipe needs, from the predictions that are pinned beside it."""
    hardware = loaded.recipe.hardware
    on_card = hardware.device == "cuda"
    needs = Needs(f"{loaded.name} {loaded.version}", on_card, hardware.count)
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
    version, cuda, finds = _torch()
    folder = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.is_dir())
    shm = Path("/dev/shm")
    return Host(
        python=platform.python_version(),
        memory=psutil.virtual_memory().total,
        free=memory.free(),
        disk=shutil.disk_usage(folder).free,
        shm=shutil.disk_usage(shm).total if shm.is_dir() else None,
        gpus=_gpus(),
        torch=version,
        torch_cuda=cuda,
        torch_finds=finds,
        engines=[*_engines()],
        compiles=bool(shutil.which("cc") or shutil.which("gcc"))
        and Path(sysconfig.get_paths()["include"], "Python.h").is_file(),
        packages=_lacking_packages(),
    )


def checks(host: Host, needs: Needs) -> Iterator[Check]:
    """Yield a check for each thing that a recipe needs; what a recipe for a CPU does not need is a note at most."""
    lack: State = "missing" if needs.on_card else "note"
    yield Check("Python", "ok", host.python)
    if host.packages is not None:
        found = ", ".join(host.packages) or "all that pyproject.toml asks for"
        yield _check("packages", not host.packages, found, "missing", "make setup")
    yield from _of_torch(host, needs, lack)
    yield from _of_cards(host, needs, lack)
    yield _of_engines(host, needs)
    if needs.on_card:
        found = "a C compiler and Python's headers" if host.compiles else "no C compiler, or no Python.h"
        yield _check("compiler", host.compiles, found, "note", "outside of a container: apt install gcc python3-dev")
    yield _amount("memory", host.free.size, host.free.words, needs.host, "a machine with more, or end what takes it")
    yield _amount("disk", host.disk, "free where runs are written", needs.disk, "make room, or --out on another disk")
    several = needs.cards > 1
    enough = host.shm is not None and host.shm >= SHARED
    found = "no /dev/shm" if host.shm is None else f"{gb(host.shm)} GB"
    yield _check("/dev/shm", enough, found, "missing" if several else "note", "docker run --ipc=host or --shm-size 1g")


def _check(name: str, well: bool, found: str, otherwise: State, way_out: str) -> Check:
    return Check(name, "ok", found) if well else Check(name, otherwise, found, way_out)


def _amount(name: str, has: int, words: str, need: int | None, way_out: str) -> Check:
    """Return the check of bytes that are free against those that are needed."""
    asked = "" if need is None else f"; the recipe needs {gb(need)} GB (predicted)"
    return _check(name, need is None or has >= need, f"{gb(has)} GB {words}{asked}", "missing", way_out)


def _of_torch(host: Host, needs: Needs, lack: State) -> Iterator[Check]:
    """Yield the check of torch: installed, built for CUDA, and with a card that it can use."""
    if host.torch is None:
        yield Check("torch", "missing", "not installed", "make setup")
        return
    found = f"{host.torch}, " + (f"built for CUDA {host.torch_cuda}" if host.torch_cuda else "built for CPUs alone")
    if needs.on_card and not host.torch_cuda:
        yield Check("torch", lack, found, "rm -r .venv, then make setup HW= without an index of CPU wheels in PIP_ARGS")
    elif needs.on_card and not host.torch_finds and host.gpus:
        yield Check("torch", lack, f"{found}, finds no usable card", "a newer driver; in a container, --gpus all")
    else:
        yield Check("torch", "ok", found)


def _of_cards(host: Host, needs: Needs, lack: State) -> Iterator[Check]:
    """Yield the checks of the driver and of the cards that the recipe takes."""
    if not host.gpus:
        found = "nvidia-smi cannot be run" if host.gpus is None else "nvidia-smi shows no card"
        way_out = f"a machine with a card and driver {DRIVER} or newer" if needs.on_card else ""
        yield Check("driver", lack, found, way_out)
        return
    driver = host.gpus[0].driver
    branch = driver.partition(".")[0]
    new = branch.isdecimal() and int(branch) >= DRIVER
    yield _check("driver", new, driver, lack, f"install {DRIVER} or newer, which CUDA 13 needs")
    if len(host.gpus) < needs.cards:
        yield Check("cards", lack, f"{len(host.gpus)}", f"the recipe takes {needs.cards}: change hardware.count")
    for number, gpu in enumerate(host.gpus[: needs.cards if needs.on_card else None]):
        way_out = (
            "`rlhf plan --fit card` looks for settings that fit"
            if needs.card and gpu.total < needs.card
            else ("nvidia-smi shows what else runs there")
        )
        if not gpu.total:
            yield Check(f"card {number}", "note", f"{gpu.name}, whose memory nvidia-smi does not show")
            continue
        words = f"of {gb(gpu.total)} GB free, {gpu.name}"
        yield _amount(f"card {number}", gpu.free, words, needs.card, way_out)


def _of_engines(host: Host, needs: Needs) -> Check:
    """Return the check of the container engines; without one, stages run by RUNTIME=local."""
    local = "or without a container: RUNTIME=local"
    ready = [e.name for e in host.engines if e.answers and (e.gives_cards or not needs.on_card)]
    if ready:
        return Check("container", "ok", ", ".join(ready))
    if not needs.on_card:
        return Check("container", "ok", "none that answers; a recipe for a CPU needs none")
    if not host.engines:
        return Check("container", "note", "neither docker nor podman", f"install one and NVIDIA's toolkit, {local}")
    first = host.engines[0]
    if not first.answers:
        return Check("container", "note", f"{first.name} does not answer", f"`{first.name} info` says why, {local}")
    way_out = "install the NVIDIA container toolkit, nvidia-ctk runtime configure --runtime=docker, restart docker"
    if first.name == "podman":
        way_out = "install the NVIDIA container toolkit, nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"
    return Check("container", "note", f"{first.name} gives containers no card", f"{way_out}, {local}")


# ---- the machine


def _answer(*words: str) -> str | None:
    """Return what a program prints; None where it cannot be run, fails, or is silent for too long."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _gpus() -> list[Gpu] | None:
    """Return the cards that nvidia-smi shows."""
    said = _answer(
        "nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.free", "--format=csv,noheader,nounits"
    )
    if said is None:
        return None
    rows = [[cell.strip() for cell in line.split(",")] for line in said.splitlines()]
    return [
        Gpu(name, driver, *(int(size) * memory.MIB if size.isdecimal() else 0 for size in sizes))
        for name, driver, *sizes in (row for row in rows if len(row) == 4)
    ]


def _torch() -> tuple[str | None, str | None, bool]:
    """Return torch's version, the CUDA that it is built for, and whether it finds a usable card."""
    if importlib.util.find_spec("torch") is None:
        return None, None, False
    import torch

    return str(torch.__version__), torch.version.cuda, torch.cuda.is_available()


def _engines() -> Iterator[Engine]:
    """Yield the container engines that are installed, those first that `make` prefers."""
    if shutil.which("docker"):
        said = _answer("docker", "info", "--format", "{{json .Runtimes}}")
        yield Engine("docker", said is not None, "nvidia" in (said or "") or bool(shutil.which("nvidia-ctk")))
    if shutil.which("podman"):
        cdi = any(Path(folder, "nvidia.yaml").is_file() for folder in ("/etc/cdi", "/var/run/cdi"))
        yield Engine("podman", _answer("podman", "info") is not None, cdi)


def _lacking_packages() -> list[str] | None:
    """Return the required packages that are missing, or have a version that is not asked for."""
    from packaging.requirements import Requirement  # comes with transformers

    try:
        lines = importlib.metadata.requires("rlhf-one-gpu") or []
    except importlib.metadata.PackageNotFoundError:  # the container image, whose build checks them
        return None
    lacking = []
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            lacking.append(f"{requirement} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            lacking.append(f"{requirement.name} {version}, asked for is {requirement.specifier}")
    return lacking
