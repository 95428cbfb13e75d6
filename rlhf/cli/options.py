"""Types of command-line options that several commands share. They refuse unusable values before any work begins."""

import difflib
import math
import os
import stat
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
from click.core import ParameterSource

from rlhf.errors import OptionError, no_such
from rlhf.process.sizes import size_in_bytes
from rlhf.run.layout import MANIFEST, RESULT_FOLDERS, SUMMARY
from rlhf.run.named import NamedRun, is_run, named_run, runs_below

FileT = TypeVar("FileT", str, Path)
LARGEST_SEED = 2**32 - 1  # as in a recipe


class InOrderOfUse(click.Group):
    """A group whose help lists its commands in the order in which they were added."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


HELP_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}  # settings of a command's context


class StrictCommand(click.Command):
    """A command that refuses an option given twice, of which click would take the last, and an argument like `4090`."""

    def make_parser(self, ctx: click.Context) -> "click.parser._OptionParser":
        """Return click's parser, whose result is checked: the arguments are parsed this once."""
        parser = super().make_parser(ctx)
        parse = parser.parse_args

        def checked(args: list[str]) -> tuple[dict[str, Any], list[str], list[click.Parameter]]:
            typed = list(args)  # click's parser empties the list
            try:
                values, unread, parameters = parse(args)
            except click.NoSuchOption as error:
                raise self._with_the_nearest(error, ctx) from None
            self._check(typed, unread, parameters, ctx)
            return values, unread, parameters

        setattr(parser, "parse_args", checked)  # noqa: B010 - a method of click's is replaced on this one parser
        return parser

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [piece for piece in super().collect_usage_pieces(ctx) if piece]

    def _with_the_nearest(self, error: click.NoSuchOption, ctx: click.Context) -> click.NoSuchOption:
        """Return the error with the options that are near; click compares the hyphens too."""
        names = [name for option in self.get_params(ctx) for name in (*option.opts, *option.secondary_opts)]
        long = [name.removeprefix("--") for name in names if name.startswith("--")]
        near = difflib.get_close_matches(error.option_name.lstrip("-"), long)
        return click.NoSuchOption(error.option_name, possibilities=[f"--{name}" for name in near], ctx=ctx)

    def _check(
        self, typed: Sequence[str], unread: Sequence[str], parameters: Iterable[click.Parameter], ctx: click.Context
    ) -> None:
        """Raise UsageError for an option that is given twice, and for an argument that belongs to no option."""
        options = [parameter for parameter in parameters if isinstance(parameter, click.Option)]
        given: set[str | None] = set()
        for option in options:
            if not option.multiple and option.name in given:
                raise click.UsageError(_given_twice(option, typed), ctx)
            given.add(option.name)
        if unread and "--" not in typed and any("--hw" in parameter.opts for parameter in self.get_params(ctx)):
            hint = "Leave it out, or name its option."
            if not {"hw", "directory"} & given:
                hint = f"Did you mean {'--recipe' if os.path.isdir(unread[0]) else '--hw'} {unread[0]}?"
            hint = "A run directory does not belong here." if is_run(Path(unread[0])) else hint
            raise click.UsageError(f"unexpected argument {unread[0]!r}. {hint}", ctx)


def typed_options(*names: str) -> list[str]:
    """Return which of these parameters of the running command were typed, as options."""
    context = click.get_current_context()
    typed = ((p, context.get_parameter_source(str(p.name))) for p in context.command.params if p.name in names)
    return [option.opts[0] for option, source in typed if source is ParameterSource.COMMANDLINE]


def _given_twice(option: click.Option, args: Sequence[str]) -> str:
    """Return the message about an option that is given twice, or both as itself and as its opposite."""
    typed = [name for name in (*option.opts, *option.secondary_opts) if name in args]
    if len(typed) > 1:
        return f"{' and '.join(typed)} exclude each other; give one"
    return f"{typed[0] if typed else option.opts[0]} is given twice; leave one of them out"


