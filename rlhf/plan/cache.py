"""Answers of earlier rehearsals, on disk."""

import functools
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

import peakmem
import rlhf
from rlhf.files import cache_root, replacing
from rlhf.packages import hash_of_modules, package_versions
from rlhf.plan.hardware import gpu_of
from rlhf.plan.phases import PredictedStage
from rlhf.process.environment import expandable_segments
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.pinned import content_hash
from rlhf.recipe.stages import EVALUATE, STAGE_TABLE
from rlhf.terminal import say

REHEARSED = TypeAdapter(PredictedStage)


def file_of(loaded: PinnedRecipe, name: StageName) -> Path:
    """Return the file of a rehearsal's answer, named after all that the answer depends on.

    Whether a recipe can be rehearsed may also depend on the other stages; a refusal is not stored.
    """
    deciding = {"model", "tokenizer", "data", "lora", EVALUATE, name, *STAGE_TABLE[name].sizes_from}
    recipe = loaded.recipe.model_dump(mode="json", include=deciding)  # other stages only bring adapters of one shape
    roles = [loaded.recipe.start, *(loaded.recipe.policies() if name == EVALUATE else [])]
    hardware = loaded.recipe.hardware.model_dump(mode="json", exclude={"name", "memory_gb", "threads"})
    device = loaded.recipe.hardware.device
    card = gpu_of(loaded.recipe.hardware.name) if device == "cuda" else None
    allocator = expandable_segments() if device == "cuda" else None
    key = content_hash([recipe, roles, hardware, card, allocator, name, _code_hash(), package_versions()])
    return cache_root() / "predictions" / f"{key[:32]}.json"


@functools.cache
def _code_hash() -> str:
    """Return the hash, at the first call, of this code and of peakmem's."""
    return content_hash([hash_of_modules(Path(str(package.__file__)).parent) for package in (rlhf, peakmem)])


def read(file: Path) -> PredictedStage | None:
    """Return the answer in a file; None without a whole one."""
    try:
        return REHEARSED.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def write(file: Path, answer: PredictedStage) -> None:
    """Keep an answer in its file, if that can be written; if not, say so."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            temporary.write_bytes(REHEARSED.dump_json(answer))
    except OSError as error:
        say(f"{error}: what is predicted is not kept; XDG_CACHE_HOME names another folder")
