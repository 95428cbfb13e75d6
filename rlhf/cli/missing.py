"""A command that lacks a stage names the command line that runs it, with the options that were typed."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf.cli import next_steps
from rlhf.cli.recipe_options import RUN_HELP
from rlhf.cli.typed import typed_options
from rlhf.errors import UserError
from rlhf.recipe import EVALUATE, StageName
from rlhf.run.finished import EvaluationMissing
from rlhf.run.parents import ParentMissing


@contextmanager
def naming_the_run(command: str, stage: StageName) -> Iterator[None]:
    """Turn ParentMissing into a UserError with the command line that runs `stage` and all that it builds on.

    The options are those of the run that were typed for `command`.
    """
    try:
        yield
    except ParentMissing as error:
        option = "--reuse runs" if command == "serve" else "--out runs"
        raise UserError(f"{command} {error.needs(option)}: first {_run(stage, error.begun)}") from error


def _run(stage: StageName, begun: bool) -> str:
    """Return the command that runs a stage and all that it builds on: make's if make started this one."""
    if line := next_steps.typed_make_line(("run", stage)):
        return f"`{line}{' RESUME=1' if begun else ''}`"
    typed = typed_options(only=("hw", "directory", "guide", "out", *RUN_HELP))
    resumed = ["--resume"] if begun else []
    return f"`{shlex.join(['rlhf', 'run', stage, *typed, '--with-parents', *resumed])}`"


@contextmanager
def naming_the_evaluation() -> Iterator[None]:
    """Let EvaluationMissing name the recipe as it was typed for the running command, and make's command if make did."""
    try:
        yield
    except EvaluationMissing as error:
        line = next_steps.typed_make_line(("run", EVALUATE))
        raise EvaluationMissing(
            error.run_directory, typed_options(only=("hw", "directory", "guide", "out")), line
        ) from error
