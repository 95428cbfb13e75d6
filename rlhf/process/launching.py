"""Several processes for one stage: their start, their meeting, and what is reported of their errors."""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

from rlhf import recipe as recipes
from rlhf.errors import UserError
from rlhf.packages import hash_of_modules
from rlhf.process import children, distributed, endings
from rlhf.process.exhaustion import EXHAUSTED
from rlhf.process.task import Task, arguments
from rlhf.recipe import PinnedRecipe, Recipe, StageName
from rlhf.recipe.stages import ONLINE
from rlhf.run.provenance import code_version
from rlhf.terminal import excerpt

TIMEOUT = timedelta(minutes=10)  # ranks wait this long for one that hangs; a dead one is noticed before


# -- their start -----------------------------------------------------------------------------------------------------


def launch(loaded: PinnedRecipe, task: Task) -> None:
    """Run a task of a recipe in as many processes as the recipe has, with accelerate's launcher, and nothing after it.

    If one ends with an error, the launcher ends the others. Raises UserError that names the rank that failed first and
    the reason.
    """
    import logging

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    stage, hardware = task.stage, loaded.recipe.hardware
    file = loaded.directory / f"accelerate-{hardware.engine}.yaml"
    if not file.exists() and hardware.engine != "ddp":
        raise UserError(f"hardware.engine: {hardware.engine} needs {file}")
    engine = ["--config_file", str(file)] if file.exists() else ["--multi_gpu"]  # on any device, for accelerate
    flags = [*engine, "--num_processes", str(hardware.count), "--main_process_port", "0"]
    logging.disable(logging.CRITICAL)  # the errors below replace the launcher's messages
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


# -- their meeting ---------------------------------------------------------------------------------------------------


@contextmanager
def joined(loaded: PinnedRecipe, stage: StageName) -> Iterator[None]:
    """Join the recipe's processes: wait for the other ranks, compare recipe and code, and silence all ranks but 0.

    Raises UserError if the launcher started another number of processes than the recipe has, if they do not meet, or if
    one has another recipe or other code.
    """
    check_world(loaded.recipe, stage)
    if not distributed.launched():
        yield
        return
    from accelerate import PartialState

    with ExitStack() as quiet:
        if distributed.rank():
            null_device = quiet.enter_context(open(os.devnull, "w"))
            quiet.enter_context(redirect_stdout(null_device))
            quiet.enter_context(redirect_stderr(null_device))
        try:
            PartialState(cpu=loaded.recipe.hardware.device == "cpu", timeout=TIMEOUT)
        except RuntimeError as error:  # torch's DistError and its subclasses
            raise UserError(
                f"rank {distributed.rank()} did not meet the others: every machine starts the same command, with rank "
                f"0's machine as MASTER_ADDR and a free MASTER_PORT ({excerpt(str(error))})"
            ) from error
        settings = recipes.deciding_settings(loaded.recipe, stage)
        try:
            distributed.agree("recipe", [loaded.sha256, settings, loaded.recipe.hardware.engine])
            distributed.agree("code", [code_version().commit, hash_of_modules(Path(__file__).parents[1])])
            yield
        except distributed.Disagreement:  # every rank raises it, so all can leave
            _leave()
            raise
        _leave()


def _leave() -> None:
    """Leave the group once all ranks are ready to: a rank that leaves earlier looks like one that died."""
    from accelerate import PartialState

    distributed.barrier()
    PartialState().destroy_process_group()


def check_world(recipe: Recipe, stage: StageName) -> None:
    """Raise UserError unless the number of ranks is the recipe's for a stage, and its engine can run the stage."""
    expected, started = recipe.processes(stage), distributed.world()
    if started != expected:
        raise UserError(
            f"{stage} with hardware.count: {recipe.hardware.count} runs in {expected} process(es), and {started} were "
            "started: let `rlhf run` start them, or give the launcher this number; `accelerate launch --cpu` starts one"
        )
    engine = recipe.hardware.engine
    if expected == 1 or engine == "ddp" or stage in ONLINE:
        return
    if recipe.hardware.device == "cpu":
        raise UserError(f"{stage} under {engine} needs GPUs: on CPUs transformers would silently use ddp instead")
    if os.environ.get(f"ACCELERATE_USE_{engine.upper()}") != "true":
        raise UserError(
            f"{stage} under {engine} needs `accelerate launch` with accelerate-{engine}.yaml: another "
            "launcher does not tell transformers"
        )
