"""Several processes, one for each device, that train one model: who is who, what they share, how they are started.

Every rank holds the same weights of the adapters, the same random state and the same numbers of a whole batch; what is
dealt out is the work on its rows. Rank 0 writes and talks. Without a launcher there is one rank, and nothing here does
anything. The rest of PPO knows only these functions; TRL's trainers bring accelerate themselves.
"""

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from rlhf import recipe as recipes
from rlhf.errors import UserError
from rlhf.files import write_json
from rlhf.process import endings
from rlhf.recipe import Loaded
from rlhf.recipe.plain_yaml import read_yaml
from rlhf.run.provenance import code_version

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")
RowsT = TypeVar("RowsT", bound="Sequence[Any] | Tensor")
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # what every launcher sets: torchrun, accelerate, Ray Train
TIMEOUT = timedelta(minutes=10)  # of ranks that wait for each other: only for one that hangs; a dead one is noticed
LOST = 75  # exit code of a rank that ended because another one had: not the reason for anything
KINDS = {"ddp": "MULTI_GPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}  # engine -> accelerate's distributed_type
_STARTED_HERE = "RLHF_LAUNCHED"


class Disagreement(UserError):
    """Ranks do not have the same recipe, code or data; each of them knows."""


# -- who is who ------------------------------------------------------------------------------------------------------


def launched() -> bool:
    """Whether a launcher has started this process as one of several, or of one."""
    return all(name in os.environ for name in RANKS)


def rank() -> int:
    return int(os.environ["RANK"]) if launched() else 0


def world() -> int:
    """How many processes there are."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def local_rank() -> int:
    """Which of its machine's devices this process has."""
    return int(os.environ["LOCAL_RANK"]) if launched() else 0


def alone(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that is started by a rank and is none itself."""
    return {name: value for name, value in environment.items() if name not in RANKS}


def child_environment(**changes: str) -> dict[str, str]:
    """Return the environment of a child process that imports this checkout and every package this process can import.

    PYTHONPATH is extended and never replaced: on a machine without an installation it is what leads to the packages.
    `changes` are set on top.
    """
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **changes}


@contextmanager
def joined(loaded: Loaded, stage: str) -> Iterator[None]:
    """Be one of the recipe's processes: meet the others, compare notes, and leave talking to rank 0.

    Raises UserError when the launcher started another number of processes than the recipe has, when they do not meet,
    or when one has another recipe or other code.
    """
    check_world(loaded.recipe, stage)
    if not launched():
        yield
        return
    from accelerate import PartialState

    with ExitStack() as quiet:
        if rank():
            nowhere = quiet.enter_context(open(os.devnull, "w"))
            quiet.enter_context(redirect_stdout(nowhere))
            quiet.enter_context(redirect_stderr(nowhere))
        try:
            PartialState(cpu=loaded.recipe.hardware.device == "cpu", timeout=TIMEOUT)
        except RuntimeError as error:  # torch's DistError and its kinds
            raise UserError(f"rank {rank()} did not meet the others: {explained(str(error))}") from error
        try:
            agree("recipe", [loaded.sha256, recipes.settings(loaded.recipe, stage), loaded.recipe.hardware.engine])
            agree("code", code_version()["commit"])
            yield
        except Disagreement:  # every rank has it
            _part()
            raise
        _part()


def _part() -> None:
    """Leave the group when all are ready to: one that goes earlier looks like one that died."""
    from accelerate import PartialState

    barrier()
    PartialState().destroy_process_group()


def check_world(recipe: recipes.Recipe, stage: str) -> None:
    """Raise UserError unless as many processes were started as the recipe has for a stage."""
    wanted = recipe.processes(stage)
    if world() == wanted:
        _check_engine(recipe, stage)
        return
    if stage not in recipes.SHARED:
        raise UserError(f"{stage} runs in one process and {world()} were started: start it without a launcher")
    raise UserError(
        f"hardware.count is {wanted} and {world()} {'process was' if world() == 1 else 'processes were'} started: "
        "let `rlhf run` start them, or give the launcher the same number (`accelerate launch --cpu` starts only one)"
    )


def _check_engine(recipe: recipes.Recipe, stage: str) -> None:
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
    if not online and launched() and os.environ.get(f"ACCELERATE_USE_{engine.upper()}") != "true":
        raise UserError(
            f"{stage} under {engine} is started by `accelerate launch` with accelerate-{engine}.yaml: another launcher "
            "does not tell transformers of it"
        )


# -- what they share -------------------------------------------------------------------------------------------------


def deal(rows: RowsT) -> RowsT:
    """This rank's rows of a sequence: every world-th. Of rows by length every rank gets about the same work."""
    return cast(RowsT, rows[rank() :: world()])  # a slice is of the sequence's own type


def all_sum(*tensors: "Tensor") -> None:
    """Add the ranks' tensors, in place. Where each rank has filled its own rows of zeros, the sum is the whole."""
    if world() > 1:
        from torch import distributed

        for tensor in tensors:
            distributed.all_reduce(tensor)


def sum_of(numbers: Mapping[str, float], device: Any) -> dict[str, float]:
    """The sum over ranks of each of some numbers, which every rank names in the same order."""
    if world() == 1:
        return dict(numbers)
    import torch

    total = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    all_sum(total)
    return dict(zip(numbers, total.tolist(), strict=True))


def reduce_gradients(parameters: "Sequence[nn.Parameter]") -> None:
    """Add the ranks' gradients, in one message: adapters are small."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if world() == 1 or not gradients:
        return
    import torch

    bucket = torch.cat([gradient.flatten() for gradient in gradients])
    all_sum(bucket)
    for gradient, total in zip(gradients, bucket.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def barrier() -> None:
    """Wait for all ranks."""
    if world() > 1:
        from accelerate import PartialState

        PartialState().wait_for_everyone()


@contextmanager
def main_first() -> Iterator[None]:
    """Rank 0 goes through a block before the others: what it writes there, they find."""
    if rank():
        barrier()
    yield
    if not rank():
        barrier()


def from_main(make: Callable[[], T]) -> T:
    """What rank 0 makes, on every rank."""
    if world() == 1:
        return make()
    from torch import distributed

    found: list[Any] = [make() if rank() == 0 else None]
    distributed.broadcast_object_list(found)
    made: T = found[0]
    return made


def agree(what: str, value: Any) -> None:
    """Raise Disagreement, on every rank, when a rank's value is not that of rank 0."""
    if world() == 1:
        return
    from torch import distributed

    found: list[Any] = [None] * world()
    distributed.all_gather_object(found, (socket.gethostname(), recipes.content_hash(value)))
    for number, (host, digest) in enumerate(found):
        if digest != found[0][1]:
            raise Disagreement(
                f"rank {number} (on {host}) has another {what} than rank 0 (on {found[0][0]}): {digest[:12]}, not "
                f"{found[0][1][:12]}; every machine needs the same checkout, command line and files"
            )


def shard(decoder: "nn.Module", whole: "set[nn.Parameter]") -> None:
    """Give each rank its part of a decoder's frozen layers (FSDP2); adapters and `whole` stay as they are everywhere.

    Nothing that is sharded has a gradient, so that what is trained is reduced as without sharding.
    """
    from torch.distributed.fsdp import fully_shard

    layers: Any = decoder.layers
    for layer in layers:
        fully_shard(layer, ignored_params=whole)
    fully_shard(decoder, ignored_params=set(decoder.parameters()))  # nothing more; it lets layers be fetched ahead


def gather(model: "nn.Module", whole: bool) -> None:
    """Fetch all parts of the layers and keep them (`whole`), or give them back and fetch them layer by layer."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(not whole, recurse=False)
            if whole:
                module.unshard()
            else:
                module.reshard()


# -- how they are started --------------------------------------------------------------------------------------------


def to_launch(recipe: recipes.Recipe, stage: str) -> bool:
    """Whether a stage is for several processes and nobody has started them yet."""
    return recipe.processes(stage) > 1 and not launched()


def launch(loaded: Loaded, stage: str) -> None:
    """Run this command line again in as many processes as the recipe has, with accelerate's launcher.

    Raises UserError that names the rank that ended first and says why; the launcher has ended the others then.
    """
    import logging

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    _check_engine(loaded.recipe, stage)
    count = loaded.recipe.hardware.count
    flags = [*_engine_flags(loaded), "--num_processes", str(count), "--main_process_port", "0"]
    arguments = launch_command_parser().parse_args([*flags, "--module", "rlhf.cli", *sys.argv[1:]])
    logging.disable(logging.CRITICAL)  # what the launcher would say is said below
    os.environ[_STARTED_HERE] = "1"
    try:
        launch_command(arguments)
    except ChildFailedError as error:
        raise UserError(_why(error.failures, stage)) from None
    except SignalException as stop:
        raise endings.stopped(stop.sigval) from None
    except ImportError as error:
        raise UserError(f"hardware.engine: {loaded.recipe.hardware.engine}: {error} (pip install it)") from None
    except (ConnectionError, RuntimeError) as error:
        raise UserError(f"the processes could not be started: {explained(str(error))}") from error
    finally:
        logging.disable(logging.NOTSET)
        del os.environ[_STARTED_HERE]


def _engine_flags(loaded: Loaded) -> list[str]:
    """How accelerate is told the engine: by the recipe's file for it; ddp needs none."""
    engine = loaded.recipe.hardware.engine
    file = loaded.directory / f"accelerate-{engine}.yaml"
    if not file.exists() and engine == "ddp":
        return ["--multi_gpu"]  # its name for several processes on anything
    if not file.exists():
        raise UserError(f"hardware.engine: {engine} needs {file}")
    kind = read_yaml(file).get("distributed_type")
    if kind != KINDS[engine]:
        raise UserError(f"{file}: distributed_type is {kind}, hardware.engine: {engine} needs {KINDS[engine]}")
    return ["--config_file", str(file)]


def _why(failures: Mapping[int, Any], stage: str) -> str:
    """One line about the rank whose end ended the others."""
    followed = (LOST, -signal.SIGTERM, 128 + signal.SIGTERM)  # what the launcher ends has not ended the run
    reasons = [f for f in failures.values() if f.exitcode not in followed] or list(failures.values())
    told = [failure for failure in reasons if os.path.isfile(failure.error_file)]
    first = min(told or reasons, key=lambda f: (f.exitcode > 0, f.timestamp))  # who was killed did not follow others
    if told:
        return str(first.message)
    number = next(number for number, failure in failures.items() if failure is first)
    how = f"ended with exit code {first.exitcode}"
    if first.exitcode < 0:
        how = f"was killed by {signal.Signals(-first.exitcode).name}"
    hint = " (the system does that when memory is short)" if first.exitcode == -signal.SIGKILL else ""
    return f"{stage}: rank {number} {how}{hint}, which ended the run; `--resume` (make: RESUME=1) continues it"


def explained(reason: str) -> str:
    """What torch says about processes that do not meet, with the way out."""
    known = {
        r"in use|EADDRINUSE": "the port is taken: give the launcher another one (--master-port, MASTER_PORT)",
        r"tim(ed )?e?-?out": "not all of them came in time: every machine starts the same command, with the same "
        "rendezvous endpoint, whose port no firewall closes",
        r"refused|No route|resolve|gai|not known|retrieve": "nobody answers there: MASTER_ADDR must be the machine of "
        "rank 0, which must have started",
    }
    first = " ".join(reason.split())[:200]
    return next((f"{way_out} ({first})" for text, way_out in known.items() if re.search(text, reason, re.I)), first)


def report(message: str) -> bool:
    """Tell the process that started this one why it ends. Returns whether there is one."""
    if _STARTED_HERE not in os.environ or not launched():
        return False
    write_json(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), {"message": message, "timestamp": int(time.time())})
    return True


def lost(error: BaseException) -> bool:
    """Whether an error only means that another rank has ended."""
    gone = r"Connection (closed|reset) by|Broken pipe|remote process exited"
    return world() > 1 and bool(re.search(gone, str(error)))
