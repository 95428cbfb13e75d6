"""The options of the running command as they were typed, for another command line."""

from collections.abc import Collection

import click
from click.core import ParameterSource

from rlhf.cli.choice import RECIPE_ROOT

NAMES_RECIPE = ("hw", "directory", "guide", "changes")  # parameters of a command that name its recipe


def typed_options(leave_out: Collection[str] = (), only: Collection[str] | None = None) -> list[str]:
    """Return the words of the options that were typed.

    Options in `leave_out` are left out; with `only`, all but these are.
    """
    words, context = _recipe_root_given(), click.get_current_context()
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


def _recipe_root_given() -> list[str]:
    """Return --recipe-root as it was given, as words of a command line."""
    context = click.get_current_context(silent=True)
    return ["--recipe-root", str(context.meta[RECIPE_ROOT])] if context and RECIPE_ROOT in context.meta else []
