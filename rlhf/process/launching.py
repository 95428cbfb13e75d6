"""The start of several processes for one stage: launching them, comparing recipe and code, reporting their errors."""

import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

from rlhf import recipe as recipes
from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.process import distributed, endings
from rlhf.process.distributed import RANKS
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.plain_yaml import read_yaml
from rlhf.run.provenance import code_version
from rlhf.terminal import excerpt

TIMEOUT = timedelta(minutes=10)  # ranks wait this long for one that hangs; a dead one is noticed before
LOST = 75  # exit code of a rank that ended because another one did
KINDS = {"ddp": "MULTI_GPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}  # engine -> accelerate's distributed_type
_STARTED_HERE = "RLHF_LAUNCHED"


# -- environments of child processes ----------------------------------------------------------------------------------


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without a launcher's variables, for a child process that is not a rank."""
    return {name: value for name, value in environment.items() if name not in RANKS}


def child_environment(**changes: str) -> dict[str, str]:
    """Return the environment of a child process that imports this checkout and every package this process can import.

    PYTHONPATH is extended and never replaced: without an installation it is the path to the packages. `changes` are set
    on top.
    """
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **changes}


# -- the meeting of the ranks -----------------------------------------------------------------------------------------


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
            raise UserError(f"rank {distributed.rank()} did not meet the others: {explain(str(error))}") from error
        try:
            distributed.agree(
                "recipe", [loaded.sha256, recipes.settings(loaded.recipe, stage), loaded.recipe.hardware.engine]
            )
            distributed.agree("code", code_version()["commit"])
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


def check_world(recipe: recipes.Recipe, stage: StageName) -> None:
    """Raise UserError unless the number of ranks is the number that the recipe has for a stage."""
    expected, started = recipe.processes(stage), distributed.world()
    if started == expected:
        _check_engine(recipe, stage)
        return
    if stage not in recipes.TRAINING_STAGES:
        raise UserError(f"{stage} runs in one process and {started} were started: start it without a launcher")
    raise UserError(
        f"hardware.count is {expected} and {started} {'process was' if started == 1 else 'processes were'} started: "
        "let `rlhf run` start them, or give the launcher the same number (`accelerate launch --cpu` starts only one)"
    )


def _check_engine(recipe: recipes.Recipe, stage: StageName) -> None:
    """Raise UserError if a stage cannot run under the recipe's engine, or was not started for it."""
    engine = recipe.hardware.engine
    if recipe.processes(stage) == 1 or engine == "ddp":
        return
    online = stage in recipes.ONLINE
    if online and engine == "deepspeed":
        raise UserError(
            f"{stage} divides its base by fsdp only: --set hardware.engine=fsdp, or ddp where each device has room"
        )
    if not online and recipe.hardware.device == "cpu":
        raise UserError(f"{stage} under {engine} needs GPUs: on CPUs transformers would silently use ddp instead")
    if not online and distributed.launched() and os.environ.get(f"ACCELERATE_USE_{engine.upper()}") != "true":
        raise UserError(
            f"{stage} under {engine} is started by `accelerate launch` with accelerate-{engine}.yaml: another launcher "
            "does not tell transformers of it"
        )


# -- start -----------------------------------------------------------------------------------------------------------


def needs_launch(recipe: recipes.Recipe, stage: StageName) -> bool:
    """Return whether a stage needs several processes that no launcher has started yet."""
    return recipe.processes(stage) > 1 and not distributed.launched()


