"""The options that name a recipe and change it, and the recipe that they lead to."""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from rlhf import recipe
from rlhf.cli.options import SEED, RunsFolder, WholeNumber
from rlhf.data.hub import hub_hint
from rlhf.errors import OptionError, UserError
from rlhf.process import distributed
from rlhf.terminal import say

KEY = "rlhf.recipes"  # key of a command's --recipe-root in click's context
RANDOM_PAIRS = 4000  # stand-in dialogues for random weights
NAMED_BY = {  # keys that say where data and weights are, by the option that sets them
    "data": {"data.source", "data.files"},
    "weights": {"model.source", "model.name", "model.revision"},
}
NAMES_RECIPE = ("hw", "directory", "changes")  # parameters of a command

Command = Callable[..., None]


@contextmanager
def _of_options() -> Iterator[None]:
    """Turn a UserError into an OptionError, where only options can be wrong."""
    try:
        yield
    except UserError as error:
        raise OptionError(*error.lines) from error


@dataclass(frozen=True)
class Choice:
    """The options that name a recipe and change it, as they were typed."""

    hw: str | None = None
    directory: Path | None = None
    data: tuple[str, ...] = ()
    weights: str | None = None
    changes: tuple[str, ...] = ()
    seed: int | None = None

    def load(self, more_data: Sequence[str] = ()) -> recipe.PinnedRecipe:
        """Return the recipe with its changes; `more_data` are further files to train on.

        Raises OptionError if the options name no recipe, missing files or what a recipe cannot have, UsageError if they
        exclude each other, and UserError if the recipe itself is wrong.
        """
        directory, data = self._directory(), (*self.data, *more_data)
        recipe.load(directory)  # a mistake in the file is none of the options
        with _of_options():
            changes = recipe.parse_overrides(self.changes)
        seed = self._seed(changes)
        for option, keys in NAMED_BY.items():
            if getattr(self, option) and (twice := keys & changes.keys()):
                raise OptionError(f"--set {min(twice)}: --{option} sets this key too; leave one of them out")
        overrides: recipe.Changes = {}
        if self.weights == "random":
            if data:
                raise click.UsageError("--weights random brings stand-in dialogues of its own: leave out --data")
            with _of_options():
                changed = recipe.load(directory, changes).recipe
            overrides |= recipe.random_weights_changes(changed, RANDOM_PAIRS, "hh")
        elif self.weights is not None:
            folder = str(Path(self.weights).resolve())
            if not Path(folder, "config.json").is_file():
                raise OptionError(
                    f"--weights {self.weights}: no config.json there; name a checkpoint's folder or random"
                )
            overrides |= {"model.source": "local", "model.name": folder, "model.revision": None, "pretrain": None}
            overrides |= {"tokenizer.source": "local", "tokenizer.name": folder, "tokenizer.revision": None}
        if missing := [file for file in data if not file or not Path(file).exists()]:
            raise OptionError(f"--data {missing[0] or repr('')}: there is no such file{hub_hint(missing[0])}")
        if data:
            files = [str(Path(file).resolve()) for file in data]
            overrides |= {"data.source": "files", "data.files": files, "data.format": "auto"}
        with _of_options():
            loaded = recipe.load(directory, overrides | changes, seed)
        if self.hw is not None:
            announce_version(loaded)
        return loaded

    def _seed(self, changes: recipe.Changes) -> int | None:
        """Take a seed out of the changes, because another seed is none. Raises OptionError if --seed is given too."""
        seed = changes.get("seed")
        if not isinstance(seed, int):
            return self.seed
        if self.seed is not None:
            raise OptionError("--set seed and --seed both set the seed; leave one of them out")
        del changes["seed"]
        return seed

    def _directory(self) -> Path:
        """Return the recipe's folder, from --recipe or --hw. Raises OptionError, UserError or UsageError."""
        if self.directory is not None:
            if self.hw is not None:
                raise click.UsageError("--hw and --recipe both name a recipe: leave one out")
            recipe.check_directory(self.directory, recipes_root())
            return self.directory
        if self.hw is None:
            raise OptionError("name a recipe: --hw NAME or --recipe DIR; `rlhf recipes` lists them")
        return recipe.resolve(self.hw, recipes_root())


def _keep(context: click.Context, parameter: click.Parameter, folder: Path | None) -> None:
    """Remember --recipe-root for `recipes_root`."""
    if folder is not None:
        context.meta[KEY] = folder


