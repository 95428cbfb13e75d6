"""Recipes: `recipes/<name>/v<N>/recipe.yaml`, read into frozen, strictly typed objects.

A recipe states everything that decides a run's outcome; rlhf/recipe/schema.py and its neighbours have its keys.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlhf.errors import UserError
from rlhf.recipe.names import GROUPS as GROUPS
from rlhf.recipe.names import ONLINE as ONLINE
from rlhf.recipe.names import POLICIES as POLICIES
from rlhf.recipe.names import STAGES as STAGES
from rlhf.recipe.names import GroupName as GroupName
from rlhf.recipe.names import OnlineName as OnlineName
from rlhf.recipe.names import PolicyName as PolicyName
from rlhf.recipe.names import Role as Role
from rlhf.recipe.names import StageName as StageName
from rlhf.recipe.names import stage_name as stage_name
from rlhf.recipe.published import Figure as Figure
from rlhf.recipe.schema import SHARED as SHARED
from rlhf.recipe.schema import Dialogues as Dialogues
from rlhf.recipe.schema import Dpo as Dpo
from rlhf.recipe.schema import Evaluate as Evaluate
from rlhf.recipe.schema import Merge as Merge
from rlhf.recipe.schema import Optimization as Optimization
from rlhf.recipe.schema import Pretrain as Pretrain
from rlhf.recipe.schema import Recipe as Recipe
from rlhf.recipe.schema import Rm as Rm
from rlhf.recipe.schema import Sft as Sft
from rlhf.recipe.schema import StageOptions as StageOptions
from rlhf.recipe.schema_data import Data as Data
from rlhf.recipe.schema_data import Flaw as Flaw
from rlhf.recipe.schema_data import Lengths as Lengths
from rlhf.recipe.schema_data import Sums as Sums
from rlhf.recipe.schema_data import Toy as Toy
from rlhf.recipe.schema_model import Architecture as Architecture
from rlhf.recipe.schema_model import Hardware as Hardware
from rlhf.recipe.schema_model import Lora as Lora
from rlhf.recipe.schema_model import Model as Model
from rlhf.recipe.schema_model import Tokenizer as Tokenizer
from rlhf.recipe.schema_online import MODEL_REWARD as MODEL_REWARD
from rlhf.recipe.schema_online import Group as Group
from rlhf.recipe.schema_online import GroupOptions as GroupOptions
from rlhf.recipe.schema_online import Grpo as Grpo
from rlhf.recipe.schema_online import OnlineOptions as OnlineOptions
from rlhf.recipe.schema_online import OnPolicy as OnPolicy
from rlhf.recipe.schema_online import Ppo as Ppo
from rlhf.recipe.schema_online import Rloo as Rloo
from rlhf.recipe.strict import as_yaml as as_yaml
from rlhf.recipe.strict import parse_overrides as parse_overrides
from rlhf.recipe.strict import read_yaml, validate, with_overrides

_PARENTS: dict[StageName, tuple[StageName, ...]] = {
    "pretrain": (),
    "sft": ("pretrain",),
    "rm": ("pretrain", "sft"),
    **dict.fromkeys(ONLINE, ("pretrain", "sft", "rm")),  # without the reward model where it scores nothing
    "dpo": ("pretrain", "sft"),
    "evaluate": ("pretrain", "sft", "rm"),  # and every trained policy that exists
    "merge": ("pretrain", "sft"),  # and the stage whose adapter is merged
}


class PinnedRecipe(NamedTuple):
    """A recipe with its folder, its hash, the overrides applied to it and the figures it is compared with."""

    recipe: Recipe
    directory: Path
    sha256: str  # of the released file's content, without overrides
    overrides: dict[str, Any]
    targets: tuple[Figure, ...]

    @property
    def name(self) -> str:
        """Return the recipe's name, the folder above its version."""
        return Path(os.path.abspath(self.directory)).parent.name

    @property
    def version(self) -> str:
        """Return the recipe's version, such as v1."""
        return Path(os.path.abspath(self.directory)).name

    @property
    def modified(self) -> bool:
        """Return whether overrides changed the recipe."""
        return bool(self.overrides)


