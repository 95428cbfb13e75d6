"""Records below results/: what was measured, with which code, on which device.

A record is one JSON object. Its `kind` says what it holds: `steps` (a stage's seconds, tokens and peaks), `memory`
(peaks of phases beside their predictions), `peer` (our steps beside TRL's) or `gpu` (an item of `bench.gpu`, whose
figures are below `measured`). Keys that end in `_seconds` or `_bytes` have that unit; `clock` says of whom the seconds
are: `cpu`, of all threads of the process, or `wall`. A figure that is None is unknown.
"""

import datetime
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch

from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.observe.device import device_facts
from rlhf.process.torch_setup import device_of
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.run.provenance import code_version

ROOT = Path(__file__).parents[1]  # of the code: a checkout, or /app in the container image
RECIPES = ROOT / "recipes"
# Records of the working directory first: an image holds only code, and runs in the caller's checkout.
RESULTS = next(
    folder.resolve() for folder in (Path("results"), ROOT / "results") if folder.is_dir() or folder.is_absolute()
)
Kind = Literal["steps", "memory", "peer", "gpu"]


class Spread(TypedDict):
    """Median, lower and upper quartile, and number of repeated measurements."""

    median: float
    low: float
    high: float
    n: int


class Ceilings(TypedDict):
    """Measured rates of a device: of a large product in operations, of a large copy in bytes read and written."""

    flops: float  # per second
    bandwidth: float  # bytes per second
    clock: Literal["cpu", "wall"]


class StageSteps(TypedDict, total=False):
    """What a stage's steps took after the warm-up. One that did not fit has `out_of_memory` and predictions alone."""

    out_of_memory: bool
    clock: Literal["cpu", "wall"]
    step_seconds: Spread
    phase_seconds: dict[str, Spread]
    tokens_per_step: float  # real tokens, no padding; the mean
    tokens_per_second: float
    peak_vram_bytes: int | None  # allocated by torch; None on a CPU
    phase_peak_bytes: dict[str, int] | None
    reserved_vram_bytes: int | None  # held by torch's allocator
    peak_rss_bytes: int  # resident pages of the process
    component_bytes: dict[str, int] | None
    adapter_bytes: int | None  # of the files
    hfu: float | None  # share of the rate of a large product, 0 to 1; what is computed twice counts twice
    mbu: float | None  # of decoding: share of the rate of a large copy, 0 to 1
    hours: float | None  # of all steps by the mean one, projected
    predicted_peak_bytes: int | None


def new(kind: Kind, loaded: PinnedRecipe | None, device: torch.device | None = None) -> dict[str, Any]:
    """Return a record without figures: its kind, date, code, device and recipe."""
    code = code_version()
    record: dict[str, Any] = {
        "kind": kind,
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "code": {"commit": code.commit, "dirty": code.dirty},
        "device": describe(loaded, device),
    }
    if loaded:
        record |= {"recipe": loaded.name, "version": loaded.version, "recipe_sha256": loaded.sha256}
        record |= {"overrides": loaded.overrides}
    return record


def describe(loaded: PinnedRecipe | None, device: torch.device | None = None) -> dict[str, object]:
    """Return the facts of a device. A processor has its family and model: one name stands for several generations."""
    device = device or (device_of(loaded.recipe) if loaded else torch.device("cpu"))
    facts = device_facts(device)
    if device.type == "cpu":
        facts |= processor(Path("/proc/cpuinfo"))
        if loaded and loaded.recipe.hardware.threads:  # of the stages, which are processes of their own
            facts["threads"] = loaded.recipe.hardware.threads
    return facts


def processor(cpuinfo: Path) -> dict[str, object]:
    """Return family, model and whether there are AMX units, as Linux names them; nothing elsewhere."""
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    numbers = {key: re.search(rf"^{name}\s*:\s*(\d+)$", text, re.M) for key, name in _NUMBERS.items()}
    found: dict[str, object] = {key: int(match[1]) for key, match in numbers.items() if match}
    return found | ({"amx": "amx_tile" in text} if text else {})


_NUMBERS = {"family": "cpu family", "model_number": "model"}


def device_text(device: object) -> str:
    """Return a device in words: the card, or the processor with its threads."""
    if not isinstance(device, Mapping):
        return str(device or "unknown")
    if device.get("type") == "cuda":
        cap = device.get("memory_cap")
        return f"{device['name']}{f' held to {cap}' if cap else ''}"
    family = f" (family {device['family']}, model {device['model_number']})" if "model_number" in device else ""
    threads = f", {device['threads']} threads" if device.get("threads", 1) != 1 else ""
    return f"{device.get('model') or device.get('name')}{family}{threads}"


def check_savable(loaded: PinnedRecipe | None = None, file: Path | None = None) -> None:
    """Raise UserError where a record could not be traced: uncommitted code, a changed recipe, a file in its place."""
    if code_version().dirty is not False:
        raise UserError("--save: the code differs from its commit, or has none: commit first, or leave out --save")
    if loaded and loaded.modified:
        raise UserError("--save: only an unchanged recipe makes a record: leave out --set or --save")
    if file and file.exists():
        raise UserError(f"--save: {file} exists, and a record replaces no other: name a new file")


def place(record: Mapping[str, Any]) -> Path:
    """Return a record's place below results/: recipe, version, device, and a name that begins with the date."""
    device = record["device"]
    name = re.sub(r"\W+", "-", device["name"].lower())
    date, commit = record["date"].replace(":", ""), (record["code"]["commit"] or "unknown")[:8]
    folder = Path(record["recipe"], record["version"], name) if "recipe" in record else Path("gpu", name)
    what = record.get("gpu_item") or record["kind"]
    return folder / f"{date}_{commit}_{what}.json"


def save(record: Mapping[str, Any], file: Path) -> Path:
    """Write a record. Return its file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, record)
    return file


def read(file: Path) -> dict[str, Any]:
    """Return a record. Raises UserError, which names the file, unless it is a JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise UserError(f"{file}: not a JSON object")
    return content


class Before(TypedDict):
    """The stages of an earlier record, and its date."""

    date: str
    stages: dict[StageName, StageSteps]


def newest_before(record: Mapping[str, Any], results: Path | None = None) -> Before | None:
    """Return the newest record of steps of the same recipe, device and shape of rows; None where there is none."""
    folder = (RESULTS if results is None else results) / place(record).parent
    for file in sorted(folder.glob("**/*.json"), key=lambda file: file.name, reverse=True):
        earlier = read(file)
        alike = all(earlier.get(key) == record.get(key) for key in ("kind", "recipe_sha256", "shape"))
        if alike and "stages" in earlier and _machine(earlier) == _machine(record):
            return {"date": earlier["date"], "stages": earlier["stages"]}
    return None


def _machine(record: Mapping[str, Any]) -> tuple[object, ...]:
    keys = ("name", "model", "family", "model_number", "threads", "memory_cap")
    return tuple(record["device"].get(key) for key in keys)