def _bounds(low: float | None, high: float | None) -> str:
    """Return bounds in words, for a line of help."""
    if low is not None and high is not None:
        return f"from {low} to {high}"
    return f"from {low} on" if low is not None else f"up to {high}"


class WholeNumber(click.IntRange):
    """An option for a whole number within bounds."""

    name = "whole number"

    def _describe_range(self) -> str:
        return _bounds(self.min, self.max)


class Number(click.FloatRange):
    """An option for a number within bounds."""

    name = "number"

    def _describe_range(self) -> str:
        if self.min_open and self.max_open:
            return f"above {self.min:g} and below {self.max:g}"
        return _bounds(self.min, self.max)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


class ZeroOrMore(Number):
    """An option for 0 or a number within bounds."""

    def _describe_range(self) -> str:
        return f"0, or {super()._describe_range()}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        zero = str(value).strip() in ("0", "0.0")
        return 0.0 if zero else super().convert(value, param, ctx)


SEED = WholeNumber(0, LARGEST_SEED)
_RECORDS = (MANIFEST, SUMMARY, "made.json")  # a folder that holds one of them belongs to a run
_RESULTS = (*(name.partition("/")[0] for name in RESULT_FOLDERS), "checkpoints")  # patterns of folders of a stage


class OutputFile(click.Path):
    """An option for a file to write. It refuses other kinds of files and unfit places.

    Those are a directory, a pipe, a device, a folder that does not exist, and a stage's folder.
    """

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(str(super().convert(value, param, ctx)))
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            if not path.parent.is_dir():
                self.fail(f"{path}: there is no folder {path.parent}; make it first, or check the path", param, ctx)
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


PRICE = click.option(
    "--price",
    type=Number(min=0),
    metavar="USD",
    help="Price of one card in dollars per hour; adds the cost.",
)


ANSWER_TEMPERATURE = click.option(
    "--temperature",
    type=ZeroOrMore(min=0.01, max=100),
    metavar="T",
    show_default="the recipe's",
    help="Temperature of sampling; 0 takes the likeliest token.",
)
ANSWER_TOKENS = click.option(
    "--tokens", type=WholeNumber(min=1), metavar="N", show_default="the recipe's", help="Longest answer, in tokens."
)


def memory_limit(context: click.Context, parameter: click.Parameter, value: str | None) -> int | Literal["card"] | None:
    """Return the bytes of a size with its unit, such as `12GB`, or `card`. Raises BadParameter for all else."""
    if value == "card":
        return "card"
    size = None if value is None else size_in_bytes(value)
    if value is not None and size is None:
        raise click.BadParameter(f"{value!r}: write a size with its unit, for example 12GB, or card")
    return size


def listed(text: str) -> list[str]:
    """Return the words of a list that one option takes; commas or spaces separate them."""
    return text.replace(",", " ").split()


def existing_files(context: click.Context, parameter: click.Parameter, files: Sequence[FileT]) -> Sequence[FileT]:
    """Return the files that a command is to read. Raises OptionError if one is absent."""
    if absent := [file for file in files if not os.path.exists(file)]:
        raise OptionError(no_such("file", absent[0], "check its path"))
    return files


def existing_file(context: click.Context, parameter: click.Parameter, file: Path) -> Path:
    """Return the file that a command is to read. Raises OptionError if it is absent."""
    return existing_files(context, parameter, [file])[0]


def existing_root(context: click.Context, parameter: click.Parameter, root: Path | None) -> Path | None:
    """Return a root of runs, if one is given. Raises OptionError if it is absent."""
    if root is not None and not root.is_dir():
        raise OptionError(no_such("folder", f"{parameter.opts[0]} {root}", "name a root of runs, such as runs"))
    return root


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


def _stage_folder(path: Path) -> Path | None:
    """Return the folder of the stage whose records or results `path` would be among, or None."""
    for absolute in (path.absolute(), path.resolve()):
        for folder in absolute.parents:
            parts = absolute.relative_to(folder).parts
            if len(parts) > 1 and not any(fnmatch(parts[0], name) for name in _RESULTS):
                continue
            if any((folder / name).is_file() for name in _RECORDS):
                return folder
    return None
