"""Records of the GPU benchmark: one JSON object for each item, and the checks of a contributed one."""

import platform
from pathlib import Path
from typing import NamedTuple, NotRequired

from typing_extensions import TypedDict

from bench import provenance, reading
from bench.gpu import packages
from bench.gpu.measured import ITEM_FIGURES, SpeedFigures
from bench.gpu.plan import DECIDED, ITEMS, GpuItem
from bench.kinds import Code, Device, Overrides
from rlhf import recipe as recipes
from rlhf.recipe import PinnedRecipe

GPU_SCHEMA = 1
OUTCOMES = ("started", "done", "failed", "timed out", "skipped")
VERDICTS = ("holds", "does not hold", None)  # None: not decided
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "numpy")


class GpuRecord(TypedDict):
    """The record of one item."""

    schema: int
    gpu_item: str
    claim: str
    verdict: str | None  # the decision about the claim: one of VERDICTS
    why: str  # the figures behind the decision, or why the item was skipped
    outcome: str  # one of OUTCOMES
    error: str | None
    seconds: float | None  # wall, of the item's whole process; None while it runs
    measured: dict[str, object]  # as bench/gpu/measured.py has it for the item
    dry_run: bool
    date: str  # and time, ISO 8601
    recipe: str | None  # None where the item is about the card alone
    version: str | None
    recipe_sha256: str | None
    modified: bool
    overrides: Overrides
    seed: int
    code: Code
    packages: dict[str, str]
    python: str
    device: Device | None  # None where the item's process did not come so far
    idle_bytes: NotRequired[int | None]  # in use on the card before the item's process began; None if not known
    # In use on the card beside torch's allocator at the item's end; None if not known. Less `idle_bytes`: its context.
    beside_bytes: NotRequired[int | None]
    environment: dict[str, str]  # variables that were set


class Decision(NamedTuple):
    """A decision about a claim (None: not decided), and the figures behind it in one line."""

    holds: bool | None
    why: str


def new_record(item: GpuItem, dry_run: bool, loaded: PinnedRecipe | None = None) -> GpuRecord:
    """Return the record of an item that starts now, without results. The item's process fills in `device`."""
    return {
        "schema": GPU_SCHEMA,
        "gpu_item": item.name,
        "claim": item.claim,
        "verdict": None,
        "why": "",
        "outcome": "started",
        "error": None,
        "seconds": None,
        "measured": {},
        "dry_run": dry_run,
        "date": provenance.now(),
        "recipe": loaded.name if loaded else None,
        "version": loaded.version if loaded else None,
        "recipe_sha256": loaded.sha256 if loaded else None,
        "modified": bool(loaded and loaded.modified),
        "overrides": loaded.overrides if loaded else {},
        "seed": loaded.recipe.seed if loaded else 0,
        "code": provenance.code(),
        "packages": {name: version for name in PACKAGES if (version := packages.installed_version(name))},
        "python": platform.python_version(),
        "device": None,
        "idle_bytes": None,
        "environment": dict(item.environment),
    }


def decide(record: GpuRecord, decision: Decision) -> None:
    """Write a decision into a record."""
    record["verdict"] = None if decision.holds is None else "holds" if decision.holds else "does not hold"
    record["why"] = decision.why


def read(file: Path) -> GpuRecord:
    """Return a record. Raises UserError, which names file and key, unless it is one and has what its item measures."""
    record = reading.read(file, GpuRecord)
    functions = {item.name: item.function for item in ITEMS}
    if function := functions.get(record["gpu_item"]):
        reading.check(record["measured"], ITEM_FIGURES[function], f"{file}: measured")
    return record


def speed_of(record: GpuRecord) -> SpeedFigures:
    """Return what a speed item has measured; of other items a record without stages."""
    return reading.check(record["measured"], SpeedFigures, f"{record['gpu_item']}: measured")


def path_of(record: GpuRecord) -> Path:
    """Return a record's place below results/: `<recipe>/<version>/<device>/gpu/…json` or `gpu/<device>/…json`."""
    device = provenance.device_folder(provenance.device_name(record["device"]) or "unknown")
    moment, commit = provenance.in_file_name(record["date"]), (record["code"]["commit"] or "unknown")[:8]
    name = f"{moment}_{commit}_{record['gpu_item']}.json"
    if record["recipe"] is None or record["version"] is None:
        return Path("gpu", device, name)
    return Path(record["recipe"], record["version"], device, "gpu", name)


def problems(record: GpuRecord, recipe_root: Path) -> list[str]:
    """Return the reasons why a record cannot be accepted as a result, if there are any.

    It must be measured on a GPU by committed code, and its recipe must be the one in `recipe_root`.
    """
    reasons = []
    if record["schema"] != GPU_SCHEMA:
        reasons.append(f"schema {record['schema']}: this code reads {GPU_SCHEMA}")
    if record["gpu_item"] not in {*DECIDED, *(item.name for item in ITEMS)}:
        reasons.append(f"there is no item {record['gpu_item']}")
    if record["verdict"] not in VERDICTS or record["outcome"] not in OUTCOMES[1:]:
        reasons.append(f"verdict {record['verdict']!r} or outcome {record['outcome']!r} is unknown")
    if record["dry_run"] or not record["device"] or record["device"]["type"] != "cuda":
        reasons.append("it was not measured on a GPU")
    reasons += code_problems(record["code"])
    if not record["packages"].get("torch"):
        reasons.append("it names no version of torch")
    if record["recipe"] and record["version"]:
        reasons += _recipe_problems(record, recipe_root)
    return reasons


def code_problems(code: Code) -> list[str]:
    """Return the reason why the code of a record is not committed code, if there is one."""
    if not code["commit"] or len(code["commit"]) != 40:
        return ["its code has no commit: outside of git, set RLHF_COMMIT to the 40 digits of it"]
    return ["its code differed from the commit"] if code["dirty"] is not False else []


def _recipe_problems(record: GpuRecord, root: Path) -> list[str]:
    reasons = ["its recipe was modified"] if record["modified"] or record["overrides"] else []
    return reasons + changed_recipe(record["recipe"] or "", record["version"] or "", record["recipe_sha256"], root)


def changed_recipe(name: str, version: str, sha256: str | None, root: Path) -> list[str]:
    """Return the reason why a record's recipe is not the one below `root`, if there is one."""
    folder = root / name / version
    if not (folder / "recipe.yaml").exists():
        return [f"there is no recipe {name} {version}"]
    if recipes.load(folder).sha256 == sha256:
        return []
    return [f"recipe {name} {version} has changed since: a released one is frozen, make the change a new version"]
