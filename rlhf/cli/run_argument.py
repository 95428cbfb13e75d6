"""A run directory as a command's argument. It stands for the options with which the run was started."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import click

from rlhf.errors import OptionError
from rlhf.run.named import NamedRun, is_run, named_run

WordT = TypeVar("WordT", str, Path)
AMONG_OTHERS = ("files", "more_data", "rewards")  # parameters among whose words a run directory may be
TAKES_RUN = {"run", *AMONG_OTHERS}
OF_THE_RUN = ("hw", "guide", "out", "data", "weights", "seed")  # parameters whose values a run directory has


def _named(word: str | Path) -> NamedRun:
    """Return the run that an argument names. Raises OptionError or UsageError if it names none."""
    word = str(word)
    if not word:
        raise OptionError("RUN '' names nothing: is a variable of the shell empty? Name it, or leave RUN out")
    option = "--recipe" if os.path.isfile(os.path.join(word, "recipe.yaml")) else "--hw"
    if option == "--recipe" or not (os.path.isdir(word) or os.sep in word):
        raise click.UsageError(f"unexpected argument {word!r}. Did you mean {option} {word}?")
    return named_run(Path(word))


RUN = click.argument(
    "run",
    metavar="[RUN]",
    required=False,
    callback=lambda context, parameter, word: None if word is None else _named(word),
)


def run_among(words: Sequence[WordT], alone: bool) -> tuple[NamedRun | None, tuple[WordT, ...]]:
    """Return the run directory among the arguments of a command that takes files too, and the other words.

    `alone`: neither a recipe nor data are named, so that a folder can be nothing but the run. Raises UsageError for
    more than one run, and OptionError for such a folder that is none, and for an empty word.
    """
    runs = [word for word in words if is_run(Path(word))]
    if len(runs) > 1:
        raise click.UsageError(f"{' and '.join(map(str, runs))}: name one run")
    meant = runs or [word for word in words if not str(word) or (alone and _like_a_run(str(word)))]
    return _named(meant[0]) if meant else None, tuple(word for word in words if word not in runs)


def _like_a_run(word: str) -> bool:
    """Return whether a word is a folder, but no saved data set, or might be meant as one."""
    absent = os.sep in word and ":" not in word and not Path(word).suffix and not os.path.exists(word)
    return absent or (os.path.isdir(word) and not os.path.isfile(os.path.join(word, "state.json")))
