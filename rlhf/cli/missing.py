"""A command that lacks a stage names the command line that runs it, with the options that were typed."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from rlhf.cli.recipe_options import RUN_HELP
from rlhf.cli.typed import typed_options
from rlhf.errors import UserError
from rlhf.recipe import StageName
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
        options = [*typed_options(only=("hw", "directory", "out", *RUN_HELP)), "--with-parents"]
        resume, variable = (["--resume"], " RESUME=1") if error.begun else ([], "")
        line = shlex.join(["rlhf", "run", stage, *options, *resume])
        raise UserError(f"{command} {error.needs}: first `{line}` (make: {stage}{variable})") from error


@contextmanager
def naming_the_evaluation() -> Iterator[None]:
    """Let EvaluationMissing name the recipe as it was typed for the running command."""
    try:
        yield
    except EvaluationMissing as error:
        raise EvaluationMissing(error.run_directory, typed_options(only=("hw", "directory", "out"))) from error