def load(directory: Path, overrides: Mapping[str, Any] | None = None, seed: int | None = None) -> PinnedRecipe:
    """Read `directory/recipe.yaml`, apply `overrides` ({"ppo.kl_coef": 0.1}) and check the result.

    `directory` may also name the file itself. Another `seed` is no modification: a released recipe is meant to be run
    with several. Raises UserError, one line, for anything that is wrong with the file, a key or a combination of
    values.
    """
    directory = directory.parent if directory.name == "recipe.yaml" else directory
    absolute = Path(os.path.abspath(directory))  # `v1`, `.` and `a/../v1` also have a name and a version
    file = directory / "recipe.yaml"
    if not (re.fullmatch(r"v[0-9]+", absolute.name) and absolute.parent.name):
        raise UserError(f"{directory}: a recipe lives in <name>/v<N>/recipe.yaml")
    content = read_yaml(file)
    overrides = dict(overrides or {})
    changes = overrides if seed is None else {**overrides, "seed": seed}
    recipe = validate(Recipe, with_overrides(content, changes), file, changes)
    targets = _figures(directory / "published.yaml")
    return PinnedRecipe(recipe, directory, content_hash(content), overrides, targets)


def _figures(file: Path) -> tuple[Figure, ...]:
    """Return the figures of a published.yaml; () if there is no such file. Raises UserError.

    The file names its `guide` once for all figures. Targets of our own have no guide.
    """
    if not (file.exists() or file.is_symlink()):  # a broken link is an error, not a recipe without figures
        return ()
    content = read_yaml(file)
    rows, guide = content.pop("targets", None), content.pop("guide", None)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file}: needs a key 'targets' with a list of figures")
    if content:
        raise UserError(f"{file}: unknown key '{next(iter(content))}'; the keys are guide and targets")
    return tuple(validate(Figure, {"guide": guide} | row, file, {}, f"targets.{i}.") for i, row in enumerate(rows))


