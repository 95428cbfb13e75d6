"""The recipe that a command's options lead to."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from rlhf import recipe as recipes
from rlhf.errors import OptionError, UserError, no_such
from rlhf.process import distributed
from rlhf.recipe import Changes, PinnedRecipe
from rlhf.recipe.folders import check_directory, default_root, guide_of, having
from rlhf.recipe.rehearsal import random_weights_changes
from rlhf.recipe.schema_data import Data
from rlhf.recipe.schema_model import is_gguf
from rlhf.recipe.stages import PRETRAIN, StageName
from rlhf.run.named import NamedRun, recipe_of
from rlhf.terminal import say

RECIPE_ROOT = "rlhf.recipes"  # key of a command's --recipe-root in click's context
RANDOM_PAIRS = 4000  # stand-in dialogues for random weights
NAMED_BY = {  # keys that say where data and weights are, by the option that sets them
    "data": {"data.source", "data.files"},
    "weights": {"model.source", "model.name", "model.revision", "model.files", "model.sha256"},
}


@dataclass(frozen=True)
class Choice:
    """The options that name a recipe and change it, as they were typed."""

    hw: str | None = None
    directory: Path | None = None
    guide: bool = False
    data: tuple[str, ...] = ()
    weights: str | None = None
    changes: tuple[str, ...] = ()
    seed: int | None = None
    run: NamedRun | None = None  # instead of all but further changes

    def load(self, merging: bool = False, quiet: bool = False, stage: StageName | None = None) -> PinnedRecipe:
        """Return the recipe with its changes. Unless `quiet`, it is said which version is taken.

        `merging`: what `rlhf.run.named.recipe_of` calls so. `stage`: of the recipes for --hw one that has it.

        Raises OptionError if the options name no recipe, missing files or what a recipe cannot have, UsageError if they
        exclude each other, and UserError if the recipe itself is wrong.
        """
        quiet = quiet or distributed.launched()  # a launcher's processes leave it to their parent
        with _of_options():
            changes = recipes.parse_overrides(self.changes)
        if self.run is not None:
            return recipe_of(self.run, recipes_root(), changes, merging)
        directory = self.directory_of_recipe(stage)
        as_written = recipes.load(directory).recipe  # without options, whose mistakes come below
        seed = self._seed(changes)
        for option, keys in NAMED_BY.items():
            if getattr(self, option) and (twice := keys & changes.keys()):
                raise OptionError(f"--set {min(twice)}: --{option} sets this key too; leave one of them out")
        named = self._weights_changes(directory, changes) | _data_changes(self.data, as_written.data)
        with _of_options():
            loaded = recipes.load(directory, named | changes, seed)
        if not quiet and (loaded.released_sha256 or self.hw):
            say(f"recipe: {loaded.directory} ({loaded.status})")
        return loaded

    def root_of_runs(self) -> Path:
        """Return the default of --out: `runs`, or a folder in it where weights, data or seed are not the recipe's."""
        weights = [f"weights-{Path(self.weights).name}"] if self.weights else []
        data = [f"data-{Path(self.data[0].removesuffix('.gz')).stem}"] if self.data else []
        seed = [] if self.seed is None else [f"seed-{self.seed}"]
        return Path("runs", *weights, *data, *seed)

    def _weights_changes(self, directory: Path, changes: Changes) -> Changes:
        """Return the changes that --weights stands for. Random weights bring data of their own."""
        if self.weights is None:
            return {}
        if self.weights == "random":
            if self.data:
                raise click.UsageError("--weights random brings stand-in dialogues of its own: leave out --data")
            with _of_options():
                changed = recipes.load(directory, changes).recipe
            return {**random_weights_changes(changed, RANDOM_PAIRS, "hh")}
        folder = str(Path(self.weights).resolve())
        if not Path(folder, "config.json").is_file() and not (is_gguf(folder) and Path(folder).is_file()):
            raise OptionError(
                f"--weights {self.weights}: no config.json there; name a checkpoint's folder, a .gguf file or random"
            )
        return {
            "model.source": "local",
            "model.name": folder,
            "model.revision": None,
            "model.files": None,
            "model.sha256": None,
            PRETRAIN: None,
            "tokenizer.source": "local",
            "tokenizer.name": folder,
            "tokenizer.revision": None,
        }

    def _seed(self, changes: Changes) -> int | None:
        """Take a seed out of the changes, because another seed is none. Raises OptionError if --seed is given too."""
        seed = changes.get("seed")
        if not isinstance(seed, int):
            return self.seed
        if self.seed is not None:
            raise OptionError("--set seed and --seed both set the seed; leave one of them out")
        del changes["seed"]
        return seed

    def directory_of_recipe(self, stage: StageName | None = None) -> Path:
        """Return the recipe's folder, from --recipe or --hw. Raises OptionError, UserError or UsageError."""
        if self.directory is not None:
            if self.hw is not None:
                raise click.UsageError("--hw and --recipe both name a recipe: leave one out")
            if self.guide:
                raise click.UsageError("--recipe names a version, which --guide would choose: leave one out")
            check_directory(self.directory, recipes_root())
            return self.directory
        if self.hw is None:
            raise OptionError("name a run directory, or a recipe: --hw NAME or --recipe DIR (`rlhf recipes`)")
        context = click.get_current_context(silent=True)
        stage = context.params.get("stage") if context and self.data else None
        default = recipes.resolve(self.hw, recipes_root(), stage)
        if not self.guide:
            return default if stage is None else having(stage, default, recipes_root())
        found = guide_of(default)
        if found is None:
            raise OptionError(f"--guide: {default.parent} follows no published guide; leave it out")
        return found[0]


def _data_changes(data: Sequence[str], own: Data) -> Changes:
    """Return the changes that training on these files, not the recipe's `own` data, stands for.

    Raises OptionError if one is missing.
    """
    if missing := [file for file in data if not file or not Path(file).exists()]:
        raise OptionError(no_such("file", f"--data {missing[0] or repr('')}", "check its path"))
    if not data:
        return {}
    files = [str(Path(file).resolve()) for file in data]
    unused: Changes = {f"data.{key}": None for key in own.own_keys()}
    return {"data.source": "files", "data.files": files, "data.format": "auto"} | unused


@contextmanager
def _of_options() -> Iterator[None]:
    """Turn a UserError into an OptionError, where only options can be wrong."""
    try:
        yield
    except UserError as error:
        raise OptionError(*error.lines) from error


def recipes_root() -> Path:
    """Return the folder in which --hw looks: --recipe-root, or the default."""
    context = click.get_current_context(silent=True)
    return (context.meta.get(RECIPE_ROOT) if context else None) or default_root()
