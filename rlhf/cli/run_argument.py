"""A run directory as a command's argument. It stands for the options with which the run was started."""

import os
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from rlhf import recipe as recipes
from rlhf.cli.choice import recipes_root
from rlhf.cli.options import StrictCommand
from rlhf.errors import OptionError
from rlhf.recipe import MERGE, POLICIES, PRETRAIN, Changes, as_yaml
from rlhf.run.named import NamedRun, RunSettings, is_run, named_run, settings_of

OF_THE_RUN = ("--hw", "--guide", "--out", "--data", "--weights", "--seed")  # options whose values a run directory has


def _named(context: click.Context, parameter: click.Parameter, word: str | None) -> NamedRun | None:
    """Return the run that an argument names. Raises OptionError or UsageError if it names none."""
    if word is None:
        return None
    option = "--recipe" if os.path.isfile(os.path.join(word, "recipe.yaml")) else "--hw"
    if option == "--recipe" or not (os.path.isdir(word) or os.sep in word):
        raise click.UsageError(f"unexpected argument {word!r}. Did you mean {option} {word}?", context)
    return named_run(Path(word))


RUN = click.argument("run", metavar="[RUN]", required=False, callback=_named)
RUN_AS_OPTIONS = click.argument("run", metavar="[RUN]", required=False, callback=_named, expose_value=False)


class CommandOnRun(StrictCommand):
    """A command that takes a run directory instead of the options that the run was started with.

    The directory is replaced by these options before they are read, so that whatever repeats the command's options,
    such as a stage's own process or the hint about what is next, has them too.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = {str(option.name) for option in self._options_in(ctx, args)}
        values, unread, _ = self.make_parser(ctx).parse_args(list(args))
        runs = [word for word in (*self._words(values), *unread) if is_run(Path(word))]
        if len(runs) > 1:
            raise click.UsageError(f"{' and '.join(runs)}: name one run", ctx)
        if runs:
            taken = [option.opts[0] for option in self.params if option.name in typed and option.opts[0] in OF_THE_RUN]
            if taken:
                raise OptionError(f"{runs[0]}: a run with its own settings; leave out {' and '.join(taken)}")
            at = len(args) - 1 - args[::-1].index(runs[0])
            args = [*self._options_of(named_run(Path(runs[0])), typed, values), *args[:at], *args[at + 1 :]]
        return super().parse_args(ctx, args)

    def _words(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield the words among which a run may be: the argument for it, and those that may be several."""
        for argument in (parameter for parameter in self.params if isinstance(parameter, click.Argument)):
            value = values.get(str(argument.name))
            if isinstance(value, tuple | list):
                yield from value
            elif argument.name == "run" and isinstance(value, str):
                yield value

    def _options_of(self, run: NamedRun, typed: Collection[str], values: Mapping[str, Any]) -> list[str]:
        """Return the options that a run stands for, beside those that were `typed`, which have `values`.

        Raises OptionError for a typed option that contradicts the run, and UserError without its recipe.
        """
        made, root = settings_of(run), values.get("recipe_root")
        directory = _recipe_folder(run, made, Path(root) if root else recipes_root(), values.get("directory"))
        typed_changes = recipes.parse_overrides(values.get("changes") or ())
        changes = _not_typed(run, made.overrides, typed_changes)
        merges = self.name == "serve" or values.get("stage") == MERGE
        if merges and run.stage in POLICIES and "merge.stage" not in typed_changes:
            recipe = recipes.load(directory, made.overrides).recipe
            changes |= {"merge.stage": run.stage} if recipe.merge and recipe.merge.stage != run.stage else {}
        words = [] if "directory" in typed else ["--recipe", str(directory)]
        words += ["--out", str(run.out), "--seed", str(made.seed)]
        words += [word for key, value in changes.items() for word in ("--set", f"{key}={as_yaml(value)}")]
        return words + self._stage_words(run, typed)

    def _stage_words(self, run: NamedRun, typed: Collection[str]) -> list[str]:
        """Return --stage of the stage whose folder was named, for a command that can have that stage."""
        stage = "base" if run.stage == PRETRAIN else run.stage
        for option in (parameter for parameter in self.params if isinstance(parameter, click.Option)):
            if option.name == "stage" and "stage" not in typed and stage in getattr(option.type, "choices", ()):
                return ["--stage", str(stage)]
        return []


def _not_typed(run: NamedRun, made: Changes, typed: Changes) -> Changes:
    """Return the changes of a run that were not typed too. Raises OptionError for one typed with another value."""
    for key in made.keys() & typed.keys():
        if made[key] != typed[key]:
            raise OptionError(f"--set {key}={as_yaml(typed[key])}: {run} has {key}={as_yaml(made[key])}; leave it out")
    return {key: value for key, value in made.items() if key not in typed}


def _recipe_folder(run: NamedRun, made: RunSettings, root: Path, typed: Path | str | None) -> Path:
    """Return the folder of a run's recipe: the one typed, or that in `root` or in the run's command by its hash.

    If no hash agrees the first of these is returned, and the stages say what differs. Raises OptionError without any.
    """
    names = made.recipe, made.version
    if typed:
        if Path(os.path.abspath(typed)).parts[-2:] != names:
            raise OptionError(f"--recipe {typed}: {run} was made with {'/'.join(names)}; leave --recipe out")
        return Path(typed)
    of_command = [Path(word) for option, word in pairwise(made.argv) if option == "--recipe"]
    folders = [folder for folder in (root.joinpath(*names), *of_command) if (folder / "recipe.yaml").is_file()]
    if not folders:
        where = "--recipe-root names the folder that it is in"
        raise OptionError(f"{run}: its recipe {'/'.join(names)} is not in {root}; {where}")
    return next((folder for folder in folders if recipes.load(folder).sha256 == made.recipe_sha256), folders[0])
