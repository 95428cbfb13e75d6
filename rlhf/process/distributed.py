"""Several processes that train one model, one for each device: their ranks, their communication and their start.

All ranks hold the same adapter weights, the same random state and the same full batch; only the work on its rows is
split. Rank 0 alone writes files and prints. Without a launcher there is one rank and the functions that communicate do
nothing. The rest of PPO uses only these functions; TRL's trainers use accelerate themselves.
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
from rlhf.recipe import PinnedRecipe, StageName
from rlhf.recipe.plain_yaml import read_yaml
from rlhf.run.provenance import code_version

if TYPE_CHECKING:
    from torch import Tensor, nn

T = TypeVar("T")
RowsT = TypeVar("RowsT", bound="Sequence[Any] | Tensor")
RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # set by every launcher: torchrun, accelerate, Ray Train
TIMEOUT = timedelta(minutes=10)  # ranks wait this long for one that hangs; a dead one is noticed before
LOST = 75  # exit code of a rank that ended because another one did
KINDS = {"ddp": "MULTI_GPU", "fsdp": "FSDP", "deepspeed": "DEEPSPEED"}  # engine -> accelerate's distributed_type
_STARTED_HERE = "RLHF_LAUNCHED"


class Disagreement(UserError):
    """Ranks differ in recipe, code or data. Every rank raises it."""


# -- ranks ------------------------------------------------------------------------------------------------------------


def launched() -> bool:
    """Return whether a launcher started this process as one of one or more ranks."""
    return all(name in os.environ for name in RANKS)


def rank() -> int:
    """Return the number of this process among all ranks; 0 without a launcher."""
    return int(os.environ["RANK"]) if launched() else 0


def world() -> int:
    """Return the number of ranks; 1 without a launcher."""
    return int(os.environ["WORLD_SIZE"]) if launched() else 1


def local_rank() -> int:
    """Return the index of this process's device on its machine."""
    return int(os.environ["LOCAL_RANK"]) if launched() else 0


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


@contextmanager
def joined(loaded: PinnedRecipe, stage: StageName) -> Iterator[None]:
    """Join the recipe's processes: wait for the other ranks, compare recipe and code, and silence all ranks but 0.

    Raises UserError if the launcher started another number of processes than the recipe has, if they do not meet, or if
    one has another recipe or other code.
    """
    check_world(loaded.recipe, stage)
    if not launched():
        yield
        return
    from accelerate import PartialState

    with ExitStack() as quiet:
        if rank():
            null_device = quiet.enter_context(open(os.devnull, "w"))
            quiet.enter_context(redirect_stdout(null_device))
            quiet.enter_context(redirect_stderr(null_device))
        try:
            PartialState(cpu=loaded.recipe.hardware.device == "cpu", timeout=TIMEOUT)
        except RuntimeError as error:  # torch's DistError and its subclasses
            raise UserError(f"rank {rank()} did not meet the others: {explain(str(error))}") from error
        try:
            agree("recipe", [loaded.sha256, recipes.settings(loaded.recipe, stage), loaded.recipe.hardware.engine])
            agree("code", code_version()["commit"])
            yield
        except Disagreement:  # every rank raises it, so all can leave
            _leave()
            raise
        _leave()


def _leave() -> None:
    """Leave the group once all ranks are ready to: a rank that leaves earlier looks like one that died."""
    from accelerate import PartialState

    barrier()
    PartialState().destroy_process_group()


