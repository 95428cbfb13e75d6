"""Where a recipe's rows come from: the hub, files, or a generator, whose files are made once and kept."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from filelock import FileLock

from rlhf.data import formats
from rlhf.data.formats import RowOptions
from rlhf.data.worlds import additions, gym, lengths, sums, toy, toy_texts
from rlhf.errors import UserError
from rlhf.files import sha256, write_json
from rlhf.process.children import child_environment
from rlhf.recipe import Recipe
from rlhf.recipe.pinned import content_hash
from rlhf.recipe.schema_data import Data, ReasoningGym
from rlhf.run.packages import package_version, require_found
from rlhf.run.reader import advising, read
from rlhf.run.records import Generated
from rlhf.terminal import excerpt


def read_from_hub(data: Data) -> formats.ParsedRows:
    """Read the pinned rows of the hub that a recipe names. Raises UserError for bad data."""
    assert data.name and data.revision
    return formats.read_hub(data.name, data.revision, RowOptions.of(data), split=data.split, data_dir=data.data_dir)


def read_source(recipe: Recipe, folder: Path) -> formats.ParsedRows:
    """Read the rows that `data.source` names; generated ones are kept in `folder`. Raises UserError for bad data."""
    data = recipe.data
    if data.source == "hub":
        return read_from_hub(data)
    if data.source == "files":
        return formats.read(data.files, RowOptions.of(data))
    # Each combination of settings and generator code has a separate folder.
    if data.source == "lengths":
        assert data.lengths
        options = {"seed": recipe.seed, "longest": recipe.longest(), **data.lengths.model_dump()}
        target = _generated_folder(folder, "lengths", options, lengths)
        files = _generate_once(target, ["pairs.jsonl"], lambda: lengths.write(target / "pairs.jsonl", **options))
        return _made(files)
    if data.source == "sums":
        assert data.sums
        options = {"seed": recipe.seed, **data.sums.model_dump()}
        target = _generated_folder(folder, "sums", options, sums)
        return _made(_generate_once(target, sums.FILES, lambda: sums.write(target, **options)))
    if data.source == "additions":
        assert data.additions
        options = {"seed": recipe.seed, **data.additions.model_dump()}
        target = _generated_folder(folder, "additions", options, additions)
        files = _generate_once(
            target, additions.files(data.additions.demonstrations), lambda: additions.write(target, **options)
        )
        return _made(files)
    if data.source == "reasoning_gym":
        assert data.reasoning_gym
        return read_tasks(data.reasoning_gym, recipe.seed, folder)
    assert data.toy
    options = {
        "seed": recipe.seed,
        "heldout_fraction": data.heldout_fraction,
        "validation_fraction": data.validation_fraction or 0.0,
        **data.toy.model_dump(),
    }
    target = _generated_folder(folder, "toy", options, toy, toy_texts)
    files = _generate_once(target, toy.files(data.toy.demonstrations), lambda: toy.write(target, **options))
    return _made(files)


def read_tasks(settings: ReasoningGym, seed: int, folder: Path, complete: bool = True) -> formats.ParsedRows:
    """Read the questions of a task of reasoning-gym. Raises UserError.

    The pinned version of the package must be installed: another may make other questions. `complete`: the task must
    have as many questions as the settings say.
    """
    require_found((gym.PACKAGE,), "data.source: reasoning_gym", "tasks")
    if (found := package_version("reasoning-gym")) != settings.version:
        raise UserError(
            f"data.reasoning_gym.version is {settings.version}, and {found} is installed, which may make other "
            f"questions: pip install reasoning-gym=={settings.version}"
        )
    options = {"seed": seed, **settings.model_dump()}
    target = _generated_folder(folder, settings.task, options, gym)
    del options["version"]

    def write() -> None:
        made = _made_apart(str(target), options)
        if complete and made < settings.size:
            raise UserError(
                f"data.reasoning_gym: {settings.task} gives {made:,} different questions, and size is "
                f"{settings.size:,}: lower it, or make the task larger with config"
            )

    files = _generate_once(target, gym.FILES, write)
    return _made(files)


def _made(files: Sequence[Path]) -> formats.ParsedRows:
    """Read files that were generated. Nothing is to be said of them."""
    rows = formats.read(files)
    return replace(rows, report=replace(rows.report, notes=()))


def _made_apart(folder: str, options: Mapping[str, object]) -> int:
    """Return the questions of `gym.write`, made in a process where each text has the same hash every time.

    Some tasks take words from sets. Raises UserError.
    """
    command = [sys.executable, "-P", "-m", gym.__name__, json.dumps({"folder": folder, **options})]
    environment = child_environment(PYTHONHASHSEED="0")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        *_, last = ["", *done.stderr.strip().splitlines()]
        raise UserError(f"data.reasoning_gym: {options['task']} cannot be made ({excerpt(last)})")
    return int(done.stdout.split()[-1])


def _generated_folder(folder: Path, kind: str, options: Mapping[str, object], *makers: ModuleType) -> Path:
    """Make a folder for generated rows, named by the options and the code that they are made from."""
    code = [sha256(Path(str(maker.__file__))) for maker in makers]
    generated = folder / f"{kind}-{content_hash([options, *code])[:12]}"
    generated.mkdir(parents=True, exist_ok=True)
    return generated


def _generate_once(folder: Path, names: Sequence[str], write: Callable[[], None]) -> list[Path]:
    """Return the files that `write` makes in `folder`, and make them only once; made.json has their hashes.

    Processes that need them at once wait for the first. Without made.json the files may be cut off and are made again.
    Raises UserError for one that has changed since, and for a made.json that cannot be read.
    """
    files, record = [folder / name for name in names], folder / "made.json"
    with FileLock(folder / ".lock"):
        with advising(f"move {folder} away: the data are made again"):
            hashes = read(record, Generated)
        if hashes is None or not all(file.is_file() for file in files):
            write()
            write_json(record, {"sha256": {file.name: sha256(file) for file in files}})
            return files
        changed = [file for file in files if sha256(file) != hashes.sha256.get(file.name)]
        if changed:
            raise UserError(f"{changed[0]} has changed since it was made here; delete {folder} to make it again")
        return files