def content_hash(content: Any) -> str:
    """Return the sha256 of parsed YAML: every value counts, comments and layout do not."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def default_root() -> Path:
    """Return the folder of recipes.

    It is RLHF_RECIPES if that is set, or else the first that holds recipes: recipes/ in the current folder, that of the
    checkout that this file belongs to, or that of the installed wheel.
    """
    if root := os.environ.get("RLHF_RECIPES"):
        return Path(root)
    package = Path(__file__).parents[1]
    candidates = (Path("recipes"), package.parent / "recipes", package / "recipes")
    return next((candidate for candidate in candidates if available(candidate)), candidates[0])


def available(root: Path) -> list[Path]:
    """Return every recipe directory below `root`, ordered by name, then version."""
    folders = [file.parent for file in root.glob("*/v*/recipe.yaml") if re.fullmatch(r"v[0-9]+", file.parent.name)]
    return sorted(folders, key=lambda d: (d.parent.name, int(d.name[1:])))


def resolve(hardware: str, root: Path) -> Path:
    """Return the newest released version of the default recipe of `hardware`; its newest draft if none is released.

    Raises UserError if there is no default recipe, or more than one.
    """
    names: set[str] = set()
    defaults: set[str] = set()
    by_status: dict[str, Path] = {}
    for directory in available(root):
        recipe = load(directory).recipe
        names.add(recipe.hardware.name)
        if recipe.hardware.name == hardware and recipe.default:
            by_status[recipe.status] = directory  # available() puts the newest version last
            defaults.add(directory.parent.name)
    if len(defaults) > 1:
        listing = " and ".join(sorted(defaults))
        raise UserError(f"--hw {hardware}: {listing} are both its default; set default: false in one, or use --recipe")
    if not by_status:
        if not names:
            raise UserError(no_recipes(root))
        raise UserError(f"--hw {hardware}: no default recipe in {root} (hardware there: {', '.join(sorted(names))})")
    return by_status.get("released") or by_status["draft"]


def no_recipes(root: Path) -> str:
    """Return the message for a folder without recipes."""
    return f"{root}: no recipes there; --recipes or RLHF_RECIPES names a folder with <name>/v<N>/recipe.yaml in it"


def longest(recipe: Recipe) -> int:
    """Return the length in tokens of the longest sequence that any stage admits."""
    return max(recipe.lengths().values())


def with_random_weights(recipe: Recipe, pairs: int, shape: str) -> dict[str, Any]:
    """Return overrides with which a recipe needs no download and no files.

    The model has its own architecture and random weights; tokenizer and dialogues are stand-ins. Memory and speed are
    those of the real ones; the results mean nothing. `shape` is as in `data.lengths`. Raises UserError for a recipe
    without `model.architecture`.
    """
    architecture = recipe.model.architecture
    if architecture is None:
        raise UserError("random weights need model.architecture, which this recipe does not have")
    vocabulary = architecture.vocab_size or recipe.tokenizer.vocab_size
    return {
        "model.source": "random",
        "model.architecture.vocab_size": vocabulary,
        "tokenizer": {"source": "words", "vocab_size": vocabulary, "template": "hh"},
        "pretrain": None,
        "data.source": "lengths",
        **({"data.files": []} if recipe.data.files else {}),
        "data.lengths": {"pairs": pairs, "shape": shape},
    }


def parents(recipe: Recipe, stage: StageName) -> list[StageName]:
    """Return the stages that must be finished before `stage`, in order."""
    needed = {*_PARENTS[stage]}
    if stage == "merge":
        needed |= {recipe.merge.stage, *parents(recipe, recipe.merge.stage)}
    section = recipe.section(stage)
    if isinstance(section, Group) and not section.model_scores:
        needed.discard("rm")
    return [name for name in STAGES if name in needed and recipe.section(name) is not None]


def stages_before(recipe: Recipe, stage: StageName) -> list[StageName]:
    """Return the stages to run before `stage`, in order.

    These are its parents; before an evaluation also one policy: PPO's, or the first that the recipe has.
    """
    trained = [name for name in POLICIES if recipe.section(name) is not None] if stage == "evaluate" else []
    return [*parents(recipe, stage), *trained[:1]]


def settings(recipe: Recipe, stage: StageName) -> dict[str, Any]:
    """Return the part of a recipe that decides what `stage` and its parents produce.

    A run continues, or builds on another, only if these settings agree.
    """
    sections = {"hardware", "seed", "model", "tokenizer", "data", stage, *parents(recipe, stage)}
    if stage != "pretrain":
        sections.add("lora")
    if stage == "dpo":
        sections.add("evaluate")  # DPO measures its gains with these keys
    relevant = {key: value for key, value in recipe.model_dump(mode="json").items() if key in sections}
    if "evaluate" in relevant and (stage == "dpo" or recipe.evaluate.num_samples == 1):
        relevant["evaluate"].pop("num_samples")  # DPO always samples one answer; older runs did too and lack this key
    for key in (
        "count",
        "engine",
        "deterministic",
        "trunk",
    ):  # they affect only rounding: a run may continue with others
        relevant["hardware"].pop(key)
    if relevant.get("lora", {}).get("layers") == "all":
        relevant["lora"].pop("layers")  # runs from before this key lack it
    for name in (name for name in ONLINE if relevant.get(name)):
        relevant[name]["vllm_url"] = relevant[name]["vllm_url"] is not None  # the server's address decides nothing
    return relevant


def differences(a: Any, b: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of the keys in which two nested dictionaries differ."""
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for key in sorted({*a, *b}) for d in differences(a.get(key), b.get(key), f"{prefix}{key}.")]
    return [] if a == b else [prefix.rstrip(".")]
