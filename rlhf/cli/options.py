"""Types of command-line options that several commands share. They refuse unusable values before any work begins."""

import difflib
import math
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import click

from rlhf.errors import OptionError
from rlhf.process.sizes import size_in_bytes
from rlhf.run.layout import RESULTS

FileT = TypeVar("FileT", str, Path)
LARGEST_SEED = 2**32 - 1  # as in a recipe


class InOrderOfUse(click.Group):
    """A group whose help lists its commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class StrictCommand(click.Command):
    """A command that refuses an option given twice, of which click would take the last."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given: set[str | None] = set()
        for option in self.make_parser(ctx).parse_args(list(args))[2]:
            if isinstance(option, click.Option) and not option.multiple and option.name in given:
                names = "/".join([*option.opts, *option.secondary_opts])
                raise click.UsageError(f"{names} is given twice; leave one of them out", ctx)
            given.add(option.name)
        return super().parse_args(ctx, args)


class WholeNumber(click.IntRange):
    """An option for a whole number within bounds."""

    name = "whole number"


class Number(click.FloatRange):
    """An option for a number within bounds."""

    name = "number"


SEED = WholeNumber(0, LARGEST_SEED)
_RECORDS = ("manifest.json", "summary.json", "made.json")  # a folder that holds one of them belongs to a run
_RESULTS = (*RESULTS, "checkpoints")  # folders of a stage


class OutputFile(click.Path):
    """An option for a file to write. It refuses a directory, a pipe, a device and a place inside a stage's folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(str(super().convert(value, param, ctx)))
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            folder = next(parent for parent in path.absolute().parents if parent.exists())
            if not folder.is_dir():
                self.fail(f"{path}: {folder} is not a folder", param, ctx)
        except (OSError, ValueError) as error:
            self.fail(f"{path}: {getattr(error, 'strerror', None) or error}", param, ctx)
        else:
            if stat.S_ISDIR(mode):
                self.fail(f"{path}: is a directory; name a file in it", param, ctx)
            if not stat.S_ISREG(mode):
                self.fail(f"{path}: a pipe or a device; name a file", param, ctx)
        if stage := _stage_folder(path):
            self.fail(f"{path}: {stage} holds records of a run; name a file outside of it", param, ctx)
        return path


OUTPUT = OutputFile()


NameT = TypeVar("NameT", bound=str)


class OneOf(click.Choice[NameT]):
    """An option that takes one of several names. The message about a misspelt one has the nearest."""

    def get_invalid_choice_message(self, value: object, ctx: click.Context | None) -> str:
        near = difflib.get_close_matches(str(value).lower(), self.choices, n=1)
        return super().get_invalid_choice_message(value, ctx) + (f" Did you mean {near[0]!r}?" if near else "")


class RunsFolder(click.Path):
    """An option for the root of runs. It refuses an empty name, as from an unset shell variable."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        if not os.fspath(value):
            self.fail("is empty; name a folder, or leave the option out", param, ctx)
        return super().convert(value, param, ctx)


def finite_price(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Return the price. Raises BadParameter if it is not finite."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value}: dollars for an hour, for example 2.5", param_hint="--price")
    return value


PRICE = click.option(
    "--price",
    type=Number(min=0),
    metavar="USD",
    callback=finite_price,
    help="Price of one card in dollars per hour; adds the cost.",
)


def memory_size(context: click.Context, parameter: click.Parameter, value: str | None) -> int | None:
    """Return the bytes of a size with its unit, such as `12GB`. Raises BadParameter for all else."""
    size = None if value is None else size_in_bytes(value)
    if value is not None and size is None:
        raise click.BadParameter(f"{value!r}: write a size with its unit, for example 12GB")
    return size


def existing_files(context: click.Context, parameter: click.Parameter, files: Sequence[FileT]) -> Sequence[FileT]:
    """Return the files that a command is to read. Raises OptionError if one is absent."""
    if absent := [file for file in files if not os.path.exists(file)]:
        raise OptionError(f"{str(absent[0]) or repr('')}: no such file; check its path")
    return files


def run_directory(context: click.Context, parameter: click.Parameter, root: Path) -> Path:
    """Return the directory of a run. Raises OptionError if it is absent."""
    if not root.is_dir():
        raise OptionError(f"{root}: no such folder; name a run directory, <out>/<recipe>/<version>")
    return root


def run_directories(context: click.Context, parameter: click.Parameter, roots: Sequence[Path]) -> Sequence[Path]:
    """Return the directories of runs. Raises OptionError if one is absent."""
    return [run_directory(context, parameter, root) for root in roots]


def refuse_inputs(to: Path, inputs: Iterable[Path | str]) -> None:
    """Raise UsageError if `to` is one of the files that the command reads, under whatever name."""
    for file in inputs:
        if to.exists() and os.path.exists(file) and os.path.samefile(to, file):
            raise click.UsageError(f"--to {to} is the same file as {file}, which is read; name another one")


def _stage_folder(path: Path) -> Path | None:
    """Return the folder of the stage whose records or results `path` would be among, or None."""
    for absolute in (path.absolute(), path.resolve()):
        for folder in absolute.parents:
            parts = absolute.relative_to(folder).parts
            if len(parts) > 1 and parts[0] not in _RESULTS:
                continue
            if any((folder / name).is_file() for name in _RECORDS):
                return folder
    return None
