"""Answers of earlier rehearsals, on disk."""

import functools
import hashlib
import json
import os
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlhf import recipe as recipes
from rlhf.files import JsonObject, read_json, replacing
from rlhf.memory.card import cards
from rlhf.memory.phases import DECODING_STEP, DEPTHS, WHOLE, Peak, RehearsalName, RehearsedRole, Reserved
from rlhf.process.cuda import expandable_segments
from rlhf.recipe import PinnedRecipe
from rlhf.run.packages import package_version

PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "bitsandbytes")
# Sections of the recipe that give sizes to a rehearsal beside its own.
SIZES_FROM: dict[RehearsalName, set[str]] = {"merge": {"sft"}, "evaluate": {"rm"}, DECODING_STEP: {"ppo"}}
# The forms of an answer's parts.
_DEPTHS = TypeAdapter(list[dict[str, Peak]])
_RESERVED = TypeAdapter(dict[str, Reserved] | None)
_ROLES = TypeAdapter(dict[str, dict[str, int | list[str]]])


def file_of(loaded: PinnedRecipe, name: RehearsalName) -> Path:
    """Return the file of a rehearsal's answer, named after all that the answer depends on."""
    deciding = {"model", "tokenizer", "data", "lora", "evaluate", name} | SIZES_FROM.get(name, set())
    recipe = loaded.recipe.model_dump(mode="json", include=deciding)  # other stages only bring adapters of one shape
    policies = [p for p in recipes.POLICIES if loaded.recipe.section(p) is not None] if name == "evaluate" else []
    hardware = loaded.recipe.hardware.model_dump(mode="json", exclude={"name", "memory_gb", "threads"})
    device = loaded.recipe.hardware.device
    card = cards.gpu_of(loaded.recipe.hardware.name) if device == "cuda" else None
    allocator = expandable_segments() if device == "cuda" else None
    versions = [package_version(name) for name in PACKAGES]
    key = recipes.content_hash([recipe, policies, hardware, card, allocator, name, _code_hash(), versions])
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "rlhf" / "predictions" / f"{key[:32]}.json"


@functools.cache
def _code_hash() -> str:
    """Return the hash of all code of rlhf as it was at the first call."""
    return hash_of_modules(Path(__file__).parents[1])


def hash_of_modules(package: Path) -> str:
    """Return the hash of all modules of a package, those of its subpackages included."""
    code = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        code.update(file.read_bytes())
    return code.hexdigest()


def read(file: Path) -> JsonObject | None:
    """Return the answer in a file; None if there is none, or a damaged one."""
    content = read_json(file)
    return content if content is not None and _is_answer(content) else None


def _is_answer(content: JsonObject) -> bool:
    """Return whether JSON has the form of a rehearsal's answer, about a stage or about a decoding step."""
    try:
        if content.keys() == {"depths", "reserved"}:
            _RESERVED.validate_python(content["reserved"])
            depths = _DEPTHS.validate_python(content["depths"])
            return len(depths) == len(DEPTHS) and all(WHOLE in d and d.keys() == depths[0].keys() for d in depths)
        roles = _ROLES.validate_python(content["roles"]) if content.keys() == {"roles"} else {}
    except ValidationError:
        return False
    return bool(roles) and all(role.keys() == RehearsedRole.__annotations__.keys() for role in roles.values())


def write(file: Path, content: JsonObject) -> None:
    """Write an answer, where the file system lets this be done."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as temporary:
            temporary.write_text(json.dumps(content))
    except OSError:
        pass  # a cache that cannot be written only costs time
