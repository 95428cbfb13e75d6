"""The block `training` of a recipe file: keys of its training sections, written once.

A section that lacks a key of the block has the block's value; a key that a section has itself is the section's own. A
section takes only keys that it knows. The hash of the file covers the block, and `Recipe` has every value in its place.
"""

from pathlib import Path

from rlhf.errors import UserError
from rlhf.files import JsonObject
from rlhf.recipe import moved
from rlhf.recipe.plain_yaml import line_of
from rlhf.recipe.schema import Recipe
from rlhf.recipe.strict import Section, section_types

BLOCK = "training"


def spread(content: JsonObject, file: Path) -> JsonObject:
    """Return the content of a recipe file with the keys of its block in the training sections that lack them.

    Raises UserError if the block is no section, or has a key that no training section of a recipe knows.
    """
    if BLOCK not in content:
        return content
    block = content[BLOCK]
    if not isinstance(block, dict):
        raise UserError(f"{file}:{line_of(file, [BLOCK])}: {BLOCK} is a section: write its keys below it")
    known = {name: kind.model_fields.keys() for name, kind in _training_kinds().items()}
    if unknown := next((key for key in block if not any(key in keys for keys in known.values())), None):
        place = f"{file}:{line_of(file, [BLOCK, unknown])}"
        if old := next((f"{name}.{unknown}" for name in known if moved.is_moved(f"{name}.{unknown}")), None):
            raise UserError(f"{place}: key '{BLOCK}.{unknown}': {moved.in_words(old)}")
        raise UserError(f"{place}: unknown key '{BLOCK}.{unknown}'; it takes keys of {', '.join(known)}")
    spread_out: JsonObject = {}
    for name, section in content.items():
        if name in known and isinstance(section, dict):
            section = {key: value for key, value in block.items() if key in known[name]} | section
        if name != BLOCK:
            spread_out[name] = section
    return spread_out


def _training_kinds() -> dict[str, type[Section]]:
    """Return the classes of the sections that train with an optimizer."""
    return {
        name: kind
        for name, field in Recipe.model_fields.items()
        for kind in section_types(field.annotation)
        if "learning_rate" in kind.model_fields
    }
