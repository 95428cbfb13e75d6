"""A run directory as a command's argument. It stands for the options with which the run was started."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import click

from rlhf.run.named import NamedRun, is_run, named_run

WordT = TypeVar("WordT", str, Path)
OF_THE_RUN = ("hw", "guide", "out", "data", "weights", "seed")  # parameters whose values a run directory has


def _named(context: click.Context, parameter: click.Parameter, word: str | None) -> NamedRun | None:
    """Return the run that an argument names. Raises OptionError or UsageError if it names none."""
    if word is None:
        return None
    option = "--recipe" if os.path.isfile(os.path.join(word, "recipe.yaml")) else "--hw"
    if option == "--recipe" or not (os.path.isdir(word) or os.sep in word):
        raise click.UsageError(f"unexpected argument {word!r}. Did you mean {option} {word}?", context)
    return named_run(Path(word))


RUN = click.argument("run", metavar="[RUN]", required=False, callback=_named)


def run_among(words: Sequence[WordT]) -> tuple[NamedRun | None, tuple[WordT, ...]]:
    """Return the run directory among the arguments of a command that takes files too, and the other words.

    Raises UsageError for more than one.
    """
    runs = [word for word in words if is_run(Path(word))]
    if len(runs) > 1:
        raise click.UsageError(f"{' and '.join(map(str, runs))}: name one run")
    return named_run(Path(runs[0])) if runs else None, tuple(word for word in words if word not in runs)
