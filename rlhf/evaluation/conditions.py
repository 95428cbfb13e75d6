"""The conditions that all stages of one reproduction share: code, packages, python and device."""

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlhf.errors import UserError
from rlhf.recipe import PinnedRecipe
from rlhf.recipe.chain import differences
from rlhf.run.finished import read_manifest
from rlhf.run.layout import SUMMARY
from rlhf.run.packages import package_versions
from rlhf.run.provenance import code_version

KEYS = ("code", "packages", "python", "device")
Conditions = Mapping[str, Any]


def of_stage(folder: Path) -> Conditions:
    """Return the conditions that a stage's manifest names. Raises UserError if it is missing or damaged."""
    manifest = read_manifest(folder).plain()
    return {key: manifest.get(key) for key in KEYS}


def of_this_process(loaded: PinnedRecipe) -> Conditions:
    """Return the conditions that the next stage will have, as far as they are known without starting the device."""
    from rlhf.observe.device import cpu_model  # imports torch

    kind = loaded.recipe.hardware.device
    of_kind = {"model": cpu_model()} if kind == "cpu" else {"memory_cap": os.environ.get("RLHF_VRAM_CAP")}
    return {
        "code": code_version(loaded.directory).plain(),
        "packages": package_versions(),
        "python": platform.python_version(),
        "device": {"type": kind, **of_kind},
    }


def check_same(folders: Sequence[Path], following: Path | None = None, now: Conditions | None = None) -> None:
    """Check that the stages in `folders` had the same conditions, and that the stage `following` will have them `now`.

    Folders of stages that are not done are passed over. Raises UserError that names the key, both stages and values.
    """
    done = [folder for folder in folders if (folder / SUMMARY).is_file()]
    if not done:
        return
    first = of_stage(done[0])
    for folder in done[1:]:
        _check_pair(done[0], first, folder, of_stage(folder))
    if following is not None and now is not None:
        both = first["device"].keys() & now["device"].keys()
        known, expected = ({**of, "device": {key: of["device"][key] for key in both}} for of in (first, now))
        _check_pair(done[0], known, following, expected)


def _check_pair(first: Path, its: Conditions, second: Path, others: Conditions) -> None:
    """Raise UserError for the first condition in which two stages differ."""
    for key in differences(its, others):
        raise UserError(
            f"{second}: {key} is {_value(others, key)}, and {_value(its, key)} in {first}; one table holds stages of "
            "the same code, packages, python and device: restore that, or choose another --out"
        )


def _value(conditions: Conditions, dotted: str) -> str:
    """Return the value of a dotted key as text."""
    value: Any = conditions
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return "none" if value is None else str(value)
