"""`rlhf --paths COMMAND …`: the files and folders of this machine that a command reads and writes.

A container is shown these. The options' types tell them, and the recipe itself: no list of options has to be kept.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from rlhf.cli.choice import Choice, recipes_root
from rlhf.cli.options import OutputFile

ASKED_FOR = "rlhf.paths"  # key in click's context


def keep(context: click.Context, parameter: click.Parameter, asked_for: bool) -> None:
    """Remember that the paths are asked for."""
    context.meta[ASKED_FOR] = asked_for


def asked_for() -> bool:
    """Return whether the running command is to name its paths and do nothing else."""
    return bool(click.get_current_context().meta.get(ASKED_FOR))


def show(choice: Choice, values: Mapping[str, Any]) -> None:
    """Print a line for each path: `read PATH`, or `write PATH`; a wrong option or recipe is refused as in the command.

    `values` are the command's other arguments.
    """
    written = {os.path.abspath(path) for path in _written(values)}
    for path in sorted(written):
        click.echo(f"write {path}")
    for path in sorted({os.path.abspath(path) for path in _read(choice, values) if os.path.exists(path)}):
        if not any(Path(path).is_relative_to(shown) for shown in written):
            click.echo(f"read {path}")


def _written(values: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the root of runs, and the folder of a file that is written."""
    if "out" in values:
        yield values["out"]
    for parameter in click.get_current_context().command.params:
        if isinstance(parameter.type, OutputFile) and (file := values.get(str(parameter.name))):
            yield file.parent


def _read(choice: Choice, values: Mapping[str, Any]) -> Iterator[str | Path]:
    """Yield what options name, and what the recipe names; some of it may be no path of this machine."""
    yield recipes_root()
    yield from filter(None, (choice.directory, choice.weights, *choice.data))
    for value in values.values():
        yield from (path for path in (value if isinstance(value, tuple) else (value,)) if isinstance(path, Path))
    yield from _strings(choice.load(quiet=True).recipe.model_dump(mode="json"))


def _strings(value: object) -> Iterator[str]:
    """Yield the texts in the settings of a recipe."""
    if isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _strings(inner)
    elif isinstance(value, str):
        yield value