def launch(loaded: PinnedRecipe, stage: StageName) -> None:
    """Run this command line again in as many processes as the recipe has, with accelerate's launcher.

    If one ends with an error, the launcher ends the others. Raises UserError that names the rank that failed first and
    the reason.
    """
    import logging

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _check_engine(loaded.recipe, stage)
    count = loaded.recipe.hardware.count
    flags = [*_engine_flags(loaded), "--num_processes", str(count), "--main_process_port", "0"]
    arguments = launch_command_parser().parse_args([*flags, "--module", "rlhf.cli", *sys.argv[1:]])
    logging.disable(logging.CRITICAL)  # the errors below replace the launcher's messages
    os.environ[_STARTED_HERE] = "1"
    try:
        launch_command(arguments)
    except ChildFailedError as error:
        raise UserError(_failure_message(error.failures, stage)) from None
    except SignalException as stop:
        raise endings.stop_for(stop.sigval) from None
    except ImportError as error:
        raise UserError(f"hardware.engine: {loaded.recipe.hardware.engine}: {error} (pip install it)") from None
    except (ConnectionError, RuntimeError) as error:
        raise UserError(f"the processes could not be started: {explain(str(error))}") from error
    finally:
        logging.disable(logging.NOTSET)
        del os.environ[_STARTED_HERE]


def _engine_flags(loaded: PinnedRecipe) -> list[str]:
    """Return the options that choose accelerate's engine: the recipe's file for it, which ddp does not need."""
    engine = loaded.recipe.hardware.engine
    file = loaded.directory / f"accelerate-{engine}.yaml"
    if not file.exists() and engine == "ddp":
        return ["--multi_gpu"]  # accelerate's name for several processes on any device
    if not file.exists():
        raise UserError(f"hardware.engine: {engine} needs {file}")
    kind = read_yaml(file).get("distributed_type")
    if kind != KINDS[engine]:
        raise UserError(f"{file}: distributed_type is {kind}, hardware.engine: {engine} needs {KINDS[engine]}")
    return ["--config_file", str(file)]


def _failure_message(failures: Mapping[int, Any], stage: StageName) -> str:
    """Return one line about the rank whose end ended the others."""
    ended_by_launcher = (LOST, -signal.SIGTERM, 128 + signal.SIGTERM)  # not the cause
    reasons = [f for f in failures.values() if f.exitcode not in ended_by_launcher] or list(failures.values())
    with_message = [failure for failure in reasons if os.path.isfile(failure.error_file)]
    # a rank that was killed comes first: it did not follow the others
    first = min(with_message or reasons, key=lambda f: (f.exitcode > 0, f.timestamp))
    if with_message:
        return str(first.message)
    number = next(number for number, failure in failures.items() if failure is first)
    ending = f"ended with exit code {first.exitcode}"
    if first.exitcode < 0:
        ending = f"was killed by {signal.Signals(-first.exitcode).name}"
    hint = " (the system does that when memory is short)" if first.exitcode == -signal.SIGKILL else ""
    return f"{stage}: rank {number} {ending}{hint}, which ended the run; `--resume` (make: RESUME=1) continues it"


def explain(reason: str) -> str:
    """Return torch's message about processes that do not meet, with the way out."""
    advice = {
        r"\bin use\b|EADDRINUSE": "the port is taken: give the launcher another one (--master-port, MASTER_PORT)",
        r"tim(ed )?e?-?out": "not all of them came in time: every machine starts the same command, with the same "
        "rendezvous endpoint, whose port no firewall closes",
        r"refused|No route|resolve|\bgai(error)?\b|not known|retrieve": "nobody answers there: MASTER_ADDR must be the "
        "machine of rank 0, which must have started",
    }
    first = excerpt(reason)
    return next((f"{way_out} ({first})" for text, way_out in advice.items() if re.search(text, reason, re.I)), first)


def report(message: str) -> bool:
    """Pass a rank's last message to the process that launched it. Returns whether there is such a process."""
    if _STARTED_HERE not in os.environ or not distributed.launched():
        return False
    write_json(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), {"message": message, "timestamp": int(time.time())})
    return True


def other_rank_ended(error: BaseException) -> bool:
    """Return whether an error only means that another rank has ended."""
    pattern = r"Connection (closed|reset) by|Broken pipe|remote process exited"
    return distributed.world() > 1 and bool(re.search(pattern, str(error)))