def _hardware_names(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    """Return the names with which a shell may complete --hw."""
    names = {recipe.load(directory).recipe.hardware.name for directory in recipe.available(recipes_root())}
    return sorted(name for name in names if name.startswith(typed))


RECIPES = click.option(
    "--recipe-root",
    metavar="DIR",
    type=click.Path(path_type=Path),
    callback=_keep,
    expose_value=False,
    help="Folder of recipes. [default: RLHF_RECIPES, recipes/ here, or the installed ones]",
)
REUSE = click.option(
    "--reuse",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="ROOT",
    help="Another root of runs; its finished stages are used if --out has none.",
)


def chooses_recipe(
    *,
    data: str | None = None,
    weights: str | None = None,
    changes: str | None = None,
    seed: str | None = None,
    out: bool = False,
) -> Callable[[Command], Command]:
    """Return a decorator that adds the options naming a recipe; the command gets them as one argument, `choice`.

    The arguments are the help texts of --data, --weights, --set and --seed; an option without a text is left out. `out`
    adds --out, which the command gets as an argument of its own.
    """
    options: list[Callable[[Command], Command]] = [
        click.option(
            "--hw",
            metavar="NAME",
            shell_complete=_hardware_names,
            help="Hardware. Takes its default recipe: the newest released version, or else a draft.",
        ),
        RECIPES,
        click.option(
            "--recipe",
            "directory",
            metavar="DIR",
            type=click.Path(path_type=Path),
            help="Folder of a recipe, used instead of --hw.",
        ),
    ]
    if data:
        options.append(click.option("--data", multiple=True, metavar="FILE", help=data))
    if weights:
        options.append(click.option("--weights", metavar="random|DIR", help=weights))
    if out:
        root = RunsFolder(path_type=Path)
        options.append(click.option("--out", default="runs", type=root, show_default=True, help="Root of all runs."))
    if changes:
        options.append(click.option("--set", "changes", multiple=True, metavar="KEY=VALUE", help=changes))
    if seed:
        options.append(click.option("--seed", type=SEED, metavar="N", help=seed))
    texts = {"data": data, "weights": weights, "changes": changes, "seed": seed}
    names = [field.name for field in fields(Choice) if texts.get(field.name, True)]

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_choice(**values: Any) -> None:
            command(choice=Choice(**{name: values.pop(name) for name in names}), **values)

        decorated: Command = with_choice
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate


CHANGES = "Change a key of the recipe. May be repeated."
TRAINING_HELP = {
    "data": "Train on this file instead of the recipe's data. May be repeated.",
    "weights": "Start from random weights with stand-in data, or from a local checkpoint's folder.",
    "changes": "Change a key of the recipe; the run is marked modified. May be repeated.",
}
RUN_HELP = {
    "data": "Data file that the run was started with, if any. May be repeated.",
    "weights": "Weights that the run was started with, if any.",
    "changes": "Key of the recipe that was changed for the run. May be repeated.",
    "seed": "Seed that the run was started with, if any.",
}


def pair_options(command: Command) -> Command:
    """Add the options that name a finished evaluation and two of its policies."""
    options = (
        chooses_recipe(out=True),
        click.option("--a", metavar="POLICY", help="Policy to compare against. [default: sft]"),
        click.option(
            "--b",
            metavar="POLICY",
            help="Policy whose wins are counted. [default: the first of ppo, rloo, grpo, dpo that was trained]",
        ),
        click.option("--limit", type=WholeNumber(min=1), metavar="N", help="Rate only the first N pairs."),
    )
    for option in reversed(options):
        command = option(command)
    return command


def typed_options(leave_out: Collection[str] = (), only: Collection[str] | None = None) -> list[str]:
    """Return the options of the running command as they were typed, for another command line.

    Options in `leave_out` are left out; with `only`, all but these are.
    """
    words, context = recipes_given(), click.get_current_context()
    for option in context.command.params:
        name, typed = str(option.name), context.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
        if not isinstance(option, click.Option) or not option.expose_value or not typed:
            continue
        if name in leave_out or (only is not None and name not in only):
            continue
        value = context.params[name]
        if option.is_flag:
            words.append((option.opts if value else option.secondary_opts)[-1])
        else:
            words += [word for part in (value if option.multiple else [value]) for word in (option.opts[0], str(part))]
    return words


def recipes_root() -> Path:
    """Return the folder in which --hw looks: --recipe-root, or the default."""
    context = click.get_current_context(silent=True)
    return (context.meta.get(KEY) if context else None) or recipe.default_root()


def recipes_given() -> list[str]:
    """Return --recipe-root as it was given, as words of a command line."""
    context = click.get_current_context(silent=True)
    return ["--recipe-root", str(context.meta[KEY])] if context and KEY in context.meta else []


def announce_version(chosen: recipe.PinnedRecipe) -> None:
    """Print on stderr which version of a recipe `--hw` takes, and what v1 is if a user may expect that.

    Nothing is printed if there is only one version, or in a process that a launcher started, whose parent has printed
    it.
    """
    versions = [d for d in recipe.available(recipes_root()) if d.parent == chosen.directory.parent]
    if len(versions) == 1 or distributed.launched():
        return
    first = recipe.load(versions[0])
    guide = next((figure.guide for figure in first.targets if figure.guide), None)
    about_first = ""
    if chosen.directory != first.directory and guide:
        about_first = f"; {first.version} has the {guide}'s own settings"
    elif first.recipe.model != recipe.load(chosen.directory).recipe.model:
        about_first = f"; {first.version} trains another model"
    say(f"recipe: {chosen.directory} ({chosen.recipe.status}{about_first})")
