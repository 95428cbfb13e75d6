"""Records of the GPU benchmark: one JSON object for each item, and the checks of a contributed one."""

import datetime
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu import packages
from bench.gpu.plan import ITEMS, Item
from rlhf import recipe as recipes
from rlhf.recipe import PinnedRecipe
from rlhf.run.provenance import code_version

SCHEMA = 1
OUTCOMES = ("started", "done", "failed", "timed out", "skipped")
VERDICTS = ("holds", "does not hold", None)  # None: not decided
PACKAGES = ("torch", "triton", "transformers", "trl", "peft", "accelerate", "datasets", "bitsandbytes", "numpy")
KEYS = {
    *("schema", "gpu_item", "claim", "verdict", "why", "outcome", "error", "seconds", "measured", "dry_run", "date"),
    *("recipe", "version", "recipe_sha256", "modified", "overrides", "seed"),
    *("code", "packages", "python", "device", "environment"),
}


class Verdict(NamedTuple):
    """A decision about a claim (None: not decided), and the figures behind it in one line."""

    holds: bool | None
    why: str


def new_record(item: Item, dry_run: bool, loaded: PinnedRecipe | None = None) -> dict[str, Any]:
    """Return the record of an item that starts now, without results. The item's process fills in `device`."""
    return {
        "schema": SCHEMA,
        "gpu_item": item.name,
        "claim": item.claim,
        "verdict": None,
        "why": "",
        "outcome": "started",
        "error": None,
        "seconds": None,
        "measured": {},
        "dry_run": dry_run,
        "date": datetime.date.today().isoformat(),
        "recipe": loaded.name if loaded else None,
        "version": loaded.version if loaded else None,
        "recipe_sha256": loaded.sha256 if loaded else None,
        "modified": bool(loaded and loaded.modified),
        "overrides": loaded.overrides if loaded else {},
        "seed": loaded.recipe.seed if loaded else 0,
        "code": code_version(),
        "packages": {name: version for name in PACKAGES if (version := packages.installed_version(name))},
        "python": platform.python_version(),
        "device": None,
        "environment": dict(item.environment),
    }


def decide(record: dict[str, Any], verdict: Verdict) -> None:
    """Write a verdict into a record."""
    record["verdict"] = None if verdict.holds is None else "holds" if verdict.holds else "does not hold"
    record["why"] = verdict.why


def path_of(record: Mapping[str, Any]) -> Path:
    """Return a record's place below results/: `<recipe>/<version>/<device>/gpu/…json` or `gpu/<device>/…json`."""
    device = (record["device"] or {}).get("name", "unknown").lower().replace(" ", "-")
    name = f"{record['date']}_{(record['code']['commit'] or 'unknown')[:8]}_{record['gpu_item']}.json"
    if record["recipe"] is None:
        return Path("gpu", device, name)
    return Path(record["recipe"], record["version"], device, "gpu", name)


def problems(record: Mapping[str, Any], recipe_root: Path) -> list[str]:
    """Return the reasons why a record cannot be accepted as a result, if there are any.

    It must be complete, measured on a GPU by committed code, and its recipe must be the one in `recipe_root`.
    """
    reasons = []
    if missing := sorted(KEYS - set(record)):
        return [f"it lacks {', '.join(missing)}"]
    if record["schema"] != SCHEMA:
        reasons.append(f"schema {record['schema']}: this code reads {SCHEMA}")
    if record["gpu_item"] not in {item.name for item in ITEMS}:
        reasons.append(f"there is no item {record['gpu_item']}")
    if record["verdict"] not in VERDICTS or record["outcome"] not in OUTCOMES[1:]:
        reasons.append(f"verdict {record['verdict']!r} or outcome {record['outcome']!r} is unknown")
    if record["dry_run"] or (record["device"] or {}).get("type") != "cuda":
        reasons.append("it was not measured on a GPU")
    reasons += code_problems(record)
    if not record["packages"].get("torch"):
        reasons.append("it names no version of torch")
    if record["recipe"]:
        reasons += _recipe_problems(record, recipe_root)
    return reasons


def code_problems(record: Mapping[str, Any]) -> list[str]:
    """Return the reason why the code of a record is not committed code, if there is one."""
    commit = record["code"]["commit"]
    if not commit or len(commit) != 40:
        return ["its code has no commit: outside of git, set RLHF_COMMIT to the 40 digits of it"]
    return ["its code differed from the commit"] if record["code"]["dirty"] is not False else []


def _recipe_problems(record: Mapping[str, Any], recipe_root: Path) -> list[str]:
    reasons = ["its recipe was modified"] if record["modified"] or record["overrides"] else []
    folder = recipe_root / record["recipe"] / record["version"]
    if not (folder / "recipe.yaml").exists():
        reasons.append(f"there is no recipe {record['recipe']} {record['version']}")
    elif recipes.load(folder).sha256 != record["recipe_sha256"]:
        reasons.append(f"recipe {record['recipe']} {record['version']} has changed since: measure it again")
    return reasons
