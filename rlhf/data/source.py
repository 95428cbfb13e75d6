"""Where a recipe's rows come from: the hub, files, or a generator, whose files are made once and kept."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from filelock import FileLock

from rlhf.data import formats
from rlhf.data.worlds import additions, gym, lengths, sums, toy
from rlhf.errors import UserError
from rlhf.files import sha256, write_json
from rlhf.packages import install_command, package_version, require
from rlhf.process.children import child_environment
from rlhf.recipe import Recipe
from rlhf.recipe.pinned import content_hash
from rlhf.recipe.schema_data import ReasoningGym
from rlhf.run.reader import advising, read
from rlhf.run.records import Generated
from rlhf.terminal import excerpt

WORLDS = {"toy": toy, "sums": sums, "additions": additions, "lengths": lengths}


def read_source(recipe: Recipe, folder: Path) -> formats.ParsedRows:
    """Read the rows that `data.source` names; generated ones are kept in `folder`. Raises UserError for bad data."""
    data = recipe.data
    if data.source == "hub":
        return formats.read_hub(data)
    if data.source == "files":
        return formats.read(data.files, data)
    if data.source == "reasoning_gym":
        assert data.reasoning_gym
        return read_tasks(data.reasoning_gym, recipe.seed, folder)
    options = {"seed": recipe.seed, **getattr(data, data.source).model_dump()}
    if data.source == "lengths":
        options["longest"] = recipe.longest()
    if data.source == "toy":
        options["heldout_fraction"], options["validation_fraction"] = (
            data.heldout_fraction,
            data.validation_fraction or 0.0,
        )
    world = WORLDS[data.source]
    return _generated(folder, data.source, options, world, lambda target: world.write(target, **options))


def read_tasks(settings: ReasoningGym, seed: int, folder: Path, complete: bool = True) -> formats.ParsedRows:
    """Read the questions of a task of reasoning-gym. Raises UserError.

    The pinned version of the package must be installed: another may make other questions. `complete`: the task must
    have as many questions as the settings say.
    """
    require([gym.PACKAGE], "data.source: reasoning_gym", install_command("tasks"))
    if (found := package_version("reasoning-gym")) != settings.version:
        raise UserError(
            f"data.reasoning_gym.version is {settings.version}, and {found} is installed, which may make other "
            f"questions: pip install reasoning-gym=={settings.version}"
        )
    options = {"seed": seed, **settings.model_dump()}
    rows = _generated(folder, settings.task, options, gym, lambda target: _made_apart(target, options))
    if complete and len(rows.rows) < settings.size:
        raise UserError(
            f"data.reasoning_gym: {settings.task} gives {len(rows.rows):,} different questions, and size is "
            f"{settings.size:,}: lower it, or make the task larger with config"
        )
    return rows


def _made_apart(folder: Path, options: Mapping[str, object]) -> list[Path]:
    """Return the file of `gym.write`, made in a process where each text has the same hash every time.

    Some tasks take words from sets. Raises UserError.
    """
    arguments = {"folder": str(folder)} | {key: value for key, value in options.items() if key != "version"}
    command = [sys.executable, "-P", "-m", gym.__name__, json.dumps(arguments)]
    environment = child_environment(PYTHONHASHSEED="0")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        *_, last = ["", *done.stderr.strip().splitlines()]
        raise UserError(f"data.reasoning_gym: {options['task']} cannot be made ({excerpt(last)})")
    return [folder / gym.FILE]


def _generated(
    folder: Path,
    kind: str,
    options: Mapping[str, object],
    world: ModuleType,
    write: Callable[[Path], list[Path]],
) -> formats.ParsedRows:
    """Read the files that `write` makes in a folder. Nothing is to be said of them.

    They are made once for the same options and code, the files that begin with the name of the `world`; made.json names
    them in their order, with their hashes. Processes that need them at once wait for the first. Without made.json they
    may be cut off and are made again. Raises UserError for a file that has changed since, and for a made.json that
    cannot be read.
    """
    module = Path(str(world.__file__))
    code = [sha256(file) for file in sorted(module.parent.glob(f"{module.stem}*"))]
    target = folder / f"{kind}-{content_hash([options, *code])[:12]}"
    target.mkdir(parents=True, exist_ok=True)
    record = target / "made.json"
    with FileLock(target / ".lock"):
        with advising(f"move {target} away: the data are made again"):
            made = read(record, Generated)
        if made is None or not all((target / name).is_file() for name in made.sha256):
            write_json(record, {"sha256": {file.name: sha256(file) for file in write(target)}})
            made = read(record, Generated)
            assert made
    rows = formats.read([target / name for name in made.sha256])
    if changed := [file for file in rows.files if file.sha256 != made.sha256[Path(file.name).name]]:
        raise UserError(f"{changed[0].name} has changed since it was made here; delete {target} to make it again")
    return replace(rows, notes=())
