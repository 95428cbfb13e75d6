"""Types of command-line options that several commands share. They refuse unusable values before any work begins."""

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import click
from click.core import ParameterSource

from rlhf.errors import OptionError, no_such
from rlhf.process.sizes import size_in_bytes
from rlhf.run.layout import MANIFEST
from rlhf.run.named import NamedRun, is_run, named_run, runs_below

LARGEST_SEED = 2**32 - 1  # as in a recipe
SEED = click.IntRange(0, LARGEST_SEED)
FILE = click.Path(exists=True, path_type=Path)  # to read


class Number(click.FloatRange):
    """An option for a finite number within bounds."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a finite number", param, ctx)


class OutputFile(click.Path):
    """An option for a file to write. Its folder is there, so that no work is lost at the end."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(str(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"{path}: there is no folder {path.parent}; make it first, or check the path", param, ctx)
        if (path.parent / MANIFEST).is_file():
            self.fail(f"{path}: {path.parent} holds records of a run; name a file outside of it", param, ctx)
        return path


OUTPUT = OutputFile()
PRICE = click.option(
    "--price", type=Number(min=0), metavar="USD", help="Price of one card in dollars per hour; adds the cost."
)
ANSWER_TEMPERATURE = click.option(
    "--temperature",
    type=Number(min=0, max=100),
    metavar="T",
    show_default="the recipe's",
    help="Temperature of sampling; 0 takes the likeliest token.",
)
ANSWER_TOKENS = click.option(
    "--tokens", type=click.IntRange(min=1), metavar="N", show_default="the recipe's", help="Longest answer, in tokens."
)


def memory_limit(context: click.Context, parameter: click.Parameter, value: str | None) -> int | Literal["card"] | None:
    """Return the bytes of a size with its unit, such as `12GB`, or `card`. Raises BadParameter for all else."""
    if value is None or value == "card":
        return None if value is None else "card"
    size = size_in_bytes(value)
    if size is None:
        raise click.BadParameter(f"{value!r}: write a size with its unit, for example 12GB, or card")
    return size


def typed_options(*names: str) -> list[str]:
    """Return which of these parameters of the running command were typed, as options."""
    context = click.get_current_context()
    typed = ((p, context.get_parameter_source(str(p.name))) for p in context.command.params if p.name in names)
    return [option.opts[0] for option, source in typed if source is ParameterSource.COMMANDLINE]


def listed(text: str) -> list[str]:
    """Return the words of a list that one option takes; commas or spaces separate them."""
    return text.replace(",", " ").split()


def existing_files(context: click.Context, parameter: click.Parameter, files: Sequence[str]) -> Sequence[str]:
    """Return the files that a command is to read. Raises OptionError if one is absent."""
    if absent := [file for file in files if not os.path.exists(file)]:
        raise OptionError(no_such("file", absent[0], "check its path"))
    return files


def run_or_stage(context: click.Context, parameter: click.Parameter, path: Path) -> NamedRun:
    """Return the directory of a run, and the stage whose folder in it was named.

    Raises OptionError if it is absent, or a folder of runs. A folder of anything else is left to the command.
    """
    of_runs = path.is_dir() and not is_run(path) and runs_below(path)
    is_stage = (path / MANIFEST).is_file()
    return named_run(path) if is_stage or of_runs or not path.is_dir() else NamedRun(path, None)


def run_directory(context: click.Context, parameter: click.Parameter, path: Path) -> Path:
    """Return the directory of a run, also for a stage's folder in it. Raises OptionError if it is absent."""
    return run_or_stage(context, parameter, path).directory


def run_directories(context: click.Context, parameter: click.Parameter, paths: Sequence[Path]) -> Sequence[Path]:
    """Return the directories of runs. Raises OptionError if one is absent."""
    return [run_directory(context, parameter, path) for path in paths]


def refuse_inputs(to: Path, inputs: Iterable[Path | str]) -> None:
    """Raise UsageError if `to` is one of the files that the command reads, under whatever name."""
    for file in inputs:
        if to.exists() and os.path.exists(file) and os.path.samefile(to, file):
            raise click.UsageError(f"--to {to} is the same file as {file}, which is read; name another one")
