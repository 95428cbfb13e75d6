"""What makes a record under results/ acceptable: committed code, a recipe that has not changed since, its place."""

from collections.abc import Mapping
from pathlib import Path
from typing import NotRequired

from typing_extensions import TypedDict

from bench.gpu import record as gpu
from bench.kinds import Code, Device, NamedFile, Overrides
from bench.provenance import device_folder, device_name
from bench.reading import check
from rlhf import recipe as recipes
from rlhf.errors import UserError

WITHOUT_RECIPE = ("peers", "against", "gpu")  # folders of results/ that are not named after a recipe


class SeedStage(TypedDict):
    """The keys of a stage's summary that decide whether a record of seeds is kept."""

    stage: str
    seed: int
    status: str
    modified: bool


class Origin(TypedDict):
    """The keys of every record, one of the GPU benchmark too."""

    code: Code
    device: NotRequired[Device | str | None]


class AnyRecord(Origin):
    """The keys that decide whether a record is kept, whatever it measures but on a GPU by bench.gpu."""

    recipe: NotRequired[str]
    version: NotRequired[str]
    recipe_sha256: NotRequired[str]
    modified: NotRequired[bool]
    overrides: NotRequired[Overrides]
    rows: NotRequired[list[NamedFile]]  # files that were given instead of the recipe's data
    seeds: NotRequired[dict[str, dict[str, SeedStage]]]  # seed -> stage -> summary


def problems(content: Mapping[str, object], place: Path, recipe_root: Path) -> list[str]:
    """Return the reasons why a record cannot be kept at `place`, its path below results/; none if it can.

    A record names committed code. Where it names a recipe, that is the one in `recipe_root`, and unmodified, but for
    the rows of a draft: a record names their files. Where it has seeds, each of their stages is done.
    """
    try:
        if "gpu_item" in content:
            return _gpu_problems(check(content, gpu.GpuRecord, str(place)), place, recipe_root)
        return _problems(check(content, AnyRecord, str(place)), place, recipe_root)
    except UserError as error:  # a key is missing or has another type
        return [error.lines[0]]


def _gpu_problems(record: gpu.GpuRecord, place: Path, recipe_root: Path) -> list[str]:
    wrong = [] if place == gpu.path_of(record) else [f"its place is {gpu.path_of(record)}"]
    return gpu.problems(record, recipe_root) + wrong


def _problems(record: AnyRecord, place: Path, recipe_root: Path) -> list[str]:
    reasons = gpu.code_problems(record["code"])
    if not device_name(record.get("device")):
        reasons.append("it names no device")
    if record.get("modified") and not _rows_alone(record, recipe_root):
        reasons.append("its recipe was modified")
    if "recipe" in record:
        name, version = record["recipe"], record.get("version", "")
        reasons += gpu.changed_recipe(name, version, record.get("recipe_sha256"), recipe_root)
    elif place.parts[0] not in WITHOUT_RECIPE:
        reasons.append(f"it names no recipe: its folder is one of {', '.join(WITHOUT_RECIPE)}")
    if "recipe" in record and place.parts[0] not in WITHOUT_RECIPE:
        reasons += _place_problems(record, place)
    return reasons + _seed_problems(record.get("seeds", {}), bool(record.get("modified")))


def _rows_alone(record: AnyRecord, recipe_root: Path) -> bool:
    """Return whether nothing but the rows of a draft was changed: a released recipe is held against its own."""
    folder = recipe_root / record.get("recipe", "") / record.get("version", "")
    draft = (folder / "recipe.yaml").exists() and recipes.load(folder).status == "draft"
    return draft and bool(record.get("rows")) and not record.get("overrides")


def _place_problems(record: AnyRecord, place: Path) -> list[str]:
    folder = Path(record["recipe"], record.get("version", ""), device_folder(device_name(record.get("device"))))
    reasons = [] if folder in place.parents else [f"its place is below {folder}"]
    return reasons + (["its recipe was modified"] if record.get("overrides") else [])


def _seed_problems(seeds: Mapping[str, Mapping[str, SeedStage]], modified: bool) -> list[str]:
    reasons = []
    for seed, stages in seeds.items():
        for stage, summary in stages.items():
            if (summary["stage"], str(summary["seed"])) != (stage, seed):
                reasons.append(f"seed {seed}, {stage}: its summary is of seed {summary['seed']}, {summary['stage']}")
            if summary["status"] != "done" or summary["modified"] != modified:
                reasons.append(f"seed {seed}, {stage}: {summary['status']}, modified: {summary['modified']}")
    return reasons
