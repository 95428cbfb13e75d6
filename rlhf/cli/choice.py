"""The recipe that a command works on: the options that name and change it, or a run that has them all."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click

from rlhf import recipe as recipes
from rlhf.cli import container
from rlhf.errors import OptionError, UserError
from rlhf.process import distributed
from rlhf.recipe import Changes, PinnedRecipe
from rlhf.recipe.folders import default_root, guide_of
from rlhf.recipe.rehearsal import random_weights_changes
from rlhf.recipe.stages import EVALUATE, MERGE, PRETRAIN, StageName
from rlhf.run.named import NamedRun, named_run, recipe_of
from rlhf.terminal import say

RANDOM_PAIRS = 4000  # stand-in dialogues for random weights
# Keys that say where data and weights are: --data and --weights set them too.
PLACES = {"data.source", "data.files", "model.source", "model.name", "model.revision", "model.files", "model.sha256"}
Command = Callable[..., None]


@dataclass(frozen=True)
class Choice:
    """The options that name a recipe and change it, as they were typed; or a run, which has all but further changes.

    Raises OptionError for settings beside a run.
    """

    hw: str | None = None
    recipe: Path | None = None
    guide: bool = False
    data: tuple[str, ...] = ()
    weights: str | None = None
    changes: tuple[str, ...] = ()
    seed: int | None = None
    out: Path | None = None
    run: NamedRun | None = None

    def __post_init__(self) -> None:
        own = (field for field in fields(self) if field.name not in ("changes", "run"))
        typed = [f"--{field.name}" for field in own if getattr(self, field.name) != field.default]
        if self.run and typed:
            raise OptionError(f"{self.run}: a run with its own settings; leave out {' and '.join(typed)}")

    @property
    def names_a_recipe(self) -> bool:
        """Return whether a recipe is named, by itself or by a run."""
        return bool(self.run or self.hw or self.recipe)

    @property
    def root(self) -> Path:
        """Return the root of runs: --out, the run's, or `runs` with a folder for weights, data or seed of one's own."""
        if self.run:
            return self.run.out
        if self.out:
            return self.out
        weights = [f"weights-{Path(self.weights).name}"] if self.weights else []
        data = [f"data-{Path(self.data[0].removesuffix('.gz')).stem}"] if self.data else []
        seed = [] if self.seed is None else [f"seed-{self.seed}"]
        return Path("runs", *weights, *data, *seed)

    def run_directory(self) -> Path:
        """Return the directory of the run that is named, or of the recipe's run below the root of runs."""
        if self.run:
            return self.run.directory
        loaded = self.load()
        return self.root / loaded.name / loaded.version

    def load(self, stage: StageName | None = None, *, others: bool = True, on_device: bool = False) -> PinnedRecipe:
        """Return the recipe with its changes, and say which version --hw takes.

        `stage`: what it is for. With `others` the recipe must have it, and --hw takes one that does. `on_device`: go on
        in the container image where the recipe's device asks for it.

        Raises OptionError for options that name no recipe, a wrong one or a damaged run, or contradict each other.
        """
        try:
            changes = recipes.parse_overrides(self.changes)
            if "seed" in changes:
                raise OptionError("--set seed: a seed is no change of the recipe: --seed N")
            if self.run:
                loaded = recipe_of(self.run, default_root(), changes)
            else:
                loaded = self._changed(self._folder(stage if others else None), changes)
        except UserError as error:
            raise OptionError(*error.lines) from error
        if stage and others:
            loaded.require(stage)
        if stage == MERGE:
            self._check_merged(loaded)
        if on_device:
            container.enter(loaded, self.root)
        if (loaded.released_sha256 or self.hw) and not distributed.launched():  # of several ranks their parent says it
            say(f"recipe: {loaded.directory} ({loaded.status})")
        return loaded

    def _check_merged(self, loaded: PinnedRecipe) -> None:
        """Raise OptionError where the folder of another policy is named than the one that is merged."""
        named, merge = self.run and self.run.stage, loaded.recipe.merge
        if merge and named and named not in (MERGE, EVALUATE, merge.stage):
            raise OptionError(f"{self.run}: {merge.stage} is what is merged here; --set merge.stage={named}")

    def _folder(self, stage: StageName | None) -> Path:
        """Return the recipe's folder, from --recipe or --hw."""
        if self.recipe:
            if self.hw or self.guide:
                raise OptionError("--recipe names a version: leave out --hw and --guide")
            return self.recipe
        if not self.hw:
            raise OptionError("name a run directory, or a recipe: --hw NAME or --recipe DIR (`rlhf recipes`)")
        default = recipes.resolve(self.hw, default_root(), stage, own=bool(self.data))
        if not self.guide:
            return default
        found = guide_of(default)
        if found is None:
            raise OptionError(f"--guide: {default.parent} follows no published guide; leave it out")
        return found

    def _changed(self, folder: Path, changes: Changes) -> PinnedRecipe:
        """Return the recipe in a folder with its data, weights and changes."""
        named = self._data_changes(folder) | self._weights_changes(folder, changes)
        if twice := PLACES & named.keys() & changes.keys():
            raise OptionError(f"--set {min(twice)}: --data or --weights sets this key too; leave one of them out")
        return recipes.load(folder, named | changes, self.seed)

    def _data_changes(self, folder: Path) -> Changes:
        """Return the changes that training on one's own files, not the recipe's data, stands for."""
        if not self.data:
            return {}
        files = [str(Path(file).resolve()) for file in self.data]
        unused: Changes = {f"data.{key}": None for key in recipes.load(folder).recipe.data.own_keys()}
        return {"data.source": "files", "data.files": files, "data.format": "auto"} | unused

    def _weights_changes(self, folder: Path, changes: Changes) -> Changes:
        """Return the changes that --weights stands for. Random weights bring data of their own."""
        if self.weights == "random":
            if self.data:
                raise OptionError("--weights random brings stand-in dialogues of its own: leave out --data")
            return {**random_weights_changes(recipes.load(folder, changes).recipe, RANDOM_PAIRS, "hh")}
        if not self.weights:
            return {}
        if not Path(self.weights).exists():
            raise OptionError(f"--weights {self.weights}: name a checkpoint's folder, a .gguf file or random")
        origin: Changes = {"source": "local", "name": str(Path(self.weights).resolve()), "revision": None}
        model: Changes = origin | {"files": None, "sha256": None}
        return (
            {PRETRAIN: None}
            | {f"model.{key}": value for key, value in model.items()}
            | {f"tokenizer.{key}": value for key, value in origin.items()}
        )


