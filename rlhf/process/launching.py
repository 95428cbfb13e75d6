"""The start of several processes for one stage, and what is reported of their errors."""

import os
import signal
from collections.abc import Mapping
from typing import Any

from rlhf.errors import UserError
from rlhf.process import children, distributed, endings
from rlhf.process.exhaustion import EXHAUSTED
from rlhf.process.meeting import check_engine
from rlhf.process.task import Task, arguments
from rlhf.recipe import PinnedRecipe, Recipe, StageName
from rlhf.recipe.plain_yaml import read_yaml
from rlhf.terminal import excerpt

DISTRIBUTED_TYPES = {"ddp": "MULTI_GPU", "fsdp": "FSDP"}  # of accelerate, by engine


def needs_launch(recipe: Recipe, stage: StageName) -> bool:
    """Return whether a stage needs several processes that no launcher has started yet."""
    return recipe.processes(stage) > 1 and not distributed.launched()


def launch(loaded: PinnedRecipe, task: Task) -> None:
    """Run a task of a recipe in as many processes as the recipe has, with accelerate's launcher.

    If one ends with an error, the launcher ends the others. Raises UserError that names the rank that failed first and
    the reason.
    """
    import logging

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    stage = task.stage
    check_engine(loaded.recipe, stage)
    count = loaded.recipe.hardware.count
    flags = [*_engine_flags(loaded), "--num_processes", str(count), "--main_process_port", "0"]
    logging.disable(logging.CRITICAL)  # the errors below replace the launcher's messages
    kept = os.environ.copy()
    # A rank must not take a file of the current folder for a library, as `python -m` does.
    os.environ |= children.child_environment(PYTHONSAFEPATH="1") | {distributed.STARTED_HERE: "1"}
    try:
        with arguments(task) as words:
            launch_command(launch_command_parser().parse_args([*flags, "--module", "rlhf.cli", *words]))
    except ChildFailedError as error:
        exhausted = any(failure.exitcode == EXHAUSTED for failure in error.failures.values())
        raise UserError(_failure_message(error.failures, stage)) from (MemoryError() if exhausted else None)
    except SignalException as stop:
        raise endings.stop_for(stop.sigval) from None
    except (ConnectionError, RuntimeError) as error:
        raise UserError(f"the processes could not be started: {excerpt(str(error))}") from error
    finally:
        logging.disable(logging.NOTSET)
        os.environ.clear()
        os.environ.update(kept)


def _engine_flags(loaded: PinnedRecipe) -> list[str]:
    """Return the options that choose accelerate's engine: the recipe's file for it, which ddp does not need."""
    engine = loaded.recipe.hardware.engine
    file = loaded.directory / f"accelerate-{engine}.yaml"
    if not file.exists() and engine == "ddp":
        return ["--multi_gpu"]  # accelerate's name for several processes on any device
    if not file.exists():
        raise UserError(f"hardware.engine: {engine} needs {file}")
    found, needed = read_yaml(file).get("distributed_type"), DISTRIBUTED_TYPES[engine]
    if found != needed:
        raise UserError(f"{file}: distributed_type is {found}, hardware.engine: {engine} needs {needed}")
    return ["--config_file", str(file)]


def _failure_message(failures: Mapping[int, Any], stage: StageName) -> str:
    """Return one line about the rank whose end ended the others."""
    ended_by_launcher = (distributed.LOST, -signal.SIGTERM, 128 + signal.SIGTERM)  # not the cause
    reasons = [f for f in failures.values() if f.exitcode not in ended_by_launcher] or list(failures.values())
    with_message = [failure for failure in reasons if os.path.isfile(failure.error_file)]
    # a rank that was killed comes first: it did not follow the others
    first = min(with_message or reasons, key=lambda f: (f.exitcode > 0, f.timestamp))
    if with_message:
        return str(first.message)
    number = next(number for number, failure in failures.items() if failure is first)
    ending = children.ending_in_words(first.exitcode)
    return f"{stage}: rank {number} {ending}, which ended the run; `--resume` continues it"
