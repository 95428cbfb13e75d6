"""A run directory that a command is given, and the recipe that its manifests name."""

import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

from rlhf.errors import OptionError, UserError, no_such
from rlhf.recipe import Changes, PinnedRecipe, StageName, as_yaml, load
from rlhf.recipe.stages import POLICIES, REWARD_MODELS, STAGES, stage_name
from rlhf.run.finished import read_manifest
from rlhf.run.layout import MANIFEST, REMAKING
from rlhf.run.records import Manifest

_MERGED = "merge.stage"  # the key that says which policy is merged
MOST_NAMED = 4  # runs in a message
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


class RunSettings(NamedTuple):
    """What a run was started with: its recipe's name and version and that file's hash, its seed, changed keys."""

    recipe: str
    version: str
    recipe_sha256: str
    argv: list[str]  # of its newest stage
    seed: int
    overrides: Changes


def is_run(path: Path) -> bool:
    """Return whether a folder is a run directory, or that of a stage."""
    return (path / MANIFEST).is_file() or bool(_stages_in(path))


def runs_below(path: Path) -> list[Path]:
    """Return the run directories in a root of runs, or in a folder of such roots, one for each seed."""
    manifests = [file for depth in range(4) for file in sorted(path.glob("*/" * depth + f"v[0-9]*/*/{MANIFEST}"))]
    stages = [file.parent for file in manifests if file.parent.name in STAGES]
    return list(dict.fromkeys(stage.parent for stage in stages if stage.parent.name != REMAKING))


def named_run(path: Path) -> NamedRun:
    """Return the run directory that `path` or the folder above it is. Raises OptionError if neither is one."""
    if not path.is_dir():
        raise OptionError(no_such("folder", path, EXPECTED))
    absolute = Path(os.path.abspath(path))
    if (path / MANIFEST).is_file():
        if absolute.name not in STAGES:
            raise OptionError(f"{path}: a stage's manifest.json in a folder that is named after no stage; {EXPECTED}")
        directory = path.parent if len(path.parts) > 1 else absolute.parent
        return NamedRun(directory, stage_name(absolute.name))
    if not _stages_in(path):
        below = ", ".join(str(run) for run in runs_below(path)[:MOST_NAMED])
        hint = f"it holds {below}: name one of them" if below else EXPECTED
        raise OptionError(f"{path}: no run, for no stage in it has a manifest.json; {hint}")
    return NamedRun(path, None)


def settings_of(run: NamedRun) -> RunSettings:
    """Return the settings of a run's named stage, or those of all its stages together.

    A key that decides nothing in a stage is taken from the stage that was started last. Raises UserError for a damaged
    manifest, for a directory that was renamed, and where stages were made with other values of a key.
    """
    ordered = sorted(_manifests(run).items(), key=lambda item: item[1].started or "")
    newest = ordered[-1][1]
    folders = Path(os.path.abspath(run.directory)).parts[-2:]
    if folders != (newest.recipe, newest.version):
        raise UserError(
            f"{run.directory}: it was made as {newest.recipe}/{newest.version}, and these names find it; move it to "
            f"{run.out / newest.recipe / newest.version}"
        )
    made: dict[str, tuple[StageName, object]] = {}
    overrides: dict[str, object] = {}
    for stage, manifest in ordered:
        overrides |= manifest.overrides
        for key, value in {"seed": manifest.seed, **_deciding(manifest)}.items():
            first, other = made.setdefault(key, (stage, value))
            if other != value:
                raise UserError(
                    f"{run.directory}: {first} was made with {key}={as_yaml(other)} and {stage} with "
                    f"{key}={as_yaml(value)}; name the folder of one, such as {run.directory / stage}"
                )
    overrides |= {key: value for key, (_, value) in made.items() if key != "seed"}
    return RunSettings(
        newest.recipe, newest.version, newest.recipe_sha256, newest.argv, newest.seed, cast(Changes, overrides)
    )


def recipe_of(
    run: NamedRun, root: Path, directory: Path | None = None, further: Changes | None = None, merging: bool = False
) -> PinnedRecipe:
    """Return the recipe of a run with its changes, the `further` ones and its seed.

    It is the recipe in `directory`, or that of its name in `root` or in the folders that the run's command names: the
    first one with the hash that the run has; if none has it, the first, and the stages say what differs. `merging`: for
    a merge, or what uses it: the policy whose folder was named is the one that is merged.

    Raises OptionError for a change that contradicts the run and without the recipe, and what `settings_of` raises.
    """
    made, further = settings_of(run), further or {}
    for key in made.overrides.keys() & further.keys():
        if made.overrides[key] != further[key]:
            was = f"{run} has {key}={as_yaml(made.overrides[key])}"
            raise OptionError(f"--set {key}={as_yaml(further[key])}: {was}; leave it out")
    loaded = load(_recipe_folder(run, made, root, directory), made.overrides | further, made.seed)
    merge = loaded.recipe.merge
    mergeable = run.stage in (*POLICIES, *REWARD_MODELS)
    if not merging or merge is None or not mergeable or merge.stage == run.stage or _MERGED in further:
        return loaded
    return loaded.with_changes({_MERGED: run.stage})


def _recipe_folder(run: NamedRun, made: RunSettings, root: Path, typed: Path | None) -> Path:
    """Return the folder of a run's recipe. Raises OptionError without any."""
    names = made.recipe, made.version
    if typed:
        if Path(os.path.abspath(typed)).parts[-2:] != names:
            raise OptionError(f"--recipe {typed}: {run} was made with {'/'.join(names)}; leave --recipe out")
        return typed
    of_command = [
        Path(word) if option == "--recipe" else Path(word, *names)
        for option, word in pairwise(made.argv)
        if option in ("--recipe", "--recipe-root")
    ]
    folders = [folder for folder in (root.joinpath(*names), *of_command) if (folder / "recipe.yaml").is_file()]
    if not folders:
        where = "--recipe-root names the folder that it is in"
        raise OptionError(f"{run}: its recipe {'/'.join(names)} is not in {root}; {where}")
    return next((folder for folder in folders if load(folder).sha256 == made.recipe_sha256), folders[0])


def _manifests(run: NamedRun) -> dict[StageName, Manifest]:
    """Return the manifests of a run's named stage, or of all its stages. Raises UserError for a damaged one."""
    stages = [run.stage] if run.stage else _stages_in(run.directory)
    return {stage: read_manifest(run.directory / stage) for stage in stages}


def _stages_in(directory: Path) -> list[StageName]:
    return [stage for stage in STAGES if (directory / stage / MANIFEST).is_file()]


def _deciding(manifest: Manifest) -> Mapping[str, object]:
    """Return those changed keys of a stage that decide what it produces: its manifest's settings have them."""
    settings = manifest.settings.plain()

    def decides(key: str, changed: object) -> bool:
        section = key.partition(".")[0]
        return section in settings and (changed is None or value(settings, key) is not None)

    return {key: changed for key, changed in manifest.overrides.items() if decides(key, changed)}


def value(settings: Mapping[str, Any], dotted: str) -> Any:
    """Return the value of a dotted key of nested settings; None where a section on the way is absent."""
    inner: Any = settings
    for name in dotted.split("."):
        inner = inner.get(name) if isinstance(inner, Mapping) else None
    return inner
