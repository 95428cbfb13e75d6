"""What makes a record under results/ acceptable: committed code, a recipe that has not changed since, its place."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu import record as gpu
from rlhf import recipe as recipes

WITHOUT_RECIPE = ("peers", "layers", "outside", "gpu")  # folders of results/ that are not named after a recipe


def problems(record: Mapping[str, Any], place: Path, recipe_root: Path) -> list[str]:
    """Return the reasons why a record cannot be kept at `place`, its path below results/; none if it can.

    A record names committed code. Where it names a recipe, that is the one in `recipe_root`, and unmodified; where it
    has seeds, each of their stages is done.
    """
    if "gpu_item" in record:
        wrong = [] if place == gpu.path_of(record) else [f"its place is {gpu.path_of(record)}"]
        return gpu.problems(record, recipe_root) + wrong
    reasons = gpu.code_problems(record)
    if not device_name(record):
        reasons.append("it names no device")
    if record.get("modified"):
        reasons.append("its recipe was modified")
    if "recipe" in record:
        reasons += _recipe_problems(record, recipe_root)
    elif place.parts[0] not in WITHOUT_RECIPE:
        reasons.append(f"it names no recipe: its folder is one of {', '.join(WITHOUT_RECIPE)}")
    if "recipe" in record and place.parts[0] not in WITHOUT_RECIPE:
        reasons += _place_problems(record, place)
    return reasons + _seed_problems(record.get("seeds", {}))


def device_name(record: Mapping[str, Any]) -> str:
    """Return the name of a record's device, which some kinds have as a string alone; empty where there is none."""
    device = record.get("device") or ""
    return str(device["name"] if isinstance(device, Mapping) else device)


def _recipe_problems(record: Mapping[str, Any], recipe_root: Path) -> list[str]:
    name, _, version = record["recipe"].partition(" ")
    version = record.get("version", version)  # bench.layers has both in one string
    folder = recipe_root / name / version
    if not (folder / "recipe.yaml").exists():
        return [f"there is no recipe {name} {version}"]
    if recipes.load(folder).sha256 != record["recipe_sha256"]:
        return [
            f"recipe {name} {version} has changed since: a released recipe is frozen, make the change a new version"
        ]
    return []


def _place_problems(record: Mapping[str, Any], place: Path) -> list[str]:
    device = device_name(record).lower().replace(" ", "-")
    folder = Path(record["recipe"], record["version"], device)
    reasons = [] if folder in place.parents else [f"its place is below {folder}"]
    return reasons + (["its recipe was modified"] if record.get("overrides") else [])


def _seed_problems(seeds: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    reasons = []
    for seed, stages in seeds.items():
        for stage, summary in stages.items():
            if (summary["stage"], str(summary["seed"])) != (stage, seed):
                reasons.append(f"seed {seed}, {stage}: its summary is of seed {summary['seed']}, {summary['stage']}")
            if summary["status"] != "done" or summary["modified"]:
                reasons.append(f"seed {seed}, {stage}: {summary['status']}, modified: {summary['modified']}")
    return reasons
