"""A run directory that a command is given, and the recipe that its manifests name."""

import os
from pathlib import Path
from typing import NamedTuple

from rlhf.errors import OptionError, UserError, no_such
from rlhf.recipe import Changes, PinnedRecipe, StageName, as_yaml, load
from rlhf.recipe.stages import STAGES, stage_name
from rlhf.run.finished import read_manifest
from rlhf.run.layout import MANIFEST
from rlhf.run.records import Manifest

EXPECTED = "name a run directory, <out>/<recipe>/<version>, or a stage's folder in it"


class NamedRun(NamedTuple):
    """A run directory, `<out>/<recipe>/<version>`, and the stage whose folder in it was named, if one was."""

    directory: Path
    stage: StageName | None

    def __str__(self) -> str:
        return str(self.directory / self.stage if self.stage else self.directory)

    @property
    def out(self) -> Path:
        """Return the root of runs above the directory, relative to the current folder if it is below it."""
        root, here = Path(os.path.abspath(self.directory)).parents[1], Path.cwd()
        return root.relative_to(here) if root.is_relative_to(here) else root


def is_run(path: Path) -> bool:
    """Return whether a folder is a run directory, or that of a stage."""
    return (path / MANIFEST).is_file() or bool(_stages_in(path))


def named_run(path: Path) -> NamedRun:
    """Return the run directory that `path` or the folder above it is. Raises OptionError if neither is one."""
    if not path.is_dir():
        raise OptionError(no_such("folder", path, EXPECTED))
    absolute = Path(os.path.abspath(path))
    if (path / MANIFEST).is_file():
        directory = path.parent if len(path.parts) > 1 else absolute.parent
        return NamedRun(directory, stage_name(absolute.name))
    if not _stages_in(path):
        raise OptionError(f"{path}: no run, for no stage in it has a manifest.json; {EXPECTED}")
    return NamedRun(path, None)


def settings_of(run: NamedRun) -> Manifest:
    """Return the manifest of a run's named stage, or of the one started last, with the changes of all its stages.

    Of a key that was changed several times the last value counts; a stage that was made with another one refuses it
    when it is read. Raises UserError for a damaged manifest, and for a directory that was renamed.
    """
    stages = [run.stage] if run.stage else _stages_in(run.directory)
    manifests = sorted((read_manifest(run.directory / stage) for stage in stages), key=lambda made: made.started or "")
    newest = manifests[-1]
    if Path(os.path.abspath(run.directory)).parts[-2:] != (newest.recipe, newest.version):
        raise UserError(
            f"{run.directory}: it was made as {newest.recipe}/{newest.version}, and these names find it; move it to "
            f"{run.out / newest.recipe / newest.version}"
        )
    changes = {key: value for made in manifests for key, value in made.overrides.items()}
    return newest.model_copy(update={"overrides": changes})


def recipe_of(run: NamedRun, root: Path, further: Changes | None = None) -> PinnedRecipe:
    """Return the recipe of a run with its changes, the `further` ones and its seed.

    It is the one in the folder that the manifest names, or without that folder the one of its name in `root`. If it was
    changed since, the stages say what differs.

    Raises OptionError for a change that contradicts the run and without the recipe, and what `settings_of` raises.
    """
    made, further = settings_of(run), further or {}
    for key in made.overrides.keys() & further.keys():
        if made.overrides[key] != further[key]:
            was = f"{run} has {key}={as_yaml(made.overrides[key])}"
            raise OptionError(f"--set {key}={as_yaml(further[key])}: {was}; leave it out")
    name = Path(made.recipe, made.version)
    for folder in (Path(made.recipe_folder or root / name), root / name):
        if (folder / "recipe.yaml").is_file():
            return load(folder, made.overrides | further, made.seed)
    raise OptionError(f"{run}: its recipe {name} is not in {root}; RLHF_RECIPES names another folder")


def _stages_in(directory: Path) -> list[StageName]:
    return [stage for stage in STAGES if (directory / stage / MANIFEST).is_file()]