def check_world(recipe: recipes.Recipe, stage: StageName) -> None:
    """Raise UserError unless the number of ranks is the number that the recipe has for a stage."""
    expected = recipe.processes(stage)
    if world() == expected:
        _check_engine(recipe, stage)
        return
    if stage not in recipes.SHARED:
        raise UserError(f"{stage} runs in one process and {world()} were started: start it without a launcher")
    raise UserError(
        f"hardware.count is {expected} and {world()} {'process was' if world() == 1 else 'processes were'} started: "
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
    if not online and launched() and os.environ.get(f"ACCELERATE_USE_{engine.upper()}") != "true":
        raise UserError(
            f"{stage} under {engine} is started by `accelerate launch` with accelerate-{engine}.yaml: another launcher "
            "does not tell transformers of it"
        )


# -- communication ---------------------------------------------------------------------------------------------------


def own_rows(rows: RowsT) -> RowsT:
    """Return this rank's rows of a sequence, every world-th.

    If the rows are sorted by length, every rank gets about the same work.
    """
    return cast(RowsT, rows[rank() :: world()])  # a slice is of the sequence's own type


def all_sum(*tensors: "Tensor") -> None:
    """Add the tensors of all ranks, in place.

    If each rank has filled only its own rows and left zeros elsewhere, the sum is the whole.
    """
    if world() > 1:
        from torch import distributed

        for tensor in tensors:
            distributed.all_reduce(tensor)


def sum_of(numbers: Mapping[str, float], device: Any) -> dict[str, float]:
    """Return the sum over ranks of each number. Every rank gives the same names in the same order."""
    if world() == 1:
        return dict(numbers)
    import torch

    total = torch.tensor(list(numbers.values()), dtype=torch.float64, device=device)
    all_sum(total)
    return dict(zip(numbers, total.tolist(), strict=True))


def reduce_gradients(parameters: "Sequence[nn.Parameter]") -> None:
    """Add the gradients of all ranks in one message; adapters are small."""
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
    """Let rank 0 run a block before the other ranks, so that they can read what it writes."""
    if rank():
        barrier()
    yield
    if not rank():
        barrier()


def from_main(make: Callable[[], T]) -> T:
    """Return on every rank what `make` returns on rank 0."""
    if world() == 1:
        return make()
    from torch import distributed

    box: list[Any] = [make() if rank() == 0 else None]
    distributed.broadcast_object_list(box)
    value: T = box[0]
    return value


def agree(name: str, value: Any) -> None:
    """Raise Disagreement on every rank if the value of any rank is not that of rank 0."""
    if world() == 1:
        return
    from torch import distributed

    digests: list[Any] = [None] * world()
    distributed.all_gather_object(digests, (socket.gethostname(), recipes.content_hash(value)))
    for number, (host, digest) in enumerate(digests):
        if digest != digests[0][1]:
            raise Disagreement(
                f"rank {number} (on {host}) has another {name} than rank 0 (on {digests[0][0]}): {digest[:12]}, not "
                f"{digests[0][1][:12]}; every machine needs the same checkout, command line and files"
            )


def shard(decoder: "nn.Module", unsharded: "set[nn.Parameter]") -> None:
    """Shard a decoder's frozen layers over the ranks (FSDP2); every rank keeps adapters and `unsharded` complete.

    No sharded weight has a gradient, so gradients are reduced as without sharding.
    """
    from torch.distributed.fsdp import fully_shard

    layers: Any = decoder.layers
    for layer in layers:
        fully_shard(layer, ignored_params=unsharded)
    fully_shard(decoder, ignored_params=set(decoder.parameters()))  # shards nothing more; layers are fetched ahead


def keep_layers_whole(model: "nn.Module", whole: bool) -> None:
    """Fetch all shards of the layers and keep them (`whole`), or free them and fetch layer by layer again."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(not whole, recurse=False)
            if whole:
                module.unshard()
            else:
                module.reshard()


# -- start -----------------------------------------------------------------------------------------------------------


def needs_launch(recipe: recipes.Recipe, stage: StageName) -> bool:
    """Return whether a stage needs several processes that no launcher has started yet."""
    return recipe.processes(stage) > 1 and not launched()


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
        raise endings.stopped(stop.sigval) from None
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
    first = " ".join(reason.split())[:200]
    return next((f"{way_out} ({first})" for text, way_out in advice.items() if re.search(text, reason, re.I)), first)


def report(message: str) -> bool:
    """Pass a rank's last message to the process that launched it. Returns whether there is such a process."""
    if _STARTED_HERE not in os.environ or not launched():
        return False
    write_json(Path(os.environ["TORCHELASTIC_ERROR_FILE"]), {"message": message, "timestamp": int(time.time())})
    return True


def other_rank_ended(error: BaseException) -> bool:
    """Return whether an error only means that another rank has ended."""
    pattern = r"Connection (closed|reset) by|Broken pipe|remote process exited"
    return world() > 1 and bool(re.search(pattern, str(error)))