# ---- options of click ----


class Number(click.FloatRange):
    """A number that is finite: click takes `nan` as being in every range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number, or fail."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


PATH = click.Path(path_type=Path)
FILE = click.Path(exists=True, path_type=Path)  # to read
SEED = click.IntRange(0, 2**32 - 1)
PRICE = click.option(
    "--price", type=Number(min=0), metavar="USD", help="Dollars for an hour of one card; adds the cost."
)
TEMPERATURE = click.option(
    "--temperature", type=Number(0, 100), help="Temperature, not the recipe's; 0 takes the likeliest token."
)
OPTIONS = (
    click.option("--hw", metavar="NAME", help="Take the default recipe of this hardware (`rlhf recipes`)."),
    click.option("--recipe", metavar="DIR", type=PATH, help="Folder of a recipe, instead of --hw."),
    click.option("--guide", is_flag=True, help="With --hw: the version that keeps a published guide's settings."),
    click.option(
        "--data",
        multiple=True,
        type=click.Path(exists=True),
        metavar="FILE",
        help="Rows of one's own; may be repeated.",
    ),
    click.option("--weights", metavar="random|DIR|FILE.gguf", help="Random weights, or those of a local checkpoint."),
    click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change a key; may be repeated."),
    click.option("--seed", type=SEED, metavar="N", help="Seed instead of the recipe's."),
    click.option("--out", type=PATH, metavar="DIR", help="Root of runs. [default: runs, or a folder in it]"),
    container.OPTION,
)
RUN = click.argument(
    "run",
    metavar="[RUN]",
    required=False,
    type=PATH,
    callback=lambda context, parameter, path: path and named_run(path),
)
TO = click.option(
    "--to",
    type=PATH,
    metavar="FILE",
    callback=lambda context, parameter, file: file and new_file(file),
    help="New file of JSON lines to write.",
)


def chooses_recipe(command: Command) -> Command:
    """Give a command the options that name a recipe and change it; it gets them, with RUN if it has that, as `choice`.

    Options that may be repeated: --data and --set.
    """

    @functools.wraps(command)
    def with_choice(**values: Any) -> None:
        chosen = {field.name: values.pop(field.name) for field in fields(Choice) if field.name in values}
        command(choice=Choice(**chosen), **values)

    decorated: Command = with_choice
    for option in reversed(OPTIONS):
        decorated = option(decorated)
    return decorated


def new_file(file: Path) -> Path:
    """Return the path of a file to write. Raises BadParameter where work would be lost: it exists, or has no folder."""
    if file.exists() or not file.parent.is_dir():
        raise click.BadParameter(f"{file}: name a new file in a folder that is there")
    return file
