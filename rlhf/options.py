"""Types of command-line options that several commands share: what they cannot use, they refuse before any work."""

import math
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

LARGEST_SEED = 2**32 - 1  # as in a recipe
SEED = click.IntRange(0, LARGEST_SEED)
_RECORDS = ("manifest.json", "summary.json", "made.json")  # a folder with one of them belongs to a run
_RESULTS = ("adapter", "model", "checkpoints")  # folders of a stage


class OutputFile(click.Path):
    """A file that will be written: not a directory, a pipe or a device, and not inside the folder of a stage."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(str(super().convert(value, param, ctx)))
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            folder = next(parent for parent in path.absolute().parents if parent.exists())
            if not folder.is_dir():
                self.fail(f"{path}: {folder} is no folder", param, ctx)
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


class RunsFolder(click.Path):
    """The root of runs, by its name: an empty one, as of a shell's unset variable, would be the current folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not os.fspath(value):
            self.fail("is empty; name a folder, or leave the option out", param, ctx)
        return super().convert(value, param, ctx)


def finite_price(context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    """Refuse a price that is no number. Raises BadParameter."""
    if value is not None and not math.isfinite(value):
        raise click.BadParameter(f"{value}: dollars for an hour, for example 2.5", param_hint="--price")
    return value


PRICE = click.option(
    "--price",
    type=click.FloatRange(min=0),
    metavar="USD",
    callback=finite_price,
    help="Price of one card in dollars per hour; adds the cost.",
)


def refuse_inputs(to: Path, inputs: Iterable[Path | str]) -> None:
    """Raise UsageError if `to` is one of the files that the command reads, under whatever name."""
    for file in inputs:
        if to.exists() and os.path.exists(file) and os.path.samefile(to, file):
            raise click.UsageError(f"--to {to} is the same file as {file}, which is read; name another one")


def _stage_folder(path: Path) -> Path | None:
    """The stage's folder whose records or results `path` would be among; None if it is elsewhere."""
    for place in (path.absolute(), path.resolve()):
        for folder in place.parents:
            inside = place.relative_to(folder).parts
            if len(inside) > 1 and inside[0] not in _RESULTS:
                continue
            if any((folder / name).is_file() for name in _RECORDS):
                return folder
    return None
